"""A profiler that the user chose is used; Lightning's own idle one is replaced during a fit only."""

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.profilers import PassThroughProfiler, SimpleProfiler
from torch import nn

from lightning_sgmcmc import BayesianModule, Gaussian
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.callbacks import SamplingSchedule
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.run.quiet_profiler import QuietProfiler


class Fails(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == 2:
            raise RuntimeError("a user's error")


def trainer_of(*callbacks: pl.Callback, profiler: SimpleProfiler | None = None) -> pl.Trainer:
    return pl.Trainer(
        max_steps=3,
        callbacks=[SamplingSchedule(every_n_steps=3), *callbacks],
        profiler=profiler,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(trainer: pl.Trainer) -> None:
    data = TensorBatches(torch.randn(8, 2), torch.randn(8, 1))
    trainer.fit(BayesianModule(net=nn.Linear(2, 1), likelihood=Gaussian(), lr=1e-3, seed=0), ResumableLoader(data, 4))


class Sees(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self.kind = type(trainer.profiler)


def test_the_idle_profiler_is_replaced_during_a_fit() -> None:
    sees = Sees()
    trainer = trainer_of(sees)
    fit(trainer)
    assert sees.kind is QuietProfiler
    assert type(trainer.profiler) is PassThroughProfiler
    trainer = trainer_of(Fails())
    with pytest.raises(RuntimeError, match="a user's error"):
        fit(trainer)
    assert type(trainer.profiler) is PassThroughProfiler


def test_a_chosen_profiler_measures() -> None:
    profiler = SimpleProfiler()
    trainer = trainer_of(profiler=profiler)
    fit(trainer)
    assert trainer.profiler is profiler
    assert any("optimizer_step" in action for action in profiler.recorded_durations)
