"""Bootstrap intervals of means over the same data, for single and paired quantities."""

import numpy as np

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
CHUNK = 2**22
"""Resampled values that are held at once."""


def resampled_means(values: Array, resamples: int = 2000, seed: int = 0) -> Array:
    """Return the means of resampled data, shape (m, B); the rows share their resamples, so they are paired.

    Args:
        values: m quantities of n data, shape (m, n).
        resamples: B, data sets of n data drawn with replacement.
        seed: of the draw.

    Source: Efron & Tibshirani 1993, chapter 6.
    """
    rows, count = values.shape
    generator = np.random.default_rng(seed)
    at_once = max(CHUNK // (rows * count), 1)
    parts = []
    for start in range(0, resamples, at_once):
        indices = generator.integers(count, size=(min(at_once, resamples - start), count))
        parts.append(values[:, indices].mean(-1))
    return np.concatenate(parts, 1)


def percentile_interval(draws: Array, level: float = 0.95) -> tuple[float, float]:
    """Return the central interval of bootstrap draws, shape (B,).

    >>> percentile_interval(np.arange(101.0), level=0.5)
    (25.0, 75.0)
    """
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
