"""Distributions of numbers: torch's, with the distribution functions that torch lacks."""

import math
from typing import Any

import torch
from torch import Tensor, distributions
from torch.distributions import constraints

from lightning_sgmcmc.predictions.special import (
    betainc,
    negative_binomial_log_prob,
    poisson_log_prob,
    student_t_normaliser,
)


class Normal(distributions.Normal):
    """The normal distribution, with mean `loc` and standard deviation `scale`."""


class StudentT(distributions.StudentT):
    """Student's t with location and scale, with its distribution function.

    >>> StudentT(df=torch.tensor(1.0), loc=torch.tensor(0.0), scale=torch.tensor(1.0)).cdf(torch.tensor(1.0))
    tensor(0.7500)
    """

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density; torch's is wrong at many degrees of freedom."""
        z = (value - self.loc) / self.scale
        return student_t_normaliser(self.df) - (self.df + 1) / 2 * (z.square() / self.df).log1p() - self.scale.log()

    def cdf(self, value: Tensor) -> Tensor:
        """Return P(Y ≤ value)."""
        t = (value - self.loc) / self.scale
        tail = betainc(self.df / 2, torch.full_like(t, 0.5), self.df / (self.df + t.square())) / 2
        return torch.where(t > 0, 1 - tail, tail)


class Poisson(distributions.Poisson):
    """Poisson's distribution, with its distribution function."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability, right in float32 at large counts too."""
        return poisson_log_prob(value, self.rate.log())

    def cdf(self, value: Tensor) -> Tensor:
        """Return P(Y ≤ value) = Q(⌊value⌋ + 1, rate), the regularised upper incomplete gamma function."""
        below, rate = torch.broadcast_tensors(value.floor(), self.rate)
        found = torch.special.gammaincc(below.clamp_min(0) + 1, rate.to(below.dtype))
        return torch.where(below < 0, 0.0, found)


class NegativeBinomial(distributions.NegativeBinomial):
    """The number of successes before r failures, with its distribution function."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability, right at large r and large counts too."""
        log_r = self.total_count.log()
        return negative_binomial_log_prob(value, self.logits + log_r, log_r)

    def cdf(self, value: Tensor) -> Tensor:
        """Return P(Y ≤ value) = I_(1-p)(r, ⌊value⌋ + 1), p the probability of a success."""
        below = value.floor()
        found = betainc(self.total_count, below.clamp_min(0) + 1, torch.sigmoid(-self.logits))
        return torch.where(below < 0, 0.0, found)


class NormalMixture(distributions.Distribution):
    """A mixture of J normal distributions for each number.

    Args:
        logits, loc, scale: log-weights up to a constant, means and standard deviations, shape (…, J).
    """

    arg_constraints = {  # noqa: RUF012 (the name and kind are torch's)
        "logits": constraints.independent(constraints.real, 1),
        "loc": constraints.independent(constraints.real, 1),
        "scale": constraints.independent(constraints.positive, 1),
    }
    support = constraints.real

    def __init__(self, logits: Tensor, loc: Tensor, scale: Tensor, validate_args: bool | None = None) -> None:
        self.logits, self.loc, self.scale = torch.broadcast_tensors(logits, loc, scale)
        super().__init__(self.loc.shape[:-1], validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        """Σ_j w_j·μ_j."""
        return (self.logits.softmax(-1) * self.loc).sum(-1)

    @property
    def variance(self) -> Tensor:
        """Σ_j w_j·(σ_j² + (μ_j - μ)²)."""
        spread = self.scale.square() + (self.loc - self.mean[..., None]).square()
        return (self.logits.softmax(-1) * spread).sum(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log Σ_j w_j·N(value; μ_j, σ_j²)."""
        standardised = (value[..., None] - self.loc) / self.scale
        each = -standardised.square() / 2 - self.scale.log() - math.log(2 * math.pi) / 2
        return (self.logits.log_softmax(-1) + each).logsumexp(-1)

    def cdf(self, value: Tensor) -> Tensor:
        """Return P(Y ≤ value)."""
        each = torch.special.ndtr((value[..., None] - self.loc) / self.scale)
        return (self.logits.softmax(-1) * each).sum(-1)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return draws of shape sample_shape + batch_shape."""
        with torch.no_grad():
            shape = torch.Size(sample_shape) + self.batch_shape
            chosen = distributions.Categorical(logits=self.logits, validate_args=False).sample(sample_shape)[..., None]
            loc, scale = (p.expand(shape + p.shape[-1:]).gather(-1, chosen)[..., 0] for p in (self.loc, self.scale))
            return torch.normal(loc, scale)


def is_discrete(law: distributions.Distribution) -> bool:
    """Return whether a distribution is one of integers."""
    return bool(getattr(law.support, "is_discrete", False))


def has_cdf(law: type[distributions.Distribution]) -> bool:
    """Return whether a class of distributions has a distribution function."""
    return law.cdf is not distributions.Distribution.cdf


__all__ = ["NegativeBinomial", "Normal", "NormalMixture", "Poisson", "StudentT", "has_cdf", "is_discrete"]
