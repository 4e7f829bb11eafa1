"""Posteriors whose potential is a sum over N data, with batch gradients for thousands of chains at once.

    U(x) = Σ_i U_i(x) - log p(x)

A batch's gradient is (N/b)·Σ_{i in batch} ∇U_i(x) - ∇log p(x): the prior enters at full strength. All formulas are
closed; x has shape (C, d), one row per chain.
"""

from abc import ABC, abstractmethod
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from lightning_sgmcmc.subsampling.covariance_friction import GradientMoments, square_of
from lightning_sgmcmc.tensors import with_moved_tensors

CHUNK = 2**22
"""Largest number of elements of an intermediate tensor; with more, chains are computed in parts."""
Sum = TypeVar("Sum", bound="FiniteSum")


class FiniteSum(ABC):
    """A potential that is a sum over N data and a prior."""

    dimension: int
    """d."""
    num_data: int
    """N."""

    @abstractmethod
    def batch_gradients(self, x: Tensor, indices: Tensor) -> Tensor:
        """Return the batch estimates of the full potential's gradient, shape (C, J, d).

        Args:
            x: positions, shape (C, d).
            indices: data of each chain's J batches, int64, shape (C, J, b); a repeated datum counts twice.
        """

    @abstractmethod
    def gradient(self, x: Tensor) -> Tensor:
        """Return ∇U(x) of all data, shape (C, d), for x of shape (C, d)."""

    @abstractmethod
    def energy(self, x: Tensor) -> Tensor:
        """Return U(x) in nats, up to a constant, shape (C,), for x of shape (C, d)."""

    def to(self: Sum, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Sum:
        """Return this sum with its data on a device and in a dtype; None keeps the current one."""
        return with_moved_tensors(self, device, dtype)


class GaussianSum(FiniteSum):
    """U(x) = Σ_i ½‖x - c_i‖², so that p is the Gaussian N(c̄, I/N).

    Args:
        centres: c, shape (N, d).

    Raises:
        ValueError: for another shape, or numbers that are not finite.

    Source: Li et al. 2021 (EWSG), section 5.1.
    """

    def __init__(self, centres: Tensor) -> None:
        _check_data("centres", centres, 2)
        self.centres = centres
        self.num_data, self.dimension = centres.shape
        self.mean = centres.mean(0)
        """c̄, shape (d,)."""

    @property
    def covariance(self) -> Tensor:
        """I/N, shape (d, d)."""
        return torch.eye(self.dimension).to(self.centres) / self.num_data

    def batch_gradients(self, x: Tensor, indices: Tensor) -> Tensor:
        centres = self.centres.index_select(0, indices.reshape(-1)).view(*indices.shape, self.dimension)
        return self.num_data * (x[:, None] - (centres[:, :, 0] if indices.shape[2] == 1 else centres.mean(2)))

    def gradient(self, x: Tensor) -> Tensor:
        return self.num_data * (x - self.mean)

    def energy(self, x: Tensor) -> Tensor:
        spread = 0.5 * (self.centres - self.mean).square().sum()
        return 0.5 * self.num_data * (x - self.mean).square().sum(1) + spread


class LogisticRegressionSum(FiniteSum):
    """U(x) = Σ_i [log(1 + exp(a_i·x)) - y_i·a_i·x] + ‖x‖²/(2v): Bayesian logistic regression with the prior N(0, vI).

    Args:
        inputs: a, shape (N, d); for an intercept, add a column of ones.
        labels: y, 0 or 1, shape (N,).
        prior_variance: v > 0.

    Raises:
        ValueError: for other shapes, labels, or a variance that is not positive.

    Source: Li et al. 2021 (EWSG), section 5.2, whose formula has 5‖x‖² where its prior N(0, 10·I) has ‖x‖²/20.
    """

    def __init__(self, inputs: Tensor, labels: Tensor, prior_variance: float) -> None:
        _check_data("inputs", inputs, 2)
        if labels.shape != inputs.shape[:1] or not bool(((labels == 0) | (labels == 1)).all()):
            raise ValueError(f"labels should be 0 or 1, with shape ({len(inputs)},), got {tuple(labels.shape)}")
        if not prior_variance > 0:
            raise ValueError(f"prior_variance must be positive, got {prior_variance}")
        self.inputs = inputs
        self.labels = labels.to(inputs)
        self.prior_variance = prior_variance
        self.num_data, self.dimension = inputs.shape

    def batch_gradients(self, x: Tensor, indices: Tensor) -> Tensor:
        _, batches, size = indices.shape
        rows = max(1, CHUNK // 4 // (batches * size * self.dimension))  # small enough to stay in a cache
        parts = zip(x.split(rows), indices.split(rows), strict=True)
        return torch.cat([self._batch_gradients(part, of_part) for part, of_part in parts])

    def _batch_gradients(self, x: Tensor, indices: Tensor) -> Tensor:
        chains, batches, size = indices.shape
        chosen = indices.reshape(-1)
        inputs = self.inputs.index_select(0, chosen).view(chains, batches * size, self.dimension)
        logits = torch.linalg.vecdot(inputs, x[:, None])  # a product of many small matrices is slower
        residuals = logits.sigmoid() - self.labels.index_select(0, chosen).view(chains, batches * size)
        if size == 1:
            data = residuals[:, :, None] * inputs
        else:
            by_batch = inputs.view(chains * batches, size, self.dimension)
            data = (residuals.view(chains * batches, 1, size) @ by_batch).view(chains, batches, self.dimension)
        return data * (self.num_data / size) + (x / self.prior_variance)[:, None]

    def gradient(self, x: Tensor) -> Tensor:
        return torch.cat([self._gradient(part) for part in x.split(max(1, CHUNK // self.num_data))])

    def _gradient(self, x: Tensor) -> Tensor:
        return ((x @ self.inputs.T).sigmoid() - self.labels) @ self.inputs + x / self.prior_variance

    def energy(self, x: Tensor) -> Tensor:
        return torch.cat([self._energy(part) for part in x.split(max(1, CHUNK // self.num_data))])

    def _energy(self, x: Tensor) -> Tensor:
        logits = x @ self.inputs.T
        return softplus(logits).sum(1) - logits @ self.labels + x.square().sum(1) / (2 * self.prior_variance)


class NormalModelSum(FiniteSum):
    """U(μ, λ) = N·λ + Σ_i (v_i - μ)²·exp(-2λ)/2: the model N(μ, σ²) of data v, x = (μ, λ = log σ), p(μ, log σ) ∝ 1.

    Args:
        values: v, shape (N,), in float64 if N is large, since squares are summed.

    Raises:
        ValueError: for another shape, or fewer than four values or equal ones.

    Source: Li et al. 2021 (EWSG), appendix G.1.
    """

    dimension = 2

    def __init__(self, values: Tensor) -> None:
        _check_data("values", values, 1)
        if len(values) < 4 or not bool(values.std() > 0):
            raise ValueError(f"values should be four or more, not all equal, got {len(values)}")
        self.num_data = len(values)
        self.centre = values.mean()
        self.deviations = values - self.centre  # so that sums of squares lose no digits
        self.squares = self.deviations.square().sum()

    @property
    def mean(self) -> Tensor:
        """The posterior mean of (μ, log σ), shape (2,): Σ(v_i - v̄)²/σ² is χ² with N-1 degrees of freedom."""
        half = torch.tensor((self.num_data - 1) / 2).to(self.centre)
        return torch.stack([self.centre, 0.5 * ((self.squares / 2).log() - torch.digamma(half))])

    @property
    def covariance(self) -> Tensor:
        """The posterior covariance, shape (2, 2), diagonal."""
        half = torch.tensor((self.num_data - 1) / 2).to(self.centre)
        of_mean = self.squares / (self.num_data * (self.num_data - 3))
        return torch.diag(torch.stack([of_mean, torch.polygamma(1, half) / 4]))

    def _gradient_of(self, x: Tensor, first: Tensor | float, second: Tensor, weight: float) -> Tensor:
        """Return the gradient from Σ(v - v̄) and Σ(v - v̄)² of a batch, shape (…), counted `weight` times."""
        offset, precision = x[..., 0] - self.centre, (-2 * x[..., 1]).exp()
        of_mean = (self.num_data * offset - weight * first) * precision
        squares = weight * second - 2 * offset * weight * first + self.num_data * offset.square()
        return torch.stack([of_mean, self.num_data - squares * precision], -1)

    def batch_gradients(self, x: Tensor, indices: Tensor) -> Tensor:
        values = self.deviations[indices]
        size = indices.shape[2]
        first, second = values.sum(2), values.square_().sum(2)
        return self._gradient_of(x[:, None], first, second, self.num_data / size)

    def gradient(self, x: Tensor) -> Tensor:
        return self._gradient_of(x, 0.0, self.squares, 1.0)

    def energy(self, x: Tensor) -> Tensor:
        squares = self.squares + self.num_data * (x[..., 0] - self.centre).square()
        return self.num_data * x[..., 1] + 0.5 * squares * (-2 * x[..., 1]).exp()


def batch_moments(target: FiniteSum, x: Tensor, batch_size: int, matrix: bool = True) -> GradientMoments:
    """Return both moments of uniform batches' gradients ñ at positions (C, d), from all data; `matrix` or diagonal.

        E[ñ] = ∇U(x),   E[ññᵀ] = cov/b + ∇U(x)∇U(x)ᵀ,   cov that of a single datum's gradient

    Source: Li et al. 2021 (EWSG), Algorithm 2, line 6.
    """
    every = torch.arange(target.num_data, device=x.device)[None, :, None]
    parts = []
    for part in x.split(max(1, CHUNK // (target.num_data * target.dimension))):
        gradients = target.batch_gradients(part, every.expand(len(part), -1, -1))
        first = gradients.mean(1)
        deviations = gradients - first[:, None]
        of_datum = deviations.transpose(1, 2) @ deviations if matrix else deviations.square().sum(1)
        parts.append((first, of_datum / (target.num_data * batch_size) + square_of(first, matrix)))
    first, second = (torch.cat(part) for part in zip(*parts, strict=True))
    return GradientMoments(first, second)


def _check_data(name: str, data: Tensor, axes: int) -> None:
    if data.dim() != axes or not data.numel() or not data.is_floating_point() or not bool(data.isfinite().all()):
        raise ValueError(
            f"{name} should be finite numbers along {axes} axes, got shape {tuple(data.shape)}, {data.dtype}"
        )
