"""A Bayesian linear regression whose posterior is known, and how far a chain is from it.

NumPy only: the JAX worker uses it too.

y = Xw + ξ with standard normal noise and the prior w ~ N(0, I), so that w | y ~ N(Λ⁻¹Xᵀy, Λ⁻¹) with Λ = XᵀX + I.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEARNING_RATE = 0.01
"""Step size of the mean loss; methods with momentum take it as lr/friction."""
BATCH = 100
_SEGMENTS = 20


@dataclass
class Regression:
    """The data, shapes (N, d) and (N,), and the seed of the batches' order."""

    inputs: NDArray[np.float32]
    targets: NDArray[np.float32]
    seed: int

    @property
    def num_data(self) -> int:
        return len(self.targets)

    @property
    def dimension(self) -> int:
        return self.inputs.shape[1]

    def posterior(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the posterior's mean (d,) and covariance (d, d)."""
        inputs = self.inputs.astype(np.float64)
        covariance = np.linalg.inv(inputs.T @ inputs + np.eye(self.dimension))
        return covariance @ inputs.T @ self.targets.astype(np.float64), covariance

    def batches(self, steps: int) -> Iterator[NDArray[np.int64]]:
        """Yield the indices of each step's batch; every epoch goes once through the data in a fresh order."""
        rng = np.random.default_rng(self.seed)
        per_epoch = self.num_data // BATCH
        for step in range(steps):
            if step % per_epoch == 0:
                order = rng.permutation(self.num_data)
            position = step % per_epoch * BATCH
            yield order[position : position + BATCH]


def make_regression(num_data: int, dimension: int = 5, seed: int = 0) -> Regression:
    """Return a regression with correlated inputs of about unit variance."""
    rng = np.random.default_rng(seed)
    mixing = np.eye(dimension) + 0.15 * rng.standard_normal((dimension, dimension))
    mixing /= np.linalg.norm(mixing, axis=0)
    inputs = (rng.standard_normal((num_data, dimension)) @ mixing).astype(np.float32)
    targets = inputs @ rng.standard_normal(dimension) + rng.standard_normal(num_data)
    return Regression(inputs, targets.astype(np.float32), seed)


def score(problem: Regression, draws: NDArray[np.float64]) -> dict[str, float]:
    """Return how far draws (T, d) are from the posterior.

    Returns:
        `mean_error`: largest error of a coordinate's mean, in posterior standard deviations. `trace_ratio`: trace of
        the draws' covariance over the true one's, `trace_ratio_error` its standard error from the chain's segments.
        `covariance_error`: the Frobenius norm of the covariances' difference over the true one's.
    """
    mean, covariance = problem.posterior()
    draws = draws.astype(np.float64)
    own_covariance = np.cov(draws.T)
    squares = ((draws - draws.mean(0)) ** 2).sum(1) / np.trace(covariance)
    segments = np.array([segment.mean() for segment in np.array_split(squares, _SEGMENTS)])
    return {
        "mean_error": float((np.abs(draws.mean(0) - mean) / np.sqrt(np.diag(covariance))).max()),
        "trace_ratio": float(np.trace(own_covariance) / np.trace(covariance)),
        "trace_ratio_error": float(segments.std(ddof=1) / np.sqrt(_SEGMENTS)),
        "covariance_error": float(np.linalg.norm(own_covariance - covariance) / np.linalg.norm(covariance)),
    }
