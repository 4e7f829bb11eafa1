"""Bootstrap intervals of means over the same data, for single and paired quantities."""

from collections.abc import Sequence

import numpy as np

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
CHUNK = 2**22
"""Resampled values that are held at once."""
MOST_BLOCKS = 4000
"""More data than this are resampled in blocks, so that time is bounded."""
RESAMPLES = 2000
CONFIDENCE = 0.95


def resampled_means(values: Array, resamples: int = RESAMPLES, seed: int = 0) -> Array:
    """Return the means of resampled data, shape (m, B); the rows share their resamples, so they are paired.

    Args:
        values: m quantities of n data, shape (m, n), in an order without meaning.
        resamples: B, data sets of n data drawn with replacement.
        seed: of the draw.

    Source: Efron & Tibshirani 1993, chapter 6.
    """
    sums = _block_sums(np.concatenate([values, np.ones_like(values[:1])]))  # the last row is the blocks' sizes
    rows, count = sums.shape
    generator = np.random.default_rng(seed)
    at_once = max(CHUNK // (rows * count), 1)
    parts = []
    for start in range(0, resamples, at_once):
        indices = generator.integers(count, size=(min(at_once, resamples - start), count))
        drawn = sums.take(indices, axis=1).sum(-1)
        parts.append(drawn[:-1] / drawn[-1])
    return np.concatenate(parts, 1)


def _block_sums(values: Array) -> Array:
    """Return the sums of at most `MOST_BLOCKS` blocks of data, whose sizes differ by at most 1; shape (m, blocks)."""
    count = values.shape[1]
    if count <= MOST_BLOCKS:
        return values
    return np.add.reduceat(values, np.arange(MOST_BLOCKS) * count // MOST_BLOCKS, axis=1)


def two_level_means(
    groups: Sequence[Array], shared_data: bool = False, resamples: int = RESAMPLES, seed: int = 0
) -> Array:
    """Return the means of resampled groups of resampled data, shape (m, B): runs with several seeds on test data.

    Every resample draws G groups with replacement, and for each of them its data with replacement. Groups count alike.

    Args:
        groups: m quantities of each group's n_g data, each of shape (m, n_g); the m rows are paired.
        shared_data: whether all groups have the same data; a resample then draws the same data for all of them.
        resamples: B.
        seed: of the draw.

    Source: Davison & Hinkley 1997, section 3.8 (both stages with replacement, whose variance is on the large side).
    """
    within = np.stack(
        [resampled_means(values, resamples, seed if shared_data else seed + g) for g, values in enumerate(groups)]
    )
    generator = np.random.default_rng((seed, 1))
    count = len(groups)
    chosen = generator.integers(count, size=(count, resamples))
    # A group that is drawn twice has data of its own each time.
    draws = np.arange(resamples) if shared_data else generator.integers(resamples, size=(count, resamples))
    means: Array = within[chosen, :, draws].mean(0).T
    return means


def percentile_interval(draws: Array, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the central interval of bootstrap draws, shape (B,); NaN if one is not finite.

    >>> percentile_interval(np.arange(101.0), confidence=0.5)
    (25.0, 75.0)
    """
    if not np.isfinite(draws).all():
        return float("nan"), float("nan")
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
