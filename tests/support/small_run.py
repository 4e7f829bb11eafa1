"""24 data in the plane and a linear network: the run that most mistakes are made with."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGLD, BayesianModule, Categorical
from lightning_sgmcmc.callbacks import SamplingSchedule
from tests.support.trainers import quiet_trainer

COUNT, BATCH = 24, 8


def tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(COUNT, 2, generator=generator)
    return x, (x.sum(1) > 0).long()


def data() -> TensorDataset:
    return TensorDataset(*tensors())


def loader(y: Tensor | None = None, x: Tensor | None = None, **options: Any) -> DataLoader[Any]:
    """Return batches of the data, or of others in their place."""
    inputs, labels = tensors()
    data = TensorDataset(inputs if x is None else x, labels if y is None else y)
    return DataLoader(data, **({"batch_size": BATCH} | options))


def module(**options: Any) -> BayesianModule:
    options = {"net": nn.Linear(2, 2), "likelihood": Categorical(), "sampler": SGLD, "lr": 0.01} | options
    return BayesianModule(**options)


def every_step() -> SamplingSchedule:
    return SamplingSchedule(every_n_steps=1)


def fit(model: pl.LightningModule, *callbacks: pl.Callback, train: Any = None, val: Any = None, **options: Any) -> None:
    """Fit for two epochs of three steps, or as the options say."""
    trainer = quiet_trainer(**({"max_epochs": 2, "callbacks": list(callbacks)} | options))
    trainer.fit(model, train if train is not None else loader(), val)


def fit_every_step(model: pl.LightningModule, *callbacks: pl.Callback, **options: Any) -> None:
    """Fit as `fit` does, with a sample of every step."""
    fit(model, every_step(), *callbacks, **options)
