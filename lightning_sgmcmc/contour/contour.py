"""A contour: the flattened target, its gradient multiplier, the learning of π, and importance weights.

A contour sampler samples from `exp(-U/τ)/Ψ(U)^ζ`, which is flatter in the energy U than the target, and weighs its
samples by Ψ(U)^ζ. Ψ is a piecewise exponential function of the energy, given by the vector π: a probability for each of
m energy bins, learned during the run by stochastic approximation (Deng et al. 2020, CSGLD). The functions take and
return tensors on one device, which has float64 (`tensors.exact_device`), and never wait for it. They compute in
log space, since ζ reaches 3·10⁶.
Chains form the leading axis C; they share one π or have one each. Bins are counted from 0 here, from 1 in the papers.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_choice, check_flag, check_kind, check_number, check_positive, check_within
from lightning_sgmcmc.contour.partition import EnergyPartition, bin_index
from lightning_sgmcmc.tensors import Control, exact

Scheme = Literal["scalable", "original", "high-order"]
Difference = Literal["backward", "forward"]
Weighting = Literal["interpolated", "bin"]


@dataclass(frozen=True)
class DecayingStepSize:
    """ω_k = min(maximum, numerator/(k^exponent + offset)), the step size of the stochastic approximation.

    Args:
        numerator: > 0.
        exponent: in (1/2, 1] for convergence, 0 for a constant step.
        offset: ≥ 0.
        maximum: upper limit, in (0, 1]; None is 1.

    Raises:
        ValueError: if an argument is out of range.
    """

    numerator: float = 1.0
    exponent: float = 0.6
    offset: float = 100.0
    maximum: float | None = None

    def __post_init__(self) -> None:
        check_positive("numerator", self.numerator)
        check_within("exponent", self.exponent, "[0, 1]")
        check_within("offset", self.offset, "[0, inf)")
        if self.maximum is not None:
            check_within("maximum", self.maximum, "(0, 1]")

    def at(self, step: int) -> float:
        """Return ω of step k = 1, 2, …"""
        largest = 1.0 if self.maximum is None else self.maximum
        return min(largest, self.numerator / (step**self.exponent + self.offset))


@dataclass(frozen=True)
class ContourRules:
    """How a contour sampler flattens the target, learns π and weighs samples; `Contour` has the formulas.

    Args:
        zeta: ζ ≥ 0, how much is flattened. "original" with 0.75 leaves mass^{1-ζ} in each bin, and a barrier of energy
            B becomes one of about (1-ζ)·B; "scalable" flattens for every ζ.
        scheme: how π is learned: "scalable" (for networks), "original" or "high-order".
        difference: "backward" or "forward" difference in the multiplier κ.
        weighting: "interpolated" weighs by Ψ(U)^ζ; "bin" weighs by π(J)^ζ, for bins that are wide relative to the
            temperature.
        correction: ρ ≥ 0 of the scheme "high-order".
        flat_last_bin: whether κ = 1 and Ψ is constant above the last edge, as eq. (6) has it in the first bin. False
            follows eq. (6) literally, but a negative multiplier in an unbounded bin drives the chain away.
        min_multiplier: lower limit of κ; None sets no limit.
        max_multiplier: upper limit of κ; None sets no limit.
        weight_exponent: α of tempered weights Ψ(U)^{αζ}, in [0, 1]; 1 is exact.
        floor: lower limit of π(i), in [0, 1/m); 0 sets no limit.

    Raises:
        ValueError: if an argument is out of range.
    """

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
        check_choice("scheme", self.scheme, get_args(Scheme))
        check_choice("difference", self.difference, get_args(Difference))
        check_choice("weighting", self.weighting, get_args(Weighting))
        if self.min_multiplier is not None:
            check_within("min_multiplier", self.min_multiplier, "(-inf, 1]")
        if self.max_multiplier is not None:
            check_within("max_multiplier", self.max_multiplier, "[1, inf)")
        check_within("weight_exponent", self.weight_exponent, "[0, 1]")
        check_flag("flat_last_bin", self.flat_last_bin)

    @property
    def regularisation(self) -> dict[str, float]:
        """The settings that make the weights inexact, by name; empty without any."""
        names = ("min_multiplier", "max_multiplier", "weight_exponent", "floor")
        defaults = {field.name: field.default for field in fields(self)}
        return {name: getattr(self, name) for name in names if getattr(self, name) != defaults[name]}


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
    """The bins of chains' energies, int64 from 0, and what follows from them in float64, each of shape (C,).

    `multiplier` is κ, and `log_density` log Ψ of the energy (log π of its bin with weighting "bin").
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
        TypeError: if an argument has another class.
        ValueError: if the floor of π is too large for the number of bins.

    Source: Deng et al. 2020 (CSGLD), eq. (5), (6), (10), (15), (57), appendix D.1; Deng et al. 2022 (ICSGLD), eq. (8).
    """

    partition: EnergyPartition
    rules: ContourRules = field(default_factory=ContourRules)

    def __post_init__(self) -> None:
        check_kind("partition", self.partition, EnergyPartition, optional=False)
        check_kind("rules", self.rules, ContourRules, optional=False)
        if self.rules.floor * self.partition.num_bins >= 1:
            raise ValueError(f"floor must be below 1/num_bins = {1 / self.partition.num_bins}, got {self.rules.floor}")

    def at(self, first_edge: Tensor, width: Tensor) -> "Contour":
        """Return the contour with a range that is tensors, for functions that are compiled for every range."""
        made, partition = object.__new__(Contour), object.__new__(EnergyPartition)
        vars(partition).update(vars(self.partition) | {"first_edge": first_edge, "width": width})
        vars(made).update(partition=partition, rules=self.rules)
        return made

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
        """Do the work of `learn_` by operations on all bins, which a compiler fuses; equal up to rounding."""
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


class ContourKernels:
    """A contour's functions with its edges on a device; compiled, each is a few kernels instead of dozens.

    Step size and temperature, which change, are then tensors of shape () in the host's memory, from which a kernel
    takes them as arguments: a compiled function would be compiled again for each new number.
    """

    def __init__(self, contour: Contour, device: torch.device, compiled: bool = False) -> None:
        self._contour = contour
        self._device = device
        self._compiled = compiled
        self._edges = contour.partition.edges(device)
        encode = contour.partition.encode
        functions: list[Callable[..., Any]] = [self._locate, encode, self._learn, self._learn_coded]
        if compiled:
            functions = [torch.compile(function, dynamic=False) for function in functions]
        self._locates, self._encodes, self._learns, self._learns_coded = functions

    def locate(self, state: ContourState, energy: Tensor, temperature: Control = 1.0) -> Location:
        """Return `Contour.locate`."""
        return Location(*self._locates(state, energy, self._input(temperature)))

    def encode(self, location: Location) -> Tensor:
        """Return the encoded energies of the chains."""
        code: Tensor = self._encodes(location.energy, location.index)
        return code

    def learn(self, state: ContourState, location: Location, step_size: float) -> None:
        """Update π from the chains' locations."""
        self._learns(state, location.index, location.log_density, self._input(step_size))

    def learn_coded(self, state: ContourState, codes: Tensor, step_size: float) -> None:
        """Update π from the encoded energies of all chains, shape (P,)."""
        self._learns_coded(state, codes, None, self._input(step_size))

    def learn_together(self, state: ContourState, location: Location, step_size: float) -> None:
        """Update π from the locations of all chains, by their encoded energies as chains of several processes do."""
        self._learns_coded(state, location.energy, location.index, self._input(step_size))

    def _input(self, value: Control) -> Control:
        """Return a number as the functions take it."""
        return torch.tensor(value, dtype=torch.float64) if self._compiled and not isinstance(value, Tensor) else value

    def _locate(self, state: ContourState, energy: Tensor, temperature: Control) -> tuple[Tensor, ...]:
        return self._contour.locate(state, energy, temperature, self._edges)

    def _learn(self, state: ContourState, index: Tensor, log_density: Tensor, step_size: Control) -> None:
        if self._compiled:
            self._contour.learn_densely_(state, index, log_density, torch.as_tensor(step_size))
        else:
            self._contour.learn_(state, index, log_density, step_size)

    def _learn_coded(self, state: ContourState, codes: Tensor, index: Tensor | None, step_size: Control) -> None:
        """Update π from codes, or from energies with their bins."""
        partition = self._contour.partition
        codes = codes if index is None else partition.encode(codes, index)
        location = self._contour.locate(state, partition.decode(codes), 1.0, self._edges, index)
        self._learn(state, location.index, location.log_density, step_size)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._contour, self._device, self._compiled)  # compiled functions cannot be copied
