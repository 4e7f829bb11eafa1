"""How much too sure a predictive is on held-out data."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.calibration import class_nll, gaussian_nll, tempered
from lightning_sgmcmc.diagnostics.stacking import factor_grid, shrunk_factor
from lightning_sgmcmc.predictions import ClassPrediction, RegressionPrediction


def sureness(likelihood: Any, terms: Mapping[str, Tensor], target: Tensor, prior_std: float) -> float | None:
    """Return the factor by which a predictive is too sure, 1 for a calibrated one, None for another kind of predictive.

    It is the calibration temperature of class probabilities, or the factor of a predictive standard deviation, with the
    least NLL and a prior N(0, prior_std²) of its logarithm, without which a few data would determine it.

    Args:
        likelihood: of the terms.
        terms: the averages that a predictive consists of.
        target: the targets.
        prior_std: standard deviation of the prior.

    Source: Guo et al. 2017, section 4.2.
    """
    prediction = likelihood.prediction(terms, None)
    factors = factor_grid()
    if isinstance(prediction, ClassPrediction):
        read = getattr(likelihood, "labels", None)
        labels = (read(target) if read is not None else target).long()
        nll = [class_nll(tempered(prediction.probabilities, factor), labels) for factor in factors.tolist()]
    elif isinstance(prediction, RegressionPrediction):
        shaped = target.reshape(prediction.mean.shape)
        nll = [gaussian_nll(prediction.mean, prediction.std * factor, shaped) for factor in factors.tolist()]
    else:
        return None
    return shrunk_factor(torch.tensor(nll, dtype=torch.float64), factors, len(target), prior_std)
