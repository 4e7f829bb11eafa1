"""The recursion of second moments against the samplers' own updates, simulated."""

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor, nn

from lightning_sgmcmc.planning import (
    Blocks,
    ChainControls,
    TensorFacts,
    blocks_of,
    draws_of_mean,
    linear_rule,
    reach,
    stage_moments,
)
from lightning_sgmcmc.samplers import MCLMC, SGHMC, SGLD, SGNHT, Sampler, UnderdampedLangevin, pSGLD
from tests.support.kinetic import ubu_variance

NUM_DATA, STD, COORDINATES = 50, 0.5, 20_000
RULES = [
    pytest.param(SGLD, {}, 0.4, id="SGLD"),
    pytest.param(SGHMC, {"friction": 0.2}, 0.1, id="SGHMC"),
    pytest.param(SGHMC, {"friction": 0.2, "noise_estimate": 0.05}, 0.1, id="SGHMC-estimate"),
    pytest.param(SGNHT, {"friction": 0.2, "thermal_inertia": 1e12}, 0.1, id="SGNHT"),
    pytest.param(UnderdampedLangevin, {"friction": 3.0}, 0.07, id="Euler"),
    pytest.param(UnderdampedLangevin, {"friction": 3.0, "integrator": "baoab"}, 0.07, id="BAOAB"),
    pytest.param(UnderdampedLangevin, {"friction": 3.0, "integrator": "obabo"}, 0.07, id="OBABO"),
    pytest.param(UnderdampedLangevin, {"friction": 3.0, "integrator": "ubu"}, 0.07, id="UBU"),
]
STEPS = 60


def controls(lr: float, step: int) -> ChainControls:
    """Two cycles of a falling step size, each with a cold part and a noisy one, at a temperature of 0.7."""
    position = (step - 1) % 30
    tau = 0.0 if position < 12 else 0.7
    return ChainControls(torch.full((1, 1), lr * (1 - position / 40)), torch.full((1,), tau), position >= 12)


def make(cls: Any, options: dict[str, Any], lr: float, theta: Tensor) -> tuple[Sampler, nn.Parameter]:
    parameter = nn.Parameter(theta)
    return cls([parameter], lr=lr, num_data=NUM_DATA, temperature=0.7, seed=1, **options), parameter


@pytest.mark.parametrize(("cls", "options", "lr"), RULES)
def test_the_recursion_is_the_samplers_own_law(cls: Any, options: dict[str, Any], lr: float) -> None:
    """The averages over two sampling stages match 20,000 simulated coordinates.

    Tolerance 5 standard errors of independent coordinates; with 16 comparisons the false-alarm rate is below 1e-5.
    """
    start = 0.6 * torch.randn(COORDINATES, generator=torch.Generator().manual_seed(0)).double()
    sampler, theta = make(cls, options, lr, start.clone())
    group = sampler.param_groups[0]
    curvature = 1 / (NUM_DATA * STD**2)
    sums = torch.zeros(2, COORDINATES).double()
    observed, anchor, was_sampling = 0, start, False
    for step in range(1, STEPS + 1):
        now = controls(lr, step)
        group["lr"], group["temperature"] = float(now.lrs), float(now.temperatures)
        if now.is_sampling and not was_sampling:
            anchor = theta.detach().clone()
        was_sampling = now.is_sampling
        if now.is_sampling and (step - 1) % 30 >= 12 + 0.25 * 18:
            value = theta.detach()
            sums += torch.stack([value * value, (value - anchor) * value]) / (0.7 * STD**2)
            observed += 1
        theta.grad = curvature * theta.detach()
        sampler.step()
    measured = sums.mean(1) / observed
    error = sums.std(1) / observed / math.sqrt(COORDINATES)

    blocks = blocks_of(STEPS, functools.partial(controls, lr))
    rule = linear_rule(sampler, group, blocks.lrs[:, 0], blocks.temperatures)
    assert rule is not None
    found = stage_moments(
        rule,
        blocks.counts,
        blocks.is_sampling,
        torch.tensor([curvature]).double(),
        start.square().mean()[None],
        torch.full((len(blocks.counts), 1), 1 / (0.7 * STD**2)).double(),
        warm_up=5 / 18,  # the first 5 of 18 steps
    )
    predicted = torch.cat([found.plain, found.anchored])
    assert observed == 26
    assert ((predicted - measured).abs() < 5 * error + 1e-12).all(), (predicted, measured, error)


@pytest.mark.parametrize(("cls", "options", "lr"), [*RULES, pytest.param(MCLMC, {"friction": 3.0}, 0.07, id="MCLMC")])
def test_a_long_run_has_the_stationary_law(cls: Any, options: dict[str, Any], lr: float) -> None:
    """The limits are closed forms: 1/(1 - lr·h/2) for SGLD, 1/(1 - lr·h/(4 - 2η)) for SGHMC, exactly 1 for BAOAB,
    1/(1 - (lr·ω)²/4) for OBABO, and for UBU with t = lr·tanh(y)/γ and y = γ·lr/2 the one below."""
    sampler, _ = make(cls, options, lr, torch.zeros(3))
    blocks = Blocks([200_000], torch.full((1, 1, 1), lr).double(), torch.ones(1, 1).double(), [True])
    found = reach(sampler, blocks, {"w": TensorFacts(3, STD, start=4.0)}, NUM_DATA)["w"]
    h = 1 / (NUM_DATA * STD**2)
    share = 1 - options.get("noise_estimate", 0.0) / options.get("friction", 1.0)
    if cls is SGLD:
        wanted = 1 / (1 - lr * h / 2)
    elif cls in (SGHMC, SGNHT):
        wanted = share / (1 - lr * h / (4 - 2 * options["friction"]))
    elif cls is MCLMC or options.get("integrator") == "baoab":
        wanted = 1.0
    elif options.get("integrator") == "obabo":
        wanted = 1 / (1 - (lr / STD) ** 2 / 4)
    elif options.get("integrator") == "ubu":
        wanted = ubu_variance(lr / STD, lr * options["friction"] / 2)
    else:  # Euler's: solve the 2x2 Lyapunov equation
        a = torch.tensor([[1.0, lr], [-lr / STD**2, 1 - lr * options["friction"]]]).double()
        q = torch.zeros(2, 2).double()
        q[1, 1] = 2 * options["friction"] * lr
        wanted = float(torch.linalg.solve(torch.eye(4).double() - torch.kron(a, a), q.flatten())[0] / STD**2)
    assert float(found.configurational[0]) == pytest.approx(wanted, rel=2e-3)


@pytest.mark.parametrize(("cls", "options", "lr"), RULES)
def test_relaxation_times_are_the_decay_of_the_mean(cls: Any, options: dict[str, Any], lr: float) -> None:
    wide = 4 * STD  # overdamped, so the mean decays without oscillation
    sampler, theta = make(cls, options, lr, torch.ones(1).double())
    group = sampler.param_groups[0]
    means = []
    for _ in range(500):
        gradient = theta.detach() / (NUM_DATA * wide**2)
        with torch.no_grad():
            sampler.update(group, [theta], [gradient], [torch.zeros(1).double() for _ in range(sampler.draws)])
        means.append(float(theta.detach()))
    blocks = Blocks([300], torch.full((1, 1, 1), lr).double(), torch.ones(1, 1).double(), [True])
    found = reach(sampler, blocks, {"w": TensorFacts(3, wide)}, NUM_DATA)["w"]
    assert found.sampling == pytest.approx(math.log(means[199] / means[499]), rel=1e-6)
    assert found.burn_in == 0


def test_blocks_do_not_change_the_result() -> None:
    sampler, _ = make(SGHMC, {}, 0.1, torch.zeros(3))
    fine, coarse = (blocks_of(STEPS * 10, lambda k: controls(0.1, 1 + (k - 1) // 10), most) for most in (600, 300))
    assert len(fine.counts) == len(coarse.counts) == STEPS, "equal neighbours are one block"
    one_by_one = Blocks(
        [1] * 600,
        fine.lrs.repeat_interleave(10, 0),
        fine.temperatures.repeat_interleave(10, 0),
        [stage for stage in fine.is_sampling for _ in range(10)],
    )
    facts = {"w": TensorFacts(3, STD, start=1.0)}
    whole, single = (reach(sampler, blocks, facts, NUM_DATA)["w"] for blocks in (coarse, one_by_one))
    assert float(whole.configurational) == pytest.approx(float(single.configurational), rel=1e-9)
    assert (whole.burn_in, whole.sampling, whole.whole) == pytest.approx(
        (single.burn_in, single.sampling, single.whole)
    )


def test_a_rule_without_a_linear_law_is_not_planned() -> None:
    sampler, _ = make(pSGLD, {}, 0.1, torch.zeros(3))
    assert reach(sampler, blocks_of(60, functools.partial(controls, 0.1)), {"w": TensorFacts(3, STD)}, NUM_DATA) == {}


@pytest.mark.parametrize(
    ("cls", "options", "lr"),
    [
        *RULES,
        pytest.param(SGHMC, {"friction": 0.02}, 0.05, id="SGHMC-complex"),
        pytest.param(SGHMC, {"friction": 0.02}, 3.0, id="SGHMC-very-complex"),
        pytest.param(UnderdampedLangevin, {"friction": 1.0, "integrator": "baoab"}, 0.3, id="BAOAB-complex"),
        pytest.param(UnderdampedLangevin, {"friction": 30.0, "integrator": "baoab"}, 0.07, id="BAOAB-real"),
    ],
)
@pytest.mark.parametrize("steps", [1, 7, 400])
def test_draws_of_a_mean_are_those_of_its_variance(cls: Any, options: dict[str, Any], lr: float, steps: int) -> None:
    """Against the sum of all covariances A^k·S, with S from a Lyapunov equation, of two curvatures."""
    sampler, _ = make(cls, options, lr, torch.zeros(2))
    lrs, taus = torch.full((1, 2), lr).double(), torch.full((1, 2), 0.7).double()
    rule = linear_rule(sampler, sampler.param_groups[0], lrs, taus)
    assert rule is not None
    curvature = torch.tensor([1 / (NUM_DATA * STD**2), 0.3 / (NUM_DATA * STD**2)]).double()
    matrices, noises = (part[0].numpy() for part in rule.step(curvature))
    found = draws_of_mean(rule, [steps], curvature)
    for matrix, noise, value in zip(matrices, noises, found.tolist(), strict=True):
        stationary = solve_discrete_lyapunov(matrix, noise)
        power, total = np.eye(2), stationary[0, 0] * steps
        for lag in range(1, steps):
            power = matrix @ power
            total += 2 * (steps - lag) * (power @ stationary)[0, 0]
        assert value == pytest.approx(steps**2 * stationary[0, 0] / total, rel=1e-9)


def test_draws_of_a_mean_do_not_depend_on_how_steps_are_grouped() -> None:
    sampler, _ = make(SGHMC, {"friction": 0.02}, 0.1, torch.zeros(1))
    rule = linear_rule(sampler, sampler.param_groups[0], *(torch.full((3, 1), v).double() for v in (0.1, 0.7)))
    assert rule is not None
    curvature = torch.tensor([0.1]).double()
    whole = rule.mapped(lambda part: part[:1])
    torch.testing.assert_close(draws_of_mean(rule, [5, 90, 5], curvature), draws_of_mean(whole, [100], curvature))
