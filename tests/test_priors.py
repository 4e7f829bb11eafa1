"""Log densities of the priors against torch.distributions."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions

from lightning_sgmcmc import GaussianPrior, LaplacePrior, StudentTPrior

SCALES = {"*.bias": 10.0, "net.0.*": 0.5, "*": 1.3}
OF_NAME = {"net.0.weight": 0.5, "net.0.bias": 10.0, "net.2.weight": 1.3, "net.2.bias": 10.0, "log_std": 1.3}
SHAPES = {"net.0.weight": (4, 3), "net.0.bias": (4,), "net.2.weight": (2, 4), "net.2.bias": (2,), "log_std": ()}


def parameters(dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
        for name, shape in SHAPES.items()
    }


def reference(density: Callable[[float], Any], scales: dict[str, float], values: dict[str, Tensor]) -> Tensor:
    return torch.stack([density(scales[name]).log_prob(value).sum() for name, value in values.items()]).sum()


def normal(scale: float) -> Any:
    return distributions.Normal(torch.tensor(0.0, dtype=torch.float64), scale)


def laplace(scale: float) -> Any:
    return distributions.Laplace(torch.tensor(0.0, dtype=torch.float64), scale)


def student_t(scale: float) -> Any:
    return distributions.StudentT(torch.tensor(2.5, dtype=torch.float64), 0.0, scale)


def student_t_prior(scale: Any) -> StudentTPrior:
    return StudentTPrior(df=2.5, scale=scale)


FAMILIES = [
    pytest.param(GaussianPrior, normal, id="Gaussian"),
    pytest.param(LaplacePrior, laplace, id="Laplace"),
    pytest.param(student_t_prior, student_t, id="StudentT"),
]


@pytest.mark.parametrize("upstream", [1.0, -0.02])
@pytest.mark.parametrize("scale", [0.7, SCALES], ids=["one-scale", "groups"])
@pytest.mark.parametrize(("make", "density"), FAMILIES)
def test_density_and_gradient(make: Any, density: Any, scale: Any, upstream: float) -> None:
    scales = OF_NAME if scale is SCALES else dict.fromkeys(SHAPES, 0.7)
    values = parameters()
    log_prob = make(scale).log_prob(values)
    expected = reference(density, scales, values)
    assert log_prob.shape == ()
    torch.testing.assert_close(log_prob, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(upstream * log_prob, list(values.values()))
    wanted = torch.autograd.grad(upstream * expected, list(values.values()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def gaussian_of(scale: Any) -> Callable[..., Tensor]:
    def log_prob(*tensors: Tensor) -> Tensor:
        return GaussianPrior(scale).log_prob(dict(zip(SHAPES, tensors, strict=True)))

    return log_prob


@pytest.mark.parametrize("scale", [0.7, SCALES], ids=["one-scale", "groups"])
def test_gaussian_gradcheck(scale: Any) -> None:
    """The hand-written backward by finite differences."""
    assert torch.autograd.gradcheck(gaussian_of(scale), tuple(parameters().values()))


@pytest.mark.parametrize("scale", [0.7, SCALES])
def test_gaussian_gradgradcheck(scale: Any) -> None:
    """Second derivatives, for Hessians and Fisher products of the potential."""
    assert torch.autograd.gradgradcheck(gaussian_of(scale), tuple(parameters().values()))


def test_gaussian_at_zero_has_a_gradient() -> None:
    """... where the gradient of a norm would be NaN."""
    value = torch.zeros(5, requires_grad=True)
    GaussianPrior().log_prob({"w": value}).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(value.grad, torch.zeros(5))  # type: ignore[arg-type]


@pytest.mark.parametrize(("make", "density"), FAMILIES)
def test_float32_is_near_float64(make: Any, density: Any) -> None:
    values = parameters(torch.float32)
    found = make(SCALES).log_prob(values)
    assert found.dtype == torch.float32
    expected = reference(density, OF_NAME, {name: value.double() for name, value in values.items()})
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_gaussian_is_weight_decay() -> None:
    """The gradient of -log p/N is θ/(N·std²), SGD's weight decay."""
    value = torch.randn(6, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(-GaussianPrior(0.3).log_prob({"w": value}) / 40, value)
    torch.testing.assert_close(gradient, value.detach() / (40 * 0.3**2))


@pytest.mark.parametrize(("make", "density"), FAMILIES)
def test_the_first_pattern_that_matches_wins(make: Any, density: Any) -> None:
    one, two = torch.tensor([1.5], dtype=torch.float64), torch.tensor([-0.5], dtype=torch.float64)
    values = {"a.bias": one, "a.weight": two}
    bias_first = make({"*.bias": 3.0, "a.*": 0.5}).log_prob(values)
    all_first = make({"a.*": 0.5, "*.bias": 3.0}).log_prob(values)
    expected = density(3.0).log_prob(one) + density(0.5).log_prob(two)
    torch.testing.assert_close(bias_first, expected.squeeze(), rtol=1e-12, atol=0)
    torch.testing.assert_close(all_first, density(0.5).log_prob(torch.cat([one, two])).sum(), rtol=1e-12, atol=0)


def test_patterns_tell_case_and_are_whole_names() -> None:
    prior = GaussianPrior({"Net.*": 2.0, "bias": 3.0, "net.[01].bias": 4.0, "*": 5.0})
    names = ["Net.w", "net.w", "bias", "x.bias", "net.1.bias", "net.2.bias"]
    assert [prior.scale_of(name) for name in names] == [2.0, 5.0, 3.0, 5.0, 4.0, 5.0]


@pytest.mark.parametrize(("make", "density"), FAMILIES)
def test_a_parameter_without_pattern_is_refused(make: Any, density: Any) -> None:
    prior = make({"*.bias": 1.0})
    prior.log_prob({"a.bias": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"prior's (std|scale) has no pattern for the parameter 'a\.weight': add one"):
        prior.log_prob({"a.bias": torch.zeros(2), "a.weight": torch.zeros(2)})


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, {"*": 1.0, "x": -2.0}])
@pytest.mark.parametrize(("make", "density"), FAMILIES)
def test_bad_scales_are_refused(make: Any, density: Any, scale: Any) -> None:
    value = scale["x"] if isinstance(scale, dict) else scale
    with pytest.raises(ValueError, match=rf"prior's (std|scale) must be a positive number, got {value}"):
        make(scale)


@pytest.mark.parametrize("df", [0.0, -1.0, math.nan, math.inf])
def test_bad_degrees_of_freedom_are_refused(df: float) -> None:
    with pytest.raises(ValueError, match=r"prior's df must be in \(0, inf\), got"):
        StudentTPrior(df=df)


@pytest.mark.parametrize(
    ("make", "density"),
    FAMILIES,
)
def test_one_prior_for_two_networks(make: Any, density: Any) -> None:
    """Networks of the same names and other sizes, one after the other."""
    prior = make(0.7)
    for size in (3, 30, 5):
        value = torch.full((size,), 0.2, dtype=torch.float64)
        expected = density(0.7).log_prob(value).sum()
        torch.testing.assert_close(prior.log_prob({"w": value}), expected, rtol=1e-12, atol=0)


def test_repr_names_the_scale() -> None:
    assert repr(GaussianPrior(2.0)) == "GaussianPrior(std=2.0)"
    assert repr(LaplacePrior({"a": 1.0, "*": 2})) == "LaplacePrior(scale={'a': 1.0, '*': 2.0})"
