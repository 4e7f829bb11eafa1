"""Moments of a chain's iterates, and draws from the Gaussian that they define (SWAG)."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Values = dict[str, Tensor]


class IterateMoments:
    """Running moments of iterates θ_1, …, θ_n, and the last K deviations from the running mean.

        mean θ̄ = Σθ_i/n,   variance Σ_diag = Σθ_i²/n - θ̄²,   deviations D_i = θ_i - θ̄_i, θ̄_i the mean of the first i

    They define the Gaussian N(θ̄, Σ) with Σ = ½·Σ_diag + D·Dᵀ/(2·(K-1)), and with K = 0 Σ = Σ_diag. The variance is
    updated by Welford's formula, which does not cancel.

    Args:
        rank: K, the largest number of deviations; 0 for a diagonal covariance.

    Source: Maddox et al. 2019 (SWAG), Algorithm 1 and eq. (1).

    >>> moments = IterateMoments(rank=2)
    >>> for value in (1.0, 3.0):
    ...     moments.add({"w": torch.tensor([value])})
    >>> moments.mean["w"], moments.variance["w"], [d["w"] for d in moments.deviations]
    (tensor([2.]), tensor([1.]), [tensor([0.]), tensor([1.])])
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.clear()

    def clear(self) -> None:
        """Forget all iterates."""
        self.count = 0
        self.mean: Values = {}
        self.deviations: list[Values] = []
        self._squares: Values = {}
        """Σ(θ_i - θ̄)²."""

    def add(self, iterate: Mapping[str, Tensor]) -> None:
        """Add an iterate.

        Args:
            iterate: tensors by name, the same names and shapes at every call; they are copied.
        """
        self.count += 1
        if self.count == 1:
            self.mean = {name: value.clone() for name, value in iterate.items()}
            self._squares = {name: torch.zeros_like(value) for name, value in iterate.items()}
        deviations: Values = {}
        for name, value in iterate.items():
            before = value - self.mean[name]
            self.mean[name] += before / self.count
            deviations[name] = value - self.mean[name]
            self._squares[name] += before * deviations[name]
        if self.rank:
            self.deviations = [*self.deviations, deviations][-self.rank :]

    @property
    def variance(self) -> Values:
        """Σ_diag by name."""
        return {name: square / self.count for name, square in self._squares.items()}

    def draw(self, generator: torch.Generator, scale: float = 1.0, row: int | None = None) -> Values:
        """Return a draw from N(θ̄, scale·Σ).

        Args:
            generator: of the moments' device.
            row: index along the tensors' first axis, for moments of several chains; None takes them whole.
        """
        kept, deviations = ... if row is None else row, self.deviations
        low_rank = self.rank > 0
        shares = torch.randn(len(deviations), generator=generator).tolist() if len(deviations) > 1 else []
        drawn = {}
        for name, mean in self.mean.items():
            own = mean[kept]
            spread = (self._squares[name][kept] / self.count).sqrt()
            noise = torch.randn(own.shape, generator=generator, dtype=own.dtype)
            drawn[name] = own + spread * noise * math.sqrt(scale / 2 if low_rank else scale)
            for share, deviation in zip(shares, deviations if shares else (), strict=True):
                drawn[name] += deviation[name][kept] * (share * math.sqrt(scale / (2 * (len(shares) - 1))))
        return drawn

    def state_dict(self, gather: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return the state: numbers and tensors."""

        def each(values: Values) -> Values:
            return {name: gather(value) for name, value in values.items()}

        moments = {"mean": each(self.mean), "squares": each(self._squares)}
        return {"count": self.count, **moments, "deviations": [each(values) for values in self.deviations]}

    def load_state_dict(self, state: Mapping[str, Any], own: Callable[[Tensor], Tensor]) -> None:
        """Restore from `state_dict`."""

        def each(values: Values) -> Values:
            return {name: own(value).clone() for name, value in values.items()}

        self.count = state["count"]
        self.mean, self._squares = each(state["mean"]), each(state["squares"])
        self.deviations = [each(values) for values in state["deviations"]]
