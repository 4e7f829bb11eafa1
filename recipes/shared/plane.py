"""Draws in the plane: those of many repeats, their time, masses and modes; the variance of replica exchange."""

import time
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc.contour import DecayingStepSize
from lightning_sgmcmc.simulation.loop import CHUNK
from lightning_sgmcmc.simulation.targets import CosineTarget
from lightning_sgmcmc.tensors import widest


class Draws(NamedTuple):
    """The draws of a method in all repeats.

    Attributes:
        progress: the share of the budget spent at each draw, increasing, shape (S,).
        places: shape (S, R, P, 2), P chains of each repeat.
        log_weights: shape (S, R, P).
        seconds: time of all repeats side by side, without compilation.
    """

    progress: Tensor
    places: Tensor
    log_weights: Tensor
    seconds: float


class Clock:
    """An observed function that times each chunk of steps; the first chunk, which compiles, is excluded."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def __call__(self, places: Tensor) -> Tensor:
        self._times.append(time.monotonic())
        return places[..., :1]

    def seconds(self, num_steps: int) -> float:
        """Return the time of `num_steps` steps, at the pace of all chunks but the first."""
        if num_steps <= CHUNK:
            return 0.0
        return (self._times[-1] - self._times[0]) * num_steps / (num_steps - CHUNK)


class VarianceEstimate:
    """Replica exchange's estimate of the variance of an energy's noise, which is smoothed from a first value.

    The estimates that it smooths are replaced by their mean; the program's scatter around it, with ten energies each.

    Args:
        first: the first value.
        truth: the variance.
        every: steps between two estimates.
        step_size: ω of the smoothing.
        by_iteration: whether ω's index is the step, not the number of estimates.
        count: number of estimates.
    """

    def __init__(
        self, first: float, truth: float, every: int, step_size: DecayingStepSize, by_iteration: bool, count: int
    ) -> None:
        self.every, self.values = every, [first]
        for update in range(1, count):
            share = step_size.at(update * every if by_iteration else update)
            self.values.append((1 - share) * self.values[-1] + share * truth)

    def __call__(self, step: int) -> float:
        """Return the variance at a step; beyond the last estimate it stays."""
        return self.values[min(step // self.every, len(self.values) - 1)]


class Squares:
    """The unit squares around the modes, which have integer coordinates, with their true masses."""

    SIDE = 17

    def __init__(self, target: CosineTarget) -> None:
        cells = target.cells()
        self.modes = target.modes
        self.truth = self.masses(cells, (-target.energy(cells)).softmax(0))

    def masses(self, places: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted share of places in each square, shape (SIDE²,); outer squares include places beyond."""
        half = self.SIDE // 2
        row, column = (places.double().round().clamp(-half, half).long() + half).unbind(1)
        sums = torch.zeros(self.SIDE**2, dtype=torch.float64)
        return sums.index_add_(0, row * self.SIDE + column, weights.double()) / weights.double().sum()

    def found(self, masses: Tensor) -> int:
        """Return how many of the 25 modes' squares have at least half of their true mass."""
        half = self.SIDE // 2
        row, column = (self.modes.round().long() + half).unbind(1)
        modes = row * self.SIDE + column
        return int((masses[modes] >= 0.5 * self.truth[modes]).sum())


def mode_coverage(samples: Tensor, modes: Tensor, radius: float = 0.25, least: int = 100) -> int:
    """Return the number of modes with at least `least` samples within a distance.

    Args:
        samples: shape (S, d).
        modes: shape (M, d).
        radius: the distance.
        least: the number of samples.

    Source: Zhang et al. 2020 (cSG-MCMC), appendix.
    """
    near = torch.zeros(len(modes), dtype=torch.int64)
    for part in widest(samples).split(100_000):
        near += (torch.cdist(part, widest(modes)) < radius).sum(0)
    return int((near >= least).sum())


def cell_masses(samples: Tensor, weights: Tensor, bounds: tuple[float, float], count: int) -> Tensor:
    """Return the weighted share of samples in each cell of a square grid, shape (count²,), ignoring those outside.

    Args:
        samples: shape (S, 2).
        weights: shape (S,), not negative.
        bounds: lower and upper ends of both axes.
        count: cells along each axis.
    """
    low, high = bounds
    index = ((widest(samples) - low) / (high - low) * count).floor().long()
    inside = ((index >= 0) & (index < count)).all(1)
    flat = index[inside, 0] * count + index[inside, 1]
    masses = torch.zeros(count * count, dtype=torch.float64).index_add_(0, flat, widest(weights[inside]))
    return masses / widest(weights).sum()


def divergence(truth: Tensor, estimate: Tensor, smoothing: float = 0.01) -> float:
    """Return the Kullback-Leibler divergence Σ p·log(p/q) between masses on the same cells, in nats.

    Args:
        truth: p, shape (cells,), summing to 1.
        estimate: q, shape (cells,), summing to 1 at most.
        smoothing: share of the uniform distribution mixed into q, so that an empty cell contributes a finite amount.
    """
    mixed = (1 - smoothing) * estimate + smoothing / len(estimate)
    return float(torch.xlogy(truth, truth).sum() - torch.xlogy(truth, mixed).sum())
