"""Probes of step sizes, and the choice among them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.plain import as_plain
from lightning_sgmcmc.tensors import widest

NOISE = 1.0
"""A step is as good as the best if its NLL is larger by at most this many standard errors of the paired difference."""
HALVINGS = 2
"""Probes between the last healthy step and the first unhealthy one, so that these are a factor of 1.19 apart."""
MOST_RIVALS = 4
"""Healthy steps above the chosen one that are tried in longer runs."""
LEAST_LOSS = 0.002
"""A larger NLL by less than this, in nats per example, is no difference."""


class Limit(str, Enum):
    """What bounds the proposed step; `sentence` says it."""

    _value_: str
    sentence: str

    EXPLORATION = "exploration", "Exploration at a larger lr does not train: it diverges, or undoes what was learned."
    GRADIENT_NOISE = (
        "gradient noise",
        "At a larger lr the mini-batch noise inflates the variance: more data per batch allow one.",
    )
    DISCRETIZATION = "discretization", "At a larger lr the discretization inflates the variance."
    CHANCE = "at chance", "At a larger lr the model does no better than chance."
    VALIDATION = "validation", "A larger lr is healthy, but its average predicts the validation data worse."
    ENERGY_ERROR = (
        "energy error",
        "At a larger lr the energy errors of MCLMC's steps have more than the wanted variance.",
    )
    ACCEPTANCE = (
        "acceptance",
        "At a larger lr MetropolisTest rejects too many trajectories: larger batches, or fewer steps in a trajectory, "
        "allow one.",
    )
    TRIED = "largest tried", "It is the largest lr tried: a larger one may be healthy too (more probes find out)."

    def __new__(cls, value: str, sentence: str) -> "Limit":
        member = str.__new__(cls, value)
        member._value_, member.sentence = value, sentence
        return member

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Probe:
    """A short run at one step size.

    Attributes:
        lr: the setting for the module's lr (the largest, if it has one for each pattern or chain).
        kinetic: kinetic temperature of all tensors together, None if the run diverged.
        configurational: configurational temperature of all tensors together, None if the run diverged.
        noise_share: the largest share of mini-batch noise in a tensor's step.
        energy: mean Ũ of the sampling stage in nats.
        nll: NLL of the average on the validation data in nats per example, None without such data.
        limit: what makes it unhealthy, None if nothing does.
        reason: a sentence on that, else "".
        log_density: log density of the average at each validation datum, for paired comparisons.
        energy_variance: variance of a step's energy error for each coordinate, of MCLMC only.
        friction: MCLMC's friction at which the momentum forgets its direction over the width of the positions.
        acceptance: mean acceptance probability of `MetropolisTest`, None without.
        refusal: the message of the sampler that refuses the step, else "".
    """

    WRITTEN: ClassVar = (
        *("lr", "kinetic", "configurational", "noise_share", "energy", "nll", "reason"),
        *("energy_variance", "friction", "acceptance", "healthy", "verdict"),
    )
    IF_SET: ClassVar = ("energy_variance", "friction", "acceptance")

    lr: float
    kinetic: float | None = None
    configurational: float | None = None
    noise_share: float | None = None
    energy: float | None = None
    nll: float | None = None
    limit: Limit | None = None
    reason: str = ""
    log_density: Tensor | None = field(default=None, repr=False, compare=False)
    energy_variance: float | None = None
    friction: float | None = None
    acceptance: float | None = None
    refusal: str = ""

    @property
    def healthy(self) -> bool:
        """Whether nothing inflates the chain's variance beyond the tolerance, and the exploration stage trains."""
        return self.limit is None

    @property
    def verdict(self) -> str:
        """ "healthy", or the limit."""
        return "healthy" if self.limit is None else self.limit.value

    def is_worse(self, other: "Probe") -> bool:
        """Return whether its average predicts the validation data worse than another's, beyond noise."""
        if self.log_density is None or other.log_density is None:
            return False
        loss = widest(other.log_density - self.log_density)
        error = float(loss.std()) / math.sqrt(len(loss)) if len(loss) > 1 else math.inf
        return float(loss.mean()) > max(NOISE * error, LEAST_LOSS)

    def as_json(self) -> dict[str, Any]:
        """Return its JSON form."""
        return as_plain(self, finite=True)


@dataclass(frozen=True)
class StepProposal:
    """The result of `propose_lr`.

    Attributes:
        lr: the proposed setting (the largest, if the module has one for each pattern or chain); never None.
        setting: the value to write into the configuration: a number, or the module's patterns and chains, all scaled
            by the same factor.
        limit: what binds.
        is_healthy: whether a short run at lr was healthy. If none was, lr is the best of those tried.
        reason: a sentence on what binds.
        probes: all probes, by step size.
        steps_made: optimizer steps of the call.
        run_steps: optimizer steps of the run, infinite if unknown.
        friction: MCLMC's proposed friction, one for all chains; None for other samplers.
    """

    WRITTEN: ClassVar = (
        *("setting", "lr", "limit", "is_healthy", "reason", "steps_made", "run_steps", "friction", "probes"),
    )
    IF_SET: ClassVar = ("friction",)

    lr: float
    setting: Any
    limit: Limit
    is_healthy: bool
    reason: str
    probes: tuple[Probe, ...]
    steps_made: int = 0
    run_steps: float = math.inf
    friction: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return its JSON form."""
        return as_plain(self, finite=True)


def search(probe: Callable[[float], Probe], lr: float, least: float, max_probes: int) -> list[Probe]:
    """Probe at lr, then up or down by factors of two until health changes, then twice between the last two.

    With validation data it then continues downwards while a smaller step predicts better, to the least step size that
    trains within the run.
    """
    probes = [probe(lr)]
    factor = 2.0 if probes[0].healthy else 0.5
    while len(probes) < max_probes and probes[-1].healthy == probes[0].healthy:
        if factor < 1 and len(probes) == 4:
            factor = 0.25  # far from it
        probes.append(probe(probes[-1].lr * factor))
    if probes[-1].healthy != probes[0].healthy:
        ends = sorted(p.lr for p in probes[-2:])
        for _ in range(min(HALVINGS, max_probes - len(probes))):
            probes.append(probe(math.sqrt(ends[0] * ends[1])))
            ends[0 if probes[-1].healthy else 1] = probes[-1].lr
    while len(probes) < max_probes:
        healthy = sorted(_below_limit(probes), key=lambda p: p.lr)
        if not healthy or healthy[0].log_density is None or healthy[0].lr / 2 < least:
            break
        if min(p.lr for p in probes) < healthy[0].lr:
            break  # a smaller one is unhealthy by chance
        if len(healthy) > 1 and not healthy[1].is_worse(healthy[0]):
            break
        probes.append(probe(healthy[0].lr / 2))
    return probes


def _below_limit(probes: Sequence[Probe]) -> list[Probe]:
    """Return the healthy probes below the limit of health, which misjudges the fewest probes.

    Heat grows with the step, so a healthy probe beyond an unhealthy one, or an unhealthy one below, is a chance event.
    Of limits with equally many the least counts that has a healthy probe below it.
    """
    ordered = sorted(probes, key=lambda p: p.lr)
    below = [sum(not p.healthy for p in ordered[:k]) for k in range(len(ordered) + 1)]
    above = [sum(p.healthy for p in ordered[k:]) for k in range(len(ordered) + 1)]
    misjudged = [one + other for one, other in zip(below, above, strict=True)]
    limits = [k for k, count in enumerate(misjudged) if count == min(misjudged)]
    kept = [[p for p in ordered[:k] if p.healthy] for k in limits]
    return next((found for found in kept if found), [])


def repeat_longer(
    probes: Sequence[Probe], longer: Callable[[float], Probe], least: float, fallback: float
) -> list[Probe]:
    """Return the probes, with longer ones where validation data would choose a step below another healthy one.

    Short runs favour small steps, which leave the chain at the optimum where it began. The longer probes are of the
    chosen step, of healthy steps above it, the largest first, until one is not worse, and of one between that and the
    next. Healthy probes without a longer one are left out then.
    """
    lr, limit, *_ = choose(probes, least, fallback)
    if limit is not Limit.VALIDATION:
        return list(probes)
    chosen = longer(lr)
    found = [chosen]
    above = math.inf
    for rival in sorted((p.lr for p in _below_limit(probes) if p.lr > lr), reverse=True)[:MOST_RIVALS]:
        found.append(longer(rival))
        if found[-1].healthy and not found[-1].is_worse(chosen):
            lr = rival
            break
        above = rival
    if above < math.inf:
        found.append(longer(math.sqrt(lr * above)))
    return found + [p for p in probes if not p.healthy]


def choose(probes: Sequence[Probe], least: float, fallback: float) -> tuple[float, Limit, bool, str]:
    """Return the proposed step size, what binds, whether it is healthy, and a sentence.

    Among the healthy steps below the smallest unhealthy one, of those from `least` on if there are any, it is the
    largest whose average predicts the validation data as well as the best; without such data the largest.
    """
    below = _below_limit(probes)
    if not below:
        return _least_bad(probes, fallback)
    candidates = [p for p in below if p.lr >= least] or [max(below, key=lambda p: p.lr)]
    best = min(candidates, key=lambda p: math.inf if p.nll is None else p.nll)
    found = max((p for p in candidates if not p.is_worse(best)), key=lambda p: p.lr)
    if any(p.lr > found.lr for p in below):
        return found.lr, Limit.VALIDATION, True, Limit.VALIDATION.sentence
    above = min((p for p in probes if not p.healthy and p.lr > found.lr), key=lambda p: p.lr, default=None)
    limit = Limit.TRIED if above is None or above.limit is None else above.limit
    return found.lr, limit, True, limit.sentence


def _least_bad(probes: Sequence[Probe], fallback: float) -> tuple[float, Limit, bool, str]:
    finite = [p for p in probes if p.energy is not None]
    lowest = min(probes, key=lambda p: p.lr)
    limit = lowest.limit or Limit.DISCRETIZATION
    trained = [p for p in finite if p.limit not in (Limit.EXPLORATION, Limit.CHANCE)]
    if not finite:
        lr = min(fallback, lowest.lr)
    elif any(p.nll is not None for p in finite):
        lr = min(finite, key=lambda p: math.inf if p.nll is None else p.nll).lr
    else:  # heat falls with the step
        lr = min(trained or finite, key=lambda p: p.lr).lr
    binds = next((p.reason for p in probes if p.lr == lr and p.reason), lowest.reason)
    return lr, limit, False, f"No step was healthy; at this one: {binds}" if binds else "No step was healthy."


def scaled(setting: Any, factor: float) -> Any:
    """Return a module's lr with all its numbers multiplied by a factor.

    >>> scaled({"*.bias": 0.5, "*": [1.0, 2.0]}, 0.5)
    {'*.bias': 0.25, '*': [0.5, 1.0]}
    """
    if isinstance(setting, dict):
        return {name: scaled(value, factor) for name, value in setting.items()}
    if isinstance(setting, list | tuple):
        return [scaled(value, factor) for value in setting]
    return float(setting) * factor


def tail_mean(energies: Tensor, share: float = 1 / 3) -> float:
    """Return the largest chain's mean over the last share of the energies (n, C), infinite if it is not finite."""
    last = energies[-max(1, round(share * len(energies))) :]
    value = float(widest(last).mean(0).max()) if len(energies) else math.inf
    return value if math.isfinite(value) and bool(torch.isfinite(energies).all()) else math.inf
