"""A small regression whose runs are compared step by step, as in a process that has made none."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Gaussian
from lightning_sgmcmc.chains import layout as seeds
from lightning_sgmcmc.datamodules import DatasetDataModule
from tests.support.trainers import quiet_trainer

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(5))
DATA = TensorDataset(X, X @ torch.tensor([[1.0], [-1.0], [0.5]]) + 0.3)


def linear(**options: Any) -> BayesianModule:
    return BayesianModule(**({"net": nn.Linear(3, 1), "likelihood": Gaussian(), "lr": 0.01} | options))


def plain_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, **({"batch_size": 4, "shuffle": True} | options))


def datamodule() -> DatasetDataModule:
    return DatasetDataModule(DATA, batch_size=4)


class States(pl.Callback):
    """Records the parameters after each step."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.found.append(state(pl_module))


def state(module: pl.LightningModule) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def fit(module: BayesianModule, data: Any = None, callbacks: Any = (), **options: Any) -> Tensor:
    """Return the states of a fit, (steps, P); by default of six steps."""
    states = States()
    trainer = quiet_trainer(**({"max_steps": 6} | options), callbacks=[*callbacks, states])
    trainer.fit(module, data if data is not None else plain_loader(), **{})
    return torch.stack(states.found)


class Fails(pl.Callback):
    def __init__(self, hook: str, error: BaseException) -> None:
        def fail(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
            if hook != "on_train_batch_end" or trainer.global_step == 9:
                raise error

        setattr(self, hook, fail)


def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the runs of the process, and restore the environment after the test."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    monkeypatch.setattr(seeds, "RUNS", seeds.ProcessRuns())
    pl.seed_everything(0, verbose=False)
