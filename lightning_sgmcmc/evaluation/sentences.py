"""Five sentences about a run: how good, better than what, calibrated, what was sampled, what next."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.scores import mean_interval, share_interval
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.health.held_out import calibration_of, held_out_findings, with_held_out
from lightning_sgmcmc.health.report import POSTERIOR, Advice, HealthReport, advise
from lightning_sgmcmc.planning.plan import with_article
from lightning_sgmcmc.tensors import widest

NO_CALIBRATION = "Calibration: not measured, since the likelihood has neither class probabilities nor intervals."
NAMES = ("quality", "gain", "calibration", "sampled", "next")
"""What the five sentences are about, in their order."""


class Claim(NamedTuple):
    """What the samples of a run are said to be: a `RunKind`'s value or a baseline's name (None if unknown), the
    measurement or plan that says so, and whether an optimization made them, so that no chain can be checked."""

    kind: str | None = None
    reason: str = ""
    is_optimized: bool = False


def advice_on(evaluation: Evaluation, health: HealthReport | None, claim: Claim) -> Advice:
    """Return the verdict on a run and its next step, by its report and by the data of this evaluation."""
    is_sampled = not claim.is_optimized
    if health is not None:
        return advise(with_held_out(health, evaluation, is_sampled), claim.kind, claim.is_optimized)
    return advise(None, claim.kind, claim.is_optimized, held_out_findings(evaluation, is_sampled))


def five_sentences(evaluation: Evaluation, data: str, health: HealthReport | None, claim: Claim) -> dict[str, str]:
    """Return the five sentences by the names in `NAMES`, from stored log densities and terms, without the network."""
    calibration = calibration_of(evaluation)
    average = evaluation.average
    density = average.log_density if average is not None else torch.empty(0)
    terms = average.terms if average is not None else {}
    return {
        "quality": _quality(evaluation, density, terms, data),
        "gain": _gain(evaluation, density),
        "calibration": NO_CALIBRATION if calibration is None else calibration.sentence,
        "sampled": sampled_sentence(health, claim),
        "next": f"Next: {advice_on(evaluation, health, claim).next}.",
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
    names = {"mean_single": "its mean single sample", "first_cycle": "the first cycle's average"}
    for name, label in names.items():
        if name == "first_cycle" and evaluation.per_datum.first_cycle(count) is None:
            continue
        found = evaluation.per_datum.gain(name, density)
        if found is not None:
            parts.append(_compared(found, label))
    if not parts:
        return f"The average of {count} samples was not compared with single ones: their densities are not stored."
    return f"The average of {count} samples is {', and '.join(parts)} in NLL (nats per example)."


def _compared(found: tuple[float, tuple[float, float]], label: str) -> str:
    gain, (low, high) = found
    if not math.isfinite(gain):
        return f"not comparable with {label}"
    if math.isnan(low):
        return f"not known to differ from {label} ({_signed(gain)} on one datum)"
    if low <= 0 <= high:
        return f"not significantly different from {label} ({_signed(gain)}, 95 %: {_signed(low)} to {_signed(high)})"
    if gain > 0:
        return f"better than {label} by {gain:.3g} (95 %: {low:.3g} to {high:.3g})"
    return f"worse than {label} by {-gain:.3g} (95 %: {-high:.3g} to {-low:.3g})"


def _signed(value: float) -> str:
    return f"{value:+.2g}".replace("-", "−")


# -- what was sampled, what next --------------------------------------------------------------------------------------


def sampled_sentence(health: HealthReport | None, claim: Claim) -> str:
    """Return whether the run sampled the posterior, and what else its samples are."""
    kind = claim.kind
    because = f": {claim.reason}" if claim.reason else ""
    problem = next((f for f in health.findings if f.severity == "problem"), None) if health is not None else None
    if kind == POSTERIOR and problem is None:
        return f"Sampled the posterior? Yes, this is a posterior sample{because}."
    if kind in (POSTERIOR, None) and problem is not None:
        return f"Sampled the posterior? Not shown; {problem.sentence}."
    if kind is not None:
        return f"Sampled the posterior? No, this is {with_article(kind)}{because}."
    return f"Sampled the posterior? Not known{because or ': no ChainHealth callback measured it'}."


def _within(low: float, high: float, guess: float | None = None) -> str:
    """Return an interval, and the same metric of a guess, in brackets."""
    known = [] if math.isnan(low) or math.isnan(high) else [f"95 %: {low:.3g} to {high:.3g}"]
    known += [] if guess is None else [f"guessing {guess:.3g}"]
    return f" ({'; '.join(known)})" if known else ""
