"""Priors against torch's distributions."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Laplace, Normal, StudentT

from lightning_sgmcmc import GaussianPrior, LaplacePrior, StudentTPrior

SCALES = {"*.bias": 2.0, "a.*": 0.5, "*": 1.5}


def parameters() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (2, 3), "c": ()}
    return {name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}


@pytest.mark.parametrize("scale", [0.7, SCALES])
@pytest.mark.parametrize(
    ("prior", "distribution"),
    [
        (GaussianPrior, lambda s: Normal(0.0, s)),
        (LaplacePrior, lambda s: Laplace(0.0, s)),
        (lambda scale: StudentTPrior(4.0, scale), lambda s: StudentT(4.0, 0.0, s)),
    ],
)
def test_value_and_gradient(prior: Any, distribution: Any, scale: Any) -> None:
    found, expected = parameters(), parameters()
    scales = (
        {"a.weight": 0.5, "a.bias": 2.0, "b.weight": 1.5, "c": 1.5}
        if isinstance(scale, dict)
        else dict.fromkeys(found, scale)
    )
    density = prior(scale).log_prob(found)
    reference = sum(
        distribution(torch.tensor(scales[n], dtype=torch.float64)).log_prob(p).sum() for n, p in expected.items()
    )
    assert density.shape == ()
    assert density.item() == pytest.approx(reference.item(), rel=1e-12)  # type: ignore[union-attr]
    (3 * density).backward()
    (3 * reference).backward()  # type: ignore[union-attr]
    for name, p in found.items():
        torch.testing.assert_close(p.grad, expected[name].grad, rtol=1e-12, atol=1e-14)


def test_the_same_prior_serves_several_networks() -> None:
    prior = GaussianPrior(SCALES)
    values = parameters()
    first = prior.log_prob(values).item()
    other = prior.log_prob({"a.bias": values["a.bias"]}).item()
    assert other == pytest.approx(Normal(0.0, 2.0).log_prob(values["a.bias"]).sum().item())
    assert prior.log_prob(values).item() == first


@pytest.mark.parametrize("build", [GaussianPrior, LaplacePrior, lambda s: StudentTPrior(3.0, s)])
def test_mistakes_say_what_is_wrong(build: Any) -> None:
    for wrong in (0.0, -1.0, float("nan"), {"*": -2.0}):
        with pytest.raises(ValueError, match="must be a positive number, got"):
            build(wrong)
    with pytest.raises(ValueError, match="no pattern for the parameter 'c'"):
        build({"*.weight": 1.0, "*.bias": 1.0}).log_prob(parameters())
    with pytest.raises(ValueError, match="df must be a positive number"):
        StudentTPrior(df=0.0)
