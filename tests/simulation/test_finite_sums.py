"""Sums over data: closed gradients against autograd, batches against the whole, moments against the truth."""

import math

import pytest
import torch
from torch import Tensor

from lightning_sgmcmc.simulation import finite_sums
from lightning_sgmcmc.simulation.finite_sums import (
    FiniteSum,
    GaussianSum,
    LogisticRegressionSum,
    NormalModelSum,
    batch_moments,
)


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SUMS = {
    "gaussian": GaussianSum(draws(7, 3)),
    "logistic": LogisticRegressionSum(draws(7, 3), (draws(7, seed=1) > 0).double(), 2.5),
    "normal": NormalModelSum(draws(7).exp()),
}


@pytest.fixture(params=SUMS)
def target(request: pytest.FixtureRequest) -> FiniteSum:
    return SUMS[request.param]


def test_gradients_are_those_of_the_energy(target: FiniteSum) -> None:
    x = draws(5, target.dimension, seed=2).requires_grad_()
    (expected,) = torch.autograd.grad(target.energy(x).sum(), x)
    torch.testing.assert_close(target.gradient(x.detach()), expected)


def test_energies_are_sums_over_data() -> None:
    """Differences of U against the formulas written out, datum by datum."""
    x, y = draws(2, 3, seed=2), draws(2, 2, seed=2)
    gaussian, logistic, normal = SUMS["gaussian"], SUMS["logistic"], SUMS["normal"]
    assert isinstance(gaussian, GaussianSum)
    assert isinstance(logistic, LogisticRegressionSum)
    expected = torch.stack([sum(0.5 * (p - c).square().sum() for c in gaussian.centres) for p in x])  # type: ignore[misc]
    torch.testing.assert_close(gaussian.energy(x), expected)
    chances = (x @ logistic.inputs.T).sigmoid()
    of_labels = torch.where(logistic.labels == 1, chances, 1 - chances)
    torch.testing.assert_close(logistic.energy(x), -of_labels.log().sum(1) + x.square().sum(1) / 5)
    values = draws(7).exp()
    law = torch.distributions.Normal(y[:, :1], y[:, 1:].exp())
    constant = 7 * 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(normal.energy(y), -law.log_prob(values).sum(1) - constant)


@pytest.mark.parametrize("size", [1, 3])
def test_batches_add_up_to_the_whole(target: FiniteSum, size: int) -> None:
    """Over all batches of `size` that begin anywhere on the circle of data, the mean gradient is that of all data."""
    x = draws(5, target.dimension, seed=2)
    circle = (torch.arange(7)[:, None] + torch.arange(size)) % 7
    gradients = target.batch_gradients(x, circle.expand(5, -1, -1))
    assert gradients.shape == (5, 7, target.dimension)
    torch.testing.assert_close(gradients.mean(1), target.gradient(x))


def test_a_batch_counts_its_own_data(target: FiniteSum) -> None:
    """A batch of three is the mean of its three data, also where one comes twice, and each chain has its own."""
    x = draws(2, target.dimension, seed=3)
    indices = torch.tensor([[[0, 4, 4]], [[6, 1, 2]]])
    single = target.batch_gradients(x, indices.transpose(1, 2))
    torch.testing.assert_close(target.batch_gradients(x, indices)[:, 0], single.mean(1))
    assert not torch.allclose(single[:, 0], single[:, 2])


def test_chunks_change_nothing(target: FiniteSum, monkeypatch: pytest.MonkeyPatch) -> None:
    x, indices = draws(9, target.dimension), torch.arange(54).view(9, 2, 3) % 7

    def results() -> list[Tensor]:
        moments = batch_moments(target, x, 2)
        return [target.batch_gradients(x, indices), target.gradient(x), target.energy(x), *moments]

    whole = results()
    monkeypatch.setattr(finite_sums, "CHUNK", 16)
    for one, other in zip(whole, results(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("size", [1, 2])
def test_moments_are_those_of_all_batches(target: FiniteSum, size: int) -> None:
    """Against the enumeration of all 7^b batches with replacement."""
    x = draws(4, target.dimension, seed=2)
    batches = torch.cartesian_prod(*[torch.arange(7)] * size).view(-1, size)
    gradients = target.batch_gradients(x, batches.expand(4, -1, -1))
    moments = batch_moments(target, x, size)
    torch.testing.assert_close(moments.first, gradients.mean(1))
    torch.testing.assert_close(moments.second, gradients.transpose(1, 2) @ gradients / len(batches))
    diagonal = batch_moments(target, x, size, matrix=False)
    torch.testing.assert_close(diagonal.second, moments.second.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("name", ["gaussian", "normal"])
def test_exact_moments_against_quadrature(name: str) -> None:
    target = GaussianSum(draws(7, 2)) if name == "gaussian" else NormalModelSum(draws(30).exp())
    assert isinstance(target, GaussianSum | NormalModelSum)
    scale = target.covariance.diagonal().sqrt()
    axis = torch.linspace(-12, 12, 801, dtype=torch.float64)
    grid = target.mean + torch.cartesian_prod(axis, axis) * scale
    weights = (-target.energy(grid)).softmax(0)
    mean = weights @ grid
    covariance = (weights[:, None] * (grid - mean)).T @ (grid - mean)
    torch.testing.assert_close(mean, target.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(covariance, target.covariance, rtol=1e-5, atol=1e-8)


def test_data_move_with_the_sum(target: FiniteSum) -> None:
    single = target.to(dtype=torch.float32)
    x = draws(3, target.dimension).float()
    assert single.gradient(x).dtype == torch.float32
    assert single.batch_gradients(x, torch.zeros(3, 1, 2, dtype=torch.int64)).dtype == torch.float32
    assert target.gradient(x.double()).dtype == torch.float64


def test_bad_data_are_refused() -> None:
    with pytest.raises(ValueError, match="centres"):
        GaussianSum(torch.zeros(3))
    with pytest.raises(ValueError, match="labels"):
        LogisticRegressionSum(torch.zeros(3, 2), torch.tensor([0, 1, 2]), 1.0)
    with pytest.raises(ValueError, match="prior_variance"):
        LogisticRegressionSum(torch.zeros(3, 2), torch.zeros(3), 0.0)
    with pytest.raises(ValueError, match="equal"):
        NormalModelSum(torch.ones(9))
    with pytest.raises(ValueError, match="finite"):
        NormalModelSum(torch.tensor([1.0, math.nan, 2.0, 3.0]))
