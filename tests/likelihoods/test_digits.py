"""Log densities and their gradients keep float32's digits where terms of the formula are large: against mpmath."""

import math
from typing import Any

import mpmath
import pytest
import torch

from lightning_sgmcmc import NegativeBinomial, Poisson, StudentT
from lightning_sgmcmc.predictions.distributions import NegativeBinomial as NegativeBinomialLaw
from lightning_sgmcmc.predictions.distributions import log_gamma_rise, stirling_error

ROUNDING = 2e-7


def reference(y: float, log_mean: float, log_r: float) -> tuple[Any, Any, Any]:
    """Return log p(y), and its derivatives with respect to log m and log r, in 60 digits."""
    with mpmath.workdps(60):
        y, m, r = mpmath.mpf(y), mpmath.exp(mpmath.mpf(log_mean)), mpmath.exp(mpmath.mpf(log_r))
        gamma = mpmath.loggamma(y + r) - mpmath.loggamma(r) - mpmath.loggamma(y + 1)
        value = gamma + y * (mpmath.log(m) - mpmath.log(r + m)) - r * mpmath.log1p(m / r)
        of_r = mpmath.digamma(y + r) - mpmath.digamma(r) - mpmath.log1p(m / r) + (m - y) / (r + m)
        return value, r * (y - m) / (r + m), r * of_r


@pytest.mark.parametrize("log_r", [-10.0, -2.0, 0.0, 2.0, 4.0, 7.0, 9.0, 12.0, 14.0, 20.0])
@pytest.mark.parametrize(("count", "ratio"), [(0, 2.0), (1, 1.0), (20, 1.3), (1e4, 0.98), (1e7, 1.0003)])
def test_negative_binomial(log_r: float, count: float, ratio: float) -> None:
    """One count: relative to the size of value and gradient, with absolute errors of a millionth of a nat."""
    likelihood = NegativeBinomial(1.0, learned=True)
    with torch.no_grad():
        likelihood.log_concentration.fill_(log_r)
    output = torch.tensor([math.log(max(count, 0.5) * ratio)], requires_grad=True)
    value = likelihood.log_prob(output, torch.tensor([count]))
    of_mean, of_r = torch.autograd.grad(value.sum(), [output, likelihood.log_concentration])
    for found, expected in zip((value, of_mean, of_r), reference(count, output.item(), log_r), strict=True):
        assert float(found) == pytest.approx(float(expected), rel=5 * ROUNDING, abs=1e-10)
    own = NegativeBinomialLaw(
        torch.tensor([math.exp(log_r)], dtype=torch.float64), logits=output.detach().double() - log_r
    )
    exact = float(reference(count, output.item(), math.log(math.exp(log_r)))[0])
    assert float(own.log_prob(torch.tensor([count]).double())) == pytest.approx(exact, rel=1e-9, abs=1e-7)


@pytest.mark.parametrize("log_r", [4.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 14.0])
def test_the_force_on_r_of_many_counts(log_r: float) -> None:
    """Counts that are not overdispersed send r to infinity, where the force on log r is small, not rounding."""
    counts = torch.poisson(torch.full((2000, 1), 20.0), generator=torch.Generator().manual_seed(0))
    forces = []
    for dtype in (torch.float32, torch.float64):
        likelihood = NegativeBinomial(math.exp(log_r), learned=True).to(dtype)
        output = torch.full((2000, 1), math.log(20.0), dtype=dtype)
        total = likelihood.log_prob(output, counts.to(dtype)).sum()
        forces.append(float(torch.autograd.grad(total, likelihood.log_concentration)[0]))
    assert forces[0] == pytest.approx(forces[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("count", [0, 1, 30, 1e3, 1e5, 1e6, 1e7])
def test_poisson(count: float) -> None:
    output = torch.tensor([math.log(max(count, 0.5)) + 1e-3], requires_grad=True)
    value = Poisson().log_prob(output, torch.tensor([count]))
    rate = mpmath.exp(mpmath.mpf(output.item()))
    expected = count * output.item() - float(rate) - float(mpmath.loggamma(count + 1))
    with mpmath.workdps(40):
        exact = mpmath.mpf(count) * mpmath.mpf(output.item()) - mpmath.exp(output.item()) - mpmath.loggamma(count + 1)
    assert float(value) == pytest.approx(float(exact), rel=ROUNDING, abs=1e-10), expected
    assert float(torch.autograd.grad(value.sum(), output)[0]) == pytest.approx(count - float(rate), rel=1e-5)


@pytest.mark.parametrize("df", [2.5, 4.0, 30.0, 1e3, 1e8, 1e15, 1e30])
def test_student_t(df: float) -> None:
    with mpmath.workdps(60):
        n = mpmath.mpf(df)
        exact = mpmath.loggamma((n + 1) / 2) - mpmath.loggamma(n / 2) - mpmath.log(n * mpmath.pi) / 2
        exact -= (n + 1) / 2 * mpmath.log1p(mpmath.mpf("1.5") ** 2 / n)
    likelihood, y = StudentT(df), torch.tensor([[1.5]])
    assert float(likelihood.log_prob(torch.zeros(1, 1), y)) == pytest.approx(float(exact), rel=ROUNDING)
    assert float(likelihood.law(torch.zeros(1, 1)).log_prob(y)) == pytest.approx(float(exact), rel=ROUNDING)


@pytest.mark.parametrize("z", [1e-6, 0.1, 1.0, 15.999, 16.0, 100.0, 1e10, 1e100])
def test_special_functions(z: float) -> None:
    with mpmath.workdps(250):
        exact = mpmath.loggamma(z) - (mpmath.mpf(z) - 0.5) * mpmath.log(z) + z - mpmath.log(2 * mpmath.pi) / 2
        rise = mpmath.loggamma(mpmath.mpf(z) + 2.5) - mpmath.loggamma(z) - 2.5 * mpmath.log(z)
    place = torch.tensor(z, dtype=torch.float64)
    assert float(stirling_error(place)) == pytest.approx(float(exact), rel=1e-11, abs=1e-14)
    if z < 1e50:
        found = float(log_gamma_rise(place, torch.tensor(2.5, dtype=torch.float64)))
        assert found == pytest.approx(float(rise), rel=1e-9, abs=1e-14)
