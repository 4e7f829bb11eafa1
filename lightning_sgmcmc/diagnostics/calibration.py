"""Post-hoc calibration of a predictive distribution by one number: pure functions of tensors."""

import math

from torch import Tensor

from lightning_sgmcmc.predictions.members import FLOOR, tempered
from lightning_sgmcmc.tensors import widest

__all__ = ["FLOOR", "LARGEST", "SMALLEST", "class_nll", "fit_std_factor", "fit_temperature", "gaussian_nll", "tempered"]

SMALLEST, LARGEST = 1e-2, 1e2
"""Bounds of a fitted temperature; data that are all right, or all wrong, have no finite optimum."""


def fit_temperature(probabilities: Tensor, labels: Tensor) -> float:
    """Return the temperature at which the tempered probabilities have the lowest mean NLL.

    The NLL is convex in 1/T, so the optimum is the root of its derivative, mean(E_T[log p] - log p_y), found by
    bisection.

    Args:
        probabilities: shape (n, K).
        labels: in 0..K-1, shape (n,).

    Source: Guo et al. 2017, section 4.2.
    """
    logs = widest(probabilities).clamp_min(FLOOR).log()
    chosen = logs.gather(1, labels[:, None])[:, 0]
    low, high = math.log(1 / LARGEST), math.log(1 / SMALLEST)  # of 1/T
    for _ in range(50):
        middle = (low + high) / 2
        expected = ((math.exp(middle) * logs).softmax(-1) * logs).sum(-1)
        low, high = (low, middle) if float((expected - chosen).mean()) > 0 else (middle, high)
    return math.exp(-(low + high) / 2)


def fit_std_factor(mean: Tensor, std: Tensor, target: Tensor) -> float:
    """Return the factor of the standard deviations at which N(target; mean, (factor·std)²) has the lowest mean NLL.

        factor² = mean((target - mean)²/std²)

    Targets that are NaN are not observed, and left out.

    Args:
        mean, std, target: shape (n, D).
    """
    return float(((widest(target) - widest(mean)) / widest(std)).square().nanmean().sqrt())


def class_nll(probabilities: Tensor, labels: Tensor) -> float:
    """Return the mean of -log p_y, in nats per datum."""
    return -float(widest(probabilities).gather(1, labels[:, None]).clamp_min(FLOOR).log().mean())


def gaussian_nll(mean: Tensor, std: Tensor, target: Tensor) -> float:
    """Return the mean of -Σ_d log N(target_d; mean_d, std_d²), in nats per datum; targets that are NaN have no term."""
    standardised = (widest(target) - widest(mean)) / widest(std)
    each = standardised.square() / 2 + widest(std).log() + math.log(2 * math.pi) / 2
    return float(each.nansum(-1).mean())
