"""The prior of `bayesianize` where none is passed: around the trained weights, wide enough to learn."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, GaussianPrior, HierarchicalPrior, bayesianize
from lightning_sgmcmc.callbacks import AutoSampling, SampleCollector
from lightning_sgmcmc.priors.state import prior_state
from tests.support.trainers import quiet_trainer


class Network(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh())
        self.fc = nn.Linear(50, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.body(x))
        return out


def trained() -> Network:
    """A network that tells quadrants, with a new head."""
    torch.manual_seed(0)
    net, x = Network(), torch.rand(400, 2) * 2 - 1
    optimizer, y = torch.optim.Adam(net.parameters(), 0.01), (x[:, 0] > 0) + 2 * (x[:, 1] > 0)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    net.fc = nn.Linear(50, 2)
    return net


def loaders(classes: bool = True) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """New classes, inside and outside of a circle."""
    torch.manual_seed(1)
    x = torch.rand(300, 2) * 2 - 1
    distance = x.square().sum(1, keepdim=True)
    rows = TensorDataset(x, (distance[:, 0] > 0.6).long() if classes else distance)
    train, val = torch.utils.data.Subset(rows, range(200)), torch.utils.data.Subset(rows, range(200, 300))
    return DataLoader(train, 50, shuffle=True), DataLoader(val, 100)


def fit(module: BayesianModule, classes: bool = True) -> BayesianModule:
    callbacks = [AutoSampling(num_draws=10), SampleCollector(in_memory=True)]
    quiet_trainer(max_epochs=60, callbacks=callbacks).fit(module, *loaders(classes))
    return module


def nll(module: BayesianModule) -> float:
    (x, y), posterior = next(iter(loaders()[1])), module.posterior
    assert posterior is not None
    return -float(posterior.predict(x).probabilities[torch.arange(len(y)), y].log().mean())


def test_all_weights_learn_new_classes_with_the_defaults() -> None:
    """Around the start with a tenth of 1/√fan_in, the former default, the new head stays near where it was drawn."""
    start = trained()
    weights = {f"net.{name}": tensor.clone() for name, tensor in start.named_parameters()}
    module = fit(bayesianize(start, "all", Categorical(), seed=0))
    former = GaussianPrior("fan_in", gain=0.1, center="start")
    assert nll(module) < 0.7 * nll(fit(bayesianize(trained(), "all", Categorical(), prior=former, seed=0)))
    prior = module.prior
    assert isinstance(prior, HierarchicalPrior)
    assert prior.given.center == "start"
    state = prior_state(module)
    for name, weight in weights.items():
        torch.testing.assert_close(state[f"prior_state.center.{name}"].squeeze(0), weight)


@pytest.mark.parametrize("prior", [0.1, GaussianPrior(0.1, center="start")])
def test_a_prior_that_is_passed_stays(prior: Any) -> None:
    module = fit(bayesianize(trained(), "all", Categorical(), prior=prior))
    assert repr(module.prior) == "GaussianPrior(std=0.1, center='start')"


def test_that_of_a_last_layer_stays() -> None:
    """It is wide already, and a fit of 50 weights gains nothing by another one."""
    assert repr(fit(bayesianize(trained(), "last_layer", Categorical())).prior).startswith("GaussianPrior(std=1.0")


def test_a_learned_noise_scale_keeps_its_own() -> None:
    net = trained()
    net.fc = nn.Linear(50, 1)
    module = fit(bayesianize(net, "all", Gaussian(learned=True)), classes=False)
    prior = module.prior
    assert isinstance(prior, HierarchicalPrior)
    assert prior.given.center == "start"
    assert prior.scale_of("likelihood.log_std", ()) == 3.0


@pytest.mark.parametrize(
    ("what", "of_head", "of_body"), [("all", 1.0, 0.1 / 50**0.5), (["fc.*", "body.2.*"], 1.0, 1.0)]
)
def test_scales_without_auto_sampling(what: Any, of_head: float, of_body: float) -> None:
    """The last layer, which often is new, is as wide in all layers as alone."""
    prior: Any = bayesianize(Network(), what, Categorical()).prior
    assert prior.scale_of("net.fc.weight", (4, 50)) == of_head
    assert prior.scale_of("net.body.2.weight", (50, 50)) == pytest.approx(of_body)


def test_a_network_without_a_last_layer_of_its_own() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    prior: Any = bayesianize(net, "all", Categorical()).prior
    assert prior.scale_of("net.0.weight", (3, 3)) == pytest.approx(0.1 / 3**0.5)
