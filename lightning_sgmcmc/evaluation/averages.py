"""The running weighted average of predictive distributions, in memory that does not grow with the samples."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.tensors import sent, widest

Terms = dict[str, Tensor]


class WeightedAverage:
    """Running weighted mean of tensors, and log of the running weighted mean of densities.

    With weights w_j = exp(l_j) it holds Σ_j w_j·t_j / Σ_j w_j for each tensor t, and log(Σ_j w_j·exp(d_j) / Σ_j w_j)
    for the log densities d; all in log space, so any constant may be added to the l_j.
    """

    def __init__(self) -> None:
        self.log_total = -math.inf
        """log Σ_j w_j."""
        self.terms: Terms = {}
        self.log_density = torch.empty(0)

    def add(self, terms: Mapping[str, Tensor], log_density: Tensor, log_weight: float) -> None:
        """Add one more member to the average.

        Args:
            terms: tensors, the same names and shapes at every call.
            log_density: log densities, shape (n,).
            log_weight: l, finite or -inf (then the member does not count).

        Raises:
            ValueError: if the log-weight is NaN or +inf.
        """
        if math.isnan(log_weight) or log_weight == math.inf:
            raise ValueError(f"a sample's log-weight must be a number or -inf, got {log_weight}")
        if log_weight == -math.inf:
            return
        if len(log_density):
            log_density = widest(log_density)
        if self.log_total == -math.inf:
            self.log_total = log_weight
            self.terms = {name: term.clone() for name, term in terms.items()}
            self.log_density = log_density.clone()
            return
        new_total = _logaddexp(self.log_total, log_weight)
        log_share, log_rest = log_weight - new_total, self.log_total - new_total
        for name, term in terms.items():
            self.terms[name] = sent(self.terms[name], term.device)  # a checkpoint's state comes on the CPU
            self.terms[name].lerp_(term, math.exp(log_share))
        if len(log_density):
            before = sent(self.log_density, log_density.device)
            self.log_density = torch.logaddexp(before + log_rest, log_density + log_share)
        self.log_total = new_total

    def copy(self) -> "WeightedAverage":
        """Return a copy that shares no memory with this one."""
        return WeightedAverage.of(self.state_dict())

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "WeightedAverage":
        """Return the average with this `state_dict()`; it shares no terms with it."""
        average = cls()
        average.load_state_dict(state)
        return average

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers and tensors."""
        return {"log_total": self.log_total, "terms": dict(self.terms), "log_density": self.log_density}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self.log_total = state["log_total"]
        self.terms = {name: term.clone() for name, term in state["terms"].items()}
        self.log_density = state["log_density"]


class ChainsAverage:
    """Average over samples, or the mean of the chains' own averages if their weights do not compare across chains.

    f̂ = Σ_j w_j·f_j / Σ_j w_j,   or   f̂ = C⁻¹·Σ_c f̂_c   with f̂_c of chain c alone
    """

    def __init__(self) -> None:
        self._parts: dict[int | None, WeightedAverage] = {}
        """By chain; None has all chains whose weights compare."""

    def add(
        self, terms: Mapping[str, Tensor], log_density: Tensor, log_weight: float, *, chain: int | None = None
    ) -> None:
        """Add one more sample."""
        self._parts.setdefault(chain, WeightedAverage()).add(terms, log_density, log_weight)

    def combined(self) -> WeightedAverage:
        """Return the average of all samples so far."""
        parts = [part for part in self._parts.values() if part.log_total > -math.inf]
        if len(parts) == 1:
            return parts[0]
        total = WeightedAverage()
        for part in parts:
            total.add(part.terms, part.log_density, 0.0)
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers and tensors."""
        return {"parts": {chain: part.state_dict() for chain, part in self._parts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self._parts = {chain: WeightedAverage.of(saved) for chain, saved in state["parts"].items()}


@dataclass
class _OpenCycle:
    """A cycle of one chain that may still get samples; `log_inverse` is logsumexp over them of -log p(D|θ)."""

    cycle: int
    average: WeightedAverage = field(default_factory=WeightedAverage)
    count: int = 0
    log_inverse: float = -math.inf

    def close_into(self, total: WeightedAverage) -> None:
        """Add the cycle's average with log ŵ = log K - logsumexp_j(-log p(D|θ_j)), if one of its samples counts."""
        if self.average.log_total > -math.inf:
            total.add(self.average.terms, self.average.log_density, math.log(self.count) - self.log_inverse)


class CycleAverage:
    """Average over cycles, each weighted by the harmonic mean of its samples' full-data likelihoods.

        f̂ = Σ_m w_m·f̂_m,   ŵ_m = [K_m⁻¹·Σ_j 1/p(D|θ_j)]⁻¹, normalised over m

    A chain's cycle is closed by the first sample of its next one; memory is one average for all closed cycles and one
    for each chain's open cycle.

    Source: Zhang et al. 2020 (cSG-MCMC), eq. (4).
    """

    def __init__(self) -> None:
        self._closed = WeightedAverage()
        self._open: dict[int, _OpenCycle] = {}

    def add(
        self,
        terms: Mapping[str, Tensor],
        log_density: Tensor,
        log_weight: float,
        *,
        chain: int,
        cycle: int,
        log_likelihood: float,
    ) -> None:
        """Add one more sample, whose log-weight counts within its chain's cycle; `log_likelihood` is log p(D|θ) of all
        data."""
        current = self._open.get(chain)
        if current is None or current.cycle != cycle:
            if current is not None:
                current.close_into(self._closed)
            current = self._open[chain] = _OpenCycle(cycle)
        current.average.add(terms, log_density, log_weight)
        current.count += 1
        current.log_inverse = _logaddexp(current.log_inverse, -log_likelihood)

    def combined(self) -> WeightedAverage:
        """Return the average of all cycles so far."""
        total = self._closed.copy()
        for cycle in self._open.values():
            cycle.close_into(total)
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers and tensors."""
        open_cycles = {chain: vars(c) | {"average": c.average.state_dict()} for chain, c in self._open.items()}
        return {"closed": self._closed.state_dict(), "open": open_cycles}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self._closed.load_state_dict(state["closed"])
        self._open = {}
        for chain, saved in state["open"].items():
            self._open[chain] = _OpenCycle(**saved | {"average": WeightedAverage.of(saved["average"])})


def _logaddexp(a: float, b: float) -> float:
    high, low = max(a, b), min(a, b)
    return high if low == -math.inf or high == math.inf else high + math.log1p(math.exp(low - high))
