"""The short form of a run's schedule: its first stages, in fewer steps."""

import copy
import math
from collections.abc import Sequence

from lightning_sgmcmc.callbacks.auto_sampling import AutoSampling
from lightning_sgmcmc.callbacks.sampling_schedule import SamplingSchedule
from lightning_sgmcmc.callbacks.schedule import RunLength, Schedule, StepControls
from lightning_sgmcmc.chains.state import Stage

MAX_SAMPLES = 5
"""Samples of a short run."""
EXPLORATION_SHARE, BURN_IN_SHARE = 0.5, 0.25
"""Shares of a short run before its sampling stage."""
COLD = StepControls(1.0, 0.0, Stage.BURN_IN)
"""The controls of optimization at the full lr."""
HOT = COLD._replace(temperature=None)
"""Those of a sampler that makes no step at temperature 0."""
STILL = HOT._replace(lr_factor=1e-15)
"""The controls of a step of practically no length."""


class FixedControls(Schedule):
    """A schedule with the controls of each step given.

    Args:
        steps: the controls of steps 1 to n; later steps have those of the last one.
        samples: the steps after which samples are drawn.
        temperature: τ of the target; None uses the module's.
        sets_lr: whether the controls' factors set the step size.
    """

    def __init__(
        self,
        steps: Sequence[StepControls],
        samples: Sequence[int],
        temperature: float | None = None,
        sets_lr: bool = True,
    ) -> None:
        self.steps, self.samples = tuple(steps), frozenset(samples)
        self.temperature = temperature
        self._sets_lr = sets_lr

    @property
    def sets_lr(self) -> bool:  # type: ignore[override]
        return self._sets_lr

    def lay_out(self, length: RunLength) -> None:
        """Do nothing: the controls do not depend on the run's length."""

    @property
    def first_sample(self) -> int:
        return min(self.samples)

    def controls(self, step: int) -> StepControls:
        return self.steps[min(step, len(self.steps)) - 1]

    def draws(self, step: int) -> bool:
        return step in self.samples


def optimization(steps: int, decays: bool = False, controls: StepControls = COLD) -> FixedControls:
    """Return the schedule of n steps that lower the energy.

    Args:
        steps: n.
        decays: whether the step size falls as a cosine.
        controls: of the first step.
    """
    factors = [(1 + math.cos(math.pi * step / steps)) / 2 if decays else 1.0 for step in range(steps)]
    return FixedControls([controls._replace(lr_factor=factor) for factor in factors], [steps])


class RunForm:
    """The stages of a run, from which short runs are made.

    Args:
        schedule: the run's; None is sampling at a constant step.
        length: the run's length.

    Raises:
        ValueError: if the schedule sets the step size whatever the module's lr is, or does not fit into the run.
    """

    def __init__(self, schedule: Schedule | None, length: RunLength) -> None:
        if getattr(schedule, "lr_decay", None) is not None:
            raise ValueError(
                "SamplingSchedule(lr_decay=…) sets the step sizes itself, whatever the module's lr is: tune without "
                "it, and choose its a and b so that the first step is the proposed lr"
            )
        if isinstance(schedule, AutoSampling):
            raise ValueError("AutoSampling brings its own sampler and lr, so there is no step size to tune: just fit")
        self.schedule = SamplingSchedule(every_n_steps=1) if schedule is None else copy.deepcopy(schedule)
        self.schedule.lay_out(length)
        self._whole = min(length.steps, 10**6)
        end = self._end_of_first_stage()
        self._sampling = (self._first_sampling, end)

    def _end_of_first_stage(self) -> int:
        """Find the first sampling stage; return its last step."""
        total = int(self._whole)
        stride = max(1, total // 20000)
        steps = [*range(1, total + 1, stride)]
        noisy = [self.schedule.controls(step).stage is Stage.SAMPLING for step in steps]
        first = noisy.index(True) if True in noisy else 0
        after = noisy.index(False, first) if False in noisy[first:] else len(steps)
        self._first_sampling = steps[first]
        return min(steps[after - 1] + stride - 1, total)

    @property
    def explores(self) -> bool:
        """Whether the run begins with steps at temperature 0 and the full lr."""
        return self._first_sampling > 1 and self.schedule.controls(1).temperature == 0

    @property
    def is_steady(self) -> bool:
        """Whether the run ends in one stage of sampling at a constant step, as for samples of the posterior."""
        first, last = (self.schedule.controls(step).lr_factor for step in self._sampling)
        return self._sampling[1] == self._whole and first == last

    @property
    def stage_end(self) -> int:
        """The last step of the first sampling stage."""
        return self._sampling[1]

    @property
    def lead(self) -> float:
        """Σ of the step sizes before the first sampling stage over the lr, in steps at the full lr."""
        last = self._first_sampling - 1 if self._first_sampling > 1 else self.schedule.first_sample
        stride = max(1, last // 2000)
        factors = [self.schedule.controls(step).lr_factor for step in range(1, last + 1, stride)]
        return sum(factors) / max(len(factors), 1) * last

    def steady(self, steps: int) -> FixedControls:
        """Return the schedule of n steps with the controls of the run's first sampling step."""
        controls = self.schedule.controls(self._first_sampling)
        return FixedControls([controls], [steps], self.schedule.temperature, self.schedule.sets_lr)

    def short(self, steps: int, first: Sequence[StepControls] = (), trajectory: int = 1) -> FixedControls:
        """Return the schedule of a short run: the run's first stages, linearly shortened.

        Args:
            steps: its length, a multiple of trajectory.
            first: the controls of steps before it.
            trajectory: steps that have the same controls, and after which a sample may be drawn.
        """
        lead, parts = self._first_sampling - 1, steps // trajectory
        share = EXPLORATION_SHARE if self.explores else BURN_IN_SHARE
        before = min(math.ceil(lead / trajectory), round(parts * share))
        noisy = parts - before
        start, last = self._sampling
        places = [1 + j * lead // before for j in range(before)]
        places += [start + j * (last - start + 1) // noisy for j in range(noisy)]
        controls = [self.schedule.controls(place) for place in places for _ in range(trajectory)]
        count = min(MAX_SAMPLES, noisy)
        samples = [len(first) + trajectory * (before + round(noisy * (j + 1) / count)) for j in range(count)]
        return FixedControls([*first, *controls], samples, self.schedule.temperature, self.schedule.sets_lr)
