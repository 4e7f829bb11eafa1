"""The store on disk: nothing is lost, whatever happens to the process or the disk."""

import errno
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sgmcmc.store import MANIFEST, DiskStore, MemoryStore, PosteriorSample


def sample(step: int, chain: int = 0, size: int = 1000) -> PosteriorSample:
    """A sample whose numbers say which one it is."""
    weight = torch.full((size, 4), float(step))[:, :2]  # not contiguous
    buffers = {"count": torch.tensor(step), "empty": torch.empty(0, 3)}
    return PosteriorSample(
        step, step // 10, chain, energy=-1.5 * step, log_weight=0.1 * step, parameters={"w": weight}, buffers=buffers
    )


def check(store: Any, steps: list[int]) -> None:
    assert [record.step for record in store.records] == steps
    for found, step in zip(store, steps, strict=True):
        expected = sample(step)
        assert torch.equal(found.parameters["w"], expected.parameters["w"])
        assert found.buffers["count"].item() == step
        assert found.buffers["empty"].shape == (0, 3)
        assert (found.energy, found.log_weight, found.cycle) == (expected.energy, expected.log_weight, step // 10)


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_round_trip_and_keep(tmp_path: Path, kind: str) -> None:
    store: Any = DiskStore.create(tmp_path / "s", {"a": 1}) if kind == "disk" else MemoryStore()
    for step in (3, 14, 25):
        store.append(sample(step))
    check(store, [3, 14, 25])
    store.keep([store.records[0], store.records[2]])
    check(store, [3, 25])
    if kind == "disk":
        again = DiskStore(tmp_path / "s")
        check(again, [3, 25])
        assert again.model_description == {"a": 1}
        assert len(list((tmp_path / "s").glob("*.safetensors"))) == 2
        with pytest.raises(FileExistsError):
            DiskStore.create(tmp_path / "s")


def test_a_line_cut_short_is_ignored_and_written_over(tmp_path: Path) -> None:
    store = DiskStore.create(tmp_path)
    for step in (1, 2, 3):
        store.append(sample(step))
    manifest = tmp_path / MANIFEST
    whole = manifest.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(last, len(whole)):
        manifest.write_bytes(whole[:cut])
        check(DiskStore(tmp_path), [1, 2])
    manifest.write_bytes(whole[: last + 20])
    DiskStore(tmp_path).append(sample(4))
    check(DiskStore(tmp_path), [1, 2, 4])


def _write_for_ever(path: str) -> None:
    store = DiskStore(path)
    step = len(store)
    while True:
        step += 1
        store.append(sample(step, size=200_000))


def test_kill_at_any_moment_leaves_a_store_that_loads(tmp_path: Path) -> None:
    """25 times `kill -9` at a random moment of writing; what the manifest names is complete, and writing goes on."""
    DiskStore.create(tmp_path / "s")
    rng, context, lengths = random.Random(0), multiprocessing.get_context("fork"), [0]
    for _ in range(25):
        process = context.Process(target=_write_for_ever, args=(str(tmp_path / "s"),))
        process.start()
        time.sleep(0.02 + 0.05 * rng.random())
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        store = DiskStore(tmp_path / "s")
        lengths.append(len(store))
        if len(store):
            assert store[-1 % len(store)].buffers["count"].item() == len(store)
    check_steps = list(range(1, lengths[-1] + 1))
    assert lengths == sorted(lengths)
    assert lengths[-1] > 20
    assert [record.step for record in DiskStore(tmp_path / "s").records] == check_steps
    for record, found in zip(store.records, store, strict=True):
        assert torch.equal(found.parameters["w"], torch.full((200_000, 2), float(record.step)))


@pytest.mark.parametrize("fails", ["write", "replace"])
def test_full_disk_loses_nothing_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    store = DiskStore.create(tmp_path)
    store.append(sample(1))

    def no_space(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync" if fails == "write" else "replace", no_space)
        with pytest.raises(OSError, match="No space left"):
            store.append(sample(2))
    check(DiskStore(tmp_path), [1])
    check(store, [1])
    assert not list(tmp_path.glob("*.tmp"))
    store.append(sample(2))
    check(DiskStore(tmp_path), [1, 2])


def test_foreign_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no sample store at .*: there is no manifest.jsonl"):
        DiskStore(tmp_path)
    for foreign in ("", "[]\n", "not json\n", json.dumps({"format": "other"}) + "\n"):
        (tmp_path / MANIFEST).write_text(foreign)
        with pytest.raises(ValueError, match="is not the manifest of a sample store"):
            DiskStore(tmp_path)
    (tmp_path / MANIFEST).unlink()
    store = DiskStore.create(tmp_path)
    store.append(sample(1))
    store.append(sample(2))
    path = tmp_path / store.records[0].file
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{path.name} is missing or damaged"):
        store[0]
    path.unlink()
    with pytest.raises(ValueError, match="is missing or damaged"):
        store[0]
    assert store[1].step == 2
