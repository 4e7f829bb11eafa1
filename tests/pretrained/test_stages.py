"""Fine-tuning in stages: the head first, then the whole network, each a fit of the same module."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, HierarchicalPrior, bayesianize
from lightning_sgmcmc.callbacks import AutoSampling, SampleCollector, SamplingSchedule
from lightning_sgmcmc.priors.state import prior_state
from tests.support.trainers import quiet_trainer


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 2)
        self.trunk_trains: set[bool] = set()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.trunk_trains.add(any(layer.training for layer in self.trunk))
        output: Tensor = self.head(self.trunk(x))
        return output


def stage(module: BayesianModule, *callbacks: pl.Callback) -> list[str]:
    schedule = SamplingSchedule(4, every_n_steps=4)
    trainer = quiet_trainer(callbacks=[schedule, SampleCollector(in_memory=True), *callbacks], max_steps=12)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(40, 3) + 2, torch.arange(40) % 2), 20, shuffle=True))
    assert module.posterior is not None
    return sorted(module.posterior[0].parameters)


def test_the_second_stage_trains_what_the_first_one_held() -> None:
    """Statistics and dropout of frozen parts stand still in a fit, and only in it."""
    torch.manual_seed(0)
    module = BayesianModule(Network(), Categorical(), sampler=SGHMC, lr=0.01)
    module.net.trunk[2].eval()  # the user's own choice
    modes = [part.training for part in module.modules()]
    module.net.trunk.requires_grad_(False)
    assert stage(module) == ["net.head.bias", "net.head.weight"]
    assert module.net.trunk_trains == {False}
    assert [part.training for part in module.modules()] == modes
    before = module.net.trunk[1].running_mean.clone()
    module.net.trunk.requires_grad_(True)
    assert len(stage(module)) == 6
    assert module.net.trunk_trains == {False, True}
    assert (module.net.trunk[1].running_mean - before).abs().min() > 0.01
    assert not module.net.trunk[2].training


class Unfreezing(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.net.trunk.requires_grad_(trainer.current_epoch > 0)


def test_parts_that_are_unfrozen_during_a_fit_are_named() -> None:
    module = BayesianModule(Network(), Categorical(), sampler=SGHMC, lr=0.01)
    module.net.trunk.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"'net.trunk.0.weight' requires gradients since the run began"):
        stage(module, Unfreezing())


def auto(module: BayesianModule) -> None:
    rows = DataLoader(TensorDataset(torch.randn(40, 3), torch.arange(40) % 2), 20)
    callbacks = [AutoSampling(num_draws=5), SampleCollector(in_memory=True)]
    quiet_trainer(callbacks=callbacks, max_steps=40).fit(module, rows, rows)


def network_for(what: str) -> BayesianModule:
    torch.manual_seed(0)
    net = Network()
    net.trunk.load_state_dict(Network().trunk.state_dict())
    return bayesianize(net, what, sampler=SGHMC, lr=0.01)


def centers(module: BayesianModule) -> dict[str, Tensor]:
    start = "prior_state.center."
    return {n.removeprefix(start): t.clone() for n, t in prior_state(module).items() if n.startswith(start)}


def test_the_second_stage_has_the_first_ones_centre_and_that_of_new_parts() -> None:
    module = network_for("last_layer")
    given = {name: p.detach().clone() for name, p in module.named_parameters()}
    stage(module)
    module.net.trunk.requires_grad_(True)
    assert len(stage(module)) == 6
    found = centers(module)
    assert found.keys() == given.keys()
    for name, center in found.items():
        assert torch.equal(center, given[name]), name


def test_another_prior_in_the_second_stage() -> None:
    module = network_for("all")
    given = {name: p.detach().clone() for name, p in module.named_parameters()}
    stage(module)
    auto(module)
    assert isinstance(module.prior, HierarchicalPrior)
    for name, center in centers(module).items():
        assert torch.equal(center, given[name]), name


@pytest.mark.parametrize("what", [None, "all"])
def test_stacked_chains_keep_their_prior(what: str | None) -> None:
    """The second stage ended with an index out of range."""
    options: Any = {"sampler": SGHMC, "lr": 0.01, "num_chains": 2}
    module = bayesianize(Network(), what, **options) if what else BayesianModule(Network(), Categorical(), **options)
    stage(module)
    with pytest.raises(ValueError, match=r"this module's chains did not begin with.*create a new module for this fit"):
        auto(module)
