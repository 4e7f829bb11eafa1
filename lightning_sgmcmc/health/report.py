"""The report on a run's health: temperatures, mini-batch noise, energies, ranked findings, and one next step.

`lightning_sgmcmc.health.assessment.assess` creates it. `BayesianModule.health` holds the latest, `health.json` in
a run's folder is its JSON form, and `sgmcmc report` reads that file.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

from lightning_sgmcmc.health.findings import OF_HELD_OUT, Finding, most_urgent, ranked
from lightning_sgmcmc.plain import as_plain, from_plain
from lightning_sgmcmc.planning.plan import RunKind, with_article

HEALTH = "health.json"
"""The file of the last report in a run's folder."""

TemperatureKind = Literal["kinetic", "configurational"]
Verdict = Literal["ok", "warning", "unknown"]
Interval = tuple[float, float]

POSTERIOR, COLD, SNAPSHOT, DEEP = tuple(kind.value for kind in RunKind)
"""What the samples of a run can be."""


@dataclass(frozen=True)
class Temperatures:
    """Temperatures of a tensor, or of all tensors together; None without a measurement.

    Attributes:
        numel: number of elements.
        kinetic: kinetic temperature.
        kinetic_interval: its lower and upper bounds.
        configurational: configurational temperature.
        configurational_interval: its lower and upper bounds.
    """

    numel: int | None = None
    kinetic: float | None = None
    kinetic_interval: Interval | None = None
    configurational: float | None = None
    configurational_interval: Interval | None = None

    def measured(self, kind: TemperatureKind) -> tuple[float | None, Interval | None]:
        """Return a temperature and its interval."""
        if kind == "kinetic":
            return self.kinetic, self.kinetic_interval
        return self.configurational, self.configurational_interval


@dataclass(frozen=True)
class EnergySummary:
    """Mean and spread of the sampling stage's energies Ũ in nats, and where its earlier half's mean should lie."""

    mean: float | None = None
    std: float | None = None
    expected: Interval | None = None


@dataclass(frozen=True)
class RunMeasures:
    """Numbers of the run as a whole; None without a measurement.

    Attributes:
        nll: mean negative log likelihood per example of the training data in the sampling stages, in nats.
        chance_nll: the same of a model that knows the labels' frequencies alone (in regression, their mean).
        heat: τ·d/2, the thermal energy of d harmonic coordinates at the temperature, in nats.
        relaxation_times: relaxation times of the prior's directions that a sampling stage covers.
        prior_norm: mean of ‖θ‖²/(d·σ²), σ the prior's standard deviation; τ at equilibrium where the prior decides.
        rhat: split R-hat of the predictions, the worst over some data.
        ess: bulk effective sample size of the predictions, the worst over some data.
        acceptance: mean acceptance probability of a `MetropolisTest` in the sampling stages.
    """

    nll: float | None = None
    chance_nll: float | None = None
    heat: float | None = None
    relaxation_times: float | None = None
    prior_norm: float | None = None
    rhat: float | None = None
    ess: float | None = None
    acceptance: float | None = None


@dataclass(frozen=True)
class HealthReport:
    """The health of a run.

    Attributes:
        step: the optimizer step of the report.
        verdict: "ok", "warning" if a finding is a problem, or "unknown".
        findings: the findings, the most urgent first.
        temperature: τ, the temperature of the target; NaN if a file does not have it.
        tolerance: accepted relative deviation.
        tensors: temperatures by the name of the parameter tensor.
        total: temperatures of all tensors together, None without a measurement.
        gradient_noise_share: share of mini-batch noise in the variance of a step, by tensor.
        energy: mean, spread and expected range of the energies.
        observations: number of observed steps.
        run: numbers of the run as a whole.
        kind: what the samples are: "posterior sample", "cold ensemble", "snapshot ensemble", "deep ensemble" or the
            name of another baseline; None if the measurements do not say.
        reason: the measurement that says so.
    """

    WRITTEN: ClassVar = (
        *("step", "verdict", "kind", "reason", "advice", "warnings", "findings", "temperature", "tolerance"),
        *("tensors", "total", "gradient_noise_share", "energy", "observations", "run"),
    )

    step: int | None = None
    verdict: Verdict = "unknown"
    findings: tuple[Finding, ...] = ()
    temperature: float = 1.0
    tolerance: float = 0.2
    tensors: Mapping[str, Temperatures] = field(default_factory=dict)
    total: Temperatures | None = None
    gradient_noise_share: Mapping[str, float] = field(default_factory=dict)
    energy: EnergySummary = field(default_factory=EnergySummary)
    observations: int = 0
    run: RunMeasures = field(default_factory=RunMeasures)
    kind: str | None = None
    reason: str = ""

    @property
    def warnings(self) -> list[str]:
        """The problems' sentences."""
        return [finding.sentence for finding in self.findings if finding.severity == "problem"]

    @property
    def notes(self) -> list[str]:
        """The notes' sentences."""
        return [finding.sentence for finding in self.findings if finding.severity == "note"]

    @property
    def advice(self) -> str:
        """The one thing to do next, the remedy of the most urgent finding; "" if none asks for anything."""
        found = most_urgent(self.findings, is_ensemble=self.kind not in (POSTERIOR, None))
        return "" if found is None else found.remedy

    def with_findings(self, *findings: Finding | None) -> "HealthReport":
        """Return this report with more findings, ranked, and the verdict that follows from all of them."""
        known = [finding for finding in findings if finding is not None and finding not in self.findings]
        together = ranked([*self.findings, *known])
        has_problem = any(finding.severity == "problem" for finding in together)
        return replace(self, findings=together, verdict="warning" if has_problem else self.verdict)

    def with_remedies(self, remedies: Iterable[Callable[[str, str | None], str | None]]) -> "HealthReport":
        """Return this report with the remedies that a run's callbacks name in place of those of a run without them."""
        known = tuple(remedies)

        def own(finding: Finding) -> str:
            named = (remedy(finding.kind.value, finding.side) for remedy in known)
            return next((text for text in named if text is not None), finding.remedy)

        return replace(self, findings=tuple(replace(f, remedy=own(f)) for f in self.findings))

    def with_divergence(self) -> "HealthReport":
        """Return this report with divergence as its first finding."""
        return self.with_findings(Finding.divergence())

    def scalars(self) -> dict[str, float]:
        """Return the numbers for a logger: the totals, the largest deviations, the number of findings."""
        scalars = {"health/warnings": float(len(self.warnings))}
        if self.total is not None and self.temperature > 0:
            for kind in ("kinetic", "configurational"):
                values = [value for entry in self.tensors.values() if (value := getattr(entry, kind)) is not None]
                if not values:
                    continue
                scalars[f"health/{kind}_temperature"] = getattr(self.total, kind)
                deviations = [abs(value / self.temperature - 1) for value in values]
                scalars[f"health/{kind}_temperature_max_deviation"] = max(deviations)
        if self.gradient_noise_share:
            scalars["health/gradient_noise_share_max"] = max(self.gradient_noise_share.values())
        return scalars

    def as_json(self) -> dict[str, Any]:
        """Return the contents of `health.json`: dictionaries, lists, strings and numbers."""
        return as_plain(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "HealthReport":
        """Return the report from its JSON form.

        Missing entries, and values that are not finite numbers, count as not measured.

        Raises:
            ValueError: if an entry has the wrong form.
        """
        report: HealthReport = from_plain(cls, content, lenient=True)
        is_known = report.temperature is content.get("temperature")
        return report if is_known else replace(report, temperature=math.nan)


# -- one next step -----------------------------------------------------------------------------------------------------

Level = Literal["good", "bad", "neutral"]
LEVELS = ("good", "bad", "neutral")


class Advice(NamedTuple):
    """What a run is worth, in a sentence, and what to do next, in the imperative and without a full stop."""

    level: Level
    verdict: str
    next: str


def advise(
    health: HealthReport | None, kind: str | None, is_optimized: bool = False, found: Sequence[Finding] = ()
) -> Advice:
    """Return the verdict on a run and the next step.

    A problem comes first, then a note that has a remedy, then what the kind of the run leaves to do. A run is called
    healthy only without a finding, and only if it sampled the posterior. `health` has the findings on held-out data;
    `found` are those of a run without a report, whose `kind` may be unknown.
    """
    findings = [*(() if health is None else health.findings), *(() if health is not None else found)]
    is_ensemble = is_optimized or kind not in (POSTERIOR, None)
    urgent = most_urgent(findings, is_ensemble)
    if urgent is not None and urgent.severity == "problem":
        return Advice("bad", "Look at this first; the most urgent comes first.", _step(urgent))
    verdict, then = _without_problem(health, kind, is_optimized)
    if urgent is not None:
        return Advice("neutral", verdict, _step(urgent))
    is_good = health is not None and health.verdict == "ok" and kind == POSTERIOR and not findings
    return Advice("good" if is_good else "neutral", verdict, then)


def _step(finding: Finding) -> str:
    """Return what to do about a finding, with its reason if the other sentences do not have it."""
    if not finding.remedy:
        return f"see to the first finding ({finding.sentence})"
    if finding.kind not in OF_HELD_OUT:
        return finding.remedy
    return f"{finding.remedy}, since {finding.sentence.partition(': ')[2]}"


def _without_problem(health: HealthReport | None, kind: str | None, is_optimized: bool) -> tuple[str, str]:
    """Return the verdict on a run without a problem, and what its kind leaves to do."""
    if is_optimized:
        says = "No chain to check: an optimization made these networks."
        return says, "compare this baseline with a run that samples, by sgmcmc compare"
    if health is None:
        says = "Not measured: the run had no ChainHealth callback."
        return says, "add ChainHealth to the callbacks, which measures what the run samples"
    if kind not in (POSTERIOR, None):
        assert kind is not None
        article = with_article(kind)
        rhat = health.run.rhat
        mixed = "" if rhat is None or not math.isfinite(rhat) else f" (R-hat of the predictions {rhat:.2f})"
        says = f"{article[:1].upper()}{article[1:]}, for prediction: not checked for convergence{mixed}."
        change = "sample at temperature 1" if health.temperature < 1 else "sample longer (`sgmcmc plan` says how long)"
        return says, f"predict with these samples; where you need the posterior itself, {change}"
    if health.verdict == "unknown":
        says = "Unknown: the temperatures were not measurable in this run."
        return says, "sample longer, since too few steps were observed for a verdict"
    if health.findings:
        return "No problem, with a note.", "more samples reduce the Monte-Carlo error"
    return "Healthy: the measured temperatures match the target's.", "more samples reduce the Monte-Carlo error"
