"""Runs of several ranks: data that differ, a rank that hangs, and signals, under Lightning's launchers."""

import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.fit import ranks as rank_watch
from tests.support.problems import Data, Net, data
from tests.support.trainers import quiet_trainer


def fit(folder: Path, strategy: str, *callbacks: pl.Callback, model: Any = None, datamodule: Any = None) -> None:
    torch.manual_seed(0)
    saver = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = quiet_trainer(
        max_steps=12,
        devices=2,
        strategy=strategy,
        enable_checkpointing=True,
        callbacks=[SamplingSchedule(every_n_steps=2), SampleCollector(folder / "samples"), *callbacks, saver],
    )
    trainer.fit(model or Net(), datamodule=datamodule or Data())


# -- data -------------------------------------------------------------------------------------------------------------


class Unequal(Data):
    """Data that differ in length, or in values, between the ranks."""

    def __init__(self, longer: int, seed: int) -> None:
        super().__init__()
        self.longer, self.seed = longer, seed

    def load(self) -> Any:
        rank = torch.distributed.get_rank()
        return data(60 + rank * self.longer, rank * self.seed), data(20, 1), data(20, 2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp_fork", "chains_fork"])
@pytest.mark.parametrize(
    ("longer", "seed", "message"),
    [
        (4, 0, "rank 1 has 64 training data and rank 0 has 60, so they would sample different posteriors"),
        (0, 5, "rank 1 has other training data than rank 0: give every rank the same data set"),
    ],
)
def test_ranks_with_other_data_are_refused(strategy: str, longer: int, seed: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException, match=message):
        fit(tmp_path, strategy, datamodule=Unequal(longer, seed))
    assert not list(tmp_path.glob("*.ckpt"))


# -- a rank that hangs ------------------------------------------------------------------------------------------------


class Hang(pl.Callback):
    """One rank stands still: in a step, or in the middle of a checkpoint or a validation that takes long."""

    def __init__(self, rank: int, step: int, seconds: float, where: str = "step") -> None:
        self.rank, self.step, self.seconds, self.where = rank, step, seconds, where

    def _wait(self, trainer: pl.Trainer, where: str) -> None:
        if (trainer.global_rank, trainer.global_step, self.where) == (self.rank, self.step, where):
            time.sleep(self.seconds)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._wait(trainer, "step")

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: Any) -> None:
        self._wait(trainer, "checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["chains_fork", "ddp_fork"])
def test_a_rank_that_hangs_ends_the_run_with_its_name(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_watch, "DEFAULT_TIMEOUT", 4.0)
    begun = time.monotonic()
    with pytest.raises(ProcessExitedException):
        fit(tmp_path, strategy, Hang(1, 6, 1000))
    assert time.monotonic() - begun < 120
    said = capfd.readouterr().err
    assert "since rank 1 has made no progress for 4 s after step 6, and the others wait for it" in said
    assert f"the last good checkpoint is {tmp_path / 'step=4.ckpt'}; to wait longer, set the strategy's timeout" in said
    assert [record.step for record in Posterior.load(tmp_path / "samples", model=Net()).records][-1] == 6


@pytest.mark.slow
def test_a_long_checkpoint_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "DEFAULT_TIMEOUT", 4.0)
    fit(tmp_path, "ddp_fork", Hang(0, 4, 9, "checkpoint"))
    assert (tmp_path / "step=12.ckpt").exists()
