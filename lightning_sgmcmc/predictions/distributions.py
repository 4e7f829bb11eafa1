"""Distributions of numbers: torch's, with the distribution functions that torch lacks."""

import math
from typing import Any

import torch
from scipy import special
from torch import Tensor, distributions
from torch.distributions import constraints

from lightning_sgmcmc.tensors import widest


class Normal(distributions.Normal):
    """The normal distribution, with mean `loc` and standard deviation `scale`."""

    def log_cdf(self, value: Tensor) -> Tensor:
        """Return log P(Y ≤ value), right in the far tail."""
        return log_ndtr((value - self.loc) / self.scale)

    def log_survival(self, value: Tensor) -> Tensor:
        """Return log P(Y > value), likewise."""
        return log_ndtr((self.loc - value) / self.scale)


class LogNormal(distributions.Distribution):
    """The distribution of e^z for a normal z.

    Args:
        loc, scale: mean and standard deviation of z.
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}  # noqa: RUF012
    support = constraints.positive

    def __init__(self, loc: Tensor, scale: Tensor, validate_args: bool | None = None) -> None:
        self.loc, self.scale = torch.broadcast_tensors(loc, scale)
        super().__init__(self.loc.shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        """e^(loc + scale²/2)."""
        return (self.loc + self.scale.square() / 2).exp()

    @property
    def variance(self) -> Tensor:
        """mean²·(e^scale² - 1)."""
        return self.mean.square() * torch.expm1(self.scale.square())

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density."""
        z = self._z(value)
        return -z.square() / 2 - self.scale.log() - value.log() - math.log(2 * math.pi) / 2

    def cdf(self, value: Tensor) -> Tensor:
        """Return P(Y ≤ value), 0 below 0."""
        return torch.special.ndtr(self._z(value.clamp_min(0)))

    def log_cdf(self, value: Tensor) -> Tensor:
        """Return log P(Y ≤ value) of value > 0."""
        return log_ndtr(self._z(value))

    def log_survival(self, value: Tensor) -> Tensor:
        """Return log P(Y > value) of value > 0."""
        return log_ndtr(-self._z(value))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return draws of shape sample_shape + batch_shape."""
        with torch.no_grad():
            shape = torch.Size(sample_shape) + self.batch_shape
            return torch.normal(self.loc.expand(shape), self.scale.expand(shape)).exp()

    def _z(self, value: Tensor) -> Tensor:
        return (value.log() - self.loc) / self.scale


class Weibull(distributions.Distribution):
    """Weibull's distribution, P(Y > y) = exp(-(y/scale)^k).

    Args:
        log_scale: the log of the scale, at which 63 % of the numbers are below.
        concentration: k; 1 is the exponential distribution.
    """

    arg_constraints = {"log_scale": constraints.real, "concentration": constraints.positive}  # noqa: RUF012
    support = constraints.positive

    def __init__(self, log_scale: Tensor, concentration: Tensor, validate_args: bool | None = None) -> None:
        self.log_scale, self.concentration = torch.broadcast_tensors(log_scale, concentration)
        super().__init__(self.log_scale.shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        """scale·Γ(1 + 1/k)."""
        return (self.log_scale + torch.lgamma(1 + 1 / self.concentration)).exp()

    @property
    def variance(self) -> Tensor:
        """scale²·(Γ(1 + 2/k) - Γ(1 + 1/k)²)."""
        one, two = (torch.lgamma(1 + power / self.concentration) for power in (1, 2))
        return (2 * self.log_scale + 2 * one).exp() * torch.expm1(two - 2 * one)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density."""
        return self.concentration.log() - value.log() + self._log_hazard(value) + self.log_survival(value)

    def cdf(self, value: Tensor) -> Tensor:
        """Return P(Y ≤ value), 0 below 0."""
        return -torch.expm1(self.log_survival(value.clamp_min(0)))

    def log_cdf(self, value: Tensor) -> Tensor:
        """Return log P(Y ≤ value) of value > 0."""
        return log1mexp(self._log_hazard(value).exp())

    def log_survival(self, value: Tensor) -> Tensor:
        """Return log P(Y > value) = -(value/scale)^k of value ≥ 0."""
        return -self._log_hazard(value).exp()

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return draws of shape sample_shape + batch_shape."""
        with torch.no_grad():
            own = self.log_scale.expand(torch.Size(sample_shape) + self.batch_shape)
            return (own + torch.empty_like(own).exponential_().log() / self.concentration).exp()

    def _log_hazard(self, value: Tensor) -> Tensor:
        """Return the log of the cumulative hazard, k·(log value - log scale)."""
        return self.concentration * (value.log() - self.log_scale)


class StudentT(distributions.StudentT):
    """Student's t with location and scale, with its distribution function.

    >>> StudentT(df=torch.tensor(1.0), loc=torch.tensor(0.0), scale=torch.tensor(1.0)).cdf(torch.tensor(1.0))
    tensor(0.7500)
    """

    def __init__(self, df: Tensor, loc: Tensor, scale: Tensor, validate_args: bool | None = None) -> None:
        self.df, self.loc, self.scale = torch.broadcast_tensors(df, loc, scale)
        self._chi2 = distributions.Chi2(self.df, validate_args=validate_args)  # torch's checks it always, and waits
        distributions.Distribution.__init__(self, self.df.shape, validate_args=validate_args)

    @property
    def variance(self) -> Tensor:
        """scale²·df/(df - 2) for df > 2, ∞ for 1 < df ≤ 2, NaN else."""
        finite = self.scale.square() * self.df / (self.df - 2)
        return torch.where(self.df > 2, finite, torch.where(self.df > 1, torch.inf, torch.nan))

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

    def log_cdf(self, value: Tensor) -> Tensor:
        """Return log P(Y ≤ value), right in the far tail."""
        each = log_ndtr((value[..., None] - self.loc) / self.scale)
        return (self.logits.log_softmax(-1) + each).logsumexp(-1)

    def log_survival(self, value: Tensor) -> Tensor:
        """Return log P(Y > value), likewise."""
        each = log_ndtr((self.loc - value[..., None]) / self.scale)
        return (self.logits.log_softmax(-1) + each).logsumexp(-1)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Return draws of shape sample_shape + batch_shape."""
        with torch.no_grad():
            shape = torch.Size(sample_shape) + self.batch_shape
            chosen = distributions.Categorical(logits=self.logits, validate_args=False).sample(sample_shape)[..., None]
            loc, scale = (p.expand(shape + p.shape[-1:]).gather(-1, chosen)[..., 0] for p in (self.loc, self.scale))
            return torch.normal(loc, scale)


def log_ndtr(x: Tensor) -> Tensor:
    """Return the log of the normal distribution function, as torch's, which runs chain by chain under `torch.vmap`.

    log(erfcx(-x/√2)/2) - x²/2 of x < -1, log(1 - erfc(x/√2)/2) else
    """
    is_low = x < -1
    # Each branch gets arguments for which its gradient is finite.
    low, high = torch.where(is_low, x, -1.0), torch.where(is_low, 0.0, x)
    tail = (torch.special.erfcx(-low / math.sqrt(2)) / 2).log() - low.square() / 2
    return torch.where(is_low, tail, torch.log1p(-torch.erfc(high / math.sqrt(2)) / 2))


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - e^(-x)) of x > 0; its gradient is 0 where x is below the smallest normal number.

    Source: Mächler 2012.
    """
    x = x.clamp_min(torch.finfo(x.dtype).tiny)
    near = x < math.log(2)
    # Each branch gets arguments for which its gradient is finite.
    small, large = torch.where(near, x, 1.0), torch.where(near, 1.0, x)
    return torch.where(near, (-torch.expm1(-small)).log(), torch.log1p(-torch.exp(-large)))


def log_probability_between(law: Any, low: Tensor, high: Tensor) -> Tensor:
    """Return log P(low < Y ≤ high) of finite low < high, from the tail in which both are.

    log(F(b) - F(a)) = log F(b) + log(1 - F(a)/F(b)),   and likewise of 1 - F(a) and 1 - F(b)

    Args:
        law: a distribution with `log_cdf` and `log_survival`.
        low, high: broadcast to its numbers.
    """
    cdf, above = law.log_cdf(high), law.log_survival(low)
    from_left = cdf + log1mexp(cdf - law.log_cdf(low))
    from_right = above + log1mexp(above - law.log_survival(high))
    return torch.where(above < cdf, from_right, from_left)


def is_discrete(law: distributions.Distribution | type[distributions.Distribution]) -> bool:
    """Return whether a distribution, or a class of them, is one of integers."""
    return bool(getattr(law.support, "is_discrete", False))


def has_cdf(law: type[distributions.Distribution]) -> bool:
    """Return whether a class of distributions has a distribution function."""
    return law.cdf is not distributions.Distribution.cdf


def cdf_of(law: distributions.Distribution, value: Tensor) -> Tensor:
    """Return P(Y ≤ value), also outside of the support, where torch's distributions give NaN or anything."""
    low, high = (
        torch.as_tensor(getattr(law.support, name, limit)).to(value)
        for name, limit in (("lower_bound", -math.inf), ("upper_bound", math.inf))
    )
    inside = torch.minimum(torch.maximum(value, low), high)
    return torch.where(value < low, 0.0, torch.where(value > high, 1.0, law.cdf(inside)))


__all__ = [
    "LogNormal",
    "NegativeBinomial",
    "Normal",
    "NormalMixture",
    "Poisson",
    "StudentT",
    "Weibull",
    "has_cdf",
    "is_discrete",
]

# -- special -----------------------------------------------------------------------------------------------------------

TERMS = 120
"""Terms of the continued fraction; it needs O(√max(a, b)) of them."""
LEAST = 1e-300
"""Replaces a zero of the recurrence in float64."""


def betainc(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Return I_x(a, b) = ∫_0^x t^(a-1)·(1-t)^(b-1) dt / B(a, b), elementwise, for a, b > 0 and x in [0, 1], with a
    relative error of 1e-12 up to a, b = 1,000, and 1e-6 up to 100,000.

    Source: DLMF 8.17.22, the continued fraction, by the modified Lentz method.

    >>> betainc(torch.tensor(2.0), torch.tensor(1.0), torch.tensor(0.5))
    tensor(0.2500)
    """
    a, b, x = torch.broadcast_tensors(a, b, x)
    dtype = x.dtype
    a, b, x = widest(a), widest(b), widest(x)
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        try:  # scipy takes a fifth of the time
            return torch.as_tensor(special.betainc(*(t.detach().numpy() for t in (a, b, x))), dtype=x.dtype).to(dtype)
        except RuntimeError:
            pass  # tensors within torch.vmap have no arrays
    return continued(a, b, x).to(dtype)


def continued(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Return I_x(a, b) of tensors of one shape by the continued fraction, in operations of torch alone."""
    swapped = x > (a + 1) / (a + b + 2)
    a, b, x = torch.where(swapped, b, a), torch.where(swapped, a, b), torch.where(swapped, 1 - x, x)
    log_front = torch.xlogy(a, x) + b * torch.log1p(-x.clamp_max(1 - 1e-16)) - a.log()
    front = (log_front - torch.lgamma(a) - torch.lgamma(b) + torch.lgamma(a + b)).exp()
    value = (front * _fraction(a, b, x)).clamp(0, 1)
    return torch.where(swapped, 1 - value, value)


def _fraction(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    least = LEAST if x.dtype == torch.float64 else 1e-30

    def nonzero(value: Tensor) -> Tensor:
        return torch.where(value.abs() < least, least, value)

    c = torch.ones_like(x)
    d = 1 / nonzero(1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / nonzero(1 + term * d)
            c = nonzero(1 + term / c)
            fraction = fraction * d * c
    return fraction


STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
"""Coefficients B_2k/(2k·(2k-1)) of z^(1-2k)."""
FROM = 16.0
"""The series is used from here on, where its error is below 1e-16."""


def stirling_error(z: Tensor) -> Tensor:
    """Return log Γ(z) - (z - 1/2)·log z + z - log(2π)/2 = 1/(12·z) - 1/(360·z³) + … of z > 0.

    Source: DLMF 5.11.1; Loader 2000.
    """
    small, large = z.clamp_max(FROM), z.clamp_min(FROM)
    direct = torch.lgamma(small) - (small - 0.5) * small.log() + small - math.log(2 * math.pi) / 2
    inverse = large.reciprocal()
    square, series = inverse.square(), torch.zeros_like(large)
    for coefficient in reversed(STIRLING):
        series = series * square + coefficient
    return torch.where(z < FROM, direct, series * inverse)


def log_gamma_rise(r: Tensor, y: Tensor) -> Tensor:
    """Return log Γ(r + y) - log Γ(r) - y·log r, elementwise, which goes to 0 as r grows.

        (r + y - 1/2)·log1p(y/r) - y + s(r + y) - s(r),   s = stirling_error

    The difference of two log Γ loses all digits at large r, and its gradient too. It is for r > 0 and y ≥ 0.

    >>> log_gamma_rise(torch.tensor([2.0, 1e6]).double(), torch.tensor([3.0, 3.0]).double())
    tensor([1.0986e+00, 3.0000e-06], dtype=torch.float64)
    """
    return (r + y - 0.5) * torch.log1p(y / r) - y + stirling_error(r + y) - stirling_error(r)


def poisson_log_prob(counts: Tensor, log_rate: Tensor) -> Tensor:
    """Return y·η - e^η - log y!, computed in float64: its terms are of the size y·log y, and the sum is near 0."""
    y, exact = widest(counts), widest(log_rate)
    return (y * exact - exact.exp() - torch.lgamma(y + 1)).to(log_rate.dtype)


def negative_binomial_log_prob(counts: Tensor, log_mean: Tensor, log_r: Tensor) -> Tensor:
    """Return log p(y) of mean m and variance m + m²/r, computed in float64.

    log_gamma_rise(r, y) + y·log r - log y! + r·log(r/(r + m)) + y·log(m/(r + m))
    """
    y, log_m, log_r = widest(counts), widest(log_mean), widest(log_r)
    r, logits = log_r.exp(), log_m - log_r
    sigmoid = torch.nn.functional.logsigmoid
    each = log_gamma_rise(r, y) + y * log_r - torch.lgamma(y + 1) + r * sigmoid(-logits) + y * sigmoid(logits)
    return each.to(log_mean.dtype)


def student_t_normaliser(df: Tensor) -> Tensor:
    """Return log Γ((ν + 1)/2) - log Γ(ν/2) - log(ν·π)/2 of Student's t, for any number of degrees of freedom.

    log_gamma_rise(ν/2, 1/2) - log(2π)/2
    """
    half = widest(df) / 2
    return (log_gamma_rise(half, torch.full_like(half, 0.5)) - math.log(2 * math.pi) / 2).to(df.dtype)
