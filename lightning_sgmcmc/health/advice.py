"""One verdict on a run and one next step, for the terminal, the report and the tutorials alike."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from lightning_sgmcmc.health.findings import OF_HELD_OUT, Finding, most_urgent
from lightning_sgmcmc.health.report import POSTERIOR, HealthReport
from lightning_sgmcmc.planning.plan import with_article

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
    healthy only without a finding, and only if it sampled the posterior.

    Args:
        health: the run's report with the findings on held-out data, None if nothing measured the run.
        kind: what the samples are said to be, None if unknown.
        is_optimized: whether an optimization made the networks, so that there is no chain to check.
        found: the findings on held-out data of a run without a report.
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
        return says, "predict with these samples; where you need the posterior itself, sample at temperature 1"
    if health.verdict == "unknown":
        says = "Unknown: the temperatures were not measurable in this run."
        return says, "sample longer, since too few steps were observed for a verdict"
    if health.findings:
        return "No problem, with a note.", "more samples reduce the Monte-Carlo error"
    return "Healthy: the measured temperatures match the target's.", "more samples reduce the Monte-Carlo error"
