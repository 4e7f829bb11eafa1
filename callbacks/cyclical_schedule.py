"""The cyclical schedule of cSG-MCMC."""

from typing import Any

import pytorch_lightning as pl

from lightning_sgmcmc.callbacks.planned_length import PlannedLength
from lightning_sgmcmc.callbacks.schedule import RunLength, Schedule, StepControls
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.checks import check_count, check_number, check_within
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.schedules import CyclicalPlan


class CyclicalSchedule(Schedule):
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
        self._plan: CyclicalPlan | None = None
        self._sample_steps: frozenset[int] = frozenset()
        self._length = PlannedLength(
            "CyclicalSchedule",
            before=f"its {num_cycles} cycles over {{steps}} steps are complete, so the last samples would be missing",
            planned="cycles were",
            ends="cycles end",
        )

    def reset(self) -> None:
        super().reset()
        self._length.reset()

    def lay_out(self, length: RunLength) -> None:
        total = self._length.steps_of(length)
        if length.is_trial:
            self._plan = CyclicalPlan(total, num_cycles=1, exploration=0.0, samples_per_cycle=1)
        else:
            self._plan = CyclicalPlan(total, self.num_cycles, self.exploration, self.samples_per_cycle)
        self._sample_steps = frozenset(self._plan.sample_steps())

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._length.begin(trainer)

    def plan(self, trainer: pl.Trainer, module: BayesianModule) -> None:
        super().plan(trainer, module)
        module.chains.progress.num_cycles = self.laid_out.num_cycles

    @property
    def laid_out(self) -> CyclicalPlan:
        """The cycles over the run's length."""
        assert self._plan is not None, "the schedule has no length yet: call lay_out(RunLength(steps))"
        return self._plan

    @property
    def first_sample(self) -> int:
        return min(self._sample_steps)

    def controls(self, step: int) -> StepControls:
        plan = self.laid_out
        exploring = plan.is_exploration(step)
        stage = Stage.EXPLORATION if exploring else Stage.SAMPLING
        return StepControls(plan.lr_factor(step), 0.0 if exploring else self.temperature, stage)

    def apply(self, step: int, module: BayesianModule, sampler: Sampler) -> None:
        super().apply(step, module, sampler)
        module.chains.progress.cycle = self.laid_out.cycle_of(step)

    def draws(self, step: int) -> bool:
        return step in self._sample_steps

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self._length.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._length.load_state_dict(state_dict)
