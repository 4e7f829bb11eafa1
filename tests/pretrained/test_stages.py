"""Fine-tuning in stages: the head first, then the whole network, each a fit of the same module."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
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
