"""The analytic targets: gradients against autograd, modes, and moments against closed forms and the literature."""

import math

import pytest
import torch

from lightning_sgmcmc.simulation.targets import GaussianMixture, Target
from tests.support.problems import TARGETS


@pytest.fixture(params=TARGETS.values(), ids=TARGETS.keys())
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.param
    return found


def test_gradients_are_those_of_the_energies(target: Target) -> None:
    generator = torch.Generator().manual_seed(0)
    x = 24 * torch.rand(500, target.dimension, generator=generator, dtype=torch.float64) - 12
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(target.energy(x).sum(), x)
    torch.testing.assert_close(target.gradient(x.detach()), gradient, rtol=1e-10, atol=1e-10)


def test_far_away_nothing_is_nan(target: Target) -> None:
    far = torch.full((3, 4, target.dimension), 300.0)
    assert target.energy(far).shape == (3, 4)
    assert target.energy(far).isfinite().all()
    assert target.gradient(far).isfinite().all()


def test_modes_are_minima_of_the_energy(target: Target) -> None:
    modes = target.modes
    assert target.gradient(modes).abs().max() < 1e-12
    for direction in torch.eye(target.dimension, dtype=torch.float64):
        for step in (0.01, -0.01):
            assert (target.energy(modes + step * direction) > target.energy(modes)).all()


def test_the_number_of_modes() -> None:
    assert [len(target.modes) for target in TARGETS.values()] == [2, 2, 25, 9, 25]


@pytest.mark.slow
def test_moments_of_mixtures_are_those_of_quadrature() -> None:
    for name in ("two modes", "asymmetric", "25 gaussians"):
        target = TARGETS[name]
        products = target.expectation(
            lambda x: torch.cat([torch.ones_like(x[:, :1]), x], 1)[:, :, None] * x[:, None, :]
        )
        first, second = products[0], products[1:]
        torch.testing.assert_close(target.mean, first, rtol=0, atol=1e-8)
        torch.testing.assert_close(target.covariance + torch.outer(target.mean, target.mean), second)
        assert target.log_normaliser() == pytest.approx(0, abs=1e-8)
    assert TARGETS["two modes"].mean.item() == pytest.approx(0)
    assert TARGETS["asymmetric"].mean.item() == pytest.approx(-1 + 20 / 6)


def test_known_figures_of_the_cosine_targets() -> None:
    nine, many = TARGETS["nine modes"], TARGETS["25 modes"]
    assert nine.energy(torch.zeros(2)).item() == pytest.approx(-20 / 3)
    assert many.energy(torch.zeros(2)).item() == pytest.approx(-4)
    # E‖x‖² of the toy in its box [-2.5, 2.5]², found from the authors' program's setting.
    inside = many.expectation(lambda x: (x.abs() <= 2.5).all(1).double())
    second = many.expectation(lambda x: (x.abs() <= 2.5).all(1).double() * x.square().sum(1))
    assert (second / inside).item() == pytest.approx(2.960, abs=0.002)


def test_bin_masses_of_a_single_gaussian() -> None:
    """U - U_min is exponential in the plane, so the masses have a closed form."""
    target = GaussianMixture([1.0], [[0.5, -1.0]], variance=0.7)
    lowest = math.log(2 * math.pi * 0.7)
    edges = lowest + torch.tensor([0.1, 0.5, 1.0, 3.0], dtype=torch.float64)
    survival = torch.cat([torch.ones(1), torch.exp(lowest - edges), torch.zeros(1)])
    torch.testing.assert_close(target.bin_masses(edges), (survival[:-1] - survival[1:]).double(), rtol=0, atol=1e-4)
    cold = torch.cat([torch.ones(1), torch.exp((lowest - edges) / 0.25), torch.zeros(1)])
    torch.testing.assert_close(target.bin_masses(edges, 0.25), (cold[:-1] - cold[1:]).double(), rtol=0, atol=1e-4)


def test_cell_masses_are_a_distribution(target: Target) -> None:
    masses = target.cell_masses(50)
    assert masses.sum().item() == pytest.approx(1)
    torch.testing.assert_close(masses @ target.cells(50), target.mean, rtol=0, atol=0.05)
    with pytest.raises(ValueError, match="must divide"):
        target.cell_masses(37)


def test_bad_mixtures_are_refused() -> None:
    with pytest.raises(ValueError, match="variance"):
        GaussianMixture([1.0], [[0.0]], 0.0)
    with pytest.raises(ValueError, match="means should have"):
        GaussianMixture([1.0, 1.0], [[0.0]])
    with pytest.raises(ValueError, match="weights must be positive"):
        GaussianMixture([1.0, -1.0], [[0.0], [1.0]])


MIXTURES = {"asymmetric": TARGETS["asymmetric"], "25 gaussians": TARGETS["25 gaussians"]}
"""One whose components are written out, and one whose components are computed at once."""


@pytest.mark.parametrize("target", MIXTURES.values(), ids=MIXTURES.keys())
def test_a_mixture_has_torchs_density_and_moves_with_its_tensors(target: GaussianMixture) -> None:
    parts = torch.distributions.Normal(target.means, math.sqrt(target.variance))
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(target.weights), torch.distributions.Independent(parts, 1)
    )
    x = torch.linspace(-30, 30, 1001).double()[:, None].expand(-1, target.dimension)
    torch.testing.assert_close(target.energy(x), -mixture.log_prob(x))
    single = target.to(dtype=torch.float32)
    assert single.means.dtype == torch.float32
    assert target.means.dtype == torch.float64
    torch.testing.assert_close(single.energy(x.float()), target.energy(x).float())


@pytest.mark.parametrize("target", MIXTURES.values(), ids=MIXTURES.keys())
def test_a_mixtures_numbers_do_not_depend_on_the_number_of_chains(target: GaussianMixture) -> None:
    x = 5 * torch.randn(37, target.dimension, generator=torch.Generator().manual_seed(0))
    single = target.to(dtype=torch.float32)
    for chains in (1, 2, 3, 7, 8, 9, 16, 36):
        assert torch.equal(single.energy(x[:chains]), single.energy(x)[:chains])
        assert torch.equal(single.gradient(x[:chains]), single.gradient(x)[:chains])
