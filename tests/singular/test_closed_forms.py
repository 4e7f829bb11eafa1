"""Learning coefficients in closed form: two sources agree, limits are known, and errors have remedies."""

import itertools

import pytest
import torch

from lightning_sgmcmc.singular import (
    deep_linear_learning_coefficient,
    reduced_rank_learning_coefficient,
    regular_learning_coefficient,
)


def test_reduced_rank_regression_is_a_deep_linear_network_of_two_layers() -> None:
    """The formula of 2005 has four cases by hand, that of 2024 a search among subsets of widths."""
    for widths in itertools.product(range(1, 7), repeat=3):
        for rank in range(min(widths) + 1):
            found = deep_linear_learning_coefficient(widths, rank)
            assert found == pytest.approx(reduced_rank_learning_coefficient(*widths, rank)), (widths, rank)


@pytest.mark.parametrize("widths", [(3, 4), (4, 6, 5), (3, 7, 7, 4)])
def test_a_network_of_full_rank_is_regular(widths: tuple[int, ...]) -> None:
    """λ = M·N/2: hidden layers that do not limit the product add directions in which nothing changes."""
    rank = min(widths[0], widths[-1])
    assert deep_linear_learning_coefficient(widths, rank).value == widths[0] * widths[-1] / 2


def test_a_product_of_numbers_has_half_and_the_multiplicity_of_its_factors() -> None:
    """w_L⋯w_1 = 0 with scalars is a normal crossing: λ = 1/2, m = L."""
    for layers in range(1, 6):
        assert deep_linear_learning_coefficient([1] * (layers + 1), 0) == pytest.approx((0.5, layers))


def test_a_gaussian_mean_of_a_quadratic() -> None:
    """Against draws of the localised law: 200,000 draws, a tolerance of four standard errors (1 in 16,000)."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    hessian, nbeta, gamma = root @ root.T, 50.0, 20.0
    factor = torch.linalg.cholesky(torch.linalg.inv(nbeta * hessian + gamma * torch.eye(4)))
    draws = torch.randn(200_000, 4, generator=generator, dtype=torch.float64) @ factor.T
    values = nbeta / 2 * ((draws @ hessian) * draws).sum(1)
    expected = regular_learning_coefficient(hessian, nbeta, gamma)
    assert abs(values.mean() - expected) < 4 * values.std() / len(values) ** 0.5
    assert regular_learning_coefficient(hessian, nbeta) == pytest.approx(2)
    assert regular_learning_coefficient(torch.diag(torch.tensor([1.0, 0.0])), nbeta) == 0.5


def test_refusals() -> None:
    with pytest.raises(ValueError, match="rank must be at most the least width 2, got 3"):
        deep_linear_learning_coefficient([4, 2, 5], 3)
    with pytest.raises(ValueError, match="at least two entries"):
        deep_linear_learning_coefficient([4], 2)
    with pytest.raises(ValueError, match="nbeta must be positive"):
        regular_learning_coefficient(torch.eye(2), 0.0)
