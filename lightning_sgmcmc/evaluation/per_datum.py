"""Log densities of each evaluation datum, for paired comparisons of averages with single samples."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.intervals import mean_interval
from lightning_sgmcmc.tensors import widest

NAMES = ("best_single", "best_average", "first_cycle")


@dataclass
class Kept:
    """Log densities log p(y|x) of one predictive.

    Attributes:
        density: for each datum, shape (n,), float32, on the CPU.
        nll: their mean with the opposite sign, in nats per datum.
        index: of the sample that it is, or that was added last, from 0.
    """

    density: Tensor
    nll: float
    index: int


@dataclass
class PerDatumScores:
    """Log densities of the best single sample, of the best average and of the first cycle's average.

    Memory is three numbers a datum, however many samples there are. The best are chosen by their NLL on the same data,
    which favours them.
    """

    kept: dict[str, Kept] = field(default_factory=dict)
    _first_cycle: int | None = None
    _is_prefix: bool = True

    def add(self, index: int, cycle: int, own: Tensor, average: Tensor) -> None:
        """Add a sample.

        Args:
            index: its index, from 0.
            cycle: its cycle.
            own: log p(y|x,θ) of each datum, shape (n,).
            average: the same of the average of all samples so far; empty while all weights are 0.
        """
        self._keep_lower("best_single", own, index)
        if not len(average):
            return
        self._keep_lower("best_average", average, index)
        self._first_cycle = cycle if self._first_cycle is None else self._first_cycle
        in_first = cycle == self._first_cycle
        last = self.kept.get("first_cycle")
        if in_first and (last is None or last.index == index - 1):
            self.kept["first_cycle"] = _kept(average, index)
        elif in_first:
            self._is_prefix = False  # the first cycle's samples did not come first

    def _keep_lower(self, name: str, density: Tensor, index: int) -> None:
        nll = -float(density.mean())
        if math.isfinite(nll) and (name not in self.kept or nll < self.kept[name].nll):
            self.kept[name] = _kept(density, index)

    def first_cycle(self, count: int) -> Kept | None:
        """Return the average of the first cycle's samples; None if there is one cycle only, or if it is not known.

        Args:
            count: number of all samples.
        """
        found = self.kept.get("first_cycle")
        return found if found is not None and self._is_prefix and found.index + 1 < count else None

    def gain(self, name: str, average: Tensor) -> tuple[float, tuple[float, float]] | None:
        """Return how much lower the average's NLL is than that of a kept predictive, and the 95 % interval.

        Args:
            name: one of `NAMES`.
            average: log density of the average at each datum, shape (n,).
        """
        found = self.kept.get(name)
        if found is None or len(found.density) != len(average):
            return None
        difference = average.cpu().double() - widest(found.density)
        return float(difference.mean()), mean_interval(difference)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers and tensors."""
        return {
            "kept": {name: dict(vars(one)) for name, one in self.kept.items()},
            "first_cycle": self._first_cycle,
            "is_prefix": self._is_prefix,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self.kept = {name: Kept(**one) for name, one in state["kept"].items()}
        self._first_cycle, self._is_prefix = state["first_cycle"], state["is_prefix"]


def _kept(density: Tensor, index: int) -> Kept:
    return Kept(density.detach().to("cpu", torch.float32, copy=True), -float(density.mean()), index)
