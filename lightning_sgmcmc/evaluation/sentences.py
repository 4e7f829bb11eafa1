"""Five sentences about a run: how good, better than what, calibrated, what was sampled, what next."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.scores import calibration_error_by_chance, mean_interval, share_interval
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.health.report import COLD, POSTERIOR, HealthReport
from lightning_sgmcmc.planning.plan import with_article
from lightning_sgmcmc.tensors import widest

NAMES = ("quality", "gain", "calibration", "sampled", "next")
"""What the five sentences are about, in their order."""
COVERAGES = {"coverage_90": 0.9, "coverage_50": 0.5}


class Claim(NamedTuple):
    """What the samples of a run are said to be: a `RunKind`'s value or a baseline's name (None if unknown), the
    measurement or plan that says so, and whether an optimization made them, so that no chain can be checked."""

    kind: str | None = None
    reason: str = ""
    is_optimized: bool = False


def five_sentences(evaluation: Evaluation, data: str, health: HealthReport | None, claim: Claim) -> dict[str, str]:
    """Return the five sentences by the names in `NAMES`, from stored log densities and terms, without the network."""
    average = evaluation.average
    density = average.log_density if average is not None else torch.empty(0)
    terms = average.terms if average is not None else {}
    return {
        "quality": _quality(evaluation, density, terms, data),
        "gain": _gain(evaluation, density),
        "calibration": _calibration(evaluation, density, terms),
        "sampled": _sampled(health, claim),
        "next": _better_than_a_guess(evaluation) or _next(health, claim),
    }


# -- how good ---------------------------------------------------------------------------------------------------------


def _quality(evaluation: Evaluation, density: Tensor, terms: Mapping[str, Tensor], data: str) -> str:
    metrics, guessing, count = evaluation.bma, evaluation.guessing, len(density)
    if not count:
        return f"Quality on the {data}: not known, since all samples have weight 0."
    parts = []
    if "accuracy" in metrics:
        low, high = share_interval(min(max(metrics["accuracy"], 0.0), 1.0), count)
        guess = f"; guessing {guessing['accuracy']:.1%}" if "accuracy" in guessing else ""
        parts.append(f"accuracy {metrics['accuracy']:.1%} (95 %: {low:.1%} to {high:.1%}{guess})")
    if "rmse" in metrics and "mean" in terms and evaluation.target is not None:
        parts.append(_rmse(metrics["rmse"], terms["mean"], evaluation.target, guessing.get("rmse")))
    if "nll" in metrics:
        shift = metrics["nll"] + float(widest(density).mean())  # the units of the targets
        low, high = (shift - end for end in reversed(mean_interval(density)))
        parts.append(f"NLL {metrics['nll']:.3g}{_within(low, high, guessing.get('nll'))}")
    if not parts:
        parts = [f"{name} {value:.3g}" for name, value in metrics.items()]
    found = ", ".join(parts)
    return f"{found[:1].upper()}{found[1:]} on {count:,} {data}."


def _rmse(rmse: float, mean: Tensor, target: Tensor, guess: float | None) -> str:
    squares = (mean.cpu().double() - target.cpu().double().reshape(mean.shape)).square().flatten(1).mean(1)
    own = math.sqrt(float(squares.mean()))
    if own == 0 or not math.isfinite(own):
        return f"RMSE {rmse:.3g}{_within(math.nan, math.nan, guess)}"
    low, high = (rmse / own * math.sqrt(max(end, 0.0)) for end in mean_interval(squares))
    return f"RMSE {rmse:.3g}{_within(low, high, guess)}"


# -- better than what -------------------------------------------------------------------------------------------------


def _gain(evaluation: Evaluation, density: Tensor) -> str:
    count = len(evaluation.members)
    if count < 2:
        return "There is one sample, so the model average is that sample."
    parts = []
    names = {"best_single": "its best single sample", "first_cycle": "the first cycle's average"}
    for name, label in names.items():
        if name == "first_cycle" and evaluation.per_datum.first_cycle(count) is None:
            continue
        found = evaluation.per_datum.gain(name, density)
        if found is not None:
            parts.append(_compared(found, label))
    if not parts:
        return f"The average of {count} samples was not compared with single ones: their densities are not stored."
    return f"The average of {count} samples is {', and '.join(parts)} (NLL in nats per datum)."


def _compared(found: tuple[float, tuple[float, float]], label: str) -> str:
    gain, (low, high) = found
    if not math.isfinite(gain):
        return f"not comparable with {label}"
    if math.isnan(low) or low <= 0 <= high:
        return f"not certainly different from {label}: by {_signed(gain)} (95 %: {_signed(low)} to {_signed(high)})"
    if gain > 0:
        return f"better than {label} by {gain:.3g} (95 %: {low:.3g} to {high:.3g})"
    return f"worse than {label} by {-gain:.3g} (95 %: {-high:.3g} to {-low:.3g})"


def _signed(value: float) -> str:
    return f"{value:+.2g}".replace("-", "−")


# -- calibrated -------------------------------------------------------------------------------------------------------


def _calibration(evaluation: Evaluation, density: Tensor, terms: Mapping[str, Tensor]) -> str:
    metrics, count = evaluation.bma, len(density)
    if "ece" in metrics and "probabilities" in terms and count:
        return _of_classes(metrics, terms["probabilities"])
    name = next((name for name in COVERAGES if name in metrics), None)
    if name is None or not count:
        return "Calibration: not measured, since the likelihood has neither class probabilities nor intervals."
    level, covered = COVERAGES[name], metrics[name]
    width = 1.96 * math.sqrt(level * (1 - level) / count)
    low, high = level - width, min(level + width, 1.0)
    word = "too wide" if covered > high else "too narrow" if covered < low else "calibrated within chance"
    return (
        f"Calibration: the central {level:.0%} intervals contain {covered:.1%} of the targets, where chance gives "
        f"{low:.1%} to {high:.1%}: {word}."
    )


def _of_classes(metrics: Mapping[str, float], probabilities: Tensor) -> str:
    confidence = probabilities.max(-1).values
    expected, most = calibration_error_by_chance(confidence)
    bias = float(widest(confidence).mean()) - metrics["accuracy"]
    off = "overconfident" if bias > 0 else "underconfident"
    word = "calibrated within chance" if metrics["ece"] <= most else off
    return (
        f"Calibration: ECE {metrics['ece']:.3g}; chance gives a calibrated model of these data {expected:.2g}, rarely "
        f"over {most:.2g}: {word}."
    )


# -- what was sampled, what next --------------------------------------------------------------------------------------


def _sampled(health: HealthReport | None, claim: Claim) -> str:
    kind = claim.kind
    because = f": {claim.reason}" if claim.reason else ""
    problem = next((f for f in health.findings if f.severity == "problem"), None) if health is not None else None
    if kind == POSTERIOR and problem is None:
        return f"Sampled the posterior? Yes, this is a posterior sample{because}."
    if kind == POSTERIOR and problem is not None:
        return f"Sampled the posterior? Not shown; {problem.sentence}."
    if kind is not None:
        return f"Sampled the posterior? No, this is {with_article(kind)}{because}."
    return f"Sampled the posterior? Not known{because or ': no ChainHealth callback measured it'}."


def _better_than_a_guess(evaluation: Evaluation) -> str | None:
    """Return what to do about an average that is no better than a guess; None if it is, or if that is not known."""
    ours, guess = evaluation.bma.get("nll", math.nan), evaluation.guessing.get("nll", math.nan)
    if not ours >= guess:
        return None
    return (
        f"Next: the average is no better than guessing (NLL {ours:.3g} and {guess:.3g}): train longer, or look whether "
        "inputs and targets belong together."
    )


def _next(health: HealthReport | None, claim: Claim) -> str:
    if health is None and claim.is_optimized:
        return "Next: compare this baseline with a run that samples, by sgmcmc compare."
    if health is None:
        return "Next: add ChainHealth to the callbacks, which measures what the run samples."
    if claim.kind == COLD and not any(finding.severity == "problem" for finding in health.findings):
        return "Next: nothing is wrong with this ensemble; the run's plan has what the posterior itself would take."
    if health.advice:
        return f"Next: {health.advice}."
    if health.findings:
        return f"Next: see to the first finding ({health.findings[0].sentence})."
    if health.verdict == "unknown" and claim.kind in (POSTERIOR, None):
        return "Next: sample longer, since too few steps were observed for a verdict."
    return "Next: nothing is wrong; more samples would reduce the Monte-Carlo error."


def _within(low: float, high: float, guess: float | None = None) -> str:
    """Return an interval, and the same metric of a guess, in brackets."""
    known = [] if math.isnan(low) or math.isnan(high) else [f"95 %: {low:.3g} to {high:.3g}"]
    known += [] if guess is None else [f"guessing {guess:.3g}"]
    return f" ({'; '.join(known)})" if known else ""
