"""The splittings' exact stationary laws on a Gaussian, the order of their bias, and their state."""

import functools
import math
from decimal import Decimal, getcontext
from typing import Any

import numpy as np
import pytest
import torch
from scipy import linalg

from lightning_sgmcmc.samplers import UnderdampedLangevin
from lightning_sgmcmc.samplers.law import bridge_variance, half_move, lag, momentum_variance
from tests.support.kinetic import Affine, step_of, ubu_variance

NUM_DATA, TEMPERATURE, FREQUENCY = 30, 0.7, 2.0
CURVATURE = np.array([[FREQUENCY**2]])
ZERO = np.zeros((2, 2))


def one_step(step: float, friction: float, integrator: str) -> Affine:
    """Return the sampler's own step at U = ½ω²θ²."""
    options = {"lr": step, "friction": friction, "integrator": integrator, "temperature": TEMPERATURE}
    return step_of(UnderdampedLangevin, CURVATURE, np.zeros(1), NUM_DATA, **options)


def ratio(step: float, friction: float, integrator: str) -> float:
    """Return the exact stationary variance of θ over the target's."""
    return float(one_step(step, friction, integrator).stationary()[1][0, 0] * FREQUENCY**2 / TEMPERATURE)


def wanted(angle: float, half: float, integrator: str) -> float:
    """Return the closed form of `ratio`, at h·ω and γ·h/2."""
    if integrator == "baoab":
        return 1.0
    return 1 / (1 - angle**2 / 4) if integrator == "obabo" else ubu_variance(angle, half)


# -- parts of a step, from their definitions --------------------------------------------------------------------------


def part(matrix: Any, noise: Any = ZERO) -> Affine:
    return Affine(np.array(matrix, dtype=float), np.zeros(2), np.array(noise, dtype=float))


def kick(step: float) -> Affine:
    return part([[1, 0], [-step * FREQUENCY**2, 1]])


def drift(step: float) -> Affine:
    return part([[1, step], [0, 1]])


def flow(step: float, friction: float, moves: bool) -> Affine:
    """Return the exact flow of dr = -γ·r·dt + √(2γτ)·dW, with dθ = r·dt if `moves`, by matrix exponentials.

    The covariance is Van Loan's: from the exponential of [[-A, D], [0, Aᵀ]]·h.
    """
    generator = np.array([[0.0, float(moves)], [0.0, -friction]])
    inflow = np.diag([0.0, 2 * friction * TEMPERATURE])
    whole = linalg.expm(np.block([[-generator, inflow], [ZERO, generator.T]]) * step)
    matrix = whole[2:, 2:].T
    return part(matrix, matrix @ whole[:2, 2:])


@pytest.mark.parametrize("friction", [0.5, 4.0, 30.0])
@pytest.mark.parametrize("integrator", ["baoab", "obabo", "ubu"])
def test_a_step_is_its_splitting_from_where_the_gradient_is(integrator: str, friction: float) -> None:
    """Matrix and noise, part by part; OBABO's and UBU's free parts of two steps are merged to one of the whole step."""
    h = 0.15
    relax = flow(h, friction, moves=False)
    parts = {
        "baoab": [kick(h), drift(h / 2), relax, drift(h / 2)],
        "obabo": [kick(h / 2), relax, kick(h / 2), drift(h)],
        "ubu": [kick(h), flow(h / 2, friction, moves=True), flow(h / 2, friction, moves=True)],
    }[integrator]
    whole = functools.reduce(Affine.then, parts)
    found = one_step(h, friction, integrator)
    np.testing.assert_allclose(found.matrix, whole.matrix, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(found.noise, whole.noise, rtol=1e-11, atol=1e-15)


def test_ubu_and_obabo_are_the_published_steps() -> None:
    """Their stationary laws, carried on to the step's end, are those of U-B-U and O-B-A-B-O as printed."""
    h, friction = 0.3, 1.5
    u, o = (flow(h / 2, friction, moves=moves) for moves in (True, False))
    ubu = functools.reduce(Affine.then, [u, kick(h), u])
    obabo = functools.reduce(Affine.then, [o, kick(h / 2), drift(h), kick(h / 2), o])
    for integrator, rest, published in (
        ("ubu", kick(h).then(u), ubu),
        ("obabo", kick(h / 2).then(o), obabo),
    ):
        _, own = one_step(h, friction, integrator).stationary()
        end = rest.matrix @ own @ rest.matrix.T + rest.noise
        np.testing.assert_allclose(end, published.stationary()[1], rtol=1e-11, atol=1e-13)


def exact_lag(half: float) -> Decimal:
    getcontext().prec = 60
    y = Decimal(half)
    return y - ((2 * y).exp() - 1) / ((2 * y).exp() + 1)


@pytest.mark.parametrize("half", [1e-9, 1e-5, 1e-3, 0.1, 0.7, 0.9999, 1.0, 1.5, 4.0, 20.0])
def test_numbers_of_a_step_are_precise_at_any_friction(half: float) -> None:
    """y - tanh y loses all digits below y = 1e-8 if it is computed as written."""
    exact = exact_lag(half)
    assert abs(float(Decimal(float(lag(half))) / exact) - 1) < 1e-15
    for dtype, tolerance in ((torch.float64, 1e-15), (torch.float32, 4e-7)):
        given = torch.tensor([half, half], dtype=dtype)
        found = lag(given)
        assert isinstance(found, torch.Tensor)
        assert found.dtype == dtype
        assert abs(float(Decimal(float(found[1])) / exact_lag(float(given[1]))) - 1) < tolerance


def test_small_frictions_have_the_limits_of_the_formulas() -> None:
    """h/2, 2·γ·τ·h and γ·τ·h³/6, to γ·h = 1e-9."""
    h, friction = 0.01, 1e-7
    assert half_move(h, friction) == pytest.approx(h / 2, rel=1e-9)
    assert momentum_variance(h, friction, 0.7) == pytest.approx(2 * friction * 0.7 * h, rel=1e-8)
    assert bridge_variance(h, friction, 0.7) == pytest.approx(friction * 0.7 * h**3 / 6, rel=1e-8)


# -- stationary laws --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("friction", [0.5, 4.0])
@pytest.mark.parametrize("angle", [0.1, 0.2, 0.5, 1.5])
@pytest.mark.parametrize("integrator", ["baoab", "obabo", "ubu"])
def test_its_positions_have_the_closed_form(integrator: str, angle: float, friction: float) -> None:
    """Var θ at any hω < 2, where Euler's positions are too hot; BAOAB's momenta are exact too."""
    step = angle / FREQUENCY
    assert ratio(step, friction, integrator) == pytest.approx(wanted(angle, friction * step / 2, integrator), rel=1e-10)
    if integrator == "baoab":
        covariance = one_step(step, friction, integrator).stationary()[1]
        assert covariance[1, 1] == pytest.approx(TEMPERATURE, rel=1e-10)
    if angle < 0.2:
        assert ratio(step, friction, "euler") > 1.02


@pytest.mark.parametrize(("integrator", "order"), [("euler", 1.0), ("obabo", 2.0), ("ubu", 2.0)])
def test_the_order_of_the_bias(integrator: str, order: float) -> None:
    """The slope of log|Var θ·ω²/τ - 1| in log h, by least squares over a factor of 16 of exact moments.

    The numbers have no noise; higher orders bend the line by less than 0.02 there.
    """
    steps = np.geomspace(1, 16, 9) * (0.0003 if integrator == "euler" else 0.005) / FREQUENCY
    for friction in (0.5, 2.0):
        biases = [abs(ratio(step, friction, integrator) - 1) for step in steps]
        slope = np.polyfit(np.log(steps), np.log(biases), 1)[0]
        assert slope == pytest.approx(order, abs=0.05)
        assert ratio(steps[0], friction, "baoab") == pytest.approx(1, rel=1e-9)


def test_small_steps_have_the_target_law() -> None:
    """All moments of (θ, r) tend to N(0, τ/ω²)·N(0, τ)."""
    target = np.diag([TEMPERATURE / FREQUENCY**2, TEMPERATURE])
    for integrator in ("euler", "baoab", "obabo", "ubu"):
        errors = [
            np.abs(one_step(step, 1.5, integrator).stationary()[1] - target).max() for step in (0.02, 0.002, 0.0002)
        ]
        assert errors[0] > 5 * errors[1] > 25 * errors[2]
        assert errors[2] < 6e-4


def test_it_is_stable_below_the_limit_of_the_frequency_only() -> None:
    """hω = 1.99 and 2.01, at a friction with h·γ = 5; UBU's limit grows with the friction: hω·√(tanh(y)/y) = 2."""
    for integrator in ("baoab", "obabo", "ubu"):
        limit = 2.0 if integrator != "ubu" else 2 * math.sqrt(2.5 / math.tanh(2.5))
        for angle, stable in ((0.995 * limit, True), (1.005 * limit, False)):
            step = angle / FREQUENCY
            matrix = one_step(step, 5 / step, integrator).matrix
            assert (np.abs(np.linalg.eigvals(matrix)).max() < 1) == stable


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("integrator", ["euler", "baoab", "obabo", "ubu"])
def test_draws_have_the_exact_moments_of_the_discretised_chain(integrator: str, dtype: torch.dtype) -> None:
    """The covariance of (θ, r) over 40,000 coordinates after 1, 2, 5 and 40 steps from one place, by `step`.

    Compared within 5 standard errors, √((c_ii·c_jj + c_ij²)/n): a false alarm in the 96 comparisons has probability
    6e-5. Seeds are fixed.
    """
    count, step, friction = 40_000, 0.2, 1.5
    place = torch.nn.Parameter(torch.full((count,), 0.3, dtype=dtype))
    rule = UnderdampedLangevin(
        [place], lr=step, friction=friction, integrator=integrator, num_data=NUM_DATA, temperature=TEMPERATURE, seed=4
    )
    move = one_step(step, friction, integrator)
    mean, covariance = np.array([0.3, 0.0]), ZERO
    for made in range(1, 41):
        place.grad = FREQUENCY**2 / NUM_DATA * place.detach()
        rule.step()
        mean, covariance = move.matrix @ mean, move.matrix @ covariance @ move.matrix.T + move.noise
        if made in (1, 2, 5, 40):
            rows = torch.stack([place.detach(), rule.state[place]["momentum_buffer"]]).double().numpy()
            rows -= mean[:, None]
            found = rows @ rows.T / count
            spread = np.diag(covariance)
            error = np.sqrt((np.outer(spread, spread) + covariance**2) / count) + 1e-9
            assert (np.abs(found - covariance) < 5 * error).all(), (made, found, covariance)


# -- its law and state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("integrator", ["euler", "baoab", "obabo", "ubu"])
def test_the_law_is_that_of_the_step(integrator: str) -> None:
    """m ← (1-a)·m - b·g + s·ξ for the momentum, from the step itself."""
    found = one_step(0.2, 1.5, integrator)
    rule = UnderdampedLangevin(
        [torch.zeros(1)], lr=0.2, friction=1.5, integrator=integrator, num_data=NUM_DATA, temperature=TEMPERATURE
    )
    law = rule.law(rule.param_groups[0])
    assert found.matrix[1, 1] == pytest.approx(1 - law.damping if integrator != "obabo" else found.matrix[1, 1])
    assert found.matrix[1, 0] == pytest.approx(-law.force * FREQUENCY**2 / NUM_DATA)
    assert found.noise[1, 1] == pytest.approx(law.variance)


@pytest.mark.parametrize("integrator", ["baoab", "obabo", "ubu"])
def test_extra_drag_acts_with_the_force(integrator: str) -> None:
    """(Γ-γ)·r with Γ-γ = 2 takes the share 2·h of the momentum before the noise, OBABO's half of it after."""
    p, step = torch.nn.Parameter(torch.zeros(1)), 0.1
    rule = UnderdampedLangevin(
        [p], lr=step, friction=1.5, integrator=integrator, num_data=NUM_DATA, temperature=TEMPERATURE
    )
    rule.extra_drag = lambda momenta: [2 * m for m in momenta]
    momenta = rule.momenta(rule.param_groups[0])
    assert momenta is not None
    momenta[0].fill_(1.0)
    with torch.no_grad():
        rule.update(rule.param_groups[0], [p], [torch.zeros(1)], None)
    decay = math.exp(-1.5 * step)
    expected = (1 - step) * decay - step if integrator == "obabo" else (1 - 2 * step) * decay
    assert momenta[0].item() == pytest.approx(expected)


def test_groups_may_have_integrators_of_their_own() -> None:
    """A group draws the same normals beside a group with UBU, whose second ones come after all first ones.

    Torch fills tensors in blocks of 16, so the sizes are multiples of it.
    """
    ends = []
    for other in ("baoab", "ubu"):
        a, b = (torch.nn.Parameter(torch.zeros(64)) for _ in range(2))
        groups = [{"params": [a], "integrator": "obabo"}, {"params": [b], "integrator": other}]
        rule = UnderdampedLangevin(groups, lr=0.1, num_data=NUM_DATA, integrator="baoab", seed=3)
        assert rule.draws == (2 if other == "ubu" else 1)
        a.grad, b.grad = torch.ones(64), torch.ones(64)
        rule.step()
        ends.append((a.detach(), b.detach(), rule.state[b]["momentum_buffer"]))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][2], ends[1][2])
    assert not torch.equal(ends[0][1], ends[1][1])


def test_a_state_of_another_integrator_is_refused() -> None:
    rules = [
        UnderdampedLangevin([torch.nn.Parameter(torch.ones(3))], lr=0.1, num_data=NUM_DATA, integrator=integrator)
        for integrator in ("euler", "baoab")
    ]
    state = rules[0].state_dict()
    with pytest.raises(ValueError, match="with integrator='euler', so one with integrator='baoab' cannot continue"):
        rules[1].load_state_dict(state)
    del state["param_groups"][0]["integrator"]
    with pytest.raises(ValueError, match="with integrator=None, so one with integrator='euler' cannot continue"):
        rules[0].load_state_dict(state)
