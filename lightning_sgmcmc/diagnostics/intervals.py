"""Intervals over the data: bootstrap of a mean, Wilson's of a share, and the calibration error that chance makes."""

import math

import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.bootstrap import CONFIDENCE, percentile_interval, resampled_means
from lightning_sgmcmc.diagnostics.metrics import CALIBRATION_BINS, confidence_bin
from lightning_sgmcmc.tensors import widest

MOST_SIMULATED = 20_000
"""For more data than this, the sums of correct predictions in a bin are drawn from their normal law."""


def mean_interval(values: Tensor, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the bootstrap percentile interval of a mean over data; NaN for fewer than two data.

    For the paired difference of two predictions pass the difference of each datum. The resamples have a fixed seed.

    Args:
        values: one number for each datum, shape (n,), in an order without meaning.
        confidence: the interval's probability.

    >>> low, high = mean_interval(torch.arange(100.0))
    >>> 43 < low < 45 and 54 < high < 56
    True
    """
    if len(values) < 2:
        return math.nan, math.nan
    return percentile_interval(resampled_means(values.detach().cpu().double().numpy()[None])[0], confidence)


def share_interval(share: float, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's interval of a share of independent data.

    Args:
        share: the share.
        count: number of data, at least 1.
        confidence: the interval's probability.

    >>> [round(end, 3) for end in share_interval(0.9, 100)]
    [0.826, 0.945]
    """
    from scipy.special import ndtri

    z = float(ndtri((1 + confidence) / 2))
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    width = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(centre - width, 0.0), min(centre + width, 1.0)


def calibration_error_by_chance(
    confidence: Tensor, bins: int = CALIBRATION_BINS, draws: int = 400
) -> tuple[float, float]:
    """Return the mean and the 95 % quantile of the calibration error of a calibrated model with these confidences.

    Each prediction is correct with the probability that it states, so the error is above 0 by chance alone.

    Args:
        confidence: probability of the predicted class of each datum, shape (n,).
        bins: number of equal bins of [0, 1].
        draws: number of simulated data sets.

    Source: Vaicenavicius et al. 2019, consistency resampling.
    """
    place = confidence_bin(confidence.detach(), bins).cpu()
    confidence = confidence.detach().cpu().double()
    count = len(confidence)
    generator = torch.Generator().manual_seed(0)
    if count <= MOST_SIMULATED:
        errors = []
        member = widest(torch.nn.functional.one_hot(place, bins))
        for size in (draws // 8,) * 8:
            correct = torch.rand(size, count, generator=generator, dtype=torch.float64) < confidence
            errors.append(((widest(correct) - confidence) @ member).abs().sum(1) / count)
        found = torch.cat(errors)
    else:
        variance = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, confidence * (1 - confidence))
        noise = torch.randn(draws, bins, generator=generator, dtype=torch.float64)
        found = (noise * variance.sqrt()).abs().sum(1) / count
    return float(found.mean()), float(found.quantile(0.95))
