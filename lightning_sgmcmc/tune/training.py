"""A warmed-up state, whatever the lr to start from: optimization with step sizes that are raised and lowered."""

import copy
import math
from dataclasses import dataclass, field
from typing import Any

from lightning_sgmcmc.callbacks import WarmStart
from lightning_sgmcmc.tune.proposal import scaled, tail_mean
from lightning_sgmcmc.tune.runs import COLD, STILL, Energies, ShortRuns, State, optimization

TRIAL_STEPS = 50
"""Optimizer steps of a trial."""
MAX_TRIALS = 14
FACTOR = 8.0
"""Between the step sizes of two trials; far from the right one it is the square."""
LEARNED = 0.05
"""The share of the energy to lose that a trained chain may still have."""


@dataclass(frozen=True)
class Trial:
    """Steps of optimization from the start: mean Ũ of the last third, infinite if they diverged, and its error."""

    lr: float
    energy: float
    error: float
    state: State

    @property
    def bound(self) -> float:
        """An energy that is certainly not lower."""
        return self.energy + 2 * self.error


@dataclass
class Training:
    """Trials of optimization, and the state that they led to.

    Attributes:
        setting: the module's lr.
        given: the largest number in it.
        energy: Ũ of the warmed-up state, the lowest that was found.
        state: the warmed-up state.
        lr: the step size that lowers the energy of the start most in some steps.
    """

    runs: ShortRuns
    setting: Any
    given: float
    start_energy: float
    start_error: float = 0.0
    energy: float = math.inf
    state: State = field(default_factory=list)
    lr: float = 0.0
    _trials: dict[float, Trial] = field(default_factory=dict)
    _curve: list[tuple[float, float]] = field(default_factory=list)

    def set_lr(self, lr: float) -> None:
        """Set the module's lr, all its patterns and chains in proportion."""
        self.runs.module.lr = scaled(self.setting, lr / self.given)

    def warm_up(self, steps: int) -> None:
        """Find a good state and a step size that trains, by trials and a burn-in of some steps."""
        self._start = self.runs.state()
        self._warm_start(steps)
        self.state, self.energy = self._start, self.start_energy
        best = self._best_trial()
        self.lr = best.lr
        if best.energy < self.start_energy or not math.isfinite(self.start_energy):
            self.state, self.energy = best.state, best.energy
        self._burn_in(best.lr, steps)

    def _warm_start(self, steps: int) -> None:
        """Begin where the run's warm start leads, in short form."""
        given = self.runs.warm_start
        if not isinstance(given, WarmStart):
            return
        short = copy.copy(given)
        short.steps, short.epochs, short.early_stopping = max(1, min(steps, given.steps or steps)), None, None
        short.reset()
        last = STILL if self.runs.is_microcanonical else COLD  # a hot step would leave the optimum
        found = self.runs.try_fit(optimization(1, controls=last), short.steps + 1, short)
        energy = math.inf if found is None else tail_mean(found.of()[1:])
        if energy < self.start_energy:
            self._start, self.start_energy = self.runs.state(), energy
            self.is_warm = True
        else:
            self.runs.set_state(self._start)

    is_warm = False
    """Whether the run's chains begin to sample from a warm start."""

    def trial(self, lr: float) -> Trial:
        """Optimize from the start at the full lr, once for each lr."""
        if lr in self._trials:
            return self._trials[lr]
        self.runs.set_state(self._start)
        self.set_lr(lr)
        found = self.runs.try_fit(optimization(TRIAL_STEPS, controls=self.runs.training_controls), TRIAL_STEPS)
        energies = None if found is None else found.of()
        energy = math.inf if energies is None else tail_mean(energies)
        error = 0.0
        if energies is not None and math.isfinite(energy):
            last = energies[-max(2, len(energies) // 3) :].mean(1)
            error = float(last.std()) / math.sqrt(len(last))
            self._record(found, lr)
        self._trials[lr] = Trial(lr, energy, error, self.runs.state())
        return self._trials[lr]

    def trains(self, lr: float) -> bool:
        """Return whether optimization at the full lr from the run's start does not raise its energy."""
        found = self.trial(lr)
        return found.energy - 2 * found.error <= self.start_energy + 2 * self.start_error

    def _record(self, found: Energies | None, lr: float, factor: float = 1.0) -> None:
        energies = found.of().mean(1).tolist() if found is not None else []
        width = max(1, len(energies) // 5)
        for end in range(width, len(energies) + 1, width):
            self._curve.append((lr * factor * (end - width / 2), sum(energies[end - width : end]) / width))

    def _best_trial(self) -> Trial:
        """Raise or lower the step size until the best one is between two worse ones."""
        lr = 2.0 ** round(math.log2(self.given))
        tried = [self.trial(lr)]
        while len(tried) < MAX_TRIALS:
            best = self._best(tried)
            above = [t for t in tried if t.lr > best.lr]
            below = [t for t in tried if t.lr < best.lr]
            gain = self.start_energy - best.energy
            is_far = gain < 0.01 * abs(self.start_energy)
            if math.isinf(best.energy) or not (above or is_far or below):
                tried.append(self.trial(min(t.lr for t in tried) / FACTOR if math.isinf(best.energy) else lr * FACTOR))
            elif not above:
                tried.append(self.trial(best.lr * FACTOR ** (2 if is_far else 1)))
            elif min(t.lr for t in above) > best.lr * FACTOR * 1.01:
                tried.append(self.trial(best.lr * FACTOR))
            elif not below:
                tried.append(self.trial(best.lr / FACTOR))
            else:
                break
        return self._best(tried)

    @staticmethod
    def _best(tried: list[Trial]) -> Trial:
        """Return the largest step size whose energy is as low as the lowest, beyond noise."""
        lowest = min(tried, key=lambda t: t.bound)
        if math.isinf(lowest.energy):
            return min(tried, key=lambda t: t.lr)
        return max((t for t in tried if t.energy - 2 * t.error <= lowest.bound), key=lambda t: t.lr)

    def _burn_in(self, lr: float, steps: int) -> None:
        """Optimize from the best state with a step that shrinks; keep the result only if its energy is lower."""
        factor = 0.5
        for _ in range(3 if steps > 0 else 0):
            self.runs.set_state(self.state)
            self.set_lr(lr * factor)
            found = self.runs.try_fit(optimization(steps, True, self.runs.training_controls), steps)
            energy = math.inf if found is None else tail_mean(found.of())
            if energy < self.energy:
                reached = min(TRIAL_STEPS * lr, max((time for time, _ in self._curve), default=0.0))
                self._curve.append((reached + lr * factor * steps / 2, energy))
                self.state, self.energy = self.runs.state(), energy
                return
            factor /= 10

    @property
    def time(self) -> float:
        """lr times steps after which a chain is trained, 0 if the run begins with a warm start."""
        gain = self.start_energy - self.energy
        if self.is_warm or not gain > 0 or not self._curve:
            return 0.0
        enough = self.energy + LEARNED * gain
        return min((time for time, energy in self._curve if energy <= enough), default=0.0)
