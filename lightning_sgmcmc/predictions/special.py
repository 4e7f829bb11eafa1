"""Special functions that torch lacks, and log densities of counts and Student's t that keep their digits."""

import math

import torch
from scipy import special
from torch import Tensor

from lightning_sgmcmc.tensors import widest

TERMS = 120
"""Terms of the continued fraction; it needs O(√max(a, b)) of them."""
LEAST = 1e-300
"""Replaces a zero of the recurrence in float64."""


def betainc(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Return I_x(a, b) = ∫_0^x t^(a-1)·(1-t)^(b-1) dt / B(a, b), elementwise.

    Its relative error is 1e-12 up to a, b = 1,000, and 1e-6 up to 100,000.

    Args:
        a, b: positive.
        x: in [0, 1].

    Source: DLMF 8.17.22, the continued fraction, by the modified Lentz method.

    >>> betainc(torch.tensor(2.0), torch.tensor(1.0), torch.tensor(0.5))
    tensor(0.2500)
    """
    a, b, x = torch.broadcast_tensors(a, b, x)
    dtype = x.dtype
    a, b, x = widest(a), widest(b), widest(x)
    found = _by_scipy(a, b, x)
    return (continued(a, b, x) if found is None else found).to(dtype)


def _by_scipy(a: Tensor, b: Tensor, x: Tensor) -> Tensor | None:
    """Return scipy's values, which take a fifth of the time; None for tensors without an array."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    try:
        return torch.as_tensor(special.betainc(*(t.detach().numpy() for t in (a, b, x))), dtype=x.dtype)
    except RuntimeError:  # within torch.vmap
        return None


def continued(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Return I_x(a, b) by the continued fraction, in operations of torch alone; see `betainc`.

    Args:
        a, b, x: of one shape.
    """
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
    """Return log Γ(z) - (z - 1/2)·log z + z - log(2π)/2 = 1/(12·z) - 1/(360·z³) + …, elementwise.

    Args:
        z: positive.

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

    The difference of two log Γ loses all digits at large r, and its gradient too.

    Args:
        r: positive.
        y: not negative.

    >>> log_gamma_rise(torch.tensor([2.0, 1e6]).double(), torch.tensor([3.0, 3.0]).double())
    tensor([1.0986e+00, 3.0000e-06], dtype=torch.float64)
    """
    return (r + y - 0.5) * torch.log1p(y / r) - y + stirling_error(r + y) - stirling_error(r)


def poisson_log_prob(counts: Tensor, log_rate: Tensor) -> Tensor:
    """Return y·η - e^η - log y!, computed in float64: its terms are of the size y·log y, and the sum is near 0.

    Args:
        counts: y ≥ 0.
        log_rate: η, of the same shape.

    Returns:
        in the dtype of `log_rate`.
    """
    y, exact = widest(counts), widest(log_rate)
    return (y * exact - exact.exp() - torch.lgamma(y + 1)).to(log_rate.dtype)


def negative_binomial_log_prob(counts: Tensor, log_mean: Tensor, log_r: Tensor) -> Tensor:
    """Return log p(y) of mean m and variance m + m²/r, computed in float64.

        log_gamma_rise(r, y) + y·log r - log y! + r·log(r/(r + m)) + y·log(m/(r + m))

    Args:
        counts: y ≥ 0.
        log_mean: log m, of the same shape.
        log_r: broadcasts to it.

    Returns:
        in the dtype of `log_mean`.
    """
    y, log_m, log_r = widest(counts), widest(log_mean), widest(log_r)
    r, logits = log_r.exp(), log_m - log_r
    sigmoid = torch.nn.functional.logsigmoid
    each = log_gamma_rise(r, y) + y * log_r - torch.lgamma(y + 1) + r * sigmoid(-logits) + y * sigmoid(logits)
    return each.to(log_mean.dtype)


def student_t_normaliser(df: Tensor) -> Tensor:
    """Return log Γ((ν + 1)/2) - log Γ(ν/2) - log(ν·π)/2 of Student's t, for any number of degrees of freedom.

        log_gamma_rise(ν/2, 1/2) - log(2π)/2

    Args:
        df: ν > 0.

    Returns:
        in the dtype of `df`.
    """
    half = widest(df) / 2
    return (log_gamma_rise(half, torch.full_like(half, 0.5)) - math.log(2 * math.pi) / 2).to(df.dtype)
