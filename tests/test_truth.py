"""Fits against full-gradient HMC, which shares no code with the library; HMC against a closed form."""

import math

import numpy as np
import pytest
import torch

from lightning_sgmcmc import SGHMC
from tests.benchmarks.truth import GAUSSIAN, PROBLEMS, Setting, compared, module_of, reference, run
from tests.support.hmc import Target, between_chains, distance, hmc, wasserstein


def test_the_distance_is_a_shift_for_shifted_laws_and_falls_with_the_number_of_draws() -> None:
    """The seed is fixed; the mean of 200 columns has a relative standard error of about 4 %, the limit is three."""
    generator = np.random.default_rng(0)
    normal = generator.normal(size=(4000, 3))
    assert np.allclose(wasserstein(normal, normal + 0.7), 0.7)
    assert distance(normal, normal + 0.7, np.full(3, 2.0)) == pytest.approx(0.35)
    few, many = generator.normal(size=(100, 200)), generator.normal(size=(20_000, 200))
    assert distance(few, many, np.ones(200)) == pytest.approx(GAUSSIAN / math.sqrt(100), rel=0.12)
    assert between_chains([few, few], np.ones(200)) == 0


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_the_reference_has_the_potential_and_gradient_of_the_library(name: str) -> None:
    problem = PROBLEMS[name]
    target = problem.target
    module = module_of(problem, sampler=SGHMC, lr=1e-3).double()
    x, y = torch.tensor(target.x), torch.tensor(target.y)
    differences = []
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_()
        energy = module.potential_energy((x, y))
        slopes = torch.autograd.grad(energy, list(module.parameters()))
        state = np.zeros((1, target.dimension))  # the scales of a prior before a fit are log v = 0
        flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()
        state[0, : len(flat)] = flat
        theirs, gradient = target.potential(state)
        expected = torch.cat([slope.reshape(-1) for slope in slopes]).numpy()
        assert np.allclose(gradient[0, : len(flat)], expected, rtol=1e-5, atol=1e-6)  # σ is kept in float32
        differences.append(float(energy.detach()) - float(theirs[0]))
        if target.nu is not None:  # the scales' own gradient, by differences
            shift = 1e-5 * np.eye(target.dimension)[len(flat) :]
            slope = (target.potential(state + shift)[0] - target.potential(state - shift)[0]) / 2e-5
            assert np.allclose(gradient[0, len(flat) :], slope, rtol=1e-4)
    assert differences[0] == pytest.approx(differences[1], abs=1e-2)  # the constant that the reference leaves out


def test_the_reference_samples_a_gaussian_posterior() -> None:
    """Four chains of 300 draws; the limits are above four standard errors."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(20, 2))
    y = x @ np.array([[1.0], [-2.0]]) + 0.5 * generator.normal(size=(20, 1))
    draws, accepted = hmc(Target((2, 1), "gaussian", x, y, 1.0, 0.5), 4, 100, 300)
    inputs = np.concatenate([x, np.ones((20, 1))], 1)
    covariance = np.linalg.inv(inputs.T @ inputs / 0.25 + np.eye(3))
    mean, std = covariance @ inputs.T @ y[:, 0] / 0.25, np.sqrt(np.diag(covariance))
    found = draws.reshape(-1, 3)
    assert accepted > 0.6
    assert np.all(np.abs(found.mean(0) - mean) < 0.25 * std)
    assert np.allclose(found.std(0), std, rtol=0.15)


@pytest.mark.slow
def test_a_planned_fit_of_a_small_network_is_as_near_to_hmc_as_hmc_is_to_itself() -> None:
    """Four chains above the planned length; the limit of 1.5 is that of the benchmark."""
    setting = Setting("smallest", steps=9_000, lr=0.003, friction=2.0)
    draws, facts = run(setting)
    row = compared(setting, draws, facts, reference(PROBLEMS["smallest"], 4, 150, 300))
    assert row["relaxation_times"] >= 3
    assert row["ratio"] < 1.5
