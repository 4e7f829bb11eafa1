"""A contour: the flattened target, its gradient multiplier, the learning of π, and importance weights.

A contour sampler samples from `exp(-U/τ)/Ψ(U)^ζ`, which is flatter in the energy U than the target, and weighs its
samples by Ψ(U)^ζ. Ψ is a piecewise exponential function of the energy, given by the vector π: a probability for each of
m energy bins, learned during the run by stochastic approximation (Deng et al. 2020, CSGLD). The functions take and
return tensors on one device, which has float64 (`tensors.exact_device`), and never wait for it. They compute in
log space, since ζ reaches 3·10⁶.
Chains form the leading axis C; they share one π or have one each. Bins are counted from 0 here, from 1 in the papers.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc.contour.partition import EnergyPartition, bin_index
from lightning_sgmcmc.contour.rules import ContourRules
from lightning_sgmcmc.tensors import exact

LARGEST_SHARE = 0.5
"""Largest share of π that moves into one bin in one step; it limits only step sizes beyond any sensible range."""


class ContourState(NamedTuple):
    """What is learned: π and the visits of each bin. All chains share one vector (m,), each has its own (C, m), or each
    of G groups of C/G successive chains shares one (G, m).

    Attributes:
        log_vector: log π, float64.
        visits: number of updates in each bin, int64.
    """

    log_vector: Tensor
    visits: Tensor


class Location(NamedTuple):
    """The bins of chains' energies and what follows from them, each of shape (C,).

    Attributes:
        index: bin of the energy, int64, from 0.
        multiplier: κ, float64.
        log_density: log Ψ of the energy (log π of its bin with weighting "bin"), float64.
        energy: the energy, float64.
        log_weight: the log importance weight, see `Contour.log_weight`, float64.
    """

    index: Tensor  # type: ignore[assignment]  # a tuple has a method of this name
    multiplier: Tensor
    log_density: Tensor
    energy: Tensor
    log_weight: Tensor


@dataclass(frozen=True)
class Contour:
    """A partition of the energy axis with the rules of a contour sampler; what is learned is a `ContourState`.

    Multiplier of the gradient, with J the bin of the mini-batch's energy:

        κ = 1 + ζ·τ·(log π(J) - log π((J-1)∨1))/Δu     (backward)
        κ = 1 + ζ·τ·(log π((J+1)∧m) - log π(J))/Δu     (forward)

    The function that is flattened away is then the continuous Ψ with that logarithmic slope in each bin: backward
    `log Ψ(u) = log π(J) + (log π(J) - log π(J-1))·(u - u_J)/Δu`. Learning, after each step:

        scalable:    π(i) += ω·π(J)·(Ψ(U)/π(J))^ζ·(1{i=J} - π(i)),      limit (mass in bin i)^{1/ζ}, normalised
        original:    π(i) += ω·Ψ(U)^ζ·(1{i=J} - π(i)),                  limit the mass in bin i
        high-order:  π(i) += ω·(Ψ(U)^ζ + ω·ρ·1{i≥J})·(1{i=J} - π(i)),   then divided by its sum, which is no longer 1

    The importance weight is Ψ(U)^ζ. With weighting "bin", learning and weights use π(J) instead of Ψ(U), as in the
    papers. This is off by O(Δu), but the only usable choice where ζ·|log π(J) - log π(J-1)| is large.

    A bin that was never visited has no slope: κ = 1 in it and in its neighbours.

    Args:
        partition: the energy bins.
        rules: ζ, scheme, limits and so on.

    Raises:
        ValueError: if the floor of π is too large for the number of bins.

    Source: Deng et al. 2020 (CSGLD), eq. (5), (6), (10), (15), (57), appendix D.1; Deng et al. 2022 (ICSGLD), eq. (8).
    """

    partition: EnergyPartition
    rules: ContourRules = field(default_factory=ContourRules)

    def __post_init__(self) -> None:
        if self.rules.floor * self.partition.num_bins >= 1:
            raise ValueError(f"floor must be below 1/num_bins = {1 / self.partition.num_bins}, got {self.rules.floor}")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain numbers and names: the rules and, under "partition", the bins."""
        return {"partition": asdict(self.partition)} | asdict(self.rules)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> "Contour":
        """Make a contour from what `to_dict` returned."""
        rules = {name: value for name, value in settings.items() if name != "partition"}
        return cls(EnergyPartition(**settings["partition"]), ContourRules(**rules))

    def initial_state(self, num_chains: int | None = None, device: torch.device | str | None = None) -> ContourState:
        """Return the initial state: a uniform π and no visits.

        Args:
            num_chains: number of chains with a vector each; None gives all chains one vector.
            device: of the tensors.
        """
        m = self.partition.num_bins
        shape = (m,) if num_chains is None else (num_chains, m)
        log_vector = torch.full(shape, -math.log(m), dtype=torch.float64, device=device)
        return ContourState(log_vector, torch.zeros(shape, dtype=torch.int64, device=device))

    def known_state(self, masses: Tensor) -> ContourState:
        """Return the limit of learning for a target with known bin masses (KSGLD).

        Args:
            masses: the target's mass in each bin, shape (m,) or (C, m), positive.
        """
        rules, log_masses = self.rules, exact(masses).log()
        if rules.scheme == "scalable":
            log_masses = log_masses / rules.zeta
        return ContourState(log_masses.log_softmax(-1), torch.ones_like(log_masses, dtype=torch.int64))

    def locate(
        self,
        state: ContourState,
        energy: Tensor,
        temperature: float | Tensor,
        edges: Tensor,
        index: Tensor | None = None,
    ) -> Location:
        """Return bin, multiplier κ and log Ψ of each energy.

        Args:
            state: what has been learned so far.
            energy: U or its estimate, shape (C,), in nats.
            temperature: τ, a number, or shape () or (C,).
            edges: `partition.edges(device)`.
            index: the bins of the energies, if known.

        Raises:
            ValueError: if an energy in the host's memory is NaN. On another device a NaN counts as the last bin, since
                a check would wait for the device.
        """
        rules = self.rules
        width, last = self.partition.width, self.partition.num_bins - 1
        energy = exact(energy)
        index = bin_index(energy, edges) if index is None else index
        neighbour = (index - 1).clamp(min=0) if rules.difference == "backward" else (index + 1).clamp(max=last)
        log_here, log_there = _take(state.log_vector, index), _take(state.log_vector, neighbour)
        known = (_take(state.visits, index) > 0) & (_take(state.visits, neighbour) > 0)
        rise = (log_here - log_there) if rules.difference == "backward" else (log_there - log_here)
        rise = torch.where(known, rise, 0.0)
        base = log_here
        if rules.flat_last_bin and rules.difference == "backward":
            in_last = index == last
            base = torch.where(in_last & known, log_there, base)
            rise = torch.where(in_last, 0.0, rise)
        multiplier = 1 + rules.zeta * temperature * rise / width
        if rules.min_multiplier is not None or rules.max_multiplier is not None:
            multiplier = multiplier.clamp(rules.min_multiplier, rules.max_multiplier)
        if rules.weighting == "bin":
            return Location(index, multiplier, log_here, energy, self.log_weight(log_here))
        # Ψ equals the bin's own π at its right edge for backward differences, at its left edge for forward ones.
        steps = exact(index) if rules.difference == "backward" else exact(index) - 1
        edge = self.partition.first_edge + steps * width
        log_density = base + torch.where(rise == 0, 0.0, rise * (energy - edge) / width)
        return Location(index, multiplier, log_density, energy, self.log_weight(log_density))

    def learn_(self, state: ContourState, index: Tensor, log_density: Tensor, step_size: float | Tensor) -> None:
        """Update π and the visits in place by one step of stochastic approximation.

        Args:
            state: changed in place; chains that share a vector, all or those of a group, make the mean of their steps.
            index: bins of the energies, shape (C,).
            log_density: log Ψ of the energies, shape (C,).
            step_size: ω, a number or shape ().
        """
        rules, (log_vector, visits) = self.rules, state
        log_share = self._log_share(log_vector, index, log_density, step_size)
        if rules.scheme == "high-order":
            self._learn_high_order_(log_vector, index, log_share, step_size)
        elif log_vector.dim() == 1:
            _move_shared_(log_vector, index, log_share.exp())
        elif len(log_vector) != len(index):
            _move_groups_(log_vector, index, log_share.exp())
        else:
            keep = torch.log1p(-log_share.exp())
            grown = torch.logaddexp(_take(log_vector, index) + keep, log_share)
            log_vector.add_(keep[:, None]).scatter_(1, index[:, None], grown[:, None])
        if rules.floor > 0:
            log_vector.clamp_(min=math.log(rules.floor))
        # A compiled loop cannot skip a step without learning, so it passes ω = 0: this counts no visit.
        ones = torch.ones_like(index)
        if isinstance(step_size, Tensor):
            ones = ones * (step_size > 0)
        if visits.dim() == 1:
            visits.scatter_add_(0, index, ones)
        else:
            rows = len(visits)
            visits.scatter_add_(1, index.view(rows, -1), ones.view(rows, -1))

    def _log_share(self, log_vector: Tensor, index: Tensor, log_density: Tensor, step_size: float | Tensor) -> Tensor:
        """Return the log of the share of π that moves into each chain's bin, shape (C,)."""
        rules = self.rules
        log_step = step_size.log() if isinstance(step_size, Tensor) else math.log(step_size)
        if rules.scheme == "scalable":
            log_here = _take(log_vector, index)
            exponent = rules.zeta * (log_density - log_here)
            log_share = log_step + log_here + exponent
        else:
            log_share = log_step + rules.zeta * log_density
        return log_share.nan_to_num(nan=-math.inf).clamp(max=math.log(LARGEST_SHARE))

    def learn_densely_(self, state: ContourState, index: Tensor, log_density: Tensor, step_size: Tensor) -> None:
        """Do the work of `learn_` by operations on all bins, which a compiler fuses; equal up to rounding.

        Args:
            state: as for `learn_`.
            index: as for `learn_`.
            log_density: as for `learn_`.
            step_size: ω > 0, shape ().
        """
        log_vector, visits = state
        if self.rules.scheme == "high-order" or (log_vector.dim() == 2 and len(log_vector) != len(index)):
            self.learn_(state, index, log_density, step_size)
            return
        share = self._log_share(log_vector, index, log_density, step_size).exp()
        hits = torch.arange(log_vector.shape[-1], device=log_vector.device) == index[:, None]
        arrives, visited = share[:, None] * hits, hits.long()
        if log_vector.dim() == 1:
            share, arrives, visited = share.mean(), arrives.mean(0), visited.sum(0)
        moved = torch.logaddexp(log_vector + torch.log1p(-share).unsqueeze(-1), arrives.log())
        if self.rules.floor > 0:
            moved = moved.clamp(min=math.log(self.rules.floor))
        log_vector.copy_(moved)
        visits.add_(visited)

    def _learn_high_order_(
        self, log_vector: Tensor, index: Tensor, log_share: Tensor, step_size: float | Tensor
    ) -> None:
        """Move shares into the bins J, and ω²ρ out of the bins at and above them; divide by the sum."""
        extra = self.rules.correction * step_size * step_size
        bins = torch.arange(log_vector.shape[-1], device=log_vector.device)
        shares = log_share.exp()[:, None] + extra * exact(bins >= index[:, None])
        shares = shares.clamp(max=LARGEST_SHARE)
        arrives = shares * (bins == index[:, None])
        if log_vector.dim() == 1:
            shares, arrives = shares.mean(0), arrives.mean(0)
        elif len(log_vector) != len(index):
            shares, arrives = (part.unflatten(0, (len(log_vector), -1)).mean(1) for part in (shares, arrives))
        moved = torch.logaddexp(log_vector + torch.log1p(-shares), arrives.log())
        log_vector.copy_(moved.log_softmax(-1))

    def log_weight(self, log_density: Tensor) -> Tensor:
        """Return the log importance weight α·ζ·log Ψ(U), up to a constant."""
        return self.rules.weight_exponent * self.rules.zeta * log_density

    def log_masses(self, state: ContourState) -> Tensor:
        """Return the log of the target's estimated mass in each bin, normalised; -inf in bins never visited."""
        log_masses = state.log_vector * (self.rules.zeta if self.rules.scheme == "scalable" else 1.0)
        return log_masses.masked_fill(state.visits == 0, -math.inf).log_softmax(-1)

    def multipliers(self, state: ContourState, temperature: float | Tensor) -> Tensor:
        """Return κ of every bin, shape (m,), for one vector π, shape (m,)."""
        centres = self.partition.first_edge + self.partition.width * (
            torch.arange(self.partition.num_bins, dtype=torch.float64, device=state.log_vector.device) - 0.5
        )
        return self.locate(state, centres, temperature, self.partition.edges(centres.device)).multiplier


def _take(vector: Tensor, index: Tensor) -> Tensor:
    """Return each chain's entry of a vector (m,), of its own row of (C, m), or of its group's row of (G, m)."""
    return vector[index] if vector.dim() == 1 else vector.gather(1, index.view(len(vector), -1)).view(-1)


def _move_shared_(log_vector: Tensor, index: Tensor, shares: Tensor) -> None:
    """Update π by the mean of the chains' steps: π(i) += mean_c[share_c·(1{i=J_c} - π(i))]."""
    if index.numel() == 1:
        keep, arrives = torch.log1p(-shares), shares
    else:
        keep = torch.log1p(-shares.mean())
        arrives = torch.zeros_like(log_vector).scatter_add_(0, index, shares / index.numel())[index]
    grown = torch.logaddexp(log_vector[index] + keep, arrives.log())
    log_vector.add_(keep).scatter_(0, index, grown)


def _move_groups_(log_vector: Tensor, index: Tensor, shares: Tensor) -> None:
    """Update each group's π by the mean of its chains' steps, as `_move_shared_` does for all chains."""
    index, shares = index.view(len(log_vector), -1), shares.view(len(log_vector), -1)
    keep = torch.log1p(-shares.mean(1, keepdim=True))
    arrives = torch.zeros_like(log_vector).scatter_add_(1, index, shares / index.shape[1])
    log_vector.copy_(torch.logaddexp(log_vector + keep, arrives.log()))
