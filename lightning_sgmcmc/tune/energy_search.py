"""MCLMC's step size: the one whose energy errors have the wanted variance."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lightning_sgmcmc.callbacks import BayesianModelAverage, ChainHealth
from lightning_sgmcmc.callbacks.schedule import StepControls
from lightning_sgmcmc.samplers import MCLMC
from lightning_sgmcmc.tune.energy_errors import EnergyErrors
from lightning_sgmcmc.tune.probes import Prober
from lightning_sgmcmc.tune.proposal import SENTENCES, Limit, Probe
from lightning_sgmcmc.tune.runs import Energies, State
from lightning_sgmcmc.tune.short_form import HOT, FixedControls

WANTED = 5e-4
"""Variance of the energy error of a step, for each coordinate (Robnik et al. 2023)."""
POWER = 6.0
"""The variance grows with this power of the time step."""
TOLERATED = 1.2
"""A probe is healthy up to this factor of the wanted variance."""
NEAR = 2.0
"""A probe is near the wanted variance within this factor, where the law of sixth order corrects its step size."""
MOST = 4.0
"""The largest factor between two step sizes."""
LONGEST = 3
"""Lengths of a probe that a preconditioner may take before it."""
ENOUGH = 3
"""Probes near the wanted variance that end the search."""


@dataclass
class EnergyProber(Prober):
    """Makes probes of MCLMC, each from the end of the last, and judges them by their energy errors.

    Callbacks that change the gradient, and clipping, take no part, since their steps conserve no energy.
    """

    _state: State = field(default_factory=list)
    _errors: EnergyErrors = field(default_factory=EnergyErrors)

    def _repeated(self, lr: float) -> Probe:
        self._errors = EnergyErrors()
        probe = self._probe(lr, self._state or self.training.state)
        if probe.energy is None:
            return probe
        self._state = self.runs.state()
        sampler = self.runs.module.sampler
        assert isinstance(sampler, MCLMC)
        variance, friction = self._errors.variance(sampler), self._errors.friction(sampler)
        limit, reason = None, ""
        if variance > TOLERATED * WANTED:
            limit = Limit.ENERGY_ERROR
            reason = f"energy error: a variance of {variance:.3g} for each coordinate and step, wanted {WANTED:g}"
        return replace(probe, limit=limit, reason=reason, energy_variance=variance, friction=friction)

    def _first_steps(self) -> list[StepControls]:
        """Return those of steps at the full lr, as many as the run's own burn-in but at most three probes' lengths.

        The scale of a full gradient shows only while the chain moves, and MCLMC cannot heat on the way.
        """
        return [HOT] * min(round(self.form.lead), LONGEST * self.steps) if self.runs.has_preconditioner else []

    def _fit(self, schedule: FixedControls, steps: int, health: ChainHealth) -> Energies:
        return self.runs.fit(schedule, steps, BayesianModelAverage(), health, self._errors, clips=False)


def corrected(probe: Probe) -> float:
    """Return the step size at which the law of sixth order expects the wanted variance, within a factor of 4."""
    if probe.energy_variance is None or not math.isfinite(probe.energy_variance):
        return probe.lr / MOST
    factor = (WANTED / max(probe.energy_variance, 1e-300)) ** (1 / POWER)
    return probe.lr * min(max(factor, 1 / MOST), MOST)


def solve(probe: Callable[[float], Probe], lr: float, max_probes: int) -> list[Probe]:
    """Probe at lr, and at each probe's corrected step size, until three are near the wanted variance.

    Args:
        probe: makes a probe.
        lr: the first step size.
        max_probes: the largest number of probes.
    """
    probes: list[Probe] = []
    while len(probes) < max_probes and len(_near(probes)) < ENOUGH:
        probes.append(probe(lr))
        lr = corrected(probes[-1])
    return probes


def _near(probes: Sequence[Probe]) -> list[Probe]:
    """Return the probes whose variance is near the wanted one."""
    return [p for p in probes if p.energy_variance is not None and 1 / NEAR < p.energy_variance / WANTED < NEAR]


def choose_by_energy(probes: Sequence[Probe]) -> tuple[float, float | None, bool, str]:
    """Return the proposed step size and friction, whether they are healthy, and a sentence.

    The step size is the mean of the corrected ones of the probes near the wanted variance, or else that of the last
    probe; the friction is that of the same probes.

    Args:
        probes: in the order in which they were made.
    """
    used = _near(probes) or list(probes[-1:])
    lr = _geometric_mean([corrected(p) for p in used])
    frictions = [p.friction for p in used if p.friction is not None]
    friction = _geometric_mean(frictions) if frictions else None
    if _near(used):
        return lr, friction, True, SENTENCES[Limit.ENERGY_ERROR]
    return lr, friction, False, f"No probe came near it; {used[-1].reason or 'the last one was far below'}"


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
