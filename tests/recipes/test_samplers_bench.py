"""The recipe `samplers_bench`: its truths, its noise, and a small run."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_sgmcmc.recipes import samplers_bench
from lightning_sgmcmc.recipes.samplers_bench import BATCHES, NOISES
from lightning_sgmcmc.recipes.samplers_bench.chains import DIVERGED, best_of, error_of, run, run_nuts
from lightning_sgmcmc.recipes.samplers_bench.methods import METHODS, NUTS, Settings
from lightning_sgmcmc.recipes.samplers_bench.problems import (
    DENSITIES,
    REGRESSIONS,
    Density,
    LogisticRegression,
    problem_of,
)
from lightning_sgmcmc.recipes.shared.logistic import full_gradient_reference
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings


def density(name: str, noise: str = "isotropic", level: float = 1.0) -> Density:
    made = problem_of(name, noise, level, 25)
    assert isinstance(made, Density)
    return made


@pytest.mark.parametrize("name", DENSITIES)
def test_the_moments_are_those_of_independent_draws(name: str) -> None:
    """Every mean within five standard errors of 200,000 draws (false alarms: 6e-7 for each of at most 40 means)."""
    made = density(name)
    values = made.observe(made.draw(200_000, torch.Generator().manual_seed(1))).double()
    assert ((values.mean(0) - made.mean) / made.std).abs().max() < 5 / math.sqrt(200_000)


@pytest.mark.parametrize("name", DENSITIES)
def test_the_gradient_is_that_of_the_density_which_is_drawn(name: str) -> None:
    """E[∇U] = 0 and E[x_i·∂_iU] = 1, by parts, within five standard errors of 200,000 draws."""
    made = density(name)
    x = made.draw(200_000, torch.Generator().manual_seed(2)).double()
    gradient = made.exact_gradient(x.float()).double()
    for values, expected in ((gradient, 0.0), (gradient * x, 1.0)):
        errors = (values.mean(0) - expected) / (values.std(0) / math.sqrt(len(x)))
        assert errors.abs().max() < 5


@pytest.mark.parametrize("name", [*DENSITIES, *REGRESSIONS])
def test_the_exact_gradient_is_that_of_the_energy_and_the_mean_of_the_noisy_ones(name: str) -> None:
    """The mean of 20,000 gradients within five standard errors (false alarms: 6e-7 for each of at most 20 means)."""
    made = problem_of(name, "isotropic", 1.0, 25)
    x = made.start(3, torch.Generator().manual_seed(6)).requires_grad_()
    (found,) = torch.autograd.grad(made.energy(x).sum(), x)
    exact = made.exact_gradient(x.detach())
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-2)
    same = x.detach()[:1].expand(20_000, -1)
    noisy = made.num_data * made.gradient(same, torch.Generator().manual_seed(7))
    assert ((noisy.mean(0) - exact[0]).abs() < 5 * noisy.std(0) / math.sqrt(len(noisy)) + 1e-2).all()


@pytest.mark.by_default("GGMC")
@pytest.mark.parametrize("method", ["GGMC", "AMAGOLD"])
def test_the_tested_trajectories_have_no_error_of_the_step_size(method: str) -> None:
    """At h² = 1 OBABO's variance of a unit Gaussian is 4/3, an error of 0.17; 128 chains' own is about 0.01."""

    class Unit(Density):
        dimension, stiffness = 2, 1.0
        mean, std = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 2**0.5, 2**0.5])

        def energy(self, x: Tensor) -> Tensor:
            return x.square().sum(-1) / 2

        def exact_gradient(self, x: Tensor) -> Tensor:
            return x

        def draw(self, count: int, generator: torch.Generator) -> Tensor:
            return torch.randn(count, self.dimension, generator=generator)

    settings = replace(read_settings(Settings, Options(Path(), Path())), gradients=1000, chains=128)
    quiet = Unit("isotropic", 0.0)
    assert run(quiet, "OBABO", 0.5, settings, 0).error > 0.13
    assert run(quiet, method, 0.5, settings, 0).error < 0.05
    # Noise of a fifth of the gradient: the test takes the noisy gradients as they are.
    assert run(Unit("isotropic", 0.2), method, 0.5, settings, 0).error < 0.05


def test_nuts_spends_the_data_of_the_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last iteration of a regression, of at most 15 gradients in such a budget, may exceed it."""
    made = problem_of("linear regression", BATCHES, 1.0, 25)
    assert made.full_cost == 20
    settings = replace(read_settings(Settings, Options(Path(), Path())), gradients=6000, chains=4)
    rows = []
    exact = made.exact_gradient

    def counted(x: Tensor) -> Tensor:
        rows.append(len(x))
        return exact(x)

    monkeypatch.setattr(made, "exact_gradient", counted)
    assert run_nuts(made, settings, 0).error < 0.2
    assert 300 <= sum(rows) / settings.chains < 300 + 31


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", DENSITIES)
def test_the_noise_has_no_mean_and_its_share_of_the_gradient(name: str, noise: str) -> None:
    """Its mean square is the gradient's over the target; distances beyond three are cut off, so it may be less."""
    made = density(name, noise)
    x = made.draw(20_000, torch.Generator().manual_seed(3))
    exact = made.exact_gradient(x)
    added = made.gradient(x, torch.Generator().manual_seed(4)) - exact
    share = float(added.square().mean() / exact.square().mean())
    assert 0.8 < share < 1.15
    assert (added.mean(0).abs() < 5 * added.std(0) / math.sqrt(len(x)) + 1e-3 * added.std()).all()


def test_the_logistic_moments_are_those_of_long_chains() -> None:
    """Chains with the full gradient, whose own error is about 0.01 standard deviations, half a per cent in variance."""
    made = LogisticRegression(25)
    draws = full_gradient_reference(made.posterior, 2000, seed=1, chains=64).draws
    errors = (made.observe(draws).mean(0) - made.mean) / made.std
    assert errors.abs().max() < 0.05


def test_exact_draws_have_an_error_of_their_number_and_diverging_chains_the_largest(tmp_path: Path) -> None:
    made = density("Gaussian")
    draws = made.observe(made.draw(100 * 16, torch.Generator().manual_seed(5))).view(100, 16, -1)
    assert error_of(draws, made) < 3 / math.sqrt(1600)
    settings = replace(read_settings(Settings, Options(tmp_path, tmp_path)), gradients=60, chains=2)
    assert run(density("banana"), "SGHMC", 4.0, settings, 0).error == DIVERGED


def test_the_ladder_is_descended_to_a_minimum() -> None:
    seen = []

    def error(factor: float) -> float:
        seen.append(factor)
        return abs(factor - 2.0)

    assert best_of((16.0, 8.0, 4.0, 2.0, 1.0), error) == 2.0
    assert len(seen) == len(set(seen)) == 4


def test_every_sampler_runs_on_a_density_and_a_regression(tmp_path: Path) -> None:
    settings = replace(
        read_settings(Settings, Options(tmp_path, tmp_path)), gradients=30, chains=2, factors=(0.01,), repeats=1
    )
    found = {}
    for name, noise in (("funnel", "correlated"), ("linear regression", samplers_bench.BATCHES)):
        of_methods = {
            method: samplers_bench.one(name, noise, method, 0, 1, settings, Options(tmp_path, tmp_path))
            for method in (*METHODS, NUTS)
        }
        found[name] = of_methods
        rows = samplers_bench.rows_of((name, noise), of_methods)
        assert {row.method.split(": ")[1] for row in rows} == {*METHODS, NUTS}
        assert all(math.isfinite(row.value) for row in rows)
    ratios = samplers_bench.summary("both", list(found.values()))
    assert [row.method for row in ratios] == [f"both: {method}" for method in (*METHODS, NUTS) if method != "SGHMC"]
    assert all(row.value > 0 for row in ratios)
