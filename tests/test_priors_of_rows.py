"""Priors as functions of the chains' rows: the same density and gradient as tensor by tensor."""

import pytest
import torch
from torch import Tensor

from lightning_sgmcmc.priors import (
    FlatPrior,
    GaussianPrior,
    HierarchicalPrior,
    LaplacePrior,
    Prior,
    StudentTPrior,
)

CHAINS = 3
SHAPES = {"net.0.weight": (4, 5), "net.0.bias": (4,), "net.2.weight": (2, 4), "log_noise": ()}
CENTER = {name: torch.ones(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
BY_PATTERN = {"*.bias": 2.0, "*": 0.3}
PRIORS = [
    GaussianPrior(),
    GaussianPrior({"*.bias": 2.0, "*": "fan_in"}),
    GaussianPrior(0.5, center=CENTER),
    GaussianPrior(BY_PATTERN, center=CENTER, centered=["net.0.*"]),
    GaussianPrior(BY_PATTERN, center="start", centered=["*.weight"]),
    LaplacePrior(0.5),
    LaplacePrior(BY_PATTERN),
    StudentTPrior(3.0, BY_PATTERN),
    FlatPrior(),
    HierarchicalPrior(),
    HierarchicalPrior("layer", std=BY_PATTERN),
    HierarchicalPrior("all", center="start"),
]


def chains_of(prior: Prior) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: torch.randn(CHAINS, *shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in SHAPES.items()
    }
    first = {name: tensor[0] for name, tensor in parameters.items()}
    state = {
        f"prior_state.{name}": 0.5 + torch.rand(CHAINS, *tensor.shape, generator=generator, dtype=torch.float64)
        for name, tensor in prior.initial_state(first).items()
    }
    return parameters, state


@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_density_and_gradient(prior: Prior) -> None:
    parameters, state = chains_of(prior)
    density = prior.of_rows(parameters | state)
    assert density is not None
    rows = torch.cat([tensor.reshape(CHAINS, -1) for tensor in parameters.values()], 1)
    expected, found = prior.log_prob_of_chains(parameters | state), density(rows, state)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if expected.requires_grad:
        tensors = list(parameters.values())
        for a, b in zip(
            torch.autograd.grad(found.sum(), tensors), torch.autograd.grad(expected.sum(), tensors), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_prior_of_ones_own_has_no_density_of_rows() -> None:
    class Own(Prior):
        def log_prob(self, parameters: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return torch.stack([-tensor.cosh().sum() for tensor in parameters.values()]).sum()

    parameters, _ = chains_of(Own())
    assert Own().of_rows(parameters) is None
