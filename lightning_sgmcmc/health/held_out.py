"""What held-out data show of a run's average: better than a guess, still improving, calibrated."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.draws import normalised_weights
from lightning_sgmcmc.diagnostics.scores import calibration_error_by_chance
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.health.findings import HEATING, Finding, FindingKind, Side, ranked
from lightning_sgmcmc.health.report import POSTERIOR, HealthReport
from lightning_sgmcmc.tensors import widest

COVERAGES = {"coverage_90": 0.9, "coverage_50": 0.5}
"""Metrics that are shares of the targets within central intervals, and the intervals' levels."""
QUARTER = 5
"""Samples in each quarter of a run before a trend is judged."""
CERTAIN = 2.0
"""Standard errors by which each quarter of the samples is better than the one before, where later ones are better."""
FALL = 1 / 3
"""Share by which the NLL falls there from the second quarter to the last; a step size that falls explains less."""
NEWEST, NEARLY_ALL = 1 / 8, 0.95
"""Share of the steps with samples, the last ones, and the weight of its samples that says that the others are worse."""
REPLACED = (FindingKind.GUESSING, FindingKind.CALIBRATION)
CALIBRATE = "calibrate the predictions on validation data, `posterior.calibrate(data)`"


@dataclass(frozen=True)
class Calibration:
    """How far an average's confidence is from its accuracy, compared with that of a calibrated model.

    Attributes:
        measured: the expected calibration error, or the share of targets in the central intervals.
        low, high: for classes, the error that a calibrated model shows on average, and the one that 95 % of such models
            stay below; for intervals, the shares that 95 % of calibrated models lie between.
        level: the intervals' level; None for classes.
        off: "overconfident", "underconfident", "too narrow" or "too wide"; "" within chance.
    """

    measured: float
    low: float
    high: float
    level: float | None = None
    off: str = ""

    @property
    def sentence(self) -> str:
        """What was measured, what chance gives, and the judgement."""
        judged = self.off or "calibrated within chance"
        if self.level is None:
            return (
                f"Calibration: ECE {self.measured:.3g} (a perfectly calibrated model would show {self.low:.3g}, 95 % "
                f"of such models below {self.high:.3g}): {judged}."
            )
        return (
            f"Calibration: the central {self.level:.0%} intervals contain {self.measured:.1%} of the targets, where "
            f"chance gives {self.low:.1%} to {self.high:.1%}: {judged}."
        )


def calibration_of(evaluation: Evaluation) -> Calibration | None:
    """Return how calibrated an average is; None if it has neither class probabilities nor intervals."""
    metrics, average = evaluation.bma, evaluation.average
    if average is None or not len(average.log_density):
        return None
    if "ece" in metrics and "probabilities" in average.terms:
        return _of_classes(metrics, average.terms["probabilities"])
    name = next((name for name in COVERAGES if name in metrics), None)
    if name is None:
        return None
    level, covered = COVERAGES[name], metrics[name]
    width = 1.96 * math.sqrt(level * (1 - level) / len(average.log_density))
    low, high = level - width, min(level + width, 1.0)
    off = "too wide" if covered > high else "too narrow" if covered < low else ""
    return Calibration(covered, low, high, level, off)


def _of_classes(metrics: Mapping[str, float], probabilities: Tensor) -> Calibration:
    confidence = probabilities.max(-1).values
    expected, most = calibration_error_by_chance(confidence)
    bias = float(widest(confidence).mean()) - metrics["accuracy"]
    off = "overconfident" if bias > 0 else "underconfident"
    return Calibration(metrics["ece"], expected, most, off="" if metrics["ece"] <= most else off)


# -- findings ----------------------------------------------------------------------------------------------------------


def held_out_findings(evaluation: Evaluation | None, is_sampled: bool = True) -> tuple[Finding, ...]:
    """Return what is wrong with an average, by held-out data; `is_sampled` is False for networks of an optimization."""
    if evaluation is None or evaluation.average is None or not len(evaluation.average.log_density):
        return ()
    found = [_guessing(evaluation), _majority(evaluation), _calibration(calibration_of(evaluation))]
    if is_sampled:
        trend = _trend([member["nll"] for member in evaluation.members if "nll" in member])
        found.append(_newest(evaluation) if trend is None else trend)
    return ranked(found)


def with_held_out(report: HealthReport, evaluation: Evaluation | None, is_sampled: bool = True) -> HealthReport:
    """Return a report with the findings on held-out data in place of those on other data; a trend stays.

    An ensemble for prediction whose average is better than a guess and calibrated needs no other step size, so its
    temperatures are notes.
    """
    if evaluation is None:
        return report
    kept = [finding for finding in report.findings if finding.kind not in REPLACED]
    has_trend = any(finding.kind is FindingKind.TREND for finding in kept)
    new = [f for f in held_out_findings(evaluation, is_sampled) if f.kind in REPLACED or not has_trend]
    is_ensemble = report.kind not in (POSTERIOR, None) or report.temperature < 1
    is_right = calibration_of(evaluation) is not None and not any(finding.kind in REPLACED for finding in new)
    if is_ensemble and evaluation.bma and is_right:
        law = [finding.kind for finding in kept if finding.kind in HEATING and finding.kind != FindingKind.DIVERGENCE]
        kept = [replace(finding, severity="note") if finding.kind in law else finding for finding in kept]
    findings = ranked([*kept, *new])
    if any(finding.severity == "problem" for finding in findings):
        return replace(report, findings=findings, verdict="warning")
    was_measured = report.total is not None and report.total.kinetic_interval is not None
    settled = report.verdict if report.verdict != "warning" else "ok" if was_measured else "unknown"
    return replace(report, findings=findings, verdict=settled)


def _guessing(evaluation: Evaluation) -> Finding | None:
    """Return the finding of an average that is no better than a prediction that does not look at the inputs."""
    ours, guess = evaluation.bma.get("nll", math.nan), evaluation.guessing.get("nll", math.nan)
    if not ours >= guess or evaluation.guessing.get("accuracy") == 1:  # of one class hindsight knows all
        return None
    sentence = f"guessing: the average is no better than guessing (NLL {ours:.3g} and {guess:.3g})"
    remedy = "train longer, or check that inputs and targets belong together"
    if (better := _better_than_guessing(evaluation)) is not None:
        sentence, remedy = f"{sentence}, though its {better} is better: it is overconfident", CALIBRATE
    return Finding(FindingKind.GUESSING, sentence, "above", remedy=remedy)


def _better_than_guessing(evaluation: Evaluation) -> str | None:
    """Return which score without a confidence is better than that of guessing; None for neither."""
    ours, guess = evaluation.bma, evaluation.guessing
    if ours.get("accuracy", math.nan) > guess.get("accuracy", math.nan):
        return "accuracy"
    return "RMSE" if ours.get("rmse", math.nan) < guess.get("rmse", math.nan) else None


def _majority(evaluation: Evaluation) -> Finding | None:
    """Return the finding of classes of which the average predicts the most frequent one only, or no better."""
    ours, guess = evaluation.bma.get("accuracy", math.nan), evaluation.guessing.get("accuracy", math.nan)
    if not ours <= guess or guess == 1 or _guessing(evaluation) is not None:
        return None
    sentence = f"guessing: the accuracy, {ours:.1%}, is no better than that of the most frequent class, {guess:.1%}"
    remedy = "choose classes by the costs of errors, not by the largest probability"
    return Finding(FindingKind.GUESSING, sentence, "below", remedy=remedy, severity="note")


def _calibration(found: Calibration | None) -> Finding | None:
    if found is None or not found.off:
        return None
    what = f"ECE {found.measured:.3g}"
    if found.level is not None:
        what = f"{found.measured:.1%} of the targets in the {found.level:.0%} intervals"
    sentence = f"calibration: the average is {found.off} ({what})"
    if found.level is not None:
        sentence = f"calibration: the intervals are {found.off} ({what})"
    side: Side = "above" if found.off in ("overconfident", "too narrow") else "below"
    return Finding(FindingKind.CALIBRATION, sentence, side, remedy=CALIBRATE, severity="note")


def _trend(nll: Sequence[float]) -> Finding | None:
    """Return the finding of samples that become better through the whole run."""
    quarters = [part for part in np.array_split(np.asarray(nll, dtype=float), 4) if len(part) >= QUARTER]
    if len(quarters) < 4 or not all(np.isfinite(part).all() for part in quarters):
        return None
    means = [float(part.mean()) for part in quarters]
    errors = [float(part.std(ddof=1)) / math.sqrt(len(part)) for part in quarters]
    for place in range(3):
        gain = means[place] - means[place + 1]
        if gain <= CERTAIN * math.hypot(errors[place], errors[place + 1]):
            return None
    if means[1] - means[3] <= FALL * abs(means[1]):
        return None
    sentence = (
        f"trend: later samples are better (their mean NLL is {means[3]:.3g} in the last quarter of the run, "
        f"{means[1]:.3g} in the second)"
    )
    return Finding(FindingKind.TREND, sentence, "below", remedy="train longer", severity="note")


def _newest(evaluation: Evaluation) -> Finding | None:
    """Return the finding of weights that leave the newest samples only, as those of a network still in training do."""
    steps = [int(member["step"]) for member in evaluation.members]
    drawn = sorted(set(steps))
    if evaluation.weight_efficiency is None or not evaluation.comparable or len(drawn) * NEWEST < QUARTER:
        return None
    first = drawn[-round(len(drawn) * NEWEST)]
    newest = [step >= first for step in steps]
    share = float(normalised_weights(torch.tensor(evaluation.log_weights))[torch.tensor(newest)].sum())
    if share < NEARLY_ALL:
        return None
    sentence = f"trend: the newest {sum(newest)} of the {len(steps)} samples have {share:.1%} of the weight"
    return Finding(FindingKind.TREND, sentence, "below", remedy="train longer", severity="note")
