"""Batch means of a series: estimates with standard errors for correlated draws."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.tensors import along_first_axis

MAX_BATCHES = 40


# -- means of batches of steps ----------------------------------------------------------------------------------------


class BatchMeans:
    """Means of consecutive batches of a stream of vectors, on the stream's device.

    There are at most `limit` batches: when all are full, neighbours are merged and the batch length doubles. So the
    batches outgrow any autocorrelation of the stream, in constant memory.

    Args:
        length: length of the vectors.
        like: a tensor with the dtype and device to use.
        limit: the largest number of batches, even.
    """

    def __init__(self, length: int, like: Tensor, limit: int = MAX_BATCHES) -> None:
        self._sums = torch.zeros(limit, length, dtype=like.dtype, device=like.device)
        self._counts = [0] * limit
        self._limit, self._size, self._last = limit, 1, 0

    def add(self, values: Tensor) -> None:
        """Add the next vector."""
        self._sums[self._last].add_(values)
        self._counts[self._last] += 1
        if self._counts[self._last] < self._size:
            return
        self._last += 1
        if self._last == self._limit:
            half = self._limit // 2
            merged = self._sums[0::2] + self._sums[1::2]
            self._sums.zero_()
            self._sums[:half] = merged
            self._counts = [self._size * 2] * half + [0] * half
            self._last, self._size = half, self._size * 2

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, lengths and positions of the batches."""
        return {"sums": self._sums, "counts": list(self._counts), "size": self._size, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self._sums.copy_(state["sums"])
        self._counts, self._size, self._last = list(state["counts"]), state["size"], state["last"]

    def full(self) -> tuple[Tensor, Tensor]:
        """Return the means (B, length) and the lengths (B,) of the full batches, on the CPU in float64."""
        counts = torch.tensor(self._counts[: self._last], dtype=torch.float64)
        return self._sums[: self._last].cpu().double() / counts[:, None], counts


def without_warm_up(means: Tensor, counts: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return the batches without those of the first `share` of the steps."""
    keep = counts.cumsum(0) - counts >= share * counts.sum()
    return means[keep], counts[keep]


def merge_batches(means: Tensor, counts: Tensor, limit: int = MAX_BATCHES) -> tuple[Tensor, Tensor]:
    """Merge neighbouring batches until there are at most `limit`, and return them."""
    while len(counts) > limit:
        if len(counts) % 2:
            means, counts = torch.cat([means, means[-1:] * 0]), torch.cat([counts, counts[-1:] * 0])
        pairs = counts.reshape(-1, 2)
        counts = pairs.sum(1)
        means = (means.reshape(len(counts), 2, -1) * pairs[..., None]).sum(1) / counts[:, None]
    return means, counts


def mean_and_error(means: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over weighted batches and its standard error.

    The error includes the correlation of neighbouring batches if it is positive, so it is safe for batches not much
    longer than the autocorrelation time.

    Args:
        means: shape (B, …), B ≥ 2.
        counts: the batches' lengths, shape (B,).
    """
    weights = along_first_axis(counts / counts.sum(), means.dim())
    mean = (weights * means).sum(0)
    deviations = weights * (means - mean)
    neighbours = 2 * (deviations[1:] * deviations[:-1]).sum(0).clamp(min=0)
    batches = len(counts)
    return mean, ((deviations.square().sum(0) + neighbours) * batches / (batches - 1)).sqrt()


def student_quantile(probability: float, dof: int) -> float:
    """Return the upper quantile of Student's t, exceeded with the given probability."""
    from scipy.special import stdtrit

    return float(-stdtrit(dof, probability))


def chi_square_interval(mean: float, error: float, probability: float, dof: int) -> tuple[float, float]:
    """Return the interval of a mean of squares, from chi-square with the degrees of freedom implied by its error.

        ν = 2·(mean/error)²,   [ν·mean/χ²_ν(1-p), ν·mean/χ²_ν(p)]

    Args:
        mean: the mean of squares, > 0.
        error: its standard error.
        probability: p, the probability of a miss on either side.
        dof: degrees of freedom of the error itself; few widen the interval, as in Student's t.
    """
    from scipy.special import chdtri, ndtri

    widened = error * student_quantile(probability, dof) / float(-ndtri(probability))
    nu = min(2 * (mean / widened) ** 2, 1e12) if widened > 0 else 1e12
    return nu * mean / float(chdtri(nu, probability)), nu * mean / max(float(chdtri(nu, 1 - probability)), 1e-300)
