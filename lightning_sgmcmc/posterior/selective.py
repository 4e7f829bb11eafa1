"""Abstention: which predictions to answer, so that few of the answers are wrong, with a guarantee."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_choice, check_within
from lightning_sgmcmc.diagnostics.decisions import COVERAGE_STEPS, selective_threshold
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.posterior.calibration import predictions_with_targets
from lightning_sgmcmc.predictions import ClassPrediction, Prediction, RegressionPrediction
from lightning_sgmcmc.tensors import widest

Score = Literal["max_probability", "entropy", "mutual_information", "std", "epistemic_std"]
OF_CLASSES, OF_NUMBERS = ("max_probability", "entropy", "mutual_information"), ("std", "epistemic_std")


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
            prediction: of the same posterior, by `Posterior.predict`.
        """
        return uncertainty_of(prediction, self.score, self.tolerance) < self.threshold


def uncertainty_of(prediction: Prediction, score: Score, tolerance: Sequence[float]) -> Tensor:
    """Return a score of each prediction, shape (n,), larger for those less sure; of numbers the largest of D, each
    divided by its tolerance."""
    if isinstance(prediction, ClassPrediction) and score in OF_CLASSES:
        return widest(-prediction.probabilities.max(1).values if score == OF_CLASSES[0] else getattr(prediction, score))
    if not isinstance(prediction, RegressionPrediction) or score not in OF_NUMBERS:
        fitting = OF_CLASSES if isinstance(prediction, ClassPrediction) else OF_NUMBERS
        raise ValueError(f"score={score!r} is not for a {type(prediction).__name__}: use {' or '.join(fitting)}")
    width = widest(getattr(prediction, score))
    return (width / width.new_tensor(tolerance)).max(1).values


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
        check_choice("score", score, OF_CLASSES + OF_NUMBERS)
    uncertainties, wrong = [], []
    largest: tuple[float, ...] = ()
    for prediction, target in predictions_with_targets(posterior, model, data, "selective"):
        if isinstance(prediction, ClassPrediction):
            score, known = score or "max_probability", target >= 0
            errors = prediction.probabilities.argmax(1) != target
        else:
            score, largest = score or "std", _tolerances(tolerance, target.shape[1])
            known = ~target.isnan().any(1)
            errors = ((target - widest(prediction.mean)).abs() > target.new_tensor(largest)).any(1)
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


def _tolerances(tolerance: float | Sequence[float] | None, count: int) -> tuple[float, ...]:
    if tolerance is None:
        raise ValueError(
            "selective needs tolerance=…, the largest error of a number that is right, in the data's units, since the "
            "likelihood predicts numbers"
        )
    given = tuple(tolerance) if isinstance(tolerance, Sequence) else (tolerance,) * count
    for each in given:
        check_within("tolerance", each, "(0, inf)")
    if len(given) != count:
        raise ValueError(f"tolerance has {len(given)} numbers, and each datum has {count}: pass one for each, or one")
    return given
