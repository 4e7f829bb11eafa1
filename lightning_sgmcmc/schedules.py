"""Step-size and temperature schedules: pure functions of the number k = 1, 2, … of the next optimizer step."""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from lightning_sgmcmc.checks import check_count, check_positive, check_within


@dataclass(frozen=True)
class Cycles:
    """Cycles of equal length in K steps; the last one is shorter where M does not divide K."""

    total_steps: int
    num_cycles: int

    @property
    def period(self) -> int:
        """P, the number of steps in a cycle."""
        return math.ceil(self.total_steps / self.num_cycles)

    def cycle_of(self, step: int) -> int:
        """Return the cycle of step k, from 0."""
        return (step - 1) // self.period

    def end_of(self, cycle: int) -> int:
        """Return the last step of a cycle."""
        return min((cycle + 1) * self.period, self.total_steps)


@dataclass(frozen=True)
class CyclicalPlan(Cycles):
    """The cyclical schedule of cSG-MCMC: M cycles in K steps (Zhang et al. 2020, eq. (2) and Algorithm 1).

        lr_k = lr_0/2·[cos(π·r(k)) + 1],   r(k) = mod(k-1, P)/P,   P = ⌈K/M⌉

    While r(k) < β = `exploration` the chain explores (temperature 0), then it samples. Each cycle draws the same number
    of samples, evenly spaced up to its end. If M does not divide K, the last cycle is shorter.

    >>> plan = CyclicalPlan(total_steps=20, num_cycles=2, exploration=0.5, samples_per_cycle=2)
    >>> plan.sample_steps()
    [8, 10, 18, 20]
    >>> [round(plan.lr_factor(step), 2) for step in (1, 6, 10, 11)]
    [1.0, 0.5, 0.02, 1.0]
    """

    exploration: float
    samples_per_cycle: int

    def __post_init__(self) -> None:
        if min(self.total_steps, self.num_cycles, self.samples_per_cycle) < 1 or not 0 <= self.exploration <= 1:
            raise ValueError(f"a plan needs positive numbers, and an exploration in [0, 1], got {self}")
        for cycle in range(self.num_cycles):
            length = self.end_of(cycle) - cycle * self.period
            stage = length - self._sampling_start
            if length < 1 or stage < self.samples_per_cycle:
                raise ValueError(
                    f"cycle {cycle + 1} of {self.num_cycles} has {max(stage, 0)} sampling steps for "
                    f"samples_per_cycle={self.samples_per_cycle}: {self.total_steps} steps in all make cycles of "
                    f"{self.period}, and exploration={self.exploration} leaves only the end of each; train longer, or "
                    "take fewer cycles, fewer samples or less exploration"
                )

    @property
    def _sampling_start(self) -> int:
        """The first position j in a cycle, from 0, with j/P ≥ β."""
        start = math.floor(self.exploration * self.period)  # may be one too low by rounding
        return start if start / self.period >= self.exploration else start + 1

    def lr_factor(self, step: int) -> float:
        """Return lr_k/lr_0."""
        return cyclical_lr_factor(step, self.period)

    def is_exploration(self, step: int) -> bool:
        """Return whether step k is in the exploration stage of its cycle."""
        return (step - 1) % self.period / self.period < self.exploration

    def sample_steps(self) -> list[int]:
        """Return the steps after which a sample is drawn."""
        steps = []
        for cycle in range(self.num_cycles):
            end = self.end_of(cycle)
            stage = end - cycle * self.period - self._sampling_start
            count = self.samples_per_cycle
            steps += [end - stage * i // count for i in reversed(range(count))]
        return steps


@dataclass(frozen=True)
class AveragingPlan(Cycles):
    """The schedule of SWAG: the step size falls to a constant, at which iterates are collected; in M equal cycles.

        lr_k = lr_0·[f + (1-f)·(cos(π·j/S) + 1)/2] for j < S,   lr_0·f for j ≥ S,   j = mod(k-1, P), S = ⌈(1-c)·P⌉

    P = ⌈K/M⌉ is the period, c = `collection` a share of it, f = `lr_factor`. The last step of a cycle is collected, and
    before it every n-th of the stage j ≥ S; they must be as many as `least`.

    Source: Maddox et al. 2019 (SWAG), Algorithm 1; the cycles as in Zhang et al. 2020 (cSG-MCMC), eq. (2).

    >>> plan = AveragingPlan(20, 2, collection=0.4, lr_factor=0.5, every_n_steps=2)
    >>> [step for step in range(1, 21) if plan.collects(step)]
    [8, 10, 18, 20]
    >>> [round(plan.lr_factor_of(step), 2) for step in (1, 4, 7, 10, 11)]
    [1.0, 0.75, 0.5, 0.5, 1.0]
    """

    collection: float
    lr_factor: float
    every_n_steps: int
    least: int = 2

    def __post_init__(self) -> None:
        last = self.total_steps - (self.num_cycles - 1) * self.period  # length of the shortest cycle
        count = -(-max(last - self._start, 0) // self.every_n_steps)
        if count < self.least:
            raise ValueError(
                f"a cycle collects {count} iterates, and a covariance needs {self.least}: {self.total_steps} steps in "
                f"{self.num_cycles} cycles, of which the last share collection={self.collection:g} is collected every "
                f"{self.every_n_steps} steps; train longer, or take fewer cycles, more collection or a smaller "
                "every_n_steps"
            )

    @property
    def _start(self) -> int:
        return math.ceil(round((1 - self.collection) * self.period, 9))

    def lr_factor_of(self, step: int) -> float:
        """Return lr_k/lr_0."""
        position = (step - 1) % self.period
        if position >= self._start:
            return self.lr_factor
        return self.lr_factor + (1 - self.lr_factor) * (math.cos(math.pi * position / self._start) + 1) / 2

    def is_collecting(self, step: int) -> bool:
        """Return whether step k is in the stage with the constant step size."""
        return (step - 1) % self.period >= self._start

    def collects(self, step: int) -> bool:
        """Return whether the state after step k is collected."""
        return self.is_collecting(step) and (self.end_of(self.cycle_of(step)) - step) % self.every_n_steps == 0

    def ends_cycle(self, step: int) -> bool:
        """Return whether step k is the last of its cycle."""
        return step == self.end_of(self.cycle_of(step))


def cyclical_lr_factor(step: int, period: int) -> float:
    """Return [cos(π·mod(k-1, P)/P) + 1]/2 for step k and period P (cSG-MCMC, eq. (2))."""
    return (math.cos(math.pi * ((step - 1) % period) / period) + 1) / 2


@dataclass(frozen=True)
class PolynomialDecay:
    """The step size lr_k = a·(b + k)^-γ.

    Args:
        a: scale > 0, in the units of lr.
        b: offset in steps, ≥ 0.
        gamma: exponent γ ≥ 0; in (0.5, 1] the bias goes to 0.

    Raises:
        ValueError: if an argument is out of range.

    Source: Welling & Teh 2011, section 3.

    >>> decay = PolynomialDecay(a=0.1, b=9.0, gamma=0.5)
    >>> [round(decay(step), 3) for step in (1, 91, 991)]
    [0.032, 0.01, 0.003]
    """

    a: float
    b: float = 0.0
    gamma: float = 0.55

    def __post_init__(self) -> None:
        check_positive("a", self.a)
        for name, value in (("b", self.b), ("gamma", self.gamma)):
            check_within(name, value, "[0, inf)")

    def __call__(self, step: int) -> float:
        """Return lr_k."""
        return self.a * (self.b + step) ** -self.gamma


@dataclass(frozen=True)
class Annealing:
    """Division by a constant at every epoch: value·divisor^-(epoch - start_epoch) from epoch `start_epoch`.

    Args:
        divisor: the constant that divides the value once per epoch, ≥ 1.
        start_epoch: number of epochs at the full value.

    Raises:
        ValueError: if an argument is out of range.

    Source: Deng et al. 2020 (CSGLD), section 4.2 (saCSGHMC: 1.01 after 400 epochs).

    >>> Annealing(divisor=2.0, start_epoch=1).factor(3)
    0.25
    """

    divisor: float = 1.01
    start_epoch: int = 0

    def __post_init__(self) -> None:
        check_within("divisor", self.divisor, "[1, inf)")
        check_count("start_epoch", self.start_epoch, least=0)

    def factor(self, epoch: int) -> float:
        """Return the factor of the value in an epoch, counted from 0."""
        return self.divisor ** -max(0, epoch - self.start_epoch)


@dataclass(frozen=True)
class Patience:
    """Early stopping: stop once this many validations in a row have brought no improvement.

    Args:
        validations: number of validations without improvement.
        min_improvement: how far the loss has to fall to count as an improvement, in nats per example, ≥ 0.

    Raises:
        ValueError: if an argument is out of range.
    """

    validations: int = 3
    min_improvement: float = 0.0

    def __post_init__(self) -> None:
        check_count("validations", self.validations, optional=False)
        check_within("min_improvement", self.min_improvement, "[0, inf)")


LR_SHARE = 0.1
"""Share of the first step size at which a stage of `WarmUpAndDecay` ends, unless another is given."""


@dataclass(frozen=True)
class WarmUpAndDecay:
    """Optimization, then one stage of draws with a falling step size, and a second one if there is a last part.

        lr_k = lr_0·max(0.02, [cos(π·(k-1)/W) + 1]/2) for k ≤ W,   lr_0·[e + (1-e)·(cos(π·u) + 1)/2] after

    K are the steps, W those of the warm-up, and u the elapsed share of the stage: of the other K - W, or of each part
    of them. e is `lr_share`, in a last part `LR_SHARE`. Each stage begins with a linear rise: over a tenth of the
    warm-up, and over 30 steps. The draws are spread evenly over the steps after the warm-up; those of the last part, a
    share of all steps, are `last_draw_steps`.

    >>> stages = WarmUpAndDecay(100, 0.2, 4)
    >>> stages.draw_steps, stages.is_warm_up(20), stages.is_warm_up(21)
    ((40, 60, 80, 100), True, False)
    >>> stages = WarmUpAndDecay(100, 0.2, 4, last_part=0.4)
    >>> stages.draw_steps, stages.last_draw_steps
    ((40, 60), (80, 100))
    """

    total_steps: int
    warm_up: float
    num_draws: int
    last_part: float = 0.0
    lr_share: float = LR_SHARE

    def __post_init__(self) -> None:
        if self.total_steps - self.warm_steps < self.num_draws:
            left = self.total_steps - self.warm_steps
            raise ValueError(
                f"{self.num_draws} draws do not fit into the {left} steps after the warm-up of a run of "
                f"{self.total_steps} steps: train for {math.ceil(self.num_draws / (1 - self.warm_up))} steps or more, "
                f"or take fewer draws, AutoSampling(num_draws={left})"
            )

    @cached_property
    def warm_steps(self) -> int:
        """W, at least 1 if there are two steps."""
        return min(max(round(self.warm_up * self.total_steps), 1), self.total_steps - 1)

    @cached_property
    def switch(self) -> int:
        """The last step before the last part; K without one."""
        return max(self.total_steps - round(self.last_part * self.total_steps), self.warm_steps + 1)

    @cached_property
    def draw_steps(self) -> tuple[int, ...]:
        """The steps after which draws are taken, without those of the last part."""
        left = self.total_steps - self.warm_steps
        count = max(1, round(self.num_draws * (self.switch - self.warm_steps) / left))
        return tuple(self.warm_steps + round((j + 1) * (self.switch - self.warm_steps) / count) for j in range(count))

    @cached_property
    def last_draw_steps(self) -> tuple[int, ...]:
        """The steps of the last part after which draws are taken."""
        left, count = self.total_steps - self.switch, self.num_draws - len(self.draw_steps)
        return tuple(self.switch + round((j + 1) * left / count) for j in range(count))

    def is_warm_up(self, step: int) -> bool:
        """Return whether step k is in the warm-up."""
        return step <= self.warm_steps

    def draws(self, step: int) -> bool:
        """Return whether a draw is taken after step k, which is not in the last part."""
        place = bisect_left(self.draw_steps, step)
        return place < len(self.draw_steps) and self.draw_steps[place] == step

    def lr_factor(self, step: int) -> float:
        """Return lr_k/lr_0 of step k."""
        warm = self.warm_steps
        if step <= warm:
            return max(0.02, (math.cos(math.pi * (step - 1) / warm) + 1) / 2) * min(1.0, step / (0.1 * warm))
        begin, end, least = warm, self.switch, self.lr_share
        if step > self.switch:
            begin, end, least = self.switch, self.total_steps, LR_SHARE
        elapsed = (step - begin - 1) / (end - begin)
        return (least + (1 - least) / 2 * (math.cos(math.pi * elapsed) + 1)) * min(1.0, (step - begin) / 30)
