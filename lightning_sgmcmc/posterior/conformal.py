"""Split conformal sets and intervals on top of a posterior's predictive."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_choice, check_within
from lightning_sgmcmc.diagnostics.conformal import class_scores, conformal_threshold
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.posterior.calibration import batches_of, check_predictions
from lightning_sgmcmc.predictions import ClassPrediction, Prediction, RegressionPrediction
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.tables import Columns, as_tensor
from lightning_sgmcmc.tensors import widest

Method = Literal["threshold", "adaptive"]


class Predictor(Protocol):
    """What conformal prediction needs of a posterior."""

    def predict(self, x: Any) -> Prediction:
        """Return the predictive of inputs."""
        ...

    def standardised(self) -> "Predictor":
        """Return the same with predictions as the network sees the targets."""
        ...


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


class Conformal:
    """Makes sets or intervals of predictions; see `Posterior.conformal`.

    Args:
        posterior: the predictive.
        threshold: the calibrated nonconformity: shape () for classes, (D,) for numbers.
        level: the guaranteed coverage.
        method: of class sets.
        seed: of the draws of adaptive sets.
        count: number of calibration data.
    """

    def __init__(
        self, posterior: Predictor, threshold: Tensor, level: float, method: Method, seed: int, count: int
    ) -> None:
        self.posterior = posterior
        self.threshold = threshold
        self.level = level
        self.method = method
        self.seed = seed
        self.count = count

    def __repr__(self) -> str:
        return f"Conformal(level={self.level}, method={self.method!r}, calibration data={self.count})"

    def predict(self, x: Any) -> ConformalPrediction:
        """Return sets or intervals for inputs, in the units of `Posterior.predict`.

        Args:
            x: inputs, as `Posterior.predict` takes them.
        """
        prediction = self.posterior.predict(x)
        if isinstance(prediction, ClassPrediction):
            probabilities = widest(prediction.probabilities)
            u = _uniform(len(probabilities), self.seed, "predict") if self.method == "adaptive" else None
            scores = class_scores(probabilities, self.method == "adaptive", None if u is None else u.to(probabilities))
            return ConformalPrediction(prediction, sets=scores <= self.threshold.to(scores))
        width = self.threshold.to(prediction.std) * prediction.std
        return ConformalPrediction(prediction, low=prediction.mean - width, high=prediction.mean + width)


def fit_conformal(
    posterior: Predictor, model: EnergyModel, data: Any, level: float, method: Method, seed: int, columns: Columns
) -> Conformal:
    """Return the sets or intervals whose threshold the calibration data determine; see `Posterior.conformal`."""
    check_within("level", level, "(0, 1)")
    check_choice("method", method, ("threshold", "adaptive"))
    batches: Iterable[Any] = batches_of(data, columns, "conformal")
    scores = []
    standardised = posterior.standardised()
    generator = torch.Generator().manual_seed(derive_seed(seed, "conformal", "fit"))
    for batch in map(columns.received, batches):
        prediction = standardised.predict([batch])
        check_predictions(prediction, "conformal")
        target = as_tensor("the target", model.inputs_and_target(batch)[1])
        scores.append(_scores(prediction, target, model, method, generator).cpu())
    if not scores:
        raise ValueError("conformal needs calibration data, and the loader has none: pass a loader with some batches")
    joined = torch.cat(scores)
    return Conformal(posterior, _threshold(joined, level), level, method, seed, len(joined))


def _threshold(scores: Tensor, level: float) -> Tensor:
    """Return `conformal_threshold` of the observed data of each column; others are NaN."""
    if scores.dim() == 1 or not bool(scores.isnan().any()):
        return conformal_threshold(scores, level)
    return torch.stack([conformal_threshold(column[~column.isnan()], level) for column in scores.unbind(1)])


def _scores(
    prediction: Prediction, target: Tensor, model: EnergyModel, method: Method, generator: torch.Generator
) -> Tensor:
    if isinstance(prediction, ClassPrediction) and prediction.probabilities.dim() == 2:
        probabilities = widest(prediction.probabilities)
        read = getattr(model.likelihood, "labels", None)
        known = model.likelihood.observed(target) if model.likelihood is not None else None
        if known is not None:
            probabilities, target = probabilities[known.to(probabilities.device)], target[known]
        labels = (read(target) if read is not None else target).long().to(probabilities.device)
        u = torch.rand(len(labels), generator=generator, dtype=torch.float64) if method == "adaptive" else None
        each = class_scores(probabilities, method == "adaptive", None if u is None else u.to(probabilities))
        return each.gather(1, labels[:, None])[:, 0]
    if isinstance(prediction, RegressionPrediction):
        mean, std = widest(prediction.mean), widest(prediction.std)
        target = target.to(mean)
        entries = model.likelihood.observed_entries(target) if model.likelihood is not None else None
        target = target if entries is None else target.masked_fill(~entries, torch.nan)
        errors = (target.reshape(mean.shape) - mean).abs() / std
        return errors[~errors.isnan().all(1)]
    raise TypeError(
        f"conformal makes sets of classes or intervals of numbers, and {type(model.likelihood).__name__} predicts a "
        f"{type(prediction).__name__}"
    )


def _uniform(count: int, seed: int, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed(seed, "conformal", name))
    return torch.rand(count, generator=generator, dtype=torch.float64)
