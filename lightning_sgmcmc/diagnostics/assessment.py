"""Is the step size right? Findings with advice, from a chain's temperatures, mini-batch noise and energies.

The formulas are in `lightning_sgmcmc.diagnostics.estimates`.
"""

import math
from collections.abc import Collection
from dataclasses import replace

import torch

from lightning_sgmcmc.diagnostics.estimates import MIN_BATCHES, Estimates, Observations
from lightning_sgmcmc.diagnostics.health import Finding, FindingKind, HealthReport, Side, TemperatureKind, Temperatures

MAX_CLIPPED = 0.05
"""Share of clipped gradients above which clipping is a finding."""
ALL_TENSORS = "all tensors together"


def assess(
    observations: Observations, step: int, tolerance: float = 0.2, false_alarm_rate: float = 0.01
) -> HealthReport:
    """Return the report on a chain's health.

    A number is a finding only if its whole interval is out of range: temperatures outside τ·(1 ± tolerance), mini-batch
    noise above tolerance times the injected noise (its relative contribution to the temperature), or an energy drift
    beyond tolerance·τ·d/2 (d/2·τ is the mean energy of d harmonic coordinates). The intervals hold jointly (Bonferroni
    over all tensors and both temperatures, noise and drift), so the probability of a false alarm in one assessment of
    a chain within the tolerance is at most `false_alarm_rate`.

    The plain configurational estimate (c = 0, Wenzel's) is used if its interval is narrower than the tolerance.
    Otherwise the noise of θ·(gradient) dominates it, and c is the state at the beginning of the sampling stage. That
    estimate starts at 0 and reaches τ once the chain has forgotten its start.

    Args:
        observations: the observed batch means.
        step: the optimizer step, for the report.
        tolerance: accepted relative deviation.
        false_alarm_rate: probability of a false alarm in one assessment.
    """
    report = HealthReport(
        step=step,
        temperature=observations.temperature,
        tolerance=tolerance,
        observations=int(observations.counts.sum()),
    )
    if not bool(torch.isfinite(observations.values).all() and torch.isfinite(observations.energies).all()):
        return report.with_divergence()
    if len(observations.counts) < 2 or not observations.names:
        return report
    estimates = Estimates(observations, tolerance, false_alarm_rate)
    is_long = len(observations.counts) >= MIN_BATCHES
    findings = _Findings(estimates).all() if is_long else ()
    report = replace(
        report,
        findings=findings,
        tensors=estimates.tensors,
        total=estimates.total,
        gradient_noise_share={name: estimates.noise_share(i) for i, name in enumerate(observations.names)},
        energy=estimates.energy(),
    )
    if findings:
        return replace(report, verdict="warning")
    intervals = (estimates.total.kinetic_interval, estimates.total.configurational_interval)
    widths = [(interval[1] - interval[0]) / 2 / observations.temperature for interval in intervals if interval]
    return replace(report, verdict="ok") if is_long and max(widths) < 2 * tolerance else report


class _Findings:
    """Problems shown by the estimates, as sentences with advice."""

    def __init__(self, estimates: Estimates) -> None:
        self._estimates, self._noisy = estimates, estimates.noisy()

    def all(self) -> tuple[Finding, ...]:
        """Return the findings, at most one of each kind and side."""
        temperatures: tuple[TemperatureKind, ...] = ("kinetic", "configurational")
        sides: tuple[Side, ...] = ("above", "below")
        found = [self._temperature(kind, side) for kind in temperatures for side in sides]
        found += [self._gradient_noise(), self._energy(), self._clipping()]
        return tuple(finding for finding in found if finding is not None)

    def _temperature(self, kind: TemperatureKind, side: Side) -> Finding | None:
        tau, tensors = self._estimates.tau, self._estimates.tensors
        off = {name: bound for name, entry in tensors.items() if (bound := self._bound(entry, kind, side)) is not None}
        if not off and self._bound(self._estimates.total, kind, side) is None:
            return None
        tensor = max(off, key=lambda name: abs(off[name] - tau), default=None)
        if tensor is None:
            entry, where = self._estimates.total, ALL_TENSORS
        else:
            entry, where = tensors[tensor], f"{tensor} ({self._share_of_tensors(off)} off)"
        value, interval = entry.measured(kind)
        low, high = interval or (math.nan, math.nan)
        sentence = (
            f"{kind} temperature: {value:.3g} in {where} is {side} the target {tau:.3g} (interval {low:.3g} to "
            f"{high:.3g}): {self._advice(kind, side, off)}"
        )
        return Finding(FindingKind(f"{kind} temperature"), sentence, side, tensor)

    def _bound(self, entry: Temperatures, kind: TemperatureKind, side: Side) -> float | None:
        """Return the bound nearer to τ if the interval lies wholly on a side of the tolerated range, else None."""
        _, interval = entry.measured(kind)
        if interval is None:
            return None
        (low, high), tau, tolerance = interval, self._estimates.tau, self._estimates.tolerance
        if side == "above":
            return low if low > tau * (1 + tolerance) else None
        return high if high < tau * (1 - tolerance) else None

    def _advice(self, kind: TemperatureKind, side: Side, off: Collection[str]) -> str:
        if side == "above" and self._noisy.keys() & set(off):
            return "mini-batch noise heats the chain: use more data per batch or a smaller lr"
        if side == "above" and kind == "configurational" and self._estimates.drift() < 0:
            return "the energy is still falling: use a longer burn-in, and a smaller lr if that does not help"
        if side == "above":
            return "the step is too large: use a smaller lr"
        if kind == "kinetic":
            return "the momentum has not reached the temperature: use a longer burn-in or more friction"
        return (
            "the chain has not yet spread over the posterior: use a longer burn-in and longer sampling (a larger lr "
            "spreads faster, if the other numbers allow it)"
        )

    def _gradient_noise(self) -> Finding | None:
        if not self._noisy:
            return None
        tensor, share = max(self._noisy.items(), key=lambda pair: pair[1])
        sentence = (
            f"gradient noise: mini-batch noise makes up {share:.0%} of the step's variance in {tensor} "
            f"({self._share_of_tensors(self._noisy)} over the limit) and heats the chain: use more data per batch or a "
            "smaller lr"
        )
        return Finding(FindingKind.GRADIENT_NOISE, sentence, "above", tensor)

    def _energy(self) -> Finding | None:
        drift = self._estimates.drift()
        if drift == 0:
            return None
        first, second = self._estimates.energy_halves()
        side: Side
        if drift < 0:
            side, word, advice = "below", "fallen", "the chain has not converged: use a longer burn-in"
        else:
            side, word = "above", "risen"
            advice = "the chain is still warming up, or diverges: use a longer burn-in or a smaller lr"
        sentence = (
            f"energy: the mean has {word} from {first:.6g} to {second:.6g} nats between the halves of the sampling "
            f"stage: {advice}"
        )
        return Finding(FindingKind.ENERGY, sentence, side)

    def _clipping(self) -> Finding | None:
        clipped = self._estimates.observations.clipped
        if clipped is None or clipped <= MAX_CLIPPED:
            return None
        sentence = (
            f"clipping: {clipped:.0%} of the gradients were clipped, so the chain does not sample the posterior: raise "
            "gradient_clip_val, or use a smaller lr instead of clipping"
        )
        return Finding(FindingKind.CLIPPING, sentence, "above")

    def _share_of_tensors(self, part: Collection[str]) -> str:
        return f"{len(part)} of {len(self._estimates.tensors)} tensors"
