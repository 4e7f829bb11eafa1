"""Files that are written by several at once, and that are on the disk before their originals are deleted."""

import os
import shutil
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.files import TEMPORARY, make_folder, write_atomically
from lightning_sgmcmc.posterior import manifest as aside
from tests.support.small_run import loader, module
from tests.support.trainers import quiet_trainer


def fit(folder: Path, steps: int, **options: Any) -> None:
    saver = ModelCheckpoint(folder / "checkpoints", filename="{step}", every_n_train_steps=4, save_top_k=-1)
    callbacks = [SamplingSchedule(every_n_steps=2), SampleCollector(folder / "samples"), saver]
    trainer = quiet_trainer(max_steps=steps, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(module(seed=1), loader(), **options)


class Disk:
    """Records which files and folders are flushed, and when names of samples are removed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flushed: set[tuple[int, int]] = set()
        self.lost: list[str] = []
        fsync, unlink = os.fsync, Path.unlink

        def flush(descriptor: int) -> None:
            fsync(descriptor)
            self.flushed.add(self._place(os.fstat(descriptor)))

        def remove(path: Path, missing_ok: bool = False) -> None:
            if path.name.startswith("sample-"):
                copies = [*path.parent.parent.glob(f"samples-*/{path.name}")]
                if not any(self._is_safe(copy) for copy in copies):
                    self.lost.append(path.name)
            unlink(path, missing_ok)

        monkeypatch.setattr(os, "fsync", flush)
        monkeypatch.setattr(Path, "unlink", remove)

    @staticmethod
    def _place(status: os.stat_result) -> tuple[int, int]:
        return status.st_dev, status.st_ino

    def has(self, path: Path) -> bool:
        return self._place(path.stat()) in self.flushed

    def _is_safe(self, copy: Path) -> bool:
        return self.has(copy) and self.has(copy.parent) and self.has(copy.parent.parent)


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_samples_moved_aside_are_on_the_disk_before_their_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """On exFAT and some file systems of clusters they are copied."""
    disk = Disk(monkeypatch)
    fit(tmp_path, 8)

    def refuse(*_: Any) -> None:
        raise OSError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(aside.os, "link", refuse)
    fit(tmp_path, 8, ckpt_path=tmp_path / "checkpoints" / "step=4.ckpt")
    assert [record.step for record in Posterior.load(tmp_path / "samples-1").records] == [6, 8]
    assert disk.lost == []


def test_new_folders_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a run, with their parents, and the one that an earlier run's samples are moved to."""
    disk = Disk(monkeypatch)
    fit(tmp_path / "a" / "b", 4)
    for folder in (tmp_path, tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/checkpoints", tmp_path / "a/b/samples"):
        assert disk.has(folder), folder
    disk.flushed.clear()
    fit(tmp_path / "a" / "b", 4)
    assert (tmp_path / "a/b/samples-1").is_dir()
    assert disk.has(tmp_path / "a/b")
    disk.flushed.clear()
    make_folder(tmp_path / "a")
    assert not disk.flushed, "nothing is new"


def write_many(path: Path, content: bytes) -> None:
    for _ in range(300):
        write_atomically(path, content, durable=False)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_writers_of_one_file(tmp_path: Path, kind: str) -> None:
    path, contents = tmp_path / "one.json", [bytes([letter]) * 1000 for letter in b"ab"]
    start: Any = get_context("fork").Process if kind == "processes" else threading.Thread
    failed: list[Any] = []
    if kind == "threads":
        threading.excepthook, before = failed.append, threading.excepthook  # type: ignore[assignment]
    writers = [start(target=write_many, args=(path, content)) for content in contents]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            assert path.read_bytes() in contents
            seen += 1
    for writer in writers:
        writer.join()
    if kind == "threads":
        threading.excepthook = before
    assert seen > 0
    assert not failed
    assert [getattr(writer, "exitcode", 0) for writer in writers] == [0, 0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["one.json"]


def calibrate(folder: Path) -> None:
    torch.set_num_threads(1)
    posterior = Posterior.load(folder)
    for _ in range(20):
        posterior.calibrate(loader(), save=True)


def test_two_processes_that_calibrate_one_posterior(tmp_path: Path) -> None:
    fit(tmp_path, 4)
    writers = [get_context("fork").Process(target=calibrate, args=(tmp_path / "samples",)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert Posterior.load(tmp_path / "samples").calibration is not None


def test_what_killed_writers_left_is_cleared(tmp_path: Path) -> None:
    """A later fit deletes their temporary files, but neither the user's files nor those that may be in use."""
    fit(tmp_path, 8)
    hour_ago = time.time() - 3600
    for folder in ("samples", "checkpoints"):
        for name in (f".left.1-1{TEMPORARY}", ".users.tmp", f".in-use.2-2{TEMPORARY}"):
            (tmp_path / folder / name).write_bytes(b"x")
            if "in-use" not in name:
                os.utime(tmp_path / folder / name, (hour_ago, hour_ago))
    shutil.copytree(tmp_path, tmp_path / "copy")
    fit(tmp_path, 8, ckpt_path=tmp_path / "checkpoints" / "step=4.ckpt")
    for folder in ("samples", "checkpoints"):
        names = {path.name for path in (tmp_path / folder).glob(".*.tmp")}
        assert names == {".users.tmp", f".in-use.2-2{TEMPORARY}"}
