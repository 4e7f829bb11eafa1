"""Schedules: when to draw samples, and with which controls."""

import math
import sys
from typing import Any, Generic, TypeVar

import torch

from lightning_sgmcmc.chains.callback import Run
from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.schedule import RunLength, Schedule, StepControls
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.chains.trainer import callbacks_of, fit_steps
from lightning_sgmcmc.checks import check_count, check_kind, check_number, check_within
from lightning_sgmcmc.namespace import pl, rank_zero_warn
from lightning_sgmcmc.samplers.sampler import Control
from lightning_sgmcmc.schedules import Annealing, CyclicalPlan, PolynomialDecay

EarlyStopping = pl.callbacks.EarlyStopping
Timer = pl.callbacks.Timer

_OF_CONTROLS = ("controls", "cycle_of", "apply", "set_controls", "_lr")
"""Methods by which a schedule sets a step's controls."""


class SamplingSchedule(Schedule):
    """One burn-in stage, then a sample at regular intervals of steps or epochs.

    The step size is the module's, decays as a·(b+k)^-γ, or is divided by a constant every epoch; the temperature may be
    divided likewise. Without `lr_decay` and `lr_annealing` torch's schedulers may set the step size.

    Args:
        burn_in_steps: optimizer steps before the first interval of `every_n_steps`.
        burn_in_epochs: the same in epochs; pass at most one of the two.
        every_n_steps: optimizer steps between samples.
        every_n_epochs: the same in epochs; pass exactly one of the two.
        burn_in_temperature: τ during burn-in (0 optimizes first); None uses the target's.
        temperature: τ of the target; None uses the module's.
        lr_decay: polynomial decay of the step size; parameter groups keep their ratios to the first.
        lr_annealing: divisor of the step size at every epoch.
        temperature_annealing: divisor of the temperature at every epoch.

    Raises:
        ValueError: for an argument out of range or a contradiction; at the start of the fit, if no sample would be
            drawn, or if epochs are requested and have no known length.

    Source: Welling & Teh 2011; Deng et al. 2020 (CSGLD), section 4.2.
    """

    def __init__(
        self,
        burn_in_steps: int | None = None,
        burn_in_epochs: int | None = None,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        burn_in_temperature: float | None = None,
        temperature: float | None = None,
        lr_decay: PolynomialDecay | None = None,
        lr_annealing: Annealing | None = None,
        temperature_annealing: Annealing | None = None,
    ) -> None:
        if (every_n_steps is None) == (every_n_epochs is None):
            raise ValueError("pass exactly one of every_n_steps and every_n_epochs")
        if burn_in_steps is not None and burn_in_epochs is not None:
            raise ValueError("pass one of burn_in_steps and burn_in_epochs, not both")
        if lr_decay is not None and lr_annealing is not None:
            raise ValueError("pass one of lr_decay and lr_annealing, not both")
        for name, value, least in (
            ("burn_in_steps", burn_in_steps, 0),
            ("burn_in_epochs", burn_in_epochs, 0),
            ("every_n_steps", every_n_steps, 1),
            ("every_n_epochs", every_n_epochs, 1),
        ):
            check_count(name, value, least)
        check_number("burn_in_temperature", burn_in_temperature)
        check_number("temperature", temperature)
        check_kind("lr_decay", lr_decay, PolynomialDecay)
        check_kind("lr_annealing", lr_annealing, Annealing)
        check_kind("temperature_annealing", temperature_annealing, Annealing)
        self.burn_in_steps = burn_in_steps
        self.burn_in_epochs = burn_in_epochs
        self.every_n_steps = every_n_steps
        self.every_n_epochs = every_n_epochs
        self.burn_in_temperature = burn_in_temperature
        self.temperature = temperature
        self.lr_decay = lr_decay
        self.lr_annealing = lr_annealing
        self.temperature_annealing = temperature_annealing
        self._burn_in = 0
        self._every = 1
        self._steps_per_epoch = 0
        self._first_lr: Control = 1.0
        self._largest_lr = 1.0

    @property
    def sets_lr(self) -> bool:  # type: ignore[override]
        return self.lr_decay is not None or self.lr_annealing is not None

    def lay_out(self, length: RunLength) -> None:
        by_epoch = self.burn_in_epochs or self.every_n_epochs or self.lr_annealing or self.temperature_annealing
        if by_epoch and length.steps_per_epoch == 0:
            raise ValueError(
                "the training loader has no length, so epochs cannot be counted in steps: pass steps instead"
            )
        self._steps_per_epoch = length.steps_per_epoch
        self._first_lr, self._largest_lr = length.lr, float(torch.as_tensor(length.lr).max())
        if self.lr_decay is not None and self._largest_lr == 0:
            raise ValueError("lr_decay sets step sizes in proportion to the first one, which is 0: pass a positive lr")
        self._burn_in = self.burn_in_steps or (self.burn_in_epochs or 0) * length.steps_per_epoch
        self._every = self.every_n_steps or (self.every_n_epochs or 0) * length.steps_per_epoch
        if length.is_trial:
            self._burn_in, self._every = 0, 1
        if self._burn_in + self._every > length.steps:
            raise ValueError(
                f"no sample would be drawn: the run has {length.steps} steps, the first sample comes after "
                f"{self._burn_in} of burn-in and {self._every} more"
            )

    @property
    def first_sample(self) -> int:
        return self._burn_in + self._every

    def controls(self, step: int) -> StepControls:
        epoch = (step - 1) // self._steps_per_epoch if self._steps_per_epoch else 0
        burning_in = step <= self._burn_in
        cold = burning_in and self.burn_in_temperature is not None
        lr_factor = 1.0
        if self.lr_decay is not None:
            lr_factor = self.lr_decay(step) / self._largest_lr
        elif self.lr_annealing is not None:
            lr_factor = self.lr_annealing.factor(epoch)
        return StepControls(
            lr_factor,
            self.burn_in_temperature if cold else self.temperature,
            Stage.BURN_IN if burning_in else Stage.SAMPLING,
            1.0 if self.temperature_annealing is None else self.temperature_annealing.factor(epoch),
        )

    def _lr(self, group: dict[str, Any], step: int, controls: StepControls) -> Control:
        if self.lr_decay is None:
            return super()._lr(group, step, controls)
        return self.lr_decay(step) * (group["initial_lr"] / self._first_lr)  # type: ignore[no-any-return]

    def steps_alike(self, step: int) -> int:
        own = any(getattr(type(self), name) is not getattr(SamplingSchedule, name) for name in _OF_CONTROLS)
        if own or self.lr_decay is not None:
            return 1
        ends = [self._burn_in] if step <= self._burn_in else []
        if self._steps_per_epoch and (self.lr_annealing or self.temperature_annealing):
            ends.append(step + -step % self._steps_per_epoch)
        return min(ends, default=sys.maxsize) - step + 1

    def draws(self, step: int) -> bool:
        return step > self._burn_in and (step - self._burn_in) % self._every == 0


Plan = TypeVar("Plan")


class WholeRunSchedule(Schedule, Generic[Plan]):
    """A schedule that is laid out over the whole run, whose number of steps its checkpoints remember."""

    plans_whole_run = True
    _plan: Plan | None = None
    total_steps: int | None = None
    """Optimizer steps of the checkpoint's run, and then of the fit."""

    def reset(self) -> None:
        super().reset()
        self.total_steps = self._plan = None

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        if saved is not None:
            self.total_steps = saved["total_steps"]
        super().begin(run, saved)

    def plan_over(self, steps: int, length: RunLength) -> Plan:
        """Return what is done in which of the schedule's steps, 1 to `steps`."""
        raise NotImplementedError

    @property
    def laid_out(self) -> Plan:
        """The plan over the run's length."""
        assert self._plan is not None, "the schedule has no length yet: call lay_out(RunLength(steps))"
        return self._plan

    def lay_out(self, length: RunLength) -> None:
        if not math.isfinite(length.steps):
            raise ValueError(
                f"{type(self).__name__} needs a run with an end: set the trainer's max_steps, or max_epochs and a "
                "loader that has a length"
            )
        self._plan = self.plan_over(int(length.steps), length)

    def plan(self, trainer: pl.Trainer, module: ChainModel) -> None:
        """Lay the schedule out; warn if the run may end early, or if its length is not the checkpoint's."""
        super().plan(trainer, module)
        total = int(fit_steps(trainer))
        ender = next((c for c in callbacks_of(trainer) if isinstance(c, EarlyStopping | Timer)), None)
        if ender is not None:
            name = type(ender).__name__
            rank_zero_warn(f"{name} may end the run before {self._missed(total)} would be missing: omit {name}.")
        if self.total_steps not in (None, total):
            planned, ends = self._planned_and_ends()
            rank_zero_warn(
                f"The checkpoint's {planned} planned for {self.total_steps} steps, this run has {total}, so its {ends} "
                "elsewhere: resume with the same max_epochs or max_steps to continue the same schedule."
            )
        self.total_steps = total

    def _missed(self, total: int) -> str:
        """Return what a run that ends early misses, for a message."""
        return f"its last step, {total}, after which {type(self).__name__} draws its samples, so they"

    def _planned_and_ends(self) -> tuple[str, str]:
        """Return what another length of the run changes, for a message."""
        return f"{type(self).__name__} was", "step size ends"

    def state(self) -> dict[str, Any]:
        return super().state() | {"total_steps": self.total_steps}


class CyclicalSchedule(WholeRunSchedule[CyclicalPlan]):
    """Cycles of exploration and sampling with a cosine step size (cSGLD, cSGHMC; any sampler).

        lr_k = lr_0/2·[cos(π·r(k)) + 1],   r(k) = mod(k-1, ⌈K/M⌉)/⌈K/M⌉

    lr_0 is each parameter group's own lr, K the run's optimizer steps. While r(k) < β the temperature is 0; then it
    is the target's, and samples are drawn, evenly spaced up to the cycle's end. With `temperature=0` it yields
    Snapshot ensembles.

    Args:
        num_cycles: M.
        exploration: β in [0, 1), the share of a cycle without noise.
        samples_per_cycle: samples drawn in each cycle.
        temperature: τ of the sampling stage; None uses the module's.

    Raises:
        ValueError: for an argument out of range; at the start of the fit, if the run has no end or its cycles are too
            short for their samples.

    Source: Zhang et al. 2020 (cSG-MCMC), eq. (2) and Algorithm 1.

    Example::

        trainer = pl.Trainer(max_epochs=200, callbacks=[CyclicalSchedule(num_cycles=4, exploration=0.8)])
    """

    def __init__(
        self,
        num_cycles: int = 4,
        exploration: float = 0.8,
        samples_per_cycle: int = 3,
        temperature: float | None = None,
    ) -> None:
        check_count("num_cycles", num_cycles, optional=False)
        check_within("exploration", exploration, "[0, 1)")
        check_count("samples_per_cycle", samples_per_cycle, optional=False)
        check_number("temperature", temperature)
        self.num_cycles = num_cycles
        self.exploration = exploration
        self.samples_per_cycle = samples_per_cycle
        self.temperature = temperature
        self._sample_steps: frozenset[int] = frozenset()

    def plan_over(self, steps: int, length: RunLength) -> CyclicalPlan:
        own = (self.num_cycles, self.exploration, self.samples_per_cycle)
        plan = CyclicalPlan(steps, *(own if not length.is_trial else (1, 0.0, 1)))
        self._sample_steps = frozenset(plan.sample_steps())
        return plan

    def plan(self, trainer: pl.Trainer, module: ChainModel) -> None:
        super().plan(trainer, module)
        module.chains.progress.num_cycles = self.laid_out.num_cycles

    @property
    def first_sample(self) -> int:
        return min(self._sample_steps)

    def controls(self, step: int) -> StepControls:
        plan = self.laid_out
        exploring = plan.is_exploration(step)
        stage = Stage.EXPLORATION if exploring else Stage.SAMPLING
        return StepControls(plan.lr_factor(step), 0.0 if exploring else self.temperature, stage)

    def cycle_of(self, step: int) -> int:
        return self.laid_out.cycle_of(step)

    def draws(self, step: int) -> bool:
        return step in self._sample_steps

    def _missed(self, total: int) -> str:
        return f"its {self.num_cycles} cycles over {total} steps are complete, so the last samples"

    def _planned_and_ends(self) -> tuple[str, str]:
        return "cycles were", "cycles end"
