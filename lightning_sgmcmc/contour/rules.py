"""Contour sampling: energy partition, gradient multiplier, the learning of π, importance weights.

A contour sampler walks by `exp(-U/τ)/Ψ(U)^ζ`, which is flatter in the energy U than the target, and weighs its samples
by Ψ(U)^ζ. Ψ is a piecewise exponential function of the energy through the vector π, a probability for each of m energy
bins, which is learned on the way by stochastic approximation (Deng et al. 2020, CSGLD). Everything here takes tensors
and returns tensors, on their device and without waiting for it, in float64 and in log space, since ζ reaches 3·10⁶.
Chains stand in a leading axis C; they share one π or have one each. Bins are counted from 0 here, from 1 in the papers.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_choice, check_number
from lightning_sgmcmc.contour.partition import EnergyPartition, bin_index

Scheme = Literal["scalable", "original", "high-order"]
Difference = Literal["backward", "forward"]
Weighting = Literal["interpolated", "bin"]
LARGEST_SHARE = 0.5
"""At most this much of π moves into one bin in one step; only steps outside of any sensible range are cut by it."""


@dataclass(frozen=True)
class DecayingStepSize:
    """ω_k = min(maximum, numerator/(k^exponent + offset)), the step size of the stochastic approximation.

    Args:
        numerator: > 0.
        exponent: in (1/2, 1] for convergence, 0 for a constant step.
        offset: ≥ 0.
        maximum: in (0, 1]; None is no limit but 1.

    Raises:
        ValueError: for an argument out of range.
    """

    numerator: float = 1.0
    exponent: float = 0.6
    offset: float = 100.0
    maximum: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.numerator < math.inf:
            raise ValueError(f"numerator must be positive and finite, got {self.numerator}")
        if not 0 <= self.exponent <= 1:
            raise ValueError(f"exponent must be in [0, 1], got {self.exponent}")
        if not 0 <= self.offset < math.inf:
            raise ValueError(f"offset must not be negative, and finite, got {self.offset}")
        if self.maximum is not None and not 0 < self.maximum <= 1:
            raise ValueError(f"maximum must be in (0, 1], got {self.maximum}")

    def at(self, step: int) -> float:
        """Return ω of the step k = 1, 2, …"""
        largest = 1.0 if self.maximum is None else self.maximum
        return min(largest, self.numerator / (step**self.exponent + self.offset))


class ContourState(NamedTuple):
    """What is learned: π and how often each bin was visited; one for all chains (m,), one for each (C, m), or one for
    each of G groups of C/G chains that follow each other (G, m).

    Attributes:
        log_vector: log π, float64.
        visits: updates made in each bin, int64.
    """

    log_vector: Tensor
    visits: Tensor


class Location(NamedTuple):
    """Where chains stand in the partition, each of shape (C,).

    Attributes:
        index: bin of the energy, int64, from 0.
        multiplier: κ, float64.
        log_density: log Ψ of the energy (log π of its bin with weighting "bin"), float64.
        energy: the energy, float64.
    """

    index: Tensor  # type: ignore[assignment]  # a tuple has a method of this name
    multiplier: Tensor
    log_density: Tensor
    energy: Tensor


@dataclass(frozen=True)
class Contour:
    """The rules of a contour sampler; the learned state is outside.

    Multiplier of the gradient, with J the bin of the mini-batch's energy:

        κ = 1 + ζ·τ·(log π(J) - log π((J-1)∨1))/Δu     (backward)
        κ = 1 + ζ·τ·(log π((J+1)∧m) - log π(J))/Δu     (forward)

    The function that is flattened away is then the continuous Ψ with that logarithmic slope in each bin: backward
    `log Ψ(u) = log π(J) + (log π(J) - log π(J-1))·(u - u_J)/Δu`. Learning, after each step:

        scalable:    π(i) += ω·π(J)·(Ψ(U)/π(J))^ζ·(1{i=J} - π(i)),      limit (mass in bin i)^{1/ζ}, normalised
        original:    π(i) += ω·Ψ(U)^ζ·(1{i=J} - π(i)),                  limit the mass in bin i
        high-order:  π(i) += ω·(Ψ(U)^ζ + ω·ρ·1{i≥J})·(1{i=J} - π(i)),   divided by its sum, which it does not keep

    and the importance weight Ψ(U)^ζ. With weighting "bin", π(J) stands in place of Ψ(U) in learning and weights, as in
    the papers: off by O(Δu), but the only usable one where ζ·|log π(J) - log π(J-1)| is large.

    A bin that was never visited has no slope: κ = 1 in it and beside it.

    Args:
        partition: the energy bins.
        zeta: ζ ≥ 0, how much is flattened; 0.75 with "original" leaves mass^{1-ζ}, "scalable" flattens for every ζ.
        scheme: how π is learned.
        difference: of the multiplier.
        weighting: "interpolated" (Ψ(U)) or "bin" (π(J)).
        correction: ρ ≥ 0 of the high-order scheme.
        flat_last_bin: κ = 1 and Ψ constant above the last edge, as in the first bin by eq. (6): a negative multiplier
            in a bin without an end drives the chain away.
        min_multiplier: lower limit of κ; None is none.
        max_multiplier: upper limit of κ; None is none.
        weight_exponent: α of tempered weights Ψ(U)^{αζ}; 1 is exact.
        floor: lower limit of π(i), in [0, 1/m); 0 is none.

    Raises:
        ValueError: for an argument out of range.

    Source: Deng et al. 2020 (CSGLD), eq. (5), (6), (10), (15), (57), appendix D.1; Deng et al. 2022 (ICSGLD), eq. (8).
    """

    partition: EnergyPartition
    zeta: float = 0.75
    scheme: Scheme = "scalable"
    difference: Difference = "backward"
    weighting: Weighting = "interpolated"
    correction: float = 1.0
    flat_last_bin: bool = True
    min_multiplier: float | None = None
    max_multiplier: float | None = None
    weight_exponent: float = 1.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("zeta", self.zeta), ("correction", self.correction), ("floor", self.floor)):
            check_number(name, value)
        check_choice("scheme", self.scheme, ("scalable", "original", "high-order"))
        check_choice("difference", self.difference, ("backward", "forward"))
        check_choice("weighting", self.weighting, ("interpolated", "bin"))
        if self.min_multiplier is not None and not -math.inf < self.min_multiplier <= 1:
            raise ValueError(f"min_multiplier must be at most 1, and finite, got {self.min_multiplier}")
        if self.max_multiplier is not None and not 1 <= self.max_multiplier < math.inf:
            raise ValueError(f"max_multiplier must be at least 1, and finite, got {self.max_multiplier}")
        if not 0 <= self.weight_exponent <= 1:
            raise ValueError(f"weight_exponent must be in [0, 1], got {self.weight_exponent}")
        if self.floor * self.partition.num_bins >= 1:
            raise ValueError(f"floor must be below 1/num_bins = {1 / self.partition.num_bins}, got {self.floor}")

    def initial_state(self, num_chains: int | None = None, device: torch.device | str | None = None) -> ContourState:
        """Return the uniform π of no knowledge.

        Args:
            num_chains: a vector for each of so many chains; None is one for all.
            device: where.
        """
        m = self.partition.num_bins
        shape = (m,) if num_chains is None else (num_chains, m)
        log_vector = torch.full(shape, -math.log(m), dtype=torch.float64, device=device)
        return ContourState(log_vector, torch.zeros(shape, dtype=torch.int64, device=device))

    def known_state(self, masses: Tensor) -> ContourState:
        """Return the limit of learning for a target whose bins have these masses (KSGLD, for tests).

        Args:
            masses: the target's mass in each bin, shape (m,) or (C, m), positive.
        """
        log_masses = masses.double().log()
        if self.scheme == "scalable":
            log_masses = log_masses / self.zeta
        return ContourState(log_masses.log_softmax(-1), torch.ones_like(log_masses, dtype=torch.int64))

    def locate(self, state: ContourState, energy: Tensor, temperature: float | Tensor, edges: Tensor) -> Location:
        """Return bin, multiplier and log Ψ of energies.

        Args:
            state: what is learned so far.
            energy: U or its estimate, shape (C,), in nats.
            temperature: τ, a number, or shape () or (C,).
            edges: `partition.edges(device)`.

        Raises:
            ValueError: for a NaN among energies in the host's memory; on another device it would be waited for, and a
                NaN counts as the last bin.
        """
        width, last = self.partition.width, self.partition.num_bins - 1
        energy = energy.double()
        index = bin_index(energy, edges)
        neighbour = (index - 1).clamp(min=0) if self.difference == "backward" else (index + 1).clamp(max=last)
        log_here, log_there = _take(state.log_vector, index), _take(state.log_vector, neighbour)
        known = (_take(state.visits, index) > 0) & (_take(state.visits, neighbour) > 0)
        rise = (log_here - log_there) if self.difference == "backward" else (log_there - log_here)
        rise = torch.where(known, rise, 0.0)
        base = log_here
        if self.flat_last_bin and self.difference == "backward":
            in_last = index == last
            base = torch.where(in_last & known, log_there, base)
            rise = torch.where(in_last, 0.0, rise)
        multiplier = 1 + self.zeta * temperature * rise / width
        if self.min_multiplier is not None or self.max_multiplier is not None:
            multiplier = multiplier.clamp(self.min_multiplier, self.max_multiplier)
        if self.weighting == "bin":
            return Location(index, multiplier, log_here, energy)
        # The edge at which Ψ is the bin's own π: the right one for backward differences, the left one for forward.
        steps = index.double() if self.difference == "backward" else index.double() - 1
        edge = self.partition.first_edge + steps * width
        log_density = base + torch.where(rise == 0, 0.0, rise * (energy - edge) / width)
        return Location(index, multiplier, log_density, energy)

    def learn_(self, state: ContourState, index: Tensor, log_density: Tensor, step_size: float | Tensor) -> None:
        """Update π and the visits in place by one step of stochastic approximation.

        Args:
            state: with one vector for all chains, or for those of a group, the mean of their steps is made.
            index: bins of the energies, shape (C,).
            log_density: log Ψ of the energies, shape (C,).
            step_size: ω, a number or shape ().
        """
        log_vector, visits = state
        log_step = step_size.log() if isinstance(step_size, Tensor) else math.log(step_size)
        if self.scheme == "scalable":
            log_here = _take(log_vector, index)
            exponent = self.zeta * (log_density - log_here)
            log_share = log_step + log_here + exponent
        else:
            log_share = log_step + self.zeta * log_density
        log_share = log_share.nan_to_num(nan=-math.inf).clamp(max=math.log(LARGEST_SHARE))
        if self.scheme == "high-order":
            self._learn_high_order_(log_vector, index, log_share, step_size)
        elif log_vector.dim() == 1:
            _move_shared_(log_vector, index, log_share.exp())
        elif len(log_vector) != len(index):
            _move_groups_(log_vector, index, log_share.exp())
        else:
            keep = torch.log1p(-log_share.exp())
            grown = torch.logaddexp(_take(log_vector, index) + keep, log_share)
            log_vector.add_(keep[:, None]).scatter_(1, index[:, None], grown[:, None])
        if self.floor > 0:
            log_vector.clamp_(min=math.log(self.floor))
        # A step size of 0 is a step without learning, in a loop that cannot leave it out.
        ones = (step_size > 0).long().expand_as(index) if isinstance(step_size, Tensor) else torch.ones_like(index)
        if visits.dim() == 1:
            visits.scatter_add_(0, index, ones)
        else:
            rows = len(visits)
            visits.scatter_add_(1, index.view(rows, -1), ones.view(rows, -1))

    def _learn_high_order_(
        self, log_vector: Tensor, index: Tensor, log_share: Tensor, step_size: float | Tensor
    ) -> None:
        """Move shares c into the bins J, and ω²ρ from the bins at and above them; divide by the sum."""
        extra = self.correction * step_size * step_size
        bins = torch.arange(log_vector.shape[-1], device=log_vector.device)
        shares = log_share.exp()[:, None] + extra * (bins >= index[:, None]).double()
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
        return self.weight_exponent * self.zeta * log_density

    def log_masses(self, state: ContourState) -> Tensor:
        """Return the log of the target's estimated mass in each bin, normalised; -inf in bins never visited."""
        log_masses = state.log_vector * (self.zeta if self.scheme == "scalable" else 1.0)
        return log_masses.masked_fill(state.visits == 0, -math.inf).log_softmax(-1)

    def multipliers(self, state: ContourState, temperature: float | Tensor) -> Tensor:
        """Return κ of every bin, shape (m,), for one vector π of shape (m,)."""
        centres = self.partition.first_edge + self.partition.width * (
            torch.arange(self.partition.num_bins, dtype=torch.float64, device=state.log_vector.device) - 0.5
        )
        return self.locate(state, centres, temperature, self.partition.edges(centres.device)).multiplier


def _take(vector: Tensor, index: Tensor) -> Tensor:
    """Return vector[index] of the one vector (m,), or each chain's entry of (C, m), or of its group's row of (G, m)."""
    return vector[index] if vector.dim() == 1 else vector.gather(1, index.view(len(vector), -1)).view(-1)


def _move_shared_(log_vector: Tensor, index: Tensor, shares: Tensor) -> None:
    """Make the mean of the chains' steps: π(i) += mean_c[share_c·(1{i=J_c} - π(i))]."""
    if index.numel() == 1:
        keep, arrives = torch.log1p(-shares), shares
    else:
        keep = torch.log1p(-shares.mean())
        arrives = torch.zeros_like(log_vector).scatter_add_(0, index, shares / index.numel())[index]
    grown = torch.logaddexp(log_vector[index] + keep, arrives.log())
    log_vector.add_(keep).scatter_(0, index, grown)


def _move_groups_(log_vector: Tensor, index: Tensor, shares: Tensor) -> None:
    """Make the mean of the steps of each group's chains, as `_move_shared_` does for all."""
    index, shares = index.view(len(log_vector), -1), shares.view(len(log_vector), -1)
    keep = torch.log1p(-shares.mean(1, keepdim=True))
    arrives = torch.zeros_like(log_vector).scatter_add_(1, index, shares / index.shape[1])
    log_vector.copy_(torch.logaddexp(log_vector + keep, arrives.log()))
