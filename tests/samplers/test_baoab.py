"""BAOAB's exact stationary law on a Gaussian, and its state."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sgmcmc.samplers import UnderdampedLangevin

NUM_DATA, TEMPERATURE, FREQUENCY = 30, 0.7, 2.0


def one_step(start: Tensor, momentum: Tensor, noise: Tensor, step: Any, friction: float, integrator: Any) -> Tensor:
    """Return (θ, r) after a step at U = ½ω²θ² with this noise, for any number of coordinates, shape (2, n)."""
    p = torch.nn.Parameter(start.clone())
    rule = UnderdampedLangevin(
        [p], lr=step, friction=friction, integrator=integrator, num_data=NUM_DATA, temperature=TEMPERATURE
    )
    group = rule.param_groups[0]
    momenta = rule.momenta(group)
    assert momenta is not None
    momenta[0].copy_(momentum)
    with torch.no_grad():
        rule.update(group, [p], [FREQUENCY**2 * start / NUM_DATA], [noise.clone()])
    return torch.stack([p.detach(), momenta[0]])


def stationary(step: float, friction: float, integrator: str) -> Tensor:
    """Return the covariance of (θ, r), from S = F·S·Fᵀ + q·qᵀ with the step's own matrix F and noise q."""
    basis = torch.eye(3, dtype=torch.float64)  # a start, a momentum, a noise
    map_ = one_step(*basis, step=step, friction=friction, integrator=integrator)
    drift, push = map_[:, :2], map_[:, 2:]
    transfer = torch.eye(4, dtype=torch.float64) - torch.kron(drift, drift)
    return torch.linalg.solve(transfer, (push @ push.T).reshape(4)).reshape(2, 2)


@pytest.mark.parametrize("friction", [0.5, 4.0])
@pytest.mark.parametrize("angle", [0.1, 0.2, 0.5, 1.5])
def test_its_positions_and_momenta_are_exact_on_a_gaussian(angle: float, friction: float) -> None:
    """Var θ = τ/ω² and Var r = τ at any hω < 2, where Euler's positions are too hot."""
    step = angle / FREQUENCY
    covariance = stationary(step, friction, "baoab")
    assert covariance[0, 0].item() == pytest.approx(TEMPERATURE / FREQUENCY**2, rel=1e-10)
    assert covariance[1, 1].item() == pytest.approx(TEMPERATURE, rel=1e-10)
    if angle < 0.2:
        assert stationary(step, friction, "euler")[0, 0].item() > 1.02 * TEMPERATURE / FREQUENCY**2


def test_it_is_stable_below_the_limit_of_the_frequency_only() -> None:
    """hω = 1.99 and 2.01, at a friction with h·γ = 5."""
    basis = torch.eye(3, dtype=torch.float64)
    for angle, stable in ((1.99, True), (2.01, False)):
        step = angle / FREQUENCY
        drift = one_step(*basis, step=step, friction=5 / step, integrator="baoab")[:, :2]
        assert (torch.linalg.eigvals(drift).abs().max().item() < 1) == stable


def test_the_law_is_that_of_the_step() -> None:
    """m ← (1-a)·m - b·g + s·ξ for the momentum, from the step itself."""
    basis, step, friction = torch.eye(3, dtype=torch.float64), 0.2, 1.5
    found = one_step(*basis, step=step, friction=friction, integrator="baoab")[1]
    rule = UnderdampedLangevin(
        [torch.zeros(1)], lr=step, friction=friction, integrator="baoab", num_data=NUM_DATA, temperature=TEMPERATURE
    )
    law = rule.law(rule.param_groups[0])
    assert found[1].item() == pytest.approx(1 - law.damping)
    assert found[0].item() == pytest.approx(-law.force * FREQUENCY**2 / NUM_DATA)
    assert found[2].item() == pytest.approx(math.sqrt(law.variance))


def test_extra_drag_acts_with_the_force() -> None:
    """(Γ-γ)·r with Γ-γ = 2 takes the share 2·h of the momentum before the noise."""
    p, step = torch.nn.Parameter(torch.zeros(1)), 0.1
    rule = UnderdampedLangevin(
        [p], lr=step, friction=1.5, integrator="baoab", num_data=NUM_DATA, temperature=TEMPERATURE
    )
    rule.extra_drag = lambda momenta: [2 * m for m in momenta]
    momenta = rule.momenta(rule.param_groups[0])
    assert momenta is not None
    momenta[0].fill_(1.0)
    with torch.no_grad():
        rule.update(rule.param_groups[0], [p], [torch.zeros(1)], None)
    assert momenta[0].item() == pytest.approx((1 - 2 * step) * math.exp(-1.5 * step))


def test_a_state_without_an_integrator_is_eulers() -> None:
    """As version 0.1.0 saved it."""
    rules = [
        UnderdampedLangevin([torch.nn.Parameter(torch.ones(3))], lr=0.1, num_data=NUM_DATA, integrator=integrator)
        for integrator in ("euler", "euler", "baoab")
    ]
    state = rules[0].state_dict()
    del state["param_groups"][0]["integrator"]
    rules[1].load_state_dict(state)
    for rule in rules[:2]:
        for _ in range(2):
            p = rule.param_groups[0]["params"][0]
            p.grad = torch.ones_like(p)
            rule.step()
    assert torch.equal(*(rule.param_groups[0]["params"][0] for rule in rules[:2]))
    with pytest.raises(ValueError, match="with integrator='euler', so one with integrator='baoab' cannot continue"):
        rules[2].load_state_dict(state)
