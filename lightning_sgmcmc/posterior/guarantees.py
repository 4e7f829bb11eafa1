"""Guarantees for any predictive, by held data: sets and intervals with a coverage, answers with a bounded risk."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_choice, check_within
from lightning_sgmcmc.diagnostics.decisions import (
    COVERAGE_STEPS,
    class_scores,
    conformal_threshold,
    selective_threshold,
)
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.namespace import rank_zero_warn
from lightning_sgmcmc.posterior.calibration import predictions_with_targets
from lightning_sgmcmc.predictions import ClassPrediction, Prediction, RegressionPrediction
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.tables import Columns, as_tensor
from lightning_sgmcmc.tensors import widest

Method = Literal["threshold", "adaptive", "class-conditional", "quantile"]
METHODS_OF_CLASSES, METHODS_OF_NUMBERS = ("threshold", "adaptive", "class-conditional"), ("threshold", "quantile")


@dataclass(frozen=True)
class ConformalPrediction:
    """Sets or intervals with guaranteed coverage.

    Attributes:
        prediction: the predictive that they are made of.
        sets: for classes, whether each class is in the set, shape (n, K); else None.
        low, high: for numbers, the ends of the intervals, shape (n, D); else None.
    """

    prediction: Prediction
    sets: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None

    def contains(self, target: Tensor) -> Tensor:
        """Return whether each target is in its set, shape (n,), or its intervals, (n, D).

        Args:
            target: labels (n,), or a series of the classes' names; or numbers (n, D) or (n,) in the units of the
                prediction.
        """
        if self.sets is not None:
            target = Columns(classes=self.prediction._names).as_labels(target)
        target = as_tensor("target", target)
        if self.sets is not None:
            return self.sets.gather(1, target.long().reshape(-1, 1).to(self.sets.device))[:, 0]
        assert self.low is not None
        assert self.high is not None
        target = target.reshape(self.low.shape).to(self.low)
        return (self.low <= target) & (target <= self.high)


@dataclass(frozen=True, eq=False)
class Conformal:
    """Makes sets or intervals of predictions; see `Posterior.conformal`.

    Attributes:
        posterior: the `Posterior`.
        threshold: the calibrated nonconformity: shape () for classes, (K,) by class; of a target, such as (D,), for
            numbers.
        level: the guaranteed coverage.
        method: of the sets or intervals.
        seed: of the draws of adaptive sets.
        count: number of calibration data.
    """

    posterior: Any
    threshold: Tensor
    level: float
    method: Method
    seed: int
    count: int

    def __repr__(self) -> str:
        return f"Conformal(level={self.level}, method={self.method!r}, calibration data={self.count})"

    def predict(self, x: Any) -> ConformalPrediction:
        """Return sets or intervals for inputs, in the units of `Posterior.predict`.

        Args:
            x: inputs, as `Posterior.predict` takes them.
        """
        prediction: Prediction = self.posterior.predict(x, self.method == "quantile")
        if isinstance(prediction, ClassPrediction):
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "conformal", "predict"))
            scores = _scores_of_classes(widest(prediction.probabilities), self.method, generator)
            return ConformalPrediction(prediction, sets=scores <= self.threshold.to(scores))
        if self.method == "quantile":
            low, high = prediction.interval(self.level)
            low, high = low - self.threshold.to(low), high + self.threshold.to(high)
            middle = (low + high) / 2  # where an interval shrinks below nothing
            return ConformalPrediction(prediction, low=torch.minimum(low, middle), high=torch.maximum(high, middle))
        width = self.threshold.to(prediction.std) * prediction.std
        return ConformalPrediction(prediction, low=prediction.mean - width, high=prediction.mean + width)


def fit_conformal(posterior: Any, model: EnergyModel, data: Any, level: float, method: Method, seed: int) -> Conformal:
    """Return the sets or intervals whose threshold the calibration data determine; see `Posterior.conformal`."""
    check_within("level", level, "(0, 1)")
    check_choice("method", method, tuple(dict.fromkeys(METHODS_OF_CLASSES + METHODS_OF_NUMBERS)))
    scores, classes = [], []
    generator = torch.Generator().manual_seed(derive_seed(seed, "conformal", "fit"))
    for prediction, target in predictions_with_targets(posterior, model, data, "conformal", method == "quantile"):
        is_of_classes = isinstance(prediction, ClassPrediction)
        fitting = METHODS_OF_CLASSES if is_of_classes else (*METHODS_OF_NUMBERS, "adaptive")
        if method not in fitting:
            raise ValueError(f"method={method!r} is not for a {type(prediction).__name__}: use {' or '.join(fitting)}")
        if isinstance(prediction, ClassPrediction):
            known = target >= 0
            each = _scores_of_classes(widest(prediction.probabilities)[known], method, generator)
            classes.append(target[known].cpu())
            scores.append((each if method == "class-conditional" else each.gather(1, target[known, None])[:, 0]).cpu())
        else:
            assert isinstance(prediction, RegressionPrediction)
            errors = _scores_of_numbers(prediction, target, level, method)
            scores.append(errors[~errors.isnan().flatten(1).all(1)].cpu())
    joined = torch.cat(scores)
    if method == "class-conditional":
        threshold = _thresholds_by_class(joined, torch.cat(classes), level)
    elif joined.dim() == 1 or not bool(joined.isnan().any()):
        threshold = conformal_threshold(joined, level)
    else:  # a number that is not observed is NaN
        observed = (each[~each.isnan()] for each in joined.flatten(1).unbind(1))
        each_threshold = [conformal_threshold(each, level) for each in observed]
        threshold = torch.stack(each_threshold).reshape(joined.shape[1:])
    counted = int((~joined.reshape(len(joined), -1).isnan()).sum(0).min())
    if method != "class-conditional" and counted < _needed(level):
        what = "sets have all classes" if classes else "intervals are infinite"
        rank_zero_warn(
            f"conformal has {counted} calibration data, fewer than the {_needed(level)} that level={level} needs, so "
            f"{what}: pass more data, or a smaller level."
        )
    return Conformal(posterior, threshold, level, method, seed, len(joined))


def _needed(level: float) -> int:
    """Return the least number of calibration data of which the level has a finite threshold."""
    return next(n for n in itertools.count(1) if conformal_threshold(torch.zeros(n), level).isfinite())


def _thresholds_by_class(scores: Tensor, labels: Tensor, level: float) -> Tensor:
    """Return the threshold of each class by its own data, infinite if they are too few, from scores (n, K)."""
    own = [scores[labels == k, k] for k in range(scores.shape[1])]
    needed = _needed(level)
    few = [f"{k} ({len(each)})" for k, each in enumerate(own) if len(each) < needed]
    if few:
        rank_zero_warn(
            f"Classes {', '.join(few)} have fewer than the {needed} calibration data (in brackets) that level={level} "
            "needs, so every set contains them: pass more data of these classes, or use method='threshold'."
        )
    infinite = scores.new_tensor(torch.inf)
    return torch.stack([conformal_threshold(each, level) if len(each) else infinite for each in own])


def _scores_of_classes(probabilities: Tensor, method: Method, generator: torch.Generator) -> Tensor:
    if method != "adaptive":
        return class_scores(probabilities, False, None)
    u = torch.rand(len(probabilities), generator=generator, dtype=torch.float64)
    return class_scores(probabilities, True, u.to(probabilities))


def _scores_of_numbers(prediction: RegressionPrediction, target: Tensor, level: float, method: Method) -> Tensor:
    """Return |y - mean|/std, or by how much a number is outside of the predictive's own interval, shape (n, D)."""
    if method == "quantile":
        low, high = (widest(end) for end in prediction.interval(level))
        return torch.maximum(low - target, target - high)
    return (target - widest(prediction.mean)).abs() / widest(prediction.std)


# -- abstention --------------------------------------------------------------------------------------------------------

Score = Literal["max_probability", "entropy", "mutual_information", "std", "epistemic_std"]
SCORES_OF_CLASSES, SCORES_OF_NUMBERS = ("max_probability", "entropy", "mutual_information"), ("std", "epistemic_std")


@dataclass(frozen=True)
class Selective:
    """Says which predictions to answer; see `Posterior.selective`.

    Attributes:
        threshold: of the score, below which predictions are answered.
        risk: the stated risk.
        confidence: with which the risk holds.
        bound: the upper confidence bound of the risk, at most the stated one.
        coverage: the share of the calibration data that is answered.
        score: the uncertainty.
        tolerance: the largest error of a number that is right, for each of D; () of classes.
        count: number of calibration data.
    """

    threshold: float
    risk: float
    confidence: float
    bound: float
    coverage: float
    score: Score
    tolerance: tuple[float, ...]
    count: int

    def accepts(self, prediction: Prediction) -> Tensor:
        """Return whether to answer each input, shape (n,).

        Args:
            prediction: of the same posterior with the same calibration, by `Posterior.predict`; after another fit or
                `calibrate` the guarantee does not hold, so call `selective` again.
        """
        return uncertainty_of(prediction, self.score, self.tolerance) < self.threshold


def uncertainty_of(prediction: Prediction, score: Score, tolerance: Sequence[float]) -> Tensor:
    """Return a score of each prediction, shape (n,), larger for those less sure; of several numbers the largest, each
    divided by its tolerance."""
    if isinstance(prediction, ClassPrediction) and score in SCORES_OF_CLASSES:
        return widest(
            -prediction.probabilities.max(1).values if score == SCORES_OF_CLASSES[0] else getattr(prediction, score)
        )
    if not isinstance(prediction, RegressionPrediction) or score not in SCORES_OF_NUMBERS:
        fitting = SCORES_OF_CLASSES if isinstance(prediction, ClassPrediction) else SCORES_OF_NUMBERS
        raise ValueError(f"score={score!r} is not for a {type(prediction).__name__}: use {' or '.join(fitting)}")
    width = widest(getattr(prediction, score))
    return (width / width.new_tensor(tolerance)).flatten(1).max(1).values


def fit_selective(
    posterior: Any,
    model: EnergyModel,
    data: Any,
    risk: float,
    confidence: float,
    score: Score | None,
    tolerance: float | Sequence[float] | None,
) -> Selective:
    """Return what the calibration data allow to answer; see `Posterior.selective`."""
    check_within("risk", risk, "(0, 1)")
    check_within("confidence", confidence, "(0, 1)")
    if score is not None:
        check_choice("score", score, SCORES_OF_CLASSES + SCORES_OF_NUMBERS)
    uncertainties, wrong = [], []
    largest: tuple[float, ...] = ()
    for prediction, target in predictions_with_targets(posterior, model, data, "selective"):
        if isinstance(prediction, ClassPrediction):
            score, known = score or "max_probability", target >= 0
            errors = prediction.probabilities.argmax(1) != target
        else:
            score, largest = score or "std", _tolerances(tolerance, target)
            known = ~target.isnan().flatten(1).any(1)
            errors = ((target - widest(prediction.mean)).abs() > target.new_tensor(largest)).flatten(1).any(1)
        uncertainties.append(uncertainty_of(prediction, score, largest)[known].cpu())
        wrong.append(errors[known].cpu())
    assert score is not None  # there was a batch
    uncertainty, is_wrong = torch.cat(uncertainties), torch.cat(wrong)
    found = selective_threshold(uncertainty, is_wrong, risk, confidence)
    if found is None:
        surest = is_wrong[uncertainty.argsort()][: max(len(is_wrong) // 2, 1)]
        rate, least = float(widest(surest).mean()), math.log((1 - confidence) / COVERAGE_STEPS) / math.log1p(-risk)
        raise ValueError(
            f"risk={risk} is not shown at confidence={confidence} for any share of the {len(is_wrong)} data: of the "
            f"surer half {rate:.1%} are wrong, and without an error it needs {math.ceil(least)} answered data; state "
            "a larger risk, pass more data, or improve the predictive"
        )
    return Selective(*found[:1], risk, confidence, *found[1:], score, largest, len(is_wrong))


def _tolerances(tolerance: float | Sequence[float] | None, target: Tensor) -> tuple[float, ...]:
    """Return the largest errors of targets (n, D), or one for all numbers of a field or sequence, (n, …)."""
    if tolerance is None:
        raise ValueError(
            "selective needs tolerance=…, the largest error of a number that is right, in the data's units, since the "
            "likelihood predicts numbers"
        )
    count = target.shape[1] if target.dim() == 2 else 1
    given = tuple(tolerance) if isinstance(tolerance, Sequence) else (tolerance,) * count
    for each in given:
        check_within("tolerance", each, "(0, inf)")
    if len(given) != count:
        raise ValueError(
            f"tolerance has {len(given)} numbers, and targets have the shape {tuple(target.shape)}: pass one number, "
            "or one for each of D of targets (n, D)"
        )
    return given
