"""Scores of predictive distributions of numbers: CRPS, interval score, probability integral transform."""

import math

import torch
from torch import Tensor

from lightning_sgmcmc.tensors import widest


def gaussian_mixture_crps(weights: Tensor, means: Tensor, stds: Tensor, y: Tensor) -> Tensor:
    """Return the continuous ranked probability score of mixtures of Gaussians, in the units of y; smaller is better.

        E|Y - y| - E|Y - Y'|/2 = Σ_s w_s·A(y - μ_s, σ_s²) - Σ_st w_s·w_t·A(μ_s - μ_t, σ_s² + σ_t²)/2

    with A(m, v) = E|N(m, v)| = m·(2Φ(m/√v) - 1) + 2·√v·φ(m/√v).

    Args:
        weights: shape (S,), summing to 1.
        means: shape (S, …).
        stds: shape (S, …).
        y: observed numbers, shape (…).

    Returns:
        shape (…).

    Source: Grimit et al. 2006 (mixtures of normal distributions).

    >>> one = torch.ones(1)  # of a standard Gaussian at its mean: (√2 - 1)/√π
    >>> gaussian_mixture_crps(one, torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1))
    tensor([0.2337])
    """
    shaped = weights.reshape(-1, *[1] * y.dim())
    own = (shaped * _mean_absolute(y - means, stds.square())).sum(0)
    between = torch.zeros_like(own)
    for weight, mean, std in zip(weights, means, stds, strict=True):
        between += weight * (shaped * _mean_absolute(mean - means, std.square() + stds.square())).sum(0)
    return own - between / 2


def _mean_absolute(mean: Tensor, variance: Tensor) -> Tensor:
    std = variance.sqrt()
    z = mean / std
    return mean * torch.erf(z / math.sqrt(2)) + std * math.sqrt(2 / math.pi) * (-z.square() / 2).exp()


def sample_crps(draws: Tensor, y: Tensor) -> Tensor:
    """Return the CRPS estimated from draws of the predictive: unbiased, for any distribution of numbers.

        S⁻¹·Σ_s |Y_s - y| - [2·S·(S - 1)]⁻¹·Σ_st |Y_s - Y_t|

    Args:
        draws: independent draws, shape (S, …), S ≥ 2.
        y: observed numbers, shape (…).

    Raises:
        ValueError: for fewer than two draws.

    Source: Gneiting & Raftery 2007, eq. (20); Zamo & Naveau 2018 (the fair estimator).
    """
    count = len(draws)
    if count < 2:
        raise ValueError(f"sample_crps needs at least 2 draws of each datum, got {count}")
    # Σ_st |Y_s - Y_t| = 2·Σ_s (2s - S + 1)·Y_(s) of the ordered draws, s from 0
    ordered = draws.sort(0).values
    ranks = torch.arange(count, dtype=draws.dtype, device=draws.device).reshape(-1, *[1] * y.dim())
    spread = 2 * ((2 * ranks - count + 1) * ordered).sum(0)
    return (draws - y).abs().mean(0) - spread / (2 * count * (count - 1))


def interval_score(low: Tensor, high: Tensor, y: Tensor, level: float) -> Tensor:
    """Return the interval score of central intervals, in the units of y: their width and a penalty for misses.

        (u - l) + (2/α)·max(l - y, 0) + (2/α)·max(y - u, 0),   α = 1 - level

    Smaller is better; the true quantiles have the smallest expectation.

    Args:
        low: lower ends of the intervals, shape (…).
        high: upper ends, shape (…).
        y: observed numbers, shape (…).
        level: their nominal coverage, in (0, 1).

    Source: Gneiting & Raftery 2007, eq. (43).

    >>> low, high, y = torch.zeros(2), torch.ones(2), torch.tensor([0.5, 1.1])
    >>> interval_score(low, high, y, 0.9)
    tensor([1.0000, 3.0000])
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), got {level}")
    missed = (low - y).clamp_min(0) + (y - high).clamp_min(0)
    return high - low + 2 / (1 - level) * missed


def pit_histogram(cdf: Tensor | tuple[Tensor, Tensor], bins: int = 10) -> Tensor:
    """Return the share of data in equal bins of the probability integral transform F_i(y_i), shape (bins,).

    It is flat for a calibrated predictive, has a hump in the middle for one that is too wide, and is high at both ends
    for one that is too sure. A count is spread evenly between P(Y < y) and P(Y ≤ y), which makes it flat for counts.

    Args:
        cdf: the predictive distribution function at each observed number, in [0, 1], any shape; of counts or ordered
            classes the pair P(Y < y) and P(Y ≤ y). `Evaluation.pit` is either.
        bins: number of bins.

    Raises:
        ValueError: for fewer than one bin, or a NaN.

    Source: Gneiting et al. 2007 (Probabilistic forecasts, calibration and sharpness); Czado, Gneiting & Held 2009,
    eq. (2) (counts).

    >>> pit_histogram(torch.tensor([0.05, 0.45, 0.55, 1.0]), bins=2)
    tensor([0.5000, 0.5000])
    >>> pit_histogram((torch.tensor([0.0, 0.4]), torch.tensor([0.4, 1.0])), bins=2)  # a calibrated Bernoulli(0.6)
    tensor([0.5833, 0.4167])
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    below, up_to = (part.reshape(-1) for part in (cdf if isinstance(cdf, tuple) else (cdf, cdf)))
    if bool((below.isnan() | up_to.isnan()).any()):
        raise ValueError("cdf must be in [0, 1], got NaN: leave out data without a prediction")
    edges = torch.arange(bins + 1, dtype=torch.float64).div(bins).to(up_to)
    # A mass at one place, and a number of a continuous law, belong to the bin that begins there.
    place = torch.bucketize(up_to.contiguous(), edges[1:-1], right=True)
    whole = widest(torch.nn.functional.one_hot(place, bins))
    width = widest(up_to - below)
    reached = ((edges[:, None] - below) / width.clamp_min(1e-300)).clamp(0, 1)
    share = torch.where(width[:, None] > 0, reached.diff(dim=0).T, whole)
    return share.sum(0).div(max(len(up_to), 1)).float()


def gaussian_mixture_quantile(weights: Tensor, means: Tensor, stds: Tensor, q: float) -> Tensor:
    """Return the quantiles of mixtures of Gaussians, shape (…), by bisection.

    Args:
        weights: shape (S,), summing to 1.
        means: shape (S, …).
        stds: shape (S, …).
        q: the quantile's probability, in (0, 1).
    """
    shaped = weights.reshape(-1, *[1] * (means.dim() - 1))
    # The mixture's quantile is between the smallest and the largest of its components'.
    each = means + stds * torch.special.ndtri(torch.tensor(q, dtype=means.dtype, device=means.device))
    low, high = each.min(0).values, each.max(0).values
    for _ in range(60):
        middle = (low + high) / 2
        below = (shaped * torch.special.ndtr((middle - means) / stds)).sum(0) < q
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2
