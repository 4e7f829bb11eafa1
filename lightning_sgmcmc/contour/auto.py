"""The settings of a contour, chosen from the energies of a warm-up."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_flag, check_positive, check_within
from lightning_sgmcmc.contour.contour import Contour, ContourRules, ContourState
from lightning_sgmcmc.contour.partition import EnergyLaw, EnergyPartition, bin_index
from lightning_sgmcmc.diagnostics.draws import chain_diagnostics

LEAST_ENERGIES = 100
"""Energies below which their standard deviation is known to worse than 7 %, even if they are independent."""
LARGEST_ZETA = 0.99
BINS_PER_STD = 2
"""Bins for each standard deviation of the energies, so that log π is nearly linear in a bin."""
FEWEST_BINS, MOST_BINS = 12, 100
SCANNED = 20
"""Numbers tried on the way to the largest that keeps a condition, which may hold again beyond it."""
LIMIT = 4.0
"""κ is kept within 1 ± this many times its expected spread, which normal energies leave once in 16,000 steps."""
KEPT_WITHIN, STANDARD_ERRORS = 0.1, 2.0
"""The efficiency of exact weights holds to 0.1 if the energies' variance is two standard errors off."""
DRIFTING = 1.0
"""The halves of a warm-up differ by more than this many standard deviations: the energies still fall."""


@dataclass(frozen=True)
class ContourGoals:
    """What `ContourGradient(auto=…)` chooses a contour's settings for.

    The contour flattens the law p of the energies to p^{1-ζ} (scheme "original", 0 ≤ ζ < 1). Both a larger spread of κ
    and a smaller weight efficiency go with a larger ζ.

    Args:
        spread: wanted root mean square of κ - 1, > 0; near 0 the chain is a plain one.
        efficiency: wanted weight efficiency (Σw)²/(S·Σw²), in (0, 1).
        exact: True keeps the weights exact and takes the largest ζ that respects both. False takes ζ for the spread,
            and tempers the weights (`weight_exponent` < 1) until they are as efficient as wanted; averages are then
            those of a flatter law than the posterior.

    Raises:
        ValueError: if an argument is out of range.
    """

    spread: float = 0.75
    efficiency: float = 0.5
    exact: bool = True

    def __post_init__(self) -> None:
        check_positive("spread", self.spread)
        check_within("efficiency", self.efficiency, "(0, 1)")
        check_flag("exact", self.exact)


@dataclass(frozen=True)
class ContourChoice:
    """What was chosen, from what, and what is expected of it.

    Attributes:
        contour: partition and rules.
        include_prior: whether the energy includes -log p(θ).
        goals: what was wanted.
        spread: expected root mean square of κ - 1.
        efficiency: expected weight efficiency.
        law: of the warm-up's energies.
        count: number of these energies.
        temperature: τ at the end of the warm-up.
        noise_share: share of the energies' variance that changes from step to step, as mini-batch noise does.
        drift: change of the energies between the halves of the warm-up, in their standard deviations.
        prior_drift: change of the prior's energy between them, in nats; None if it is not known.
        data_std: standard deviation of the energies without the prior, in nats; None if it is not known.
        independent: effective sample size of the energies.
        zeta_of_law: ζ for the goals if the law were known exactly.
    """

    contour: Contour
    include_prior: bool
    goals: ContourGoals
    spread: float
    efficiency: float
    law: EnergyLaw
    count: int
    temperature: float
    noise_share: float
    drift: float
    prior_drift: float | None = None
    data_std: float | None = None
    independent: float | None = None
    zeta_of_law: float | None = None

    @property
    def sentence(self) -> str:
        """What was chosen, in one sentence, with a second one where a goal was missed."""
        partition, rules = self.contour.partition, self.contour.rules
        prior = "in" if self.include_prior else "left out of"
        why = ""
        if not self.include_prior and self.prior_drift is not None and self.data_std is not None:
            why = f" (it changed by {self.prior_drift:.3g} nats, the data's has a std of {self.data_std:.3g})"
        said = (
            f"chose zeta={rules.zeta:.3g}, num_bins={partition.num_bins}, first_edge={partition.first_edge:.6g}, "
            f"width={partition.width:.4g}, κ within [{rules.min_multiplier:.3g}, {rules.max_multiplier:.3g}], "
            f"weight_exponent={rules.weight_exponent:.3g}, and the prior {prior} the energy{why}, from {self.count} "
            f"energies (std {self.law.std:.4g} nats, {100 * self.noise_share:.0f} % of the variance from step to "
            f"step): expected spread of κ {self.spread:.3g} of {self.goals.spread:.3g} wanted, weight efficiency "
            f"{self.efficiency:.2g} of {self.goals.efficiency:.2g} wanted"
        )
        if self.drift > DRIFTING:
            said += ". The energies still change: use a longer warm-up"
        elif self.independent is not None and rules.zeta < 0.9 * (self.zeta_of_law or 0.0):
            said += (
                f". Their effective sample size of {self.independent:.0f} leaves their law uncertain, so zeta is not "
                f"{self.zeta_of_law:.3g}, with which the weights could fail: use a longer warm-up for more"
            )
        elif self.spread < 0.5 * self.goals.spread:
            said += ". The energies are too wide for more with exact weights" if self.goals.exact else ""
        return said

    def as_json(self) -> dict[str, Any]:
        """Return the choice as plain numbers, names and mappings of them."""
        plain = asdict(self) | {"contour": self.contour.to_dict()}
        shape = self.law.shape
        return plain | {"law": asdict(self.law) | {"shape": None if math.isinf(shape) else shape}}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "ContourChoice":
        """Make a choice from what `as_json` returned."""
        law = dict(entry["law"])
        made = {
            "contour": Contour.from_dict(entry["contour"]),
            "goals": ContourGoals(**entry["goals"]),
            "law": EnergyLaw(**law | {"shape": math.inf if law["shape"] is None else law["shape"]}),
        }
        return cls(**dict(entry) | made)

    def scalars(self) -> dict[str, float | bool]:
        """Return the chosen numbers by name, for a logger's hyperparameters."""
        partition, rules = self.contour.partition, self.contour.rules
        chosen = {name: getattr(rules, name) for name in ("zeta", "min_multiplier", "max_multiplier")}
        return {
            **asdict(partition),
            **chosen,
            "weight_exponent": rules.weight_exponent,
            "include_prior": self.include_prior,
            "expected_spread": self.spread,
            "expected_efficiency": self.efficiency,
        }

    def initial_state(self, energies: Tensor) -> ContourState:
        """Return π at the fitted law's masses, and the warm-up's visits, shapes (m,).

        Args:
            energies: those of the warm-up, with or without the prior as chosen; any shape.
        """
        partition = self.contour.partition
        index = bin_index(energies.cpu().double().reshape(-1), partition.edges())
        visits = torch.bincount(index, minlength=partition.num_bins)
        return ContourState(self.law.log_masses(partition), visits)


def choose_contour(
    energies: Tensor, temperature: float = 1.0, goals: ContourGoals | None = None, log_prior: Tensor | None = None
) -> ContourChoice:
    """Return the contour for the energies of a warm-up.

    ζ is the largest at which the spread of κ is at most the wanted one and the weights, exact ones, are at least as
    efficient as wanted (see `ContourGoals.exact`), for the shifted gamma law with the energies' first three moments.
    Exact weights also keep their efficiency to 0.1 if the variance is two standard errors off, by the effective sample
    size of the energies: π of too narrow a law pushes the chain to high energies, where samples have no weight.
    Bins of a quarter of their standard deviation cover 99 % of the flattened law. The prior's energy is left out if it
    changes, between the halves of the warm-up, by more than the standard deviation of the data's: then the bins would
    not hold.

    Args:
        energies: Ũ of the warm-up's steps in nats, shape (S, C) or (S,), with the prior; NaN where none was recorded.
        temperature: τ.
        goals: None uses `ContourGoals()`.
        log_prior: log p(θ) of the same steps; None keeps the prior in.

    Raises:
        ValueError: for too few energies, or if they are infinite or all equal.
    """
    goals = ContourGoals() if goals is None else goals
    energies = energies.cpu().double().reshape(len(energies), -1)
    known = ~energies.isnan()
    count = int(known.sum())
    if count < LEAST_ENERGIES:
        raise ValueError(
            f"auto=True has {count} energies of the warm-up to choose from, fewer than {LEAST_ENERGIES}: lengthen the "
            "burn-in or warm_up_steps"
        )
    if not bool(energies[known].isfinite().all()):
        raise ValueError("auto=True cannot choose from infinite energies of the warm-up: use a smaller lr")
    include_prior, prior_drift, data_std = True, None, None
    if log_prior is not None:
        prior = -log_prior.cpu().double().reshape(energies.shape)
        prior_drift = _change(prior, known)
        data_std = float((energies - prior)[known].std())
        include_prior = prior_drift <= data_std
        energies = energies if include_prior else energies - prior
    law = EnergyLaw.of(energies[known])
    if not law.std > 1e-9 * max(1.0, abs(law.mean)):
        raise ValueError(
            f"auto=True cannot choose from energies that are all {law.mean:.6g}: lengthen the warm-up, or pass "
            "first_edge and width"
        )
    independent = _effective(energies)
    zeta = largest(lambda z: _expected(law, z, 1.0, temperature)[0] <= goals.spread, LARGEST_ZETA)
    exponent, of_law = 1.0, None
    if goals.exact:
        zeta = min(zeta, largest(lambda z: _expected(law, z, 1.0, temperature)[1] >= goals.efficiency, LARGEST_ZETA))
        of_law, zeta = zeta, min(zeta, largest(lambda z: _is_kept(law, z, temperature, independent), LARGEST_ZETA))
    else:
        exponent = largest(lambda a: _expected(law, zeta, a, temperature)[1] >= goals.efficiency, 1.0)
    spread, efficiency = _expected(law, zeta, exponent, temperature)
    return ContourChoice(
        contour=_contour(law, zeta, exponent, spread),
        include_prior=include_prior,
        goals=goals,
        spread=spread,
        efficiency=efficiency,
        law=law,
        count=count,
        temperature=temperature,
        noise_share=_noise_share(energies),
        drift=_change(energies, known) / law.std,
        prior_drift=prior_drift,
        data_std=data_std,
        independent=independent,
        zeta_of_law=of_law,
    )


def _contour(law: EnergyLaw, zeta: float, exponent: float, spread: float | None = None) -> Contour:
    first, last = law.edges(zeta)
    inner = math.ceil((last - first) / (law.std / BINS_PER_STD))
    inner = min(max(inner, FEWEST_BINS - 2), MOST_BINS - 2)
    partition = EnergyPartition(first, (last - first) / inner, inner + 2)
    low, high = (None, None) if spread is None else (1 - LIMIT * spread, 1 + LIMIT * spread)
    rules = ContourRules(
        zeta=zeta, scheme="original", weight_exponent=exponent, min_multiplier=low, max_multiplier=high
    )
    return Contour(partition, rules)


def _is_kept(law: EnergyLaw, zeta: float, temperature: float, independent: float) -> bool:
    """Return whether the weights are as efficient as promised, to 0.1, if the variance is a few standard errors off."""
    error = STANDARD_ERRORS * math.sqrt((2 + 6 / law.shape) / independent)
    promised = _expected(law, zeta, 1.0, temperature)[1]
    others = (EnergyLaw(law.mean, law.std * (1 + error) ** half, law.shape) for half in (0.5, -0.5))
    had = (_expected(law, zeta, 1.0, temperature, other)[1] for other in others)
    return all(abs(one - promised) <= KEPT_WITHIN for one in had)


def _effective(energies: Tensor) -> float:
    """Return the effective sample size of energies (S, C), at least 1 and at most their number."""
    complete = energies[~energies.isnan().any(1)]
    found = chain_diagnostics(complete.T.numpy()).ess_bulk
    return min(max(found, 1.0), float(complete.numel())) if math.isfinite(found) else 1.0


def _expected(
    law: EnergyLaw, zeta: float, exponent: float, temperature: float, truth: EnergyLaw | None = None
) -> tuple[float, float]:
    """Return the root mean square of κ - 1 and the weight efficiency of a chain whose π has the law's masses.

    The chain's energies have the density p/Ψ^ζ, and weights are Ψ^{αζ}; p is the law, or the truth if that is another.
    """
    contour = _contour(law, zeta, exponent)
    partition, (u, log_density) = contour.partition, (truth or law).points(zeta)
    log_masses = law.log_masses(partition)
    state = ContourState(log_masses, torch.ones_like(log_masses, dtype=torch.int64))
    location = contour.locate(state, u, temperature, partition.edges())
    sampled = (log_density - zeta * location.log_density).softmax(0)
    weights = (location.log_weight - location.log_weight.max()).exp()
    spread = (sampled * (location.multiplier - 1).square()).sum().sqrt()
    efficiency = (sampled * weights).sum().square() / (sampled * weights.square()).sum()
    return float(spread), float(efficiency)


def largest(holds: Callable[[float], bool], limit: float) -> float:
    """Return the largest number up to a limit below which a condition holds throughout, to a thousandth of 1.

    The number is at most 1; steps towards it become finer near 1, since a condition on ζ changes fastest there.
    """
    low = 0.0
    for step in range(1, SCANNED + 1):
        high = 1 - (1 - limit) ** (step / SCANNED) if limit < 1 else step / SCANNED
        if not holds(high):
            break
        low = high
    else:
        return limit
    while high - low > 1e-3 * (1.001 - low):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _change(values: Tensor, known: Tensor) -> float:
    """Return the difference between the means of the later and the earlier half of the rows, over all chains."""
    half = len(values) // 2
    parts = [values[rows][known[rows]] for rows in (slice(half), slice(half, None))]
    return abs(float(parts[1].mean() - parts[0].mean())) if all(map(len, parts)) else 0.0


def _noise_share(energies: Tensor) -> float:
    """Return half the mean square of successive differences over the variance, at most 1."""
    steps = energies.diff(dim=0)
    steps, known = steps[~steps.isnan()], energies[~energies.isnan()]
    return min(1.0, float(steps.square().mean() / 2 / known.var())) if len(steps) else 1.0
