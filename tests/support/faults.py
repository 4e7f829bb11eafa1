"""The small run that is interrupted, and whose files are damaged."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, Posterior
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from tests.support.trainers import quiet_trainer

STEPS, PER_EPOCH = 24, 6


def loader() -> ResumableLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PER_EPOCH * 4, 2, generator=generator)
    return ResumableLoader(TensorDataset(x, (x.sum(1) > 0).long()), 4)


def module(width: int = 8) -> BayesianModule:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))
    return BayesianModule(net=net, likelihood=Categorical(), sampler=SGHMC, lr=0.05, seed=1)


def fit(folder: Path, *callbacks: pl.Callback, width: int = 8, keep: bool = True, **fit_options: Any) -> BayesianModule:
    """Run, or go on with, the run that the others are interruptions of."""
    model = module(width)
    own: list[pl.Callback] = [SamplingSchedule(every_n_steps=2), SampleCollector(folder / "samples"), *callbacks]
    if keep:
        own.append(pl.callbacks.ModelCheckpoint(folder, save_last=True, every_n_train_steps=4))
    trainer = quiet_trainer(max_steps=STEPS, callbacks=own, enable_checkpointing=keep)
    trainer.fit(model, loader(), **fit_options)
    return model


def steps_of(folder: Path) -> list[int]:
    return [record.step for record in Posterior.load(folder / "samples").records]


@contextmanager
def limited_files(size: int = 2**40) -> Iterator[None]:
    """Allow no file of this process to be larger than so many bytes, or than the block asks for (`RLIMIT_FSIZE`)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[0][1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[0])
        signal.signal(signal.SIGXFSZ, before[1])


class SignalAt(pl.Callback):
    """Sends this process a signal in the middle of a step: the gradient is known, the update not made."""

    def __init__(self, step: int, *signals: int) -> None:
        self.step, self.signals = step, signals

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.step - 1:
            for number in self.signals:
                os.kill(os.getpid(), number)
