"""Random-walk Metropolis has the law of what it walks on; and what autocorrelation says of a known chain."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.draws import autocorrelation, autocorrelation_time
from lightning_sgmcmc.simulation.random_walk import random_walk_metropolis

MEAN = torch.tensor([1.0, -2.0], dtype=torch.float64)
COVARIANCE = torch.tensor([[2.0, 0.6], [0.6, 0.5]], dtype=torch.float64)
START = MEAN + torch.zeros(100, 2, dtype=torch.float64)


def log_density(x: Tensor) -> Tensor:
    centred = x - MEAN
    return -0.5 * (centred @ torch.linalg.inv(COVARIANCE) * centred).sum(-1)


@pytest.mark.parametrize("covariance", [None, COVARIANCE])
def test_the_law_is_the_gaussian(covariance: Tensor | None) -> None:
    """The means over chains of first and second moments are within 4.9 standard errors (over the independent chains) of
    the truth: a false alarm in some 10⁵ seeds for each of 5 figures."""
    run = random_walk_metropolis(log_density, START, 1500, covariance=covariance, burn_in=500, seed=1)
    centred = run.draws - MEAN
    a, b = centred[..., 0], centred[..., 1]
    seen = torch.stack([a, b, a * a, b * b, a * b], -1).mean(0)
    expected = torch.tensor([0, 0, COVARIANCE[0, 0], COVARIANCE[1, 1], COVARIANCE[0, 1]]).double()
    error = seen.std(0) / math.sqrt(len(seen))
    assert bool(((seen.mean(0) - expected).abs() < 4.9 * error).all())
    assert float(error.max()) < 0.06
    torch.testing.assert_close(run.log_densities, log_density(run.draws))
    assert run.draws.shape == (1000, 100, 2)


def test_the_scale_is_learned_in_the_burn_in() -> None:
    """From far too small a step, 500 steps of learning bring the mean acceptance of 100 chains to what is asked for."""
    for target in (0.234, 0.5):
        run = random_walk_metropolis(
            log_density, START, 1500, scale=1e-3, burn_in=500, target_acceptance=target, keep_every=100
        )
        assert float(run.acceptance.mean()) == pytest.approx(target, abs=0.02)
    fixed = random_walk_metropolis(log_density, START, 10, scale=0.5)
    assert torch.equal(fixed.scale, torch.full((100,), 0.5).double())
    assert not torch.equal(run.scale, run.scale[:1].expand(100))


def test_chains_do_not_depend_on_their_number() -> None:
    few, many = (random_walk_metropolis(log_density, START[:n], 1100, seed=3, burn_in=20) for n in (2, 5))
    torch.testing.assert_close(few.draws, many.draws[:, :2])
    assert not torch.equal(few.draws[:, 0], few.draws[:, 1])


def test_where_there_is_no_density_no_chain_goes() -> None:
    """A half-plane of -inf and one of NaN leave a strip, in which the first coordinate is a truncated normal."""

    def strip(x: Tensor) -> Tensor:
        inside = torch.where(x[:, 0] > 0, -x.square().sum(1) / 2, -math.inf)
        return torch.where(x[:, 0] < 1, inside, math.nan)

    run = random_walk_metropolis(strip, torch.full((100, 2), 0.5).double(), 600, scale=1.0, seed=2)
    first = run.draws[..., 0]
    assert bool(((first > 0) & (first < 1)).all())
    # E = (φ(0) - φ(1))/(Φ(1) - Φ(0)); 4.9 standard errors, as above.
    expected = (1 - math.exp(-0.5)) / math.sqrt(2 * math.pi) / 0.3413447460685429
    means = first[100:].mean(0)
    assert abs(float(means.mean()) - expected) < 4.9 * float(means.std()) / 10
    with pytest.raises(ValueError, match="finite at every chain's start"):
        random_walk_metropolis(strip, torch.zeros(2, 2), 10)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"burn_in": -1}, "burn_in"),
        ({"burn_in": 10}, "no draw after"),
        ({"keep_every": 11}, "no draw after"),
        ({"scale": 0.0}, "scale"),
        ({"target_acceptance": 0.0}, "target_acceptance"),
        ({"initial": torch.zeros(2)}, "initial"),
        ({"initial": torch.full((3, 2), math.nan)}, "initial"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        random_walk_metropolis(log_density, **({"initial": START, "num_steps": 10} | options))


@pytest.mark.parametrize("rho", [0.9, 0.0, -0.5])
def test_the_autocorrelation_time_of_a_known_chain(rho: float) -> None:
    """x_k = ρ·x_{k-1} + ξ has ρ_t = ρ^t and the time (1+ρ)/(1-ρ). The mean of 40 chains of 20,000 is within 3 % and 3 %
    of a standard deviation of it: their spread is some 5 %, of which the mean has 0.8 %."""
    noise = torch.randn(20_000, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chain = torch.empty_like(noise)
    chain[0] = noise[0] / math.sqrt(1 - rho**2)
    for k in range(1, len(noise)):
        chain[k] = rho * chain[k - 1] + noise[k]
    expected = (1 + rho) / (1 - rho)
    assert float(autocorrelation_time(chain).mean()) == pytest.approx(expected, rel=0.04)
    lags = autocorrelation(chain, 5)
    assert lags.shape == (5, 40)
    torch.testing.assert_close(lags.mean(1), rho ** torch.arange(5.0).double(), rtol=0, atol=0.01)


def test_no_autocorrelation_of_what_does_not_move() -> None:
    with pytest.raises(ValueError, match="constant chain"):
        autocorrelation_time(torch.ones(10))
    with pytest.raises(ValueError, match="four draws"):
        autocorrelation_time(torch.ones(3))
    with pytest.raises(ValueError, match="at 11 lags"):
        autocorrelation(torch.arange(10.0), 11)
