"""Replica exchange, groups of interacting chains and Stein variational descent on analytic targets."""

import functools
import math
from typing import Any

import pytest
import torch

from lightning_sgmcmc.contour import Contour, ContourRules, DecayingStepSize
from lightning_sgmcmc.contour.partition import EnergyPartition
from lightning_sgmcmc.samplers import SGHMC
from lightning_sgmcmc.simulation import ContourRun, ExchangeRun, Simulation, simulate
from lightning_sgmcmc.simulation.densities import descend, median_bandwidth, stein_direction
from lightning_sgmcmc.simulation.loop import has_compiler
from lightning_sgmcmc.simulation.targets import GaussianMixture
from lightning_sgmcmc.tempering.replica_exchange import attempted_pairs, log_swap_rate, swapped

BIMODAL = GaussianMixture([0.3, 0.7], [[-4.0], [4.0]])
HOT = 8.0


def ladders(count: int, steps: int, exchange: ExchangeRun | None = None, **options: Any) -> Simulation:
    """Run ladders of two temperatures on two modes, eight nats apart, all from the right one."""
    exchange = exchange or ExchangeRun((1.0, HOT), (1.0, 4.0), every=5)
    settings: dict[str, Any] = {"lr": 0.05, "keep_every": 10, "burn_in": 2000, "initial": torch.tensor([4.0])}
    return simulate(BIMODAL, num_steps=steps, num_chains=2 * count, exchange=exchange, **(settings | options))


def coldest(run: Simulation) -> torch.Tensor:
    """Return the places in the coldest slot, shape (S, L)."""
    assert run.slots is not None
    pairs = run.slots.unflatten(1, (-1, 2))
    assert (pairs.sum(2) == 1).all()
    first, second = run.positions[..., 0].unflatten(1, (-1, 2)).unbind(2)
    return torch.where(pairs[:, :, 0] == 0, first, second)


# -- the rule ---------------------------------------------------------------------------------------------------------


def test_swaps_are_in_detailed_balance() -> None:
    """On six states with three temperatures, for both turns of pairs: p(s)·P(s → s') = p(s')·P(s' → s) exactly."""
    energies = torch.tensor([0.0, 0.3, 1.1, 2.0, 2.5, 4.0], dtype=torch.float64)
    temperatures = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    states = torch.cartesian_prod(*[torch.arange(6)] * 3)
    log_density = -(energies[states] / temperatures).sum(1)
    for attempt in (0, 1):
        (pair,) = attempted_pairs(attempt, 3).nonzero()[:, 0].tolist()
        cold, hot = energies[states[:, pair]], energies[states[:, pair + 1]]
        log_probability = log_swap_rate(cold, hot, temperatures[pair], temperatures[pair + 1]).clamp(max=0)
        accepted = torch.zeros(len(states), 2, dtype=torch.bool)
        accepted[:, pair] = True
        partners = states.gather(1, swapped(torch.arange(3).expand(len(states), 3), accepted))
        partner = (partners * torch.tensor([36, 6, 1])).sum(1)
        assert not torch.equal(partner, torch.arange(216))
        flow = log_density + log_probability
        torch.testing.assert_close(flow, flow[partner], rtol=0, atol=1e-12)


def test_the_corrected_rate_is_unbiased_under_gaussian_noise() -> None:
    """With noise of variance v on each energy, the rate's mean over 10⁶ draws is the rate without noise.

    The rate is log-normal with log-variance 2·δ²·v, so its mean's standard error is √(exp(2δ²v) - 1)/1000 of it; 4.5 of
    them. Without the correction the mean is exp(δ²·v) = 1.16 times as large, which is far outside.
    """
    generator = torch.Generator().manual_seed(0)
    cold, hot = torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64), torch.tensor([2.5, 0.2, 2.9], dtype=torch.float64)
    variance, coldness = 0.6, 1 - 1 / 2
    noise = variance**0.5 * torch.randn(2, 1_000_000, 3, generator=generator, dtype=torch.float64)
    truth = log_swap_rate(cold, hot, 1.0, 2.0).exp()
    mean = log_swap_rate(cold + noise[0], hot + noise[1], 1.0, 2.0, variance).exp().mean(0)
    error = 4.5 * math.sqrt(math.exp(2 * coldness**2 * variance) - 1) / 1000
    assert error < 0.01
    torch.testing.assert_close(mean, truth, rtol=error, atol=0)
    biased = log_swap_rate(cold + noise[0], hot + noise[1], 1.0, 2.0).exp().mean(0)
    torch.testing.assert_close(biased, truth * math.exp(coldness**2 * variance), rtol=error, atol=0)
    halved = log_swap_rate(cold, hot, 1.0, 2.0, variance, correction=2.0)
    torch.testing.assert_close(halved, truth.log() - coldness**2 * variance / 2)


def test_pairs_take_turns_and_swaps_keep_every_chain() -> None:
    assert attempted_pairs(0, 5).tolist() == [True, False, True, False]
    assert attempted_pairs(1, 5).tolist() == [False, True, False, True]
    assert attempted_pairs(0, 2).tolist() == attempted_pairs(1, 2).tolist() == [True]
    order = torch.tensor([[3, 0, 4, 1, 2], [0, 1, 2, 3, 4]])
    accepted = torch.tensor([[True, False, False, True], [False, True, False, False]])
    assert swapped(order, accepted).tolist() == [[0, 3, 4, 2, 1], [0, 2, 1, 3, 4]]


# -- in the light loop ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_the_coldest_slot_has_the_right_masses(noise: float) -> None:
    """The share of draws in the left mode is 0.3, within 4.5 standard errors over 100 independent ladders.

    All start in the right mode, which a chain without exchange leaves in one run of many. With noise on the energies
    and its variance in the rate the cap leaves a bias, here below the Monte-Carlo error.
    """
    exchange = ExchangeRun((1.0, HOT), (1.0, 4.0), every=5, variance=noise**2)
    run = ladders(100, 12_000, exchange, energy_noise=noise, seed=4)
    shares = (coldest(run) < 0).double().mean(0)
    error = float(shares.std()) / math.sqrt(len(shares))
    assert error < 0.012
    assert float(shares.mean()) == pytest.approx(0.3, abs=4.5 * error)
    variance = (coldest(run).abs() - 4).square().mean()
    assert float(variance) == pytest.approx(1 / (1 - 0.05 / 2), rel=0.1)  # of SGLD's own law, not the hot chain's
    alone = simulate(BIMODAL, lr=0.05, num_steps=3000, num_chains=100, initial=torch.tensor([4.0]))
    assert (alone.last < 0).double().mean() < 0.2


def test_swaps_do_not_depend_on_the_number_of_ladders() -> None:
    few, many = (ladders(count, 300, burn_in=0, keep_every=1, seed=3, energy_noise=0.3) for count in (2, 5))
    assert torch.equal(few.positions, many.positions[:, :4])
    assert few.slots is not None
    assert many.slots is not None
    assert torch.equal(few.slots, many.slots[:, :4])
    assert (few.slots[1:] != few.slots[:-1]).any()
    tried = torch.arange(2, 301) % 5 == 0
    assert not (few.slots[1:] != few.slots[:-1])[~tried].any()


def test_without_swaps_each_chain_has_its_slots_lr_and_temperature() -> None:
    run = ladders(1, 200, ExchangeRun((1.0, HOT), (1.0, 4.0), every=1000), burn_in=0, seed=7)
    for chain, (lr, temperature) in enumerate([(0.05, 1.0), (0.2, HOT)]):
        alone = simulate(
            BIMODAL, lr=lr, temperature=temperature, num_steps=200, num_chains=2, initial=torch.tensor([4.0]), seed=7
        )
        torch.testing.assert_close(run.last[chain], alone.last[chain], rtol=1e-4, atol=1e-4)


def test_a_large_variance_forbids_swaps() -> None:
    varying = ExchangeRun((1.0, HOT), every=1, variance=lambda k: 1e4 if k <= 100 else 0.0)
    run = ladders(4, 200, varying, burn_in=0, keep_every=1)
    assert run.slots is not None
    assert (run.slots[:100] == torch.tensor([0, 1]).repeat(4)).all()
    assert (run.slots[100:] != torch.tensor([0, 1]).repeat(4)).any()


@pytest.mark.slow
def test_compiled_exchange_is_the_eager_one() -> None:
    if not has_compiler():
        pytest.skip("no C++ compiler")
    exchange = ExchangeRun((1.0, 2.0, 4.0), (1.0, 2.0, 3.0), every=3)
    eager, compiled = (
        simulate(BIMODAL, lr=0.02, num_steps=40, num_chains=6, keep_every=1, exchange=exchange, compile=compile)
        for compile in (False, True)
    )
    torch.testing.assert_close(compiled.positions, eager.positions, rtol=1e-4, atol=1e-4)
    assert eager.slots is not None
    assert compiled.slots is not None
    assert torch.equal(eager.slots, compiled.slots)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_chains": 3}, "ladders of 2"),
        ({"temperature": lambda k: 1.0 - (k == 5)}, "temperature=0"),
        ({"sampler": functools.partial(SGHMC, friction=0.1)}, "momentum"),
        ({"contour": ContourRun(Contour(EnergyPartition(2.0, 1.0, 10)))}, "contour"),
    ],
)
def test_exchange_refuses(options: dict[str, Any], said: str) -> None:
    settings: dict[str, Any] = {"lr": 0.1, "num_steps": 10, "num_chains": 2, "exchange": ExchangeRun((1.0, 2.0))}
    with pytest.raises(ValueError, match=said):
        simulate(BIMODAL, **(settings | options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperatures": (1.0,)}, "temperatures"),
        ({"temperatures": (2.0, 1.0)}, "increasing"),
        ({"temperatures": (0.0, 1.0)}, "positive"),
        ({"lrs": (1.0,)}, "lrs"),
        ({"every": 0}, "every"),
        ({"variance": -1.0}, "variance"),
        ({"correction": 0.5}, "correction"),
    ],
)
def test_bad_ladders_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ExchangeRun(**({"temperatures": (1.0, 2.0)} | options))


# -- groups of interacting chains -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["scalable", "original", "high-order"])
def test_a_group_is_a_run_of_its_own(scheme: Any) -> None:
    """Three groups of four chains: the first is the run of four that share π; the others differ from it."""
    rules = Contour(EnergyPartition(2.0, 1.0, 20), ContourRules(0.75, scheme))
    step_size = DecayingStepSize(1, 0.6, 100)
    options: dict[str, Any] = {"lr": 0.05, "num_steps": 200, "keep_every": 1, "seed": 5}
    alone = simulate(BIMODAL, num_chains=4, contour=ContourRun(rules, step_size, shared=True), **options)
    three = simulate(BIMODAL, num_chains=12, contour=ContourRun(rules, step_size, shared=True, groups=3), **options)
    torch.testing.assert_close(three.positions[:, :4], alone.positions, rtol=1e-4, atol=1e-4)
    assert three.contour is not None
    assert alone.contour is not None
    assert three.contour.log_vector.shape == (3, 20)
    torch.testing.assert_close(three.contour.log_vector[0], alone.contour.log_vector, rtol=1e-6, atol=1e-6)
    assert torch.equal(three.contour.visits[0], alone.contour.visits)
    assert three.contour.visits.sum(1).tolist() == [800] * 3
    torch.testing.assert_close(three.contour.log_vector.exp().sum(1), torch.ones(3, dtype=torch.float64))
    assert not torch.allclose(three.contour.log_vector[1], three.contour.log_vector[0])


def test_groups_must_divide_the_chains() -> None:
    rules = Contour(EnergyPartition(2.0, 1.0, 20))
    with pytest.raises(ValueError, match="evenly"):
        simulate(BIMODAL, lr=0.1, num_steps=5, num_chains=5, contour=ContourRun(rules, shared=True, groups=2))
    with pytest.raises(ValueError, match="shared=True"):
        ContourRun(rules, groups=2)


# -- Stein variational gradient descent -------------------------------------------------------------------------------


def test_the_stein_direction_is_its_formula() -> None:
    """Against the sum over pairs with the kernel's gradient by autograd, for two sets at once."""
    generator = torch.Generator().manual_seed(1)
    particles = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    gradients = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    found = stein_direction(particles, gradients)
    for x, g, row, h in zip(particles, gradients, found, median_bandwidth(particles), strict=True):
        squares = torch.cdist(x, x).square()
        assert float(h) == pytest.approx(float(squares[torch.triu_indices(6, 6, 1).unbind()].median()) / math.log(6))
        for i in range(6):
            total = torch.zeros(3, dtype=torch.float64)
            for j in range(6):
                other = x[j].clone().requires_grad_()
                kernel = torch.exp(-(other - x[i]).square().sum() / h)
                (push,) = torch.autograd.grad(kernel, other)
                total += -kernel.detach() * g[j] + push
            torch.testing.assert_close(row[i], total / 6)


def test_particles_take_a_gaussians_moments() -> None:
    """At the end of the descent a kernel of constant width has exact moments only in the limit of many particles: 100
    have the mean to 0.01, and the variances to 10 %."""
    target = GaussianMixture([1.0], [[1.0, -2.0]], variance=0.5)
    start = torch.rand(100, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    seen: list[int] = []
    end = descend(target.gradient, start, 0.5, 800, lambda step, x: seen.append(step))
    assert seen == list(range(1, 801))
    torch.testing.assert_close(end.mean(0), target.mean, rtol=0, atol=0.01)
    torch.testing.assert_close(end.var(0), target.covariance.diagonal(), rtol=0.1, atol=0)


def test_descent_refuses() -> None:
    with pytest.raises(ValueError, match="at least two"):
        stein_direction(torch.zeros(1, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="lr must"):
        descend(BIMODAL.gradient, torch.zeros(3, 1), -1.0, 5)
    with pytest.raises(ValueError, match="smaller lr"):
        descend(lambda x: x.square().square() * x, torch.randn(3, 1), 1e6, 20)
