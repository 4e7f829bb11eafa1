"""The posterior of Bayesian logistic regression, and two references for its moments."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from lightning_sgmcmc import SGHMC
from lightning_sgmcmc.diagnostics.draws import weight_efficiency


def laplace_approximation(
    x: Tensor, prior_variance: float, gradient: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the mode of a logistic regression's posterior, shape (d,), and a factor L of the Laplace approximation.

    LLᵀ, shape (d, d), is the inverse of the Hessian at the mode.

    Args:
        x: inputs, shape (N, d), in float64.
        prior_variance: of the Gaussian prior.
        gradient: ∇U of points (m, d), shape (m, d).
    """
    theta = x.new_zeros(1, x.shape[1])
    for _ in range(30):  # Newton's method: U is convex
        p = (theta @ x.T).sigmoid()[0]
        hessian = (x.T * (p * (1 - p))) @ x + torch.eye(x.shape[1]).to(x) / prior_variance
        theta = theta - torch.linalg.solve(hessian, gradient(theta)[0])
    return theta[0], torch.linalg.cholesky(torch.linalg.inv(hessian))


@dataclass(frozen=True)
class LogisticPosterior:
    """U(θ) = Σ_i [softplus(x_iᵀθ) - y_i·x_iᵀθ] + ‖θ‖²/(2·std²), up to a constant, in float64.

    Attributes:
        x: inputs with a column of ones, shape (N, d).
        y: labels 0 and 1, shape (N,).
        std: standard deviation of the Gaussian prior.
    """

    x: Tensor
    y: Tensor
    std: float

    def potential(self, theta: Tensor) -> Tensor:
        """Return U of many points (m, d), shape (m,)."""
        logits = theta @ self.x.T
        data = nn.functional.softplus(logits).sum(1) - logits @ self.y
        return data + theta.square().sum(1) / (2 * self.std**2)

    def gradient(self, theta: Tensor) -> Tensor:
        """Return ∇U of many points (m, d), shape (m, d)."""
        return ((theta @ self.x.T).sigmoid() - self.y) @ self.x + theta / self.std**2

    @cached_property
    def laplace(self) -> tuple[Tensor, Tensor]:
        """The mode, shape (d,), and a factor L, shape (d, d): LLᵀ is the inverse of the Hessian there."""
        return laplace_approximation(self.x, self.std**2, self.gradient)


@dataclass(frozen=True)
class Reference:
    """The moments that a sampler is compared with.

    Attributes:
        mean: posterior mean, shape (d,).
        std: posterior standard deviations, shape (d,).
        draws: draws of the posterior, shape (m, d); empty if they are weighted.
        effective: the effective number of draws, if it is known.
    """

    mean: Tensor
    std: Tensor
    draws: Tensor
    effective: float | None = None

    def mean_error(self, mean: Tensor) -> float:
        """Return the root mean square, over the coefficients, of the error in posterior standard deviations."""
        return float(((mean - self.mean) / self.std).square().mean().sqrt())

    def variance_ratio(self, std: Tensor) -> float:
        """Return tr(D⁻¹Σ)/d with D the reference's variances: a trace that no single coefficient dominates."""
        return float((std / self.std).square().mean())


def full_gradient_reference(posterior: LogisticPosterior, steps: int, seed: int, chains: int) -> Reference:
    """Return the moments of many long chains of SGHMC with the full gradient.

    They run in z, with θ = mode + Lz, where the posterior is almost standard normal. There a step a inflates variances
    by the factor 1/(1 - a/(2(2-η))), or half a per cent.

    Args:
        posterior: the target.
        steps: steps of each chain; the first tenth is discarded.
        seed: seed of the noise.
        chains: number of chains.
    """
    mode, factor = posterior.laplace
    generator = torch.Generator().manual_seed(seed)
    z = nn.Parameter(torch.randn(chains, len(mode), generator=generator, dtype=mode.dtype))
    sampler = SGHMC([z], lr=0.02, friction=0.2, num_data=1, num_chains=chains, seed=seed)
    kept = []
    for step in range(steps):
        z.grad = posterior.gradient(mode + z.detach() @ factor.T) @ factor
        sampler.step()
        if step >= steps // 10 and step % 5 == 0:
            kept.append(mode + z.detach() @ factor.T)
    draws = torch.cat(kept)
    return Reference(draws.mean(0), draws.std(0), draws)


def importance_draws(posterior: LogisticPosterior, proposals: int, seed: int, df: float = 8.0) -> tuple[Tensor, Tensor]:
    """Return draws (m, d) from a Student-t at the Laplace approximation, and their log-weights (m,).

    Args:
        posterior: the target.
        proposals: number of draws m.
        seed: their seed.
        df: degrees of freedom.
    """
    mode, factor = posterior.laplace
    rng = np.random.default_rng(seed)
    student = rng.standard_normal((proposals, len(mode))) / np.sqrt(rng.chisquare(df, (proposals, 1)) / df)
    z = torch.as_tensor(student, dtype=mode.dtype)
    theta = mode + z @ factor.T
    energy = torch.cat([posterior.potential(part) for part in theta.split(10_000)])
    return theta, -energy + (df + len(mode)) / 2 * (z.square().sum(1) / df).log1p()


def importance_reference(posterior: LogisticPosterior, proposals: int, seed: int) -> Reference:
    """Return the moments by self-normalised importance sampling, see `importance_draws`.

    Args:
        posterior: the target.
        proposals: number of proposals.
        seed: their seed.
    """
    theta, log_weights = importance_draws(posterior, proposals, seed)
    weights = log_weights.softmax(0)
    mean = weights @ theta
    std = (weights @ (theta - mean).square()).sqrt()
    return Reference(mean, std, theta[:0], weight_efficiency(log_weights) * proposals)
