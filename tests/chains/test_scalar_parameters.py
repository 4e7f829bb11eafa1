"""Parameters without axes, alone and beside others: each chain has the energies and gradients that it has alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    BayesianModule,
    Bernoulli,
    Categorical,
    FlatPrior,
    Gaussian,
    GaussianPrior,
    LaplacePrior,
    StudentTPrior,
)
from lightning_sgmcmc.callbacks import ChainHealth, SamplingSchedule
from lightning_sgmcmc.chains.stacked import clip_each_chain
from lightning_sgmcmc.priors import Prior
from tests.support.recorders import Each
from tests.support.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:lr=0")

CHAINS, NUM_DATA = 3, 12


class Cauchy(Prior):
    """A prior of the user's own, which has no method for several chains."""

    def log_prob(self, parameters: Any) -> Tensor:
        return torch.stack([-torch.log1p(p.square()).sum() for p in parameters.values()]).sum()


PRIORS = {
    "Gaussian": GaussianPrior(0.7),
    "Gaussian, by name": GaussianPrior({"scale": 0.3, "*.bias": 2.0, "*": 1.0}),
    "Laplace": LaplacePrior({"scale": 0.3, "*": 1.0}),
    "Student t": StudentTPrior(3.0, 0.5),
    "flat": FlatPrior(),
    "own": Cauchy(),
}
LIKELIHOODS: dict[str, Any] = {
    "Categorical": (Categorical, lambda x: (x[:, 0] > 0).long()),
    "Bernoulli": (Bernoulli, lambda x: (x[:, 0] > 0).float()),
    "Gaussian": (Gaussian, lambda x: x @ torch.ones(4, 2)),
    "Gaussian, learned": (lambda: Gaussian(0.5, learned=True), lambda x: x @ torch.ones(4, 2)),
    "Gaussian, one each": (lambda: Gaussian([0.5, 0.7], learned=True), lambda x: x @ torch.ones(4, 2)),
}


class Scaled(BayesianModule):
    """A linear network times a scalar parameter, which comes first."""

    def __init__(self, num_chains: int = 1, outputs: int = 2, **options: Any) -> None:
        super().__init__(num_chains=num_chains, num_data=NUM_DATA, seed=2, **options)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.layer = nn.Linear(4, outputs)

    def initialise_chain(self, chain: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


def inputs() -> Tensor:
    return torch.randn(NUM_DATA, 4, generator=torch.Generator().manual_seed(1))


def first_step(likelihood: str, prior: str, **options: Any) -> tuple[Scaled, dict[str, Tensor], Tensor, dict[str, Any]]:
    """Return a module after steps at lr = 0, its chains' tensors, their energies and the gradients of Ũ/N."""
    make, target = LIKELIHOODS[likelihood]
    outputs = 1 if likelihood == "Bernoulli" else 2
    module = Scaled(CHAINS, outputs, likelihood=make(), prior=PRIORS[prior], lr=0.0, shared_batch=True, **options)
    seen = Each(
        "on_before_optimizer_step",
        lambda trainer, module, optimizer: (
            module.chains.observed.energy,
            {name: p.grad.clone() for name, p in module.named_parameters()},
        ),
    )
    trainer = quiet_trainer(max_steps=4, callbacks=[SamplingSchedule(every_n_steps=1), ChainHealth(1), seen])
    x = inputs()
    trainer.fit(module, DataLoader(TensorDataset(x, target(x)), NUM_DATA))
    energy, gradients = seen.seen[0]
    return module, {name: p.detach() for name, p in module.named_parameters()}, energy, gradients


def check_against_single_chains(likelihood: str, prior: str, **options: Any) -> None:
    _, tensors, energy, gradients = first_step(likelihood, prior, **options)
    make, target = LIKELIHOODS[likelihood]
    x = inputs()
    for chain in range(CHAINS):
        alone = Scaled(1, 1 if likelihood == "Bernoulli" else 2, likelihood=make(), prior=PRIORS[prior])
        alone.load_state_dict({name: tensor[chain] for name, tensor in tensors.items()})
        potential = -alone.log_likelihood((x, target(x))).sum() - alone.log_prior()
        potential.backward()
        assert energy[chain].item() == pytest.approx(potential.item(), rel=1e-5)
        for name, parameter in alone.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(gradients[name][chain] * NUM_DATA, parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("execution", ["loop", "vmap"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("prior", PRIORS)
def test_each_chain_has_the_energy_and_gradient_of_one_alone(prior: str, likelihood: str, execution: str) -> None:
    check_against_single_chains(likelihood, prior, chain_execution=execution)


@pytest.mark.parametrize(
    ("prior", "likelihood"),
    [
        pytest.param(
            prior,
            likelihood,
            marks=() if (prior, likelihood) == ("Gaussian", "Gaussian, learned") else pytest.mark.slow,
        )
        for prior in PRIORS
        for likelihood in LIKELIHOODS
    ],
)
def test_compiled_chains_too(prior: str, likelihood: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        compiler = torch.compile
        patch.setattr(torch, "compile", lambda function, **options: compiler(function, backend="eager"))
        check_against_single_chains(likelihood, prior, chain_execution="vmap", compile=True)


def test_clipping_with_parameters_without_axes() -> None:
    """By the norm of each chain's whole gradient."""
    gradients = [torch.tensor([3.0, 0.1, 0.0]), torch.tensor([[4.0, 0.0], [0.0, 0.1], [0.0, 0.0]])]
    clip_each_chain(gradients, 1.0)
    torch.testing.assert_close(gradients[0], torch.tensor([0.6, 0.1, 0.0]))
    torch.testing.assert_close(gradients[1], torch.tensor([[0.8, 0.0], [0.0, 0.1], [0.0, 0.0]]))
