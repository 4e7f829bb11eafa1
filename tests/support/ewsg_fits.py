"""A fit with EWSG, and the gradients of its batches and steps."""

from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc import BayesianModule, UnderdampedLangevin
from lightning_sgmcmc.callbacks import SamplerCallback
from tests.support.problems import Data, Even, Plain
from tests.support.trainers import quiet_trainer

Underdamped = partial(UnderdampedLangevin, friction=5.0)


class Gradients(SamplerCallback):
    """Notes the gradients of every step as the sampler sees them, and those of every batch."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self.batches: list[Tensor] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.batches.append(flat(pl_module))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.steps.append(flat(pl_module))


def flat(module: Any) -> Tensor:
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in module.parameters()])


def fit_with(module: BayesianModule, callbacks: list[Any], **options: Any) -> pl.Trainer:
    trainer = quiet_trainer(callbacks=callbacks, **options)
    trainer.fit(module, datamodule=Even(8) if isinstance(module, Plain) else Data())
    return trainer
