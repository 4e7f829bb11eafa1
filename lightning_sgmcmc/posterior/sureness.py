"""How much too sure a predictive is on held-out data."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.calibration import class_nll, tempered
from lightning_sgmcmc.diagnostics.stacking import factor_grid, shrunk_factor
from lightning_sgmcmc.predictions import ClassPrediction


def sureness(likelihood: Any, terms: Mapping[str, Tensor], target: Tensor, prior_std: float) -> float | None:
    """Return the calibration temperature of class probabilities, 1 for a calibrated predictive, None for another kind.

    It has the least NLL with a prior N(0, prior_std²) of its logarithm, without which a few data would determine it.
    Above 1 the predictive is too sure.

    Args:
        likelihood: of the terms.
        terms: the averages that a predictive consists of.
        target: the targets.
        prior_std: standard deviation of the prior.

    Source: Guo et al. 2017, section 4.2.
    """
    prediction = likelihood.prediction(terms, None)
    factors = factor_grid()
    if not isinstance(prediction, ClassPrediction):
        return None
    probabilities, labels = likelihood.scored(prediction, target)
    nll = [class_nll(tempered(probabilities, factor), labels) for factor in factors.tolist()]
    return shrunk_factor(torch.tensor(nll, dtype=torch.float64), factors, len(target), prior_std)
