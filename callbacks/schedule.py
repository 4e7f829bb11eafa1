"""Schedules: when to draw samples, and with which controls; an optimization of the chains before."""

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch.optim import AdamW, Optimizer

from lightning_sgmcmc.chains.callback import Place, Run, sampling_module
from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.schedule import FirstStage, RunLength, Schedule, StepControls, epoch_length, schedule_of
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.chains.trainer import callbacks_of, fit_steps, instances_of, is_trial
from lightning_sgmcmc.chains.warm_start import BestStates, ChainOptimizers, check_optimizer, make_optimizer
from lightning_sgmcmc.checks import check_choice, check_count, check_kind, check_number, check_positive, check_within
from lightning_sgmcmc.fit.checks import watches_samples
from lightning_sgmcmc.namespace import pl, rank_zero_info, rank_zero_warn
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.sampler import Control
from lightning_sgmcmc.schedules import Annealing, CyclicalPlan, Patience, PolynomialDecay, cyclical_lr_factor

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
        self.epoch_steps = length.steps_per_epoch if by_epoch and not length.is_trial else 0
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

    def plan(self, trainer: pl.Trainer, module: ChainModel) -> None:
        """Lay the schedule out; warn if the chains' present states may end the run."""
        super().plan(trainer, module)
        early = next((c for c in instances_of(trainer, EarlyStopping) if not watches_samples(c)), None)
        if early is not None:
            rank_zero_warn(
                f"EarlyStopping(monitor={early.monitor!r}) watches the chains' present states, and may end the run "
                "before its last samples are drawn: omit it, or let it monitor 'val/bma_nll' of a BayesianModelAverage."
            )

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
            name, way = type(ender).__name__, "omit {}"
            if isinstance(ender, Timer):
                way = "omit {} (max_time), and set max_epochs to what the time allows"
            rank_zero_warn(f"{name} may end the run before {self._missed(total)} would be missing: {way.format(name)}.")
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


# -- a warm start ------------------------------------------------------------------------------------------------------


class WarmStart(FirstStage):
    """Optimizes every chain by a torch optimizer before the run's schedule begins.

    The loss is the one that the chains sample, Ũ/N with the prior, at temperature 0. Each chain has an optimizer of its
    own, so it is optimized as it would be alone; for several chains that is the training of an ensemble. Afterwards the
    sampler takes over: momenta are drawn from their stationary law at the controls of its first step (zero if that
    step has temperature 0), and the schedule counts its steps, cycles and burn-in from there. The run's length includes
    the warm start.

    With early stopping each chain keeps its best state on the validation data, by the mean of -log p(y|x,θ). It
    returns to that state when its patience is over, and waits there for the others. At the end of the warm start every
    chain is at its best state, and if all have stopped early, the schedule gets the steps that remain. Chains are
    validated when the trainer validates.

    Contours, replica exchange, control variates, `EWSG`'s choice and `ChainHealth` begin after it.

    Args:
        optimizer: a class of `torch.optim`, or a partial of one, whose `step` needs no closure. Its weight decay is 0,
            since the prior is in the loss.
        lr: step size of the optimizer.
        steps: the largest number of optimizer steps.
        epochs: the same in epochs; pass exactly one of the two.
        early_stopping: when a chain stops before that; None never stops it, and keeps its last state.
        lr_schedule: "cosine" lets lr fall as lr·[cos(π·(k-1)/K) + 1]/2 over the K steps, "constant" keeps it.

    Raises:
        ValueError: for an argument out of range; at the start of the fit, if the schedule has no step left, if early
            stopping has no validation data, or if a torch scheduler would count the warm start's steps.
        TypeError: for an optimizer that is none, or that needs a closure.

    Source: Sommer et al. 2024 (Connecting the dots: is mode-connectedness the key to feasible sample-based inference in
    Bayesian neural networks?), chains that start at the members of a deep ensemble.

    Example::

        warm_start = WarmStart(lr=1e-3, epochs=20, early_stopping=Patience(5))
        trainer = pl.Trainer(max_epochs=100, callbacks=[warm_start, CyclicalSchedule(num_cycles=4)])
    """

    changes_chain = True
    place = Place.FIRST_STAGE
    setting = "warm_start"
    claims: ClassVar[Mapping[str, str | None]] = {"draw momenta": "_draw_momenta"}

    def __init__(
        self,
        optimizer: Callable[..., Optimizer] = AdamW,
        lr: float = 1e-3,
        steps: int | None = None,
        epochs: int | None = None,
        early_stopping: Patience | None = None,
        lr_schedule: Literal["constant", "cosine"] = "constant",
    ) -> None:
        check_optimizer(optimizer)
        check_positive("lr", lr)
        if (steps is None) == (epochs is None):
            raise ValueError("pass exactly one of steps and epochs, the length of the warm start")
        check_count("steps", steps)
        check_count("epochs", epochs)
        check_kind("early_stopping", early_stopping, Patience)
        check_choice("lr_schedule", lr_schedule, ("constant", "cosine"))
        self.optimizer = optimizer
        self.lr = lr
        self.steps = steps
        self.epochs = epochs
        self.early_stopping = early_stopping
        self.lr_schedule = lr_schedule
        self.reset()

    def reset(self) -> None:
        self._planned = 0
        """Steps of the warm start without early stopping."""
        self._ended = self._draws_momenta = False
        self._optimizers: ChainOptimizers | None = None
        self._best: BestStates | None = None

    # -- the start ----------------------------------------------------------------------------------------------------

    def enter(self, trainer: pl.Trainer, module: ChainModel) -> None:
        if self._run is None:
            super().on_train_start(trainer, module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.enter(trainer, sampling_module(pl_module, self))

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        module, sampler = run.module, run.sampler
        self._check_run(run.trainer, sampler, saved)
        self._planned = self._length(run.trainer)
        self.epoch_steps = epoch_length(run.trainer) if self.steps is None and not is_trial(run.trainer) else 0
        saved = saved or {}
        progress = run.chains.progress
        progress.warm_steps = saved.get("warm_steps", self._planned)
        self._draws_momenta, self._ended = saved.get("draws_momenta", False), saved.get("ended", False)
        if self._ended:
            return
        progress.stage, progress.warm_lr = Stage.WARM_START, self.lr
        make = functools.partial(make_optimizer, self.optimizer, lr=self.lr)
        self._optimizers = ChainOptimizers(sampler, make, self._controls)
        if self.early_stopping is not None:
            self._best = BestStates(module.chains, self.early_stopping)
        for index, chain in enumerate(module.chains.layout.chains) if saved else ():
            own = saved["chains"][chain]
            self._optimizers.load_state_dict(index, own["optimizer"])
            if self._best is not None and "watch" in own:
                self._best.load_state_dict(index, own)
        sampler.stand_in = self._optimizers

    def _check_run(self, trainer: pl.Trainer, sampler: Sampler, saved: dict[str, Any] | None) -> None:
        if saved is None and sampler.step_count > 0:
            raise ValueError(
                f"the checkpoint's run has no WarmStart, and its chains have made {sampler.step_count} steps: remove "
                "WarmStart, or begin a new run with chain_start=[…]"
            )
        if trainer.lr_scheduler_configs:
            scheduler = type(trainer.lr_scheduler_configs[0].scheduler).__name__
            raise ValueError(
                f"the {scheduler} would count the steps of WarmStart as the sampler's: remove it, or let a schedule "
                "set the step size (CyclicalSchedule, SamplingSchedule(lr_decay=…))"
            )
        if self.early_stopping is not None and not trainer.enable_validation:
            raise ValueError(
                "WarmStart stops early by the validation data, and this run validates nothing: pass a validation "
                "loader and limit_val_batches above 0, or early_stopping=None"
            )

    def _length(self, trainer: pl.Trainer) -> int:
        """Return the planned number of steps."""
        total, schedule = fit_steps(trainer), schedule_of(trainer)
        if is_trial(trainer):
            return min(1, int(total) - 1)
        each = epoch_length(trainer)
        if self.epochs is not None and each == 0:
            raise ValueError("the training loader has no length, so epochs cannot be counted: pass WarmStart(steps=…)")
        length = self.steps if self.steps is not None else (self.epochs or 0) * each
        if schedule is not None and length >= total:
            raise ValueError(
                f"WarmStart takes {length} steps of a run of {total}, which leaves none to {type(schedule).__name__}: "
                "shorten it, or lengthen the run"
            )
        return int(min(length, total))

    # -- a step -------------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.advance(trainer, self.run.module, batch_idx)
        if not self._ended:
            self.run.sampler.set_control("temperature", 0.0)

    def acts_in(self, step: int) -> bool:
        return self._draws_momenta or (not self._ended and step > self.run.chains.progress.warm_steps)

    def _controls(self) -> tuple[Sequence[int], float]:
        """Return the chains that go on in the coming step, and the factor of lr."""
        factor = 1.0
        if self.lr_schedule == "cosine":
            factor = cyclical_lr_factor(self.run.sampler.step_count + 1, self._planned)
        self.run.chains.progress.warm_lr = self.lr * factor
        return range(self.run.module.num_chains) if self._best is None else self._best.active, factor

    # -- early stopping -----------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._watches(trainer) and self._best is not None:
            self.run.chains.observed.validation.clear()
            for chain in set(range(self.run.module.num_chains)).difference(self._best.active):
                self._best.restore(chain)  # its buffers may have changed, since it still sees batches

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        best = self._best
        if not self._watches(trainer) or best is None:
            return
        module = self.run.module
        seen, layout = module.chains.observed.validation, module.chains.layout
        if seen.total is None:
            raise RuntimeError(
                f"WarmStart(early_stopping=…) reads the loss that BayesianModule.validation_step computes, and "
                f"{type(module).__name__} does not call it: call super().validation_step(batch, batch_idx)"
            )
        count = torch.full_like(seen.total, seen.count)
        losses = layout.mean_over_data(seen.total) / layout.mean_over_data(count)
        best.validated(losses.tolist(), module.sampler.step_count)
        stopped = torch.tensor([watch.stopped_at is not None for watch in best.watches], device=module.device)
        if layout.gather(stopped.float()).all():
            # An accumulated step that is under way ends without effect, since no chain moves.
            module.chains.progress.warm_steps = module.sampler.step_count + int(module.chains.accumulation.accumulating)
            schedule = schedule_of(trainer)
            if schedule is not None:
                schedule.plan(trainer, module)

    def _watches(self, trainer: pl.Trainer) -> bool:
        return not self._ended and trainer.state.fn == "fit" and not trainer.sanity_checking

    # -- the end ------------------------------------------------------------------------------------------------------

    def advance(self, trainer: pl.Trainer, module: ChainModel, batch_idx: int) -> None:
        over = module.sampler.step_count >= module.chains.progress.warm_steps
        if over and not self._ended and batch_idx % trainer.accumulate_grad_batches == 0:
            self._end(trainer, module)

    def _end(self, trainer: pl.Trainer, module: ChainModel) -> None:
        """Return the chains to their best states, and let the sampler make the next step."""
        self._ended = self._draws_momenta = True
        self.epoch_steps = 0
        module.sampler.stand_in = self._optimizers = None
        module.sampler.set_control("temperature", module.target_temperature)
        progress = module.chains.progress
        progress.stage, progress.warm_lr = Stage.SAMPLING, None
        best, self._best = self._best, None
        if best is None:
            rank_zero_info(f"WarmStart ended after {progress.warm_steps} steps.")
            return
        if best.watches[0].best_loss is None and not is_trial(trainer):
            rank_zero_warn(
                f"WarmStart ended after {progress.warm_steps} steps without a validation, so early stopping had no "
                "effect: validate more often (val_check_interval), or pass early_stopping=None."
            )
        for chain in range(module.num_chains):
            best.restore(chain)
        found = ", ".join(str(watch) for watch in best.watches)
        rank_zero_info(f"WarmStart ended after {progress.warm_steps} steps; best validation NLL: {found}.")

    def _draw_momenta(self, trainer: pl.Trainer) -> None:
        """Draw the momenta of the sampler's first step, when its controls are known."""
        if self._draws_momenta:
            self._draws_momenta = False
            self.run.sampler.draw_momenta()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.advance(trainer, self.run.module, 0)

    def end(self) -> None:
        self.run.sampler.stand_in = self._optimizers = self._best = None

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def saves_alone(self) -> bool:
        return self._ended or super().saves_alone

    def state(self) -> dict[str, Any]:
        if self._run is None:
            return {}
        module, optimizers = self.run.module, self._optimizers
        state = {
            "warm_steps": module.chains.progress.warm_steps,
            "ended": self._ended,
            "draws_momenta": self._draws_momenta,
        }
        if optimizers is None:
            return state
        own: list[dict[str, Any]] = [{"optimizer": optimizers.state_dict(chain)} for chain in range(module.num_chains)]
        if self._best is not None:
            for chain, of_chain in enumerate(own):
                of_chain |= self._best.state_dict(chain)
        return state | {"chains": module.chains.layout.collect(own)}
