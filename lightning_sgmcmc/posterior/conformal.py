"""Conformal sets and intervals: a guaranteed coverage for any predictive, by held data."""

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_choice, check_within
from lightning_sgmcmc.diagnostics import decisions
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.namespace import rank_zero_warn
from lightning_sgmcmc.posterior.calibration import predictions_with_targets
from lightning_sgmcmc.predictions import ClassPrediction, Prediction, RegressionPrediction
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.tables import as_tensor
from lightning_sgmcmc.tensors import widest

Method = Literal["threshold", "adaptive", "class-conditional", "quantile"]
OF_CLASSES, OF_NUMBERS = ("threshold", "adaptive", "class-conditional"), ("threshold", "quantile")


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
            target: labels (n,), or numbers (n, D) or (n,) in the units of the prediction.
        """
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
    check_choice("method", method, tuple(dict.fromkeys(OF_CLASSES + OF_NUMBERS)))
    scores, classes = [], []
    generator = torch.Generator().manual_seed(derive_seed(seed, "conformal", "fit"))
    for prediction, target in predictions_with_targets(posterior, model, data, "conformal", method == "quantile"):
        fitting = OF_CLASSES if isinstance(prediction, ClassPrediction) else (*OF_NUMBERS, "adaptive")
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
        threshold = decisions.conformal_threshold(joined, level)
    else:  # a number that is not observed is NaN
        observed = (each[~each.isnan()] for each in joined.flatten(1).unbind(1))
        each_threshold = [decisions.conformal_threshold(each, level) for each in observed]
        threshold = torch.stack(each_threshold).reshape(joined.shape[1:])
    return Conformal(posterior, threshold, level, method, seed, len(joined))


def _thresholds_by_class(scores: Tensor, labels: Tensor, level: float) -> Tensor:
    """Return the threshold of each class by its own data, infinite if they are too few, from scores (n, K)."""
    own = [scores[labels == k, k] for k in range(scores.shape[1])]
    needed = next(n for n in itertools.count(1) if decisions.conformal_threshold(torch.zeros(n), level).isfinite())
    few = [f"{k} ({len(each)})" for k, each in enumerate(own) if len(each) < needed]
    if few:
        rank_zero_warn(
            f"Classes {', '.join(few)} have fewer than the {needed} calibration data (in brackets) that level={level} "
            "needs, so every set contains them: pass more data of these classes, or use method='threshold'."
        )
    infinite = scores.new_tensor(torch.inf)
    return torch.stack([decisions.conformal_threshold(each, level) if len(each) else infinite for each in own])


def _scores_of_classes(probabilities: Tensor, method: Method, generator: torch.Generator) -> Tensor:
    if method != "adaptive":
        return decisions.class_scores(probabilities, False, None)
    u = torch.rand(len(probabilities), generator=generator, dtype=torch.float64)
    return decisions.class_scores(probabilities, True, u.to(probabilities))


def _scores_of_numbers(prediction: RegressionPrediction, target: Tensor, level: float, method: Method) -> Tensor:
    """Return |y - mean|/std, or by how much a number is outside of the predictive's own interval, shape (n, D)."""
    if method == "quantile":
        low, high = (widest(end) for end in prediction.interval(level))
        return torch.maximum(low - target, target - high)
    return (target - widest(prediction.mean)).abs() / widest(prediction.std)
