"""A run limited by epochs ends where Lightning ends it, whatever the epochs' lengths, and resumes there."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Gaussian
from lightning_sgmcmc.callbacks import CyclicalSchedule, SampleCollector
from lightning_sgmcmc.datamodules import DatasetDataModule
from tests.support.random_runs import Fails
from tests.support.trainers import quiet_trainer

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))


def module(kind: type[BayesianModule] = BayesianModule) -> BayesianModule:
    torch.manual_seed(0)
    return kind(nn.Linear(6, 2), Gaussian(), lr=0.01, seed=1)


def loader(rows: int = 24, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X[:rows], X[:rows, :2]), batch_size)


class Changing(pl.LightningDataModule):
    """Another number of rows, or batch size, in each epoch, as a function of the epoch."""

    def __init__(self, rows: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.rows, self.sizes = rows, sizes

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        epoch = self.trainer.current_epoch
        return loader(self.rows[epoch % len(self.rows)], self.sizes[epoch % len(self.sizes)])


class Raises(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.fit_loop.max_epochs = 4


class Cuts(BayesianModule):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


RUNS: dict[str, tuple[dict[str, Any], list[pl.Callback], Any, int]] = {
    "data that grow": ({"reload_dataloaders_every_n_epochs": 1}, [], Changing((16, 24, 32, 40), (4,)), 28),
    "batches that grow": ({"reload_dataloaders_every_n_epochs": 1}, [], Changing((24,), (12, 8, 4, 2)), 23),
    "batches that shrink": ({"reload_dataloaders_every_n_epochs": 1}, [], Changing((24,), (2, 4, 8, 12)), 23),
    "every other epoch": ({"reload_dataloaders_every_n_epochs": 2}, [], Changing((16, 24, 32, 40), (4,)), 24),
    "a callback raises max_epochs": ({"max_epochs": 2}, [Raises()], None, 24),
    "epochs that a hook cuts": ({}, [], None, 8),
    "accumulation": ({"accumulate_grad_batches": 4}, [], None, 8),
    "steps": ({"max_steps": 9}, [], None, 9),
    "a fraction": ({"limit_train_batches": 0.5}, [], None, 12),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_where_lightning_ends_it(name: str, tmp_path: Path) -> None:
    options, callbacks, datamodule, steps = RUNS[name]
    given: dict[str, Any] = {"train_dataloaders": loader()} if datamodule is None else {"datamodule": datamodule}
    saver = pl.callbacks.ModelCheckpoint(
        tmp_path, "{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True
    )
    every = {"max_epochs": 4, "enable_checkpointing": True} | options
    kind = Cuts if name == "epochs that a hook cuts" else BayesianModule
    trainer, whole = quiet_trainer(**every, callbacks=[*callbacks, saver]), module(kind)
    trainer.fit(whole, **given)
    assert (trainer.global_step, trainer.max_steps) == (steps, options.get("max_steps", -1))
    if "max_steps" not in options:
        assert trainer.current_epoch == 4
    every["max_epochs"] = 4  # a resumed run does not know what a callback did before
    resumed, found = quiet_trainer(**every, callbacks=callbacks), module(kind)
    resumed.fit(found, ckpt_path=tmp_path / "epoch=1.ckpt" if steps != 9 else tmp_path / "epoch=0.ckpt", **given)
    assert (resumed.global_step, resumed.current_epoch) == (trainer.global_step, trainer.current_epoch)
    assert torch.equal(found.net.weight, whole.net.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [RuntimeError("a mistake"), KeyboardInterrupt()])
@pytest.mark.parametrize("size", [4, 2])
def test_a_trainer_whose_fit_failed_goes_on(error: BaseException, size: int) -> None:
    failing = Fails("on_train_batch_end", error)  # at the ninth step
    trainer, model = quiet_trainer(max_epochs=2, callbacks=[failing]), module()
    with pytest.raises((RuntimeError, SystemExit)):
        trainer.fit(model, loader())
    trainer.callbacks.remove(failing)  # type: ignore[attr-defined]
    assert trainer.max_steps == -1
    trainer.fit_loop.max_epochs = 5
    trainer.fit(model, loader(24, size))
    assert trainer.current_epoch == 5
    assert trainer.global_step == 9 + 4 * (24 // size)


def test_a_raised_run_resumes(tmp_path: Path) -> None:
    """A second fit of a trainer, its cycles and samples, from a checkpoint in its middle, by a new trainer."""
    saver = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5, save_top_k=-1)

    def trained(*callbacks: pl.Callback, **options: Any) -> tuple[pl.Trainer, SampleCollector]:
        collector = SampleCollector(in_memory=True)
        chosen = [CyclicalSchedule(2, 0.5, 2), collector, *callbacks]
        options = {"max_epochs": 2, "enable_checkpointing": bool(callbacks)} | options
        return quiet_trainer(**options, callbacks=chosen), collector

    data = DatasetDataModule(TensorDataset(X[:24], X[:24, :2]), batch_size=4)
    (trainer, collector), whole = trained(saver), module()
    trainer.fit(whole, datamodule=data)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(whole, datamodule=data)
    assert trainer.global_step == 24
    (resumed, others), found = trained(max_epochs=4), module()
    resumed.fit(found, datamodule=data, ckpt_path=tmp_path / "step=20.ckpt")
    assert (resumed.global_step, resumed.current_epoch) == (24, 4)
    assert torch.equal(found.net.weight, whole.net.weight)  # type: ignore[arg-type]
    draws = [[draw.step for draw in c.posterior or ()] for c in (collector, others)]
    assert draws[0] == draws[1] == [5, 6, 11, 12]
