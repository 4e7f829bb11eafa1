"""The exact switching diffusion against closed forms, moment equations and the published stationary moments.

False alarms: comparisons of means and variances at 4 standard errors, 6e-5 each; Kolmogorov-Smirnov and chi-square
tests at p < 1e-4. Seeds are fixed.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import linalg, stats
from torch import Tensor

from lightning_sgmcmc.simulation.switching_diffusion import (
    Potentials,
    _Jumps,
    coupled_ornstein_uhlenbeck,
    ornstein_uhlenbeck,
    stationary_moments,
    switching_paths,
    underdamped,
)

Array = np.ndarray[Any, Any]

SLOPES, CENTRES = (5.0, 15.0), (5.0, -5 / 3)
POTENTIALS = Potentials(SLOPES, CENTRES)
PUBLISHED = {
    10: (1.623, 10.954),
    1: (1.316, 8.847),
    0.1: (0.455, 2.830),
    0.01: (0.0602, 0.4139),
    0.001: (0.0062, 0.1315),
}


def assert_moments(draws: Tensor, mean: float, variance: float) -> None:
    """Compare mean and variance of independent draws at 4 standard errors."""
    centred = draws - mean
    assert abs(float(centred.mean())) < 4 * float(draws.std()) / len(draws) ** 0.5
    squares = centred.square()
    assert abs(float(squares.mean()) - variance) < 4 * float(squares.std()) / len(draws) ** 0.5


def two_states(a: Any, b: Any, eta: float, beta: float) -> tuple[float, float]:
    """Return the stationary mean and variance for two states, by Cramer's rule.

    With u_i = E[θ1{i}] and w_i = E[θ²1{i}], and P(i) = 1/2, the generator -a_i(θ-b_i)∂ + ∂²/β + (jumps to the other)/η,
    applied to θ1{i} and θ²1{i}, has the mean 0:
        (a_1 + 1/η)·u_1 - u_2/η = a_1·b_1/2,   (2a_1 + 1/η)·w_1 - w_2/η = 2a_1·b_1·u_1 + 1/β,   and so for 2.
    """
    r = 1 / eta

    def solve(p: float, q: float, f: float, g: float) -> tuple[float, float]:
        determinant = (p + r) * (q + r) - r * r
        return (f * (q + r) + r * g) / determinant, ((p + r) * g + r * f) / determinant

    u = solve(a[0], a[1], a[0] * b[0] / 2, a[1] * b[1] / 2)
    w = solve(2 * a[0], 2 * a[1], 2 * a[0] * b[0] * u[0] + 1 / beta, 2 * a[1] * b[1] * u[1] + 1 / beta)
    return sum(u), sum(w) - sum(u) ** 2


@pytest.mark.parametrize("eta", PUBLISHED)
def test_stationary_moments_are_the_published_ones(eta: float) -> None:
    ours = stationary_moments(POTENTIALS, eta)
    assert ours == pytest.approx(two_states(SLOPES, CENTRES, eta, 1.0), rel=1e-10)
    for value, published in zip(ours, PUBLISHED[eta], strict=True):
        digits = len(str(published).split(".")[1])
        assert round(value, digits) == published


def test_stationary_moments_in_the_limits() -> None:
    """Fast switching leaves the mean potential's law N(b̄, 1/(βā)); slow switching the mixture of the pieces' laws."""
    a, b, beta = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([-1.0, 0.5, 2.0]), 2.0
    mean, variance = stationary_moments(Potentials(a, b, beta), 1e-9)
    assert mean == pytest.approx(float((a * b).sum() / a.sum()), abs=1e-6)
    assert variance == pytest.approx(1 / (beta * 3.0), abs=1e-6)
    mean, variance = stationary_moments(Potentials(a, b, beta), 1e9)
    assert mean == pytest.approx(float(b.mean()), abs=1e-6)
    assert variance == pytest.approx(float((1 / (beta * a)).mean() + b.var(correction=0)), abs=1e-6)


@pytest.mark.parametrize("eta", [10, 1, 0.1, 0.01])
def test_paths_have_the_stationary_moments(eta: float) -> None:
    """The index begins in its own law, and what is left of θ_0 = 0 after 3 is e^-15 of it."""
    draws = switching_paths(ornstein_uhlenbeck(POTENTIALS), eta, [3.0], 8000, seed=1).places[0]
    assert_moments(draws, *stationary_moments(POTENTIALS, eta))


@pytest.mark.slow
def test_paths_have_the_stationary_moments_of_fast_switching() -> None:
    draws = switching_paths(ornstein_uhlenbeck(POTENTIALS), 0.001, [3.0], 8000, seed=1).places[0]
    assert_moments(draws, *stationary_moments(POTENTIALS, 0.001))


def test_one_piece_is_an_ornstein_uhlenbeck_process() -> None:
    """Means, variances and the covariance of two times of dθ = -a(θ-b)dt + √(2/β)dW from a fixed place."""
    a, b, beta, start, first, second = 3.0, -1.0, 4.0, 2.0, 0.1, 0.35
    paths = switching_paths(ornstein_uhlenbeck(Potentials([a], [b], beta)), 1.0, [0.0, first, second], 40_000, 0, start)
    assert (paths.places[0] == start).all()
    assert (paths.states == 0).all()
    for place, time in zip(paths.places[1:], (first, second), strict=True):
        decay = math.exp(-a * time)
        assert_moments(place, b + (start - b) * decay, (1 - decay**2) / (beta * a))
    early, late = paths.places[1:]
    products = (early - early.mean()) * (late - late.mean())
    expected = math.exp(-a * (second - first)) * (1 - math.exp(-2 * a * first)) / (beta * a)
    assert abs(float(products.mean()) - expected) < 4 * float(products.std()) / 200


def moments(drifts: Array, pushes: Array, noise: Array, eta: float, start: Array, time: float) -> tuple[Array, Array]:
    """Return E[z] and E[zzᵀ] at a time for dz = (c_i - A_i·z)dt + noise of covariance rate Q, i uniform at first.

    With p_i = P(i), m_i = E[z1{i}] and M_i = E[zzᵀ1{i}] Itô's formula gives linear equations by index:
        m' = c·p - A·m,   M' = Q·p + c·mᵀ + m·cᵀ - A·M - M·Aᵀ,   and jumps that mix the indices at rate 1/η.
    """
    count, d = pushes.shape
    one = np.eye(d)
    size = 1 + d + d * d
    rates = np.kron((np.ones((count, count)) - count * np.eye(count)) / eta, np.eye(size))
    for i, (a, c) in enumerate(zip(drifts, pushes, strict=True)):
        block = np.zeros((size, size))
        block[1 : 1 + d, 0] = c
        block[1 : 1 + d, 1 : 1 + d] = -a
        block[1 + d :, 0] = noise.reshape(-1)
        block[1 + d :, 1 : 1 + d] = np.kron(c[:, None], one) + np.kron(one, c[:, None])
        block[1 + d :, 1 + d :] = -np.kron(a, one) - np.kron(one, a)
        rates[size * i : size * (i + 1), size * i : size * (i + 1)] += block
    initial = np.tile(np.concatenate([[1], start, np.outer(start, start).reshape(-1)]) / count, count)
    total = (linalg.expm(rates * time) @ initial).reshape(count, size).sum(0)
    return total[1 : 1 + d], total[1 + d :].reshape(d, d)


def assert_first_and_second_moments(place: Tensor, expected: tuple[Array, Array]) -> None:
    """Compare E[z] and E[zzᵀ] at 4 standard errors, and E[(z_1-z_2)²], of which rounding must leave something."""
    products = (place[:, :, None] * place[:, None, :]).flatten(1)
    difference = (place[:, :1] - place[:, 1:]).square()
    found = torch.cat([place, products, difference], 1)
    first, second = expected
    squared = second[0, 0] - 2 * second[0, 1] + second[1, 1]
    truth = torch.tensor([*first, *second.reshape(-1), squared])
    assert float(((found.mean(0) - truth) / (found.std(0) / len(place) ** 0.5)).abs().max()) < 4


THREE, TIMES = (np.array([1.0, 4.0, 2.0]), np.array([2.0, -1.0, 0.5])), [0.1, 0.3, 0.3, 0.8]


@pytest.mark.parametrize("eta", [3.0, 0.2, 0.02])
def test_three_indices_and_the_coupled_pair_at_finite_times(eta: float) -> None:
    """All moments of (θ, ζ) at some times, with places in between: nothing depends on what is asked."""
    (a, b), start = THREE, np.array([1.0, -0.5])
    paths = switching_paths(coupled_ornstein_uhlenbeck(Potentials(a, b)), eta, TIMES, 10_000, 2, torch.tensor(start))
    assert torch.allclose(paths.places[1], paths.places[2])
    drifts = np.array([np.diag([slope, a.mean()]) for slope in a])
    pushes = np.stack([a * b, np.full(3, (a * b).mean())], 1)
    for time, place in zip(TIMES, paths.places, strict=True):
        assert_first_and_second_moments(place, moments(drifts, pushes, np.full((2, 2), 2.0), eta, start, time))


@pytest.mark.parametrize("friction", [0.5, 4.0])
@pytest.mark.parametrize("eta", [3.0, 0.1])
def test_underdamped_with_three_indices_at_finite_times(eta: float, friction: float) -> None:
    (a, b), start, beta = THREE, np.array([1.0, -0.5]), 2.0
    paths = switching_paths(underdamped(Potentials(a, b, beta), friction), eta, TIMES, 10_000, 2, torch.tensor(start))
    drifts = np.array([[[0, -1], [slope, friction]] for slope in a])
    pushes = np.stack([np.zeros(3), a * b], 1)
    for time, place in zip(TIMES, paths.places, strict=True):
        noise = np.diag([0, 2 * friction / beta])
        assert_first_and_second_moments(place, moments(drifts, pushes, noise, eta, start, time))


def test_the_coupled_pair_is_one_without_switching() -> None:
    both = switching_paths(coupled_ornstein_uhlenbeck(Potentials([2.0], [1.0])), 1.0, [0.5, 2.0], 100, 0).places
    torch.testing.assert_close(both[..., 0], both[..., 1], atol=1e-7, rtol=0)


@pytest.mark.parametrize("count", [2, 5])
def test_holding_times_and_next_indices(count: int) -> None:
    """A jump comes after an exponential time with mean η/(S-1), and goes to each other index alike."""
    eta = 0.3
    jumps = _Jumps(count, 5000, eta, seed=3)
    assert stats.chisquare(torch.bincount(jumps.states, minlength=count)).pvalue > 1e-4
    holding, moves = [], torch.zeros(count, count)
    for _ in range(4):
        before, left = jumps.states, jumps.left
        holding.append(left)
        jumps.advance_(left)
        moves.index_put_((before, jumps.states), torch.ones(5000), accumulate=True)
    assert stats.kstest(torch.cat(holding), stats.expon(scale=eta / (count - 1)).cdf).pvalue > 1e-4
    assert (moves.diagonal() == 0).all()
    if count > 2:
        others = moves[~torch.eye(count, dtype=torch.bool)].view(count, count - 1)
        assert stats.chi2_contingency(others).pvalue > 1e-4  # the same shares from every index …
        assert all(stats.chisquare(row).pvalue > 1e-4 for row in others)  # … and equal ones


def test_those_who_do_not_jump_go_on_waiting() -> None:
    jumps = _Jumps(3, 50, 1.0, seed=0)
    before, left = jumps.states.clone(), jumps.left.clone()
    jumps.advance_(left / 2)
    assert torch.equal(jumps.states, before)
    torch.testing.assert_close(jumps.left, left / 2)


@pytest.mark.parametrize("eta", [2.0, 0.1])
def test_indices_have_the_transition_matrix(eta: float) -> None:
    """Pairs of indices at two times against exp(Q·dt)/S."""
    count, gap = 4, 0.15
    potentials = Potentials([1.0] * 4, [0.0] * 4)
    one, other = switching_paths(ornstein_uhlenbeck(potentials), eta, [0.2, 0.2 + gap], 20_000, 5).states
    found = torch.bincount(count * one + other, minlength=count**2)
    generator = (np.ones((count, count)) - count * np.eye(count)) / eta
    expected = linalg.expm(generator * gap).reshape(-1) / count * 20_000
    assert stats.chisquare(found, expected).pvalue > 1e-4


@pytest.mark.parametrize("friction", [0.5, 2 * math.sqrt(5), 30.0], ids=["swings", "critical", "damped"])
def test_underdamped_stationary_law_of_one_index(friction: float) -> None:
    """N(b, 1/(βa)) × N(0, 1/β), whether it swings or not."""
    a, b, beta = 5.0, 2.0, 4.0
    potentials = Potentials([a], [b], beta)
    x, v = switching_paths(underdamped(potentials, friction), 1.0, [80.0], 40_000, 0).places[0].unbind(-1)
    assert_moments(x, b, 1 / (beta * a))
    assert_moments(v, 0.0, 1 / beta)
    products = (x - b) * v
    assert abs(float(products.mean())) < 4 * float(products.std()) / 200


@pytest.mark.parametrize("friction", [0.5, 2 * math.sqrt(5), 30.0], ids=["swings", "critical", "damped"])
@pytest.mark.parametrize("time", [0.01, 0.6])
def test_underdamped_piece_at_a_time(friction: float, time: float) -> None:
    """Mean and covariance against Van Loan's matrix exponential."""
    a, b, beta, start = 5.0, 2.0, 4.0, np.array([1.0, -3.0])
    drift = np.array([[0, -1], [a, friction]])
    push = np.diag([0, 2 * friction / beta])
    big = linalg.expm(np.block([[drift, push], [np.zeros((2, 2)), -drift.T]]) * time)
    factor = linalg.expm(-drift * time)
    covariance = factor @ big[:2, 2:]
    mean = np.array([b, 0]) + factor @ (start - np.array([b, 0]))
    potentials = Potentials([a], [b], beta)
    place = switching_paths(underdamped(potentials, friction), 1.0, [time], 40_000, 1, torch.tensor(start)).places[0]
    centred = place - torch.tensor(mean)
    assert float((centred.mean(0) / centred.std(0)).abs().max()) < 4 / 200
    products = (centred[:, :, None] * centred[:, None, :]).reshape(-1, 4)
    z = (products.mean(0) - torch.tensor(covariance).reshape(-1)) / (products.std(0) / 200)
    assert float(z.abs().max()) < 4


def test_inverse_temperature_scales_the_variance() -> None:
    """With one centre β scales the noise and so every variance: μ_β is N(b, 1/(βa)) up to the switching of a."""
    for beta in (0.5, 1.0, 8.0):
        together = Potentials(SLOPES, (1.0, 1.0), beta)
        mean, variance = stationary_moments(together, 0.1)
        unscaled = stationary_moments(Potentials(SLOPES, (1.0, 1.0)), 0.1)[1]
        assert (mean, beta * variance) == pytest.approx((1.0, unscaled))
        draws = switching_paths(ornstein_uhlenbeck(together), 0.1, [3.0], 10_000, 4).places[0]
        assert_moments(draws, mean, variance)
        # Between b's the switching itself spreads, so β → ∞ leaves a variance.
        potentials = Potentials(SLOPES, CENTRES, beta)
        apart = stationary_moments(potentials, 0.1)
        assert apart == pytest.approx(two_states(SLOPES, CENTRES, 0.1, beta), rel=1e-10)
        assert_moments(switching_paths(ornstein_uhlenbeck(potentials), 0.1, [3.0], 10_000, 4).places[0], *apart)


def test_paths_are_functions_of_the_seed() -> None:
    def places(seed: int) -> Tensor:
        return switching_paths(ornstein_uhlenbeck(POTENTIALS), 0.1, [0.5, 1.0], 7, seed).places

    assert torch.equal(places(3), places(3))
    assert not torch.equal(places(3), places(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"switching_time": 0.0}, "switching_time must be positive"),
        ({"switching_time": -1.0}, "switching_time must be a finite number"),
        ({"times": [1.0, 0.5]}, "times must be finite, increasing"),
        ({"times": [-1.0]}, "times must be finite, increasing"),
        ({"num_chains": 0}, "num_chains must be at least 1"),
        ({"initial": torch.zeros(4)}, "does not fit 3 chains"),
    ],
)
def test_mistakes(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "diffusions": ornstein_uhlenbeck(POTENTIALS),
        "switching_time": 1.0,
        "times": [1.0],
        "num_chains": 3,
    }
    with pytest.raises(ValueError, match=message):
        switching_paths(**(good | change))
    with pytest.raises(ValueError, match="friction must be positive"):
        underdamped(POTENTIALS, friction=0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slopes": (1.0, 0.0)}, "slopes must be positive"),
        ({"slopes": (1.0,)}, "must share a shape"),
        ({"centres": (1.0, math.nan)}, "finite"),
        ({"inverse_temperature": 0.0}, "inverse_temperature must be positive"),
    ],
)
def test_mistakes_in_potentials(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Potentials(**({"slopes": SLOPES, "centres": CENTRES} | change))
