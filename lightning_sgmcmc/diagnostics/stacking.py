"""Stacking: weights of samples by their joint predictive density of held-out data."""

import math

import torch
from torch import Tensor

from lightning_sgmcmc.tensors import widest


def stacking_weights(log_densities: Tensor, pseudo_count: float = 0.02, iterations: int = 80) -> Tensor:
    """Return the weights at which the mixture of the samples predicts held-out data best, shape (S,), float64.

        maximize Σ_i log Σ_j w_j·p_j(y_i) + α·n/S·Σ_j log w_j   over w ≥ 0, Σ_j w_j = 1

    It is found by expectation maximization from even weights; each iteration raises the objective.

    Args:
        log_densities: log p_j(y_i), shape (S, n).
        pseudo_count: α ≥ 0, the strength of the Dirichlet prior towards even weights, over that of the data.
        iterations: of expectation maximization.

    Source: Yao et al. 2018 (Using stacking to average Bayesian predictive distributions), section 3.

    >>> stacking_weights(torch.tensor([[-1.0, -1.0], [-9.0, -9.0]]), pseudo_count=0.0).round(decimals=3).tolist()
    [1.0, 0.0]
    """
    logs = widest(log_densities)
    samples, data = logs.shape
    weights = logs.new_full((samples,), 1 / samples)
    prior = pseudo_count * data / samples
    for _ in range(iterations):
        shares = (logs + weights.clamp_min(1e-300).log()[:, None]).softmax(0)
        weights = (shares.sum(1) + prior) / (data * (1 + pseudo_count))
    return weights


def shrunk_factor(nll: Tensor, factors: Tensor, count: int, prior_std: float) -> float:
    """Return the factor f with the least Σ_i NLL_i(f) + (log f)²/(2·s²), a fit with a prior around 1.

    Args:
        nll: mean NLL of the data at each factor, shape (F,).
        factors: shape (F,).
        count: number of data.
        prior_std: s.
    """
    penalty = widest(factors).log().square() / (2 * prior_std**2)
    return float(factors[int((count * widest(nll) + penalty).argmin())])


def factor_grid(smallest: float = 0.3, largest: float = 4.0, count: int = 60) -> Tensor:
    """Return factors evenly spaced in their logarithm, shape (F,), float64."""
    return torch.linspace(math.log(smallest), math.log(largest), count, dtype=torch.float64).exp()
