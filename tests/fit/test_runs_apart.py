"""Runs that share a disk: nothing of one is lost in, or mixed with, another."""

import os
import shutil
import signal
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.posterior import lock
from lightning_sgmcmc.posterior.disk import DiskStore
from tests.support.problems import Data, network
from tests.support.processes import in_a_process
from tests.support.recorders import Each
from tests.support.trainers import quiet_trainer


def fit(
    folder: Path, steps: int = 8, *callbacks: pl.Callback, dirpath: Path | None = None, seed: int = 3, **options: Any
) -> BayesianModule:
    """Fit with a sample after every second step and a checkpoint after every fourth."""
    torch.manual_seed(0)
    module = BayesianModule(net=network(), likelihood=Categorical(), sampler=SGHMC, lr=0.05, seed=seed)
    saver = pl.callbacks.ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=4, save_top_k=-1)
    collector = SampleCollector(dirpath)
    trainer = quiet_trainer(
        max_steps=steps,
        callbacks=[SamplingSchedule(every_n_steps=2), collector, *callbacks, saver],
        logger=pl.loggers.CSVLogger(folder.parent, name="", version=folder.name),
        enable_checkpointing=True,
    )
    trainer.fit(module, datamodule=Data(), **options)
    return module


def steps_in(path: Path) -> list[int]:
    return [record.step for record in DiskStore(path).records]


def bytes_in(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def states(posterior: Posterior) -> list[torch.Tensor]:
    return [torch.cat([t.flatten() for t in sample.parameters.values()]) for sample in posterior]


def test_a_copied_run_works_on_its_own_samples(tmp_path: Path) -> None:
    fit(tmp_path / "original")
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    before = bytes_in(tmp_path / "original" / "samples")
    fit(tmp_path / "copy", 12, ckpt_path=tmp_path / "copy" / "checkpoints" / "step=4.ckpt")
    assert bytes_in(tmp_path / "original" / "samples") == before
    assert steps_in(tmp_path / "copy" / "samples") == [2, 4, 6, 8, 10, 12]
    (tmp_path / "copy").rename(tmp_path / "moved")
    fit(tmp_path / "moved", 14, ckpt_path=tmp_path / "moved" / "checkpoints" / "step=12.ckpt")
    assert steps_in(tmp_path / "moved" / "samples") == [2, 4, 6, 8, 10, 12, 14]
    assert not (tmp_path / "copy").exists()


def test_the_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    fit(tmp_path / "first", dirpath=tmp_path / "s")
    fit(tmp_path / "second", dirpath=tmp_path / "s")
    before = bytes_in(tmp_path / "s"), bytes_in(tmp_path / "s-1")
    checkpoint = tmp_path / "first" / "checkpoints" / "step=4.ckpt"
    with pytest.raises(ValueError, match=r"s holds the samples of another run than .*: pass dirpath='.*/s-1', where"):
        fit(tmp_path / "first", 12, dirpath=tmp_path / "s", ckpt_path=checkpoint)
    assert before == (bytes_in(tmp_path / "s"), bytes_in(tmp_path / "s-1"))
    fit(tmp_path / "first", 12, ckpt_path=checkpoint)  # finds its samples where they were moved to
    assert steps_in(tmp_path / "s-1") == [2, 4, 6, 8, 10, 12]


def test_later_samples_are_moved_aside_and_an_open_posterior_keeps_them(tmp_path: Path) -> None:
    """A posterior of a first fit gives the same samples while later fits resume from before and begin again."""

    def run(steps: int, seed: int, **options: Any) -> Posterior:
        torch.manual_seed(0)
        module = BayesianModule(net=network(), likelihood=Categorical(), sampler=SGHMC, lr=0.05, seed=seed)
        saver = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
        trainer = quiet_trainer(
            max_steps=steps,
            callbacks=[SamplingSchedule(every_n_steps=2), SampleCollector(tmp_path / "samples"), saver],
            enable_checkpointing=True,
        )
        trainer.fit(module, datamodule=Data(), **options)
        assert module.posterior is not None
        return module.posterior

    first = run(10, seed=3)
    loaded, expected = Posterior.load(tmp_path / "samples"), states(first)
    run(10, seed=3, ckpt_path=tmp_path / "step=8.ckpt")  # draws step 10 again
    assert steps_in(tmp_path / "samples-1") == [10]
    for posterior in (first, loaded):
        assert all(map(torch.equal, states(posterior), expected))
    run(10, seed=5)  # moves all aside, and writes files of the same names
    assert steps_in(tmp_path / "samples-2") == steps_in(tmp_path / "samples") == [r.step for r in first.records]
    for posterior in (first, loaded):
        assert all(map(torch.equal, states(posterior), expected))
        assert not torch.equal(states(Posterior.load(tmp_path / "samples"))[-1], expected[-1])


def test_a_second_process_is_refused_and_a_killed_one_does_not_block(tmp_path: Path) -> None:
    """Two runs in one store: the later is refused with a sentence, and the earlier one ends undisturbed."""
    path = tmp_path / "s"
    said: list[str] = []

    def attempt() -> None:
        with pytest.raises(RuntimeError, match=rf"store {path} is in use by another process \(id {os.getppid()}\)"):
            fit(tmp_path / "second", dirpath=path)
        with pytest.raises(RuntimeError, match="in use by another process"):
            fit(tmp_path / "first", dirpath=path, ckpt_path=tmp_path / "first" / "checkpoints" / "step=4.ckpt")

    def in_mid_run(trainer: pl.Trainer, *arguments: Any) -> int:
        if trainer.global_step == 5:
            said.append(f"exit code {in_a_process(attempt)}")
        return 0

    fit(tmp_path / "first", 8, Each("on_train_batch_end", in_mid_run), dirpath=path)
    assert said == ["exit code 0"]
    assert steps_in(path) == [2, 4, 6, 8]
    hold = get_context("fork").Process(target=lambda: (lock.StoreLock(path), time.sleep(60)))
    hold.start()
    try:
        end = time.monotonic() + 30
        while (path / lock.LOCK).read_text() != f"{hold.pid}\n":
            assert time.monotonic() < end
            time.sleep(0.01)
        assert hold.pid is not None
        os.kill(hold.pid, signal.SIGKILL)
    finally:
        hold.join()
    fit(tmp_path / "first", 10, dirpath=path, ckpt_path=tmp_path / "first" / "checkpoints" / "step=8.ckpt")
    assert steps_in(path) == [2, 4, 6, 8, 10]


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="cannot be locked .No locks available.*start only one run in this folder"):
        lock.StoreLock(tmp_path).release()
