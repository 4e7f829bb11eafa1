"""Sample stores that a kill or a full disk meets."""

import errno
import json
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sgmcmc import files as files_module
from lightning_sgmcmc.posterior import manifest
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.manifest import MANIFEST
from tests.support.stored_samples import assert_is_sample, files, sample


def _write_for_ever(path: Path, first: int) -> None:
    """Append samples, every fifth time dropping all but the newest four, until killed."""
    torch.set_num_threads(1)
    store = DiskStore(path)
    for step in range(first, 10**6):
        store.append(sample(step))
        if step % 5 == 0:
            store.keep(store.records[-4:])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_kill_at_any_moment_leaves_a_store_that_loads(tmp_path: Path) -> None:
    """24 times in a row, each process going on where the one before was killed."""
    chooser = random.Random(0)
    context = multiprocessing.get_context("fork")  # nothing is imported again
    DiskStore.create(tmp_path, model_description={"dict": {}})
    last = 0
    for _ in range(24):
        writer = context.Process(target=_write_for_ever, args=(tmp_path, last + 1))
        writer.start()
        limit = time.monotonic() + 60
        while _last_step(tmp_path / MANIFEST) <= last and time.monotonic() < limit:
            time.sleep(0.002)  # a busy machine may take long to start the writer
        time.sleep(chooser.random() * 0.1)
        writer.kill()
        writer.join()
        assert writer.exitcode == -9, "the writer should be killed, not fail"
        store = DiskStore(tmp_path)
        steps = [record.step for record in store.records]
        assert steps == list(range(steps[0], steps[-1] + 1)) if steps else last == 0
        for found, step in zip(store, steps, strict=True):
            assert_is_sample(found, step)
        assert store.model_description == {"dict": {}}
        if steps:
            assert steps[-1] >= last, "what was named stays named"
            last = steps[-1]
    assert last >= 24, "each writer comes to write"


def _last_step(manifest: Path) -> int:
    """Return the step of the last complete line, 0 where there is none."""
    lines = manifest.read_text().split("\n")[1:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


class FullDisk:
    """A file that takes so many more bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def write(self, content: bytes) -> int:
        self._file.write(content[: self._room])
        if len(content) > self._room:
            self._file.flush()
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(content)

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def fill_disk(monkeypatch: pytest.MonkeyPatch, where: str, room: int = 30) -> None:
    def no_space(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if where in ("replace", "fsync"):
        monkeypatch.setattr(files_module.os, where, no_space)
        return

    def small_open(path: Any, mode: str = "r") -> Any:
        hit = (where == "manifest") == (Path(path).name.lstrip(".").startswith(MANIFEST))
        return FullDisk(open(path, mode), room) if hit and mode != "r" else open(path, mode)

    for module in (files_module, manifest):
        monkeypatch.setattr(module, "open", small_open, raising=False)


@pytest.mark.parametrize("where", ["replace", "fsync", "sample", "manifest"])
def test_a_full_disk_names_no_half_sample(where: str, tmp_path: Path) -> None:
    store = DiskStore.create(tmp_path)
    store.append(sample(1))
    with pytest.MonkeyPatch.context() as patch:
        fill_disk(patch, where)
        with pytest.raises(OSError, match="No space left"):
            store.append(sample(2))
    assert [r.step for r in store.records] == [1]
    again = DiskStore(tmp_path)
    assert [r.step for r in again.records] == [1]
    assert_is_sample(again[0], 1)
    assert not list(tmp_path.glob("*.tmp"))
    for one in (store, again):  # once there is room, either goes on
        one.append(sample(2))
        assert [r.step for r in DiskStore(tmp_path).records] == [1, 2]
        assert_is_sample(DiskStore(tmp_path)[1], 2)
        one.keep(one.records[:1])


@pytest.mark.parametrize("where", ["replace", "fsync", "manifest"])
def test_a_full_disk_loses_nothing_in_keep(where: str, tmp_path: Path) -> None:
    store = DiskStore.create(tmp_path)
    for step in (1, 2, 3):
        store.append(sample(step))
    with pytest.MonkeyPatch.context() as patch:
        fill_disk(patch, where)
        with pytest.raises(OSError, match="No space left"):
            store.keep(store.records[1:])
    again = DiskStore(tmp_path)
    assert [r.step for r in again.records] == [1, 2, 3]
    for found, step in zip(again, (1, 2, 3), strict=True):
        assert_is_sample(found, step)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_failed_keep_leaves_the_records_as_they_are(tmp_path: Path) -> None:
    store = DiskStore.create(tmp_path)
    for step in (1, 2, 3):
        store.append(sample(step))
    with pytest.MonkeyPatch.context() as patch:
        fill_disk(patch, "replace")
        with pytest.raises(OSError, match="No space left"):
            store.keep(store.records[1:])
    assert [r.step for r in store.records] == [1, 2, 3]


def test_a_failed_create_leaves_no_store(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fill_disk(patch, "replace")
        with pytest.raises(OSError, match="No space left"):
            DiskStore.create(tmp_path / "s")
    assert files(tmp_path / "s") == []
    DiskStore.create(tmp_path / "s")
