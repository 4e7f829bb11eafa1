"""Draws in the plane: what a method leaves of many repeats, how long it took, and which modes it found."""

import time
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc.simulation.loop import CHUNK
from lightning_sgmcmc.simulation.targets import CosineTarget


class Draws(NamedTuple):
    """What a method leaves of all repeats.

    Attributes:
        progress: the share of the budget that was spent by each draw, rising, shape (S,).
        places: shape (S, R, P, 2), P chains of each repeat.
        log_weights: shape (S, R, P).
        seconds: of all repeats side by side, without compiling.
    """

    progress: Tensor
    places: Tensor
    log_weights: Tensor
    seconds: float


class Clock:
    """An observed function that takes the time of each chunk of steps: the first one, which compiles, is left out."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def __call__(self, places: Tensor) -> Tensor:
        self._times.append(time.monotonic())
        return places[..., :1]

    def seconds(self, num_steps: int) -> float:
        """Return how long so many steps took, at the pace of all chunks but the first."""
        if num_steps <= CHUNK:
            return 0.0
        return (self._times[-1] - self._times[0]) * num_steps / (num_steps - CHUNK)


class Squares:
    """The unit squares around the modes, whole numbers in both coordinates, with their true masses."""

    SIDE = 17

    def __init__(self, target: CosineTarget) -> None:
        cells = target.cells()
        self.modes = target.modes
        self.truth = self.masses(cells, (-target.energy(cells)).softmax(0))

    def masses(self, places: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted share of places in each square, shape (SIDE²,); the outermost hold what lies beyond."""
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
