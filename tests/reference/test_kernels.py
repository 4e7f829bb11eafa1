"""NUTS and HMC have the law of what they are run on; the warm-up finds steps and scales; chains are independent."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sgmcmc.reference import DensityDraws, sample_density
from lightning_sgmcmc.reference.chains import Kernel, StepSizes, Variances, windows
from lightning_sgmcmc.reference.kernels import Draws, Phase, hamiltonian_monte_carlo, no_u_turn
from lightning_sgmcmc.simulation import LogisticRegressionSum, random_walk_metropolis
from tests.reference.densities import Potential, banana, correlated, funnel, gaussian

KERNELS: list[Kernel] = ["nuts", "hmc"]
MEAN = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
COVARIANCE = torch.tensor([[2.0, 0.6, 0.0], [0.6, 0.5, -0.1], [0.0, -0.1, 0.2]], dtype=torch.float64)


def starts(chains: int, dimension: int, seed: int = 0) -> Tensor:
    return torch.randn(chains, dimension, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def differences(seen: Tensor, expected: Tensor) -> Tensor:
    """Return the differences of means over independent chains from the truth, in standard errors.

    Args:
        seen: a mean of each chain and quantity, shape (C, Q).
        expected: shape (Q,).
    """
    return (seen.mean(0) - expected).abs() / (seen.std(0) / math.sqrt(len(seen)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_law_is_the_gaussian(kernel: Kernel) -> None:
    """Means over 100 chains of first and second moments are within 4.9 standard errors (over chains, t with 99 degrees
    of freedom) of the truth: a false alarm in 4 of 10⁶ seeds for each of 9 figures."""
    run = sample_density(correlated(MEAN, COVARIANCE), starts(100, 3), kernel=kernel, warmup=60, draws=60, seed=1)
    centred = run.draws - MEAN
    seconds = (centred[..., :, None] * centred[..., None, :]).mean(1)
    upper = torch.triu_indices(3, 3)
    seen = torch.cat([centred.mean(1), seconds[:, upper[0], upper[1]]], 1)
    expected = torch.cat([torch.zeros(3).double(), COVARIANCE[upper[0], upper[1]]])
    assert bool((differences(seen, expected) < 4.9).all())
    assert float((seen.std(0) / 10).max()) < 0.08  # the test can see an error of that size
    assert int(run.divergences.sum()) == 0
    torch.testing.assert_close(run.energies[:, -1], correlated(MEAN, COVARIANCE)(run.draws[:, -1])[0])


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_iteration_leaves_the_banana_as_it_is(kernel: Kernel) -> None:
    """3000 chains begin at exact draws and make three iterations with fixed step sizes: E[a], E[b], E[a²], E[b²] and
    E[a²b] are within 4.9 standard errors of the truth, a false alarm in 10⁶ seeds for each of 5 figures. The step is
    so large that errors of H are: without the weights, or the test at the end, the law would be another one."""
    generator = torch.Generator().manual_seed(2)
    a, noise = torch.randn(2, 3000, generator=generator, dtype=torch.float64)
    place = torch.stack([a, a.square() - 1 + 0.5 * noise], 1)
    step, variance = torch.full_like(a, 0.35), torch.tensor([[1.0, 0.6]]).double().expand(3000, 2)
    generators = [torch.Generator().manual_seed(chain) for chain in range(3000)]
    state, draws = Phase(place, *banana(place), place), Draws(generators, place)
    acceptance = 0.0
    for _ in range(3):
        if kernel == "nuts":
            move = no_u_turn(banana, state, step, variance, draws, 5)
        else:
            move = hamiltonian_monte_carlo(banana, state, step, variance, draws, 1.5, 0.5, 100)
        state, acceptance = move.phase, float(move.acceptance.mean())
    assert acceptance < 0.9
    a, b = state.place.unbind(1)
    seen = torch.stack([a, b, a.square(), b.square(), a.square() * b], -1)
    expected = torch.tensor([0, 0, 1, 2.25, 2], dtype=torch.float64)
    assert bool((differences(seen, expected) < 4.9).all()), differences(seen, expected)
    assert abs(float(torch.corrcoef(torch.stack([a, place[:, 0]]))[0, 1])) < 0.9  # they have moved
    energy, gradient = banana(state.place)
    torch.testing.assert_close(state.energy, energy)
    torch.testing.assert_close(state.gradient, gradient)


def test_fifty_dimensions_of_different_scales_are_learned() -> None:
    """Scales from 0.3 to 3. The mean and Var/s² of each coordinate over 24 chains: within 5.5 standard errors over
    chains (t with 23 degrees of freedom: a false alarm in 1 of 700 seeds for the 100 figures together). One window of
    75 draws finds the scales to 16 %, and then a trajectory takes few steps although the scales differ by 10."""
    scales = torch.logspace(-0.5, 0.5, 50, dtype=torch.float64)
    run = sample_density(gaussian(scales), scales * starts(24, 50), warmup=100, draws=60, seed=3)
    standard = run.draws / scales
    assert bool((differences(standard.mean(1), torch.zeros(50)) < 5.5).all())
    assert bool((differences(standard.square().mean(1), torch.ones(50)) < 5.5).all())
    ratio = (run.variance / scales.square()).log().mean(0)
    assert float(ratio.abs().max()) < 0.3
    assert float(run.gradients.double().mean()) / 60 < 16


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_acceptance_is_near_its_target(kernel: Kernel) -> None:
    """The mean over 40 chains in 20 dimensions; its standard error is about 0.01. After so short a warm-up the averaged
    step size is smaller than the one that meets the target, so the acceptance is above it."""
    found = []
    for target in (0.65, 0.85):
        given: dict[str, Any] = {"kernel": kernel, "target_acceptance": target, "seed": 4}
        run = sample_density(gaussian(torch.ones(20).double()), starts(40, 20), warmup=100, draws=20, **given)
        found.append(float(run.acceptance.mean()))
        assert -0.03 < found[-1] - target < 0.2
    assert found[1] - found[0] > 0.05


@pytest.mark.parametrize("target", [0.6, 0.8, 0.95])
def test_dual_averaging_meets_its_target(target: float) -> None:
    """Where the acceptance is exp(-ε²) the step size that meets the target is √(-log δ)."""
    sizes = StepSizes(torch.tensor([0.01, 3.0], dtype=torch.float64), target)
    for _ in range(2000):
        sizes.update((-(2 * sizes.log_step).exp()).exp())
    expected = torch.full((2,), math.sqrt(-math.log(target)), dtype=torch.float64)
    torch.testing.assert_close(sizes.log_average.exp(), expected, rtol=0.05, atol=0)


def test_chains_do_not_depend_on_one_another_or_on_their_order() -> None:
    """A chain alone is bit for bit that chain in a stack; permuted chains have permuted results."""
    initial = starts(4, 2, seed=5)
    given: dict[str, Any] = {"warmup": 40, "draws": 20, "seed": 5}
    for kernel in KERNELS:
        together = sample_density(banana, initial, kernel=kernel, **given)
        alone = sample_density(banana, initial[2:3], kernel=kernel, chains=[2], **given)
        assert torch.equal(alone.draws[0], together.draws[2])
        assert torch.equal(alone.step_size[0], together.step_size[2])
        order = [3, 1, 0, 2]
        permuted = sample_density(banana, initial[order], kernel=kernel, chains=order, **given)
        for name in DensityDraws.__dataclass_fields__:
            assert torch.equal(getattr(permuted, name), getattr(together, name)[order]), name
        assert not torch.equal(together.draws[0], together.draws[1])


def test_a_funnel_diverges_and_says_so() -> None:
    """Neal's funnel has a neck that no step size suits: chains diverge, and those of a normal law do not."""
    run = sample_density(funnel, starts(8, 10, seed=6), warmup=40, draws=30, max_depth=6, seed=6)
    assert int(run.divergences.sum()) > 0
    plain = sample_density(gaussian(torch.ones(10).double()), starts(8, 10, seed=6), warmup=40, draws=30, seed=6)
    assert int(plain.divergences.sum()) == 0


def test_short_trajectories_are_reported() -> None:
    run = sample_density(gaussian(torch.ones(2).double()), starts(3, 2), warmup=0, draws=20, max_depth=1)
    assert bool((run.at_limit > 0).all())
    assert bool((run.gradients <= 20).all())


def test_logistic_regression_agrees_with_random_walk_metropolis() -> None:
    """The posterior means and variances of 60 chains of each kind agree within 4.9 standard errors of their difference:
    a false alarm in 10⁵ seeds for each of 6 figures."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    labels = (inputs @ torch.tensor([1.0, -1.0, 0.5]).double() > 0.3 * inputs[:, 1]).double()
    target = LogisticRegressionSum(inputs, labels, prior_variance=4.0)

    def potential(x: Tensor) -> tuple[Tensor, Tensor]:
        return target.energy(x), target.gradient(x)

    ours = sample_density(potential, starts(60, 3), warmup=60, draws=60, seed=7)
    walk = random_walk_metropolis(lambda x: -target.energy(x), starts(60, 3, 1), 1500, burn_in=500, keep_every=10)
    theirs = walk.draws.transpose(0, 1)
    center = theirs.mean((0, 1))
    one, other = (torch.cat([d.mean(1), (d - center).square().mean(1)], 1) for d in (ours.draws, theirs))
    error = (one.var(0) / 60 + other.var(0) / 60).sqrt()
    assert bool(((one.mean(0) - other.mean(0)).abs() < 4.9 * error).all())


def test_step_sizes_follow_dual_averaging() -> None:
    """Against the recursion written out for one chain; a chain whose acceptance is the target keeps log(10·ε_0)."""
    sizes = StepSizes(torch.tensor([0.1, 0.2], dtype=torch.float64), 0.8)
    shortfall, average = 0.0, math.log(0.1)
    for t, acceptance in enumerate((0.3, 0.9, 0.6), start=1):
        sizes.update(torch.tensor([acceptance, 0.8], dtype=torch.float64))
        shortfall = (1 - 1 / (t + 10)) * shortfall + (0.8 - acceptance) / (t + 10)
        log_step = math.log(1.0) - math.sqrt(t) / 0.05 * shortfall
        average = t**-0.75 * log_step + (1 - t**-0.75) * average
        assert float(sizes.log_step[0]) == pytest.approx(log_step)
        assert float(sizes.log_average[0]) == pytest.approx(average)
        assert float(sizes.log_step[1].exp()) == pytest.approx(2.0)


def test_variances_are_those_of_a_window() -> None:
    places = starts(30, 6).reshape(30, 2, 3) * 3 + 100
    found = Variances(places[0])
    for place in places:
        found.add(place)
    torch.testing.assert_close(found.take(), places.var(0) * 30 / 35 + 1e-3 * 5 / 35)
    assert found.count == 0


@pytest.mark.parametrize("warmup", [0, 5, 20, 100, 149, 150, 151, 400, 1000])
def test_windows_fill_the_warm_up(warmup: int) -> None:
    begin, ends = windows(warmup)
    assert ends == sorted(set(ends))
    assert all(begin < end <= warmup for end in ends)
    assert (len(ends) > 0) == (warmup >= 20)
    lengths = [b - a for a, b in zip([begin, *ends], ends, strict=False)]
    assert lengths == sorted(lengths)


def bad(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(1).double() * math.nan, x


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "mala"}, "kernel must be 'nuts' or 'hmc', got 'mala'"),
        ({"draws": 0}, "draws must be at least 1, got 0"),
        ({"target_acceptance": 1.0}, r"target_acceptance must be in \(0, 1\), got 1.0"),
        ({"max_depth": 30}, "max_depth must be at most 20, a million gradients, got 30"),
        ({"length": 0.0}, "length must be positive, got 0.0"),
        ({"jitter": 2.0}, r"jitter must be in \[0, 1\], got 2.0"),
        ({"draws": 3, "every_n_draws": 4}, "draws=3 leaves no draw with every_n_draws=4: raise draws"),
        ({"potential": bad}, "the energy of chain 0 at its start is nan, or its gradient is not finite"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    potential: Potential = options.pop("potential", banana)
    with pytest.raises(ValueError, match=message):
        sample_density(potential, starts(2, 2), **options)
