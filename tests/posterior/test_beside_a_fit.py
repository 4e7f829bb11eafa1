"""Posteriors that are read while a fit writes the store, and deletes its oldest samples."""

import copy
import gc
import pickle
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.posterior.disk import DiskStore
from tests.support.recorders import Each
from tests.support.small_run import loader, module, tensors
from tests.support.trainers import quiet_trainer

KEPT = 6


def fit(store: Path, steps: int, pause: float = 0.0, *callbacks: pl.Callback) -> None:
    """Fit with a sample of every step, of which the newest are kept."""
    wait = Each("on_train_batch_end", lambda *_: time.sleep(pause) or 0)
    collector = SampleCollector(store, max_samples=KEPT)
    trainer = quiet_trainer(max_steps=steps, callbacks=[SamplingSchedule(every_n_steps=1), collector, wait, *callbacks])
    trainer.fit(module(num_chains=2), loader())


@pytest.mark.parametrize(
    "steps", [pytest.param(60, id="60 steps"), pytest.param(1500, id="1500 steps", marks=pytest.mark.slow)]
)
def test_every_load_beside_a_fit_succeeds(tmp_path: Path, steps: int) -> None:
    """Another process loads and predicts as often as it can, while every step deletes samples.

    Some hundreds of loads: `uv run pytest -m slow -n 0 tests/posterior/test_beside_a_fit.py`.
    """
    store, x = tmp_path / "store", tensors()[0]

    def write() -> None:
        torch.set_num_threads(1)
        fit(store, steps, 0.01)

    writer = get_context("fork").Process(target=write)
    writer.start()
    while not (store / "manifest.jsonl").exists() and writer.is_alive():
        time.sleep(0.002)
    loads = 0
    while writer.is_alive():
        posterior = Posterior.load(store)
        if len(posterior) == 0:
            continue
        probabilities = posterior.predict(x).probabilities
        assert torch.isfinite(probabilities).all()
        first = posterior.store.records[0]
        assert set(posterior.store.shapes(0)) == set(posterior.store[0].parameters)
        assert posterior.store[0].step == first.step
        loads += 1
    writer.join()
    assert writer.exitcode == 0
    assert loads > steps // 30
    assert len(Posterior.load(store)) == KEPT


def test_an_open_posterior_stays_whole_and_can_be_copied(tmp_path: Path) -> None:
    """Its samples are those of the moment when it was opened, though the fit has deleted their files."""
    store, opened = tmp_path / "store", list[Posterior]()

    def look(trainer: pl.Trainer, *_: Any) -> int:
        if trainer.global_step == 10:
            opened.append(Posterior.load(store))
        return 0

    fit(store, 30, 0.0, Each("on_train_batch_end", look))
    (posterior,) = opened
    steps = [record.step for record in posterior.store.records]
    assert max(steps) < 11
    assert [sample.step for sample in posterior] == steps
    expected = posterior.predict(tensors()[0]).probabilities
    for other in (copy.deepcopy(posterior), copy.copy(posterior)):
        assert torch.equal(other.predict(tensors()[0]).probabilities, expected)
    thinned = posterior.thin(every=2)
    assert [sample.step for sample in thinned]
    elsewhere = pickle.loads(pickle.dumps(posterior.store))
    with pytest.raises(ValueError, match="missing or damaged"):
        elsewhere[0]


def test_a_missing_sample_beside_a_fit_is_said(tmp_path: Path) -> None:
    """A store that was opened before the fit began to delete its samples."""
    path, said = tmp_path / "store", list[str]()
    fit(path, 10)

    def look(trainer: pl.Trainer, *_: Any) -> int:
        if trainer.global_step == 8:
            before = DiskStore(path)
            (path / before.records[0].file).unlink()
            with pytest.raises(
                ValueError, match=r"a fit is running there.*max_samples.*load the posterior again"
            ) as found:
                before[0]
            said.append(str(found.value))
        return 0

    fit(path, 10, 0.0, Each("on_train_batch_end", look))
    assert len(said) == 1


def test_open_files_are_closed(tmp_path: Path) -> None:
    """A loop that watches a fit does not run out of descriptors."""
    import os

    path, counts, threads = tmp_path / "store", list[int](), threading.active_count()

    def look(trainer: pl.Trainer, *_: Any) -> int:
        if trainer.global_step > 8:
            for _ in range(20):
                assert len(list(Posterior.load(path))) == KEPT
            gc.collect()
            counts.append(len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0)
        return 0

    fit(path, 12, 0.0, Each("on_train_batch_end", look))
    assert len(set(counts)) == 1
    assert threading.active_count() <= threads


def test_a_fit_that_ends_while_its_manifest_is_read(tmp_path: Path) -> None:
    """Its last step deletes the oldest samples, and then it holds the folder no longer."""
    writer = DiskStore.create(tmp_path / "store")
    for step in range(6):
        writer.append(PosteriorSample(step, 0, 0, 0.0, 0.0, {"w": torch.tensor([float(step)])}, {}))
    reader = DiskStore(tmp_path / "store")
    writer.discard(writer.keep_newest(2) | writer.trim())
    reader.hold()
    assert [float(sample.parameters["w"]) for sample in reader] == [4.0, 5.0]
