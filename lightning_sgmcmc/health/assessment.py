"""Findings on a run, from a chain's temperatures, mini-batch noise and energies, and from what is known of the run.

The formulas are in `lightning_sgmcmc.health.estimates`; findings on the run as a whole are in
`lightning_sgmcmc.health.verdict`.
"""

import math
from collections.abc import Collection
from dataclasses import replace

import torch

from lightning_sgmcmc.health.estimates import MIN_BATCHES, Estimates, Observations
from lightning_sgmcmc.health.findings import SMALLER_AND_LONGER, STILL_FALLING, Finding, FindingKind, Severity, Side
from lightning_sgmcmc.health.report import HealthReport, TemperatureKind, Temperatures
from lightning_sgmcmc.health.verdict import LEAST_SHARE, RunFacts, judge

MAX_CLIPPED = 0.05
"""Share of clipped gradients above which clipping is a finding."""
ALL_TENSORS = "all tensors together"


def assess(
    observations: Observations,
    step: int,
    tolerance: float = 0.2,
    false_alarm_rate: float = 0.01,
    facts: RunFacts | None = None,
) -> HealthReport:
    """Return the report on a run's health.

    A number is a finding only if its whole interval is out of range: temperatures outside τ·(1 ± tolerance), mini-batch
    noise above tolerance times the injected noise (its relative contribution to the temperature), or an energy drift
    beyond tolerance·τ·d/2 (d/2·τ is the mean energy of d harmonic coordinates). The intervals hold jointly (Bonferroni
    over all tensors and both temperatures, noise and drift), so the probability of a false alarm in one assessment of
    a chain within the tolerance is at most `false_alarm_rate`. A temperature whose interval is wider than ± τ is not
    measurable, and has none.

    The plain configurational estimate (c = 0, Wenzel's) is used if its interval is narrower than the tolerance.
    Otherwise the noise of θ·(gradient) dominates it, and c is the state at the beginning of the sampling stage. That
    estimate starts at 0 and reaches τ once the chain has forgotten its start.

    Args:
        observations: the observed batch means.
        step: the optimizer step, for the report.
        tolerance: accepted relative deviation.
        false_alarm_rate: probability of a false alarm in one assessment.
        facts: what is known of the run besides; None is a run at a constant temperature of which nothing is known.
    """
    facts = RunFacts() if facts is None else facts
    report = HealthReport(
        step=step,
        temperature=observations.temperature,
        tolerance=tolerance,
        observations=int(observations.counts.sum()),
    )
    if not bool(torch.isfinite(observations.values).all() and torch.isfinite(observations.energies).all()):
        return report.with_divergence()
    if len(observations.counts) < 2 or not observations.names:
        return judge(report, facts, None)
    estimates = Estimates(observations, tolerance, false_alarm_rate)
    is_long = len(observations.counts) >= MIN_BATCHES
    intervals = (estimates.total.kinetic_interval, estimates.total.configurational_interval)
    widths = [(ends[1] - ends[0]) / 2 / observations.temperature if ends else math.inf for ends in intervals]
    report = replace(
        report,
        tensors=estimates.tensors,
        total=estimates.total,
        gradient_noise_share={
            name: 0.0 if facts.is_full_batch else estimates.noise_share(i) for i, name in enumerate(observations.names)
        },
        energy=replace(estimates.energy(), expected=None) if facts.has_moved_target else estimates.energy(),
        verdict="ok" if is_long and max(widths) < 2 * tolerance else "unknown",
    )
    if is_long:
        report = report.with_findings(*_Findings(estimates, facts).all())
    return judge(report, facts, estimates if is_long else None)


class _Findings:
    """Problems shown by the estimates, each with a remedy."""

    def __init__(self, estimates: Estimates, facts: RunFacts) -> None:
        self._estimates, self._facts = estimates, facts
        self._is_tested = facts.acceptance is not None
        """Whether a test removes the error of the steps from the law."""
        # The measured noise has a bias of lr·λ, which is all of it if each step has all data.
        self._noisy = {} if facts.is_full_batch or self._is_tested else estimates.noisy()

    def all(self) -> tuple[Finding | None, ...]:
        """Return the findings, at most one of each kind and side."""
        if self._is_tested:
            return (self._relaxation(), self._energy())
        temperatures: tuple[TemperatureKind, ...] = ("kinetic", "configurational")
        hot = [self._temperature(kind, "above") for kind in temperatures]
        cold = [self._temperature("kinetic", "below"), self._relaxation()]
        return (*hot, *cold, self._gradient_noise(), self._energy(), self._clipping())

    # -- temperatures -------------------------------------------------------------------------------------------------

    def _temperature(self, kind: TemperatureKind, side: Side) -> Finding | None:
        off = self._off(kind, side)
        if off is None:
            return None
        subject = FindingKind.KINETIC if kind == "kinetic" else FindingKind.CONFIGURATIONAL
        sentence = f"{subject.value}: {self._deviation(kind, side, off)}"
        return Finding(subject, sentence, side, self._worst(off), self._remedy(kind, side, off))

    def _off(self, kind: TemperatureKind, side: Side) -> dict[str, float] | None:
        """Return the nearer bounds of the tensors that are certainly off, None if neither they nor the total are."""
        tensors = self._estimates.tensors
        off = {name: bound for name, entry in tensors.items() if (bound := self._bound(entry, kind, side)) is not None}
        return off if off or self._bound(self._estimates.total, kind, side) is not None else None

    def _bound(self, entry: Temperatures, kind: TemperatureKind, side: Side) -> float | None:
        """Return the bound nearer to τ if the interval lies wholly on a side of the tolerated range, else None."""
        _, interval = entry.measured(kind)
        if interval is None:
            return None
        (low, high), tau, tolerance = interval, self._estimates.tau, self._estimates.tolerance
        if side == "above":
            return low if low > tau * (1 + tolerance) else None
        return high if high < tau * (1 - tolerance) else None

    def _worst(self, off: dict[str, float]) -> str | None:
        return max(off, key=lambda name: abs(off[name] - self._estimates.tau), default=None)

    def _deviation(self, kind: TemperatureKind, side: Side, off: dict[str, float]) -> str:
        """Return by how much a temperature is off, and where."""
        tensor, tau = self._worst(off), self._estimates.tau
        entry = self._estimates.total if tensor is None else self._estimates.tensors[tensor]
        where = ALL_TENSORS if tensor is None else f"{tensor} ({self._share_of_tensors(off)} off)"
        value, interval = entry.measured(kind)
        low, high = interval or (math.nan, math.nan)
        return f"{value:.3g} in {where} is {side} the target {tau:.3g} (interval {low:.3g} to {high:.3g})"

    def _remedy(self, kind: TemperatureKind, side: Side, off: Collection[str]) -> str:
        if side == "above" and self._noisy.keys() & set(off):
            return self._quieter()
        if side == "above" and self._facts.is_steady and self._estimates.is_cooling():
            return STILL_FALLING
        if side == "above" and kind == "configurational" and self._is_kinetic_right(off):
            return "use a longer burn-in, since the kinetic temperature is right, or a smaller lr"
        return SMALLER_AND_LONGER if side == "above" else "use a longer burn-in or more friction"

    def _is_kinetic_right(self, off: Collection[str]) -> bool:
        """Return whether the steps are certainly no hotter than tolerated."""
        entries = [self._estimates.tensors[name] for name in off] or [self._estimates.total]
        highest = self._estimates.tau * (1 + self._estimates.tolerance)
        intervals = [entry.measured("kinetic")[1] for entry in entries]
        return all(interval is not None and interval[1] < highest for interval in intervals)

    def _relaxation(self) -> Finding | None:
        """Return the finding of a configurational temperature below the target's: the chain has not relaxed."""
        off = self._off("configurational", "below")
        if off is None:
            return None
        facts, total = self._facts, self._estimates.total
        covered, reached = facts.covered(total, self._estimates.tau), total.configurational or 0.0
        reached = reached if reached > LEAST_SHARE * self._estimates.tau else 0.0
        sentence = f"relaxation: the configurational temperature {self._deviation('configurational', 'below', off)}"
        if covered is not None:
            sentence += f", so a sampling stage covers about {covered:.2g} relaxation times of the slow directions"
        severity: Severity = "note" if facts.is_cyclical or self._estimates.tau <= facts.cold_below else "problem"
        heat = self._estimates.tau * self._estimates.observations.dimension / 2
        remedy = facts.relaxation_remedy(covered, reached, heat)
        return Finding(FindingKind.RELAXATION, sentence, "below", self._worst(off), remedy, severity)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _quieter(self) -> str:
        """Return the remedy for mini-batch noise, which is proportional to lr."""
        excess = max(share / (1 - share) if share < 1 else math.inf for share in self._noisy.values())
        factor = self._estimates.tolerance / excess if 0 < excess < math.inf else 0.0
        lr = f"{factor:.2g} times the lr" if factor else "a fraction of the lr"
        return f"use more data per batch, or a smaller lr in a longer run (about {lr}; `sgmcmc tune` finds it)"

    def _gradient_noise(self) -> Finding | None:
        if not self._noisy:
            return None
        tensor, share = max(self._noisy.items(), key=lambda pair: pair[1])
        sentence = (
            f"gradient noise: mini-batch noise makes up {share:.0%} of the step's variance in {tensor} "
            f"({self._share_of_tensors(self._noisy)} over the limit) and inflates the chain's variance"
        )
        return Finding(FindingKind.GRADIENT_NOISE, sentence, "above", tensor, self._quieter())

    def _energy(self) -> Finding | None:
        drift = self._estimates.drift()
        if drift == 0 or not self._facts.is_steady:
            return None
        first, second = self._estimates.energy_halves()
        side: Side = "below" if drift < 0 else "above"
        sentence = (
            f"energy: the mean has {'fallen' if drift < 0 else 'risen'} from {first:.6g} to {second:.6g} nats between "
            "the halves of the sampling stage"
        )
        # A cold ensemble is no draw from an equilibrium, so a longer way to it is no advice.
        severity: Severity = "note" if self._estimates.tau <= self._facts.cold_below else "problem"
        return Finding(FindingKind.ENERGY, sentence, side, remedy="use a longer burn-in", severity=severity)

    def _clipping(self) -> Finding | None:
        clipped = self._estimates.observations.clipped
        if clipped is None or clipped <= MAX_CLIPPED:
            return None
        sentence = f"clipping: {clipped:.0%} of the gradients were clipped, so the chain does not sample the posterior"
        return Finding(FindingKind.CLIPPING, sentence, "above", remedy="raise gradient_clip_val")

    def _share_of_tensors(self, part: Collection[str]) -> str:
        return f"{len(part)} of {len(self._estimates.tensors)} tensors"
