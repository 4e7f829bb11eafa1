"""Two fits at one folder: processes of the command line, threads, and a fit within a fit; nothing is lost or mixed."""

import multiprocessing
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.loggers import CSVLogger

from lightning_sgmcmc import Posterior, files
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.cli import fit as command
from lightning_sgmcmc.cli import main
from lightning_sgmcmc.posterior import disk, lock
from tests.support.processes import in_a_process
from tests.support.recorders import Each
from tests.support.small_run import loader, module
from tests.support.trainers import quiet_trainer

STEPS = 8


def fit(store: Path, *callbacks: pl.Callback, seed: int = 0, steps: int = STEPS, **options: Any) -> pl.LightningModule:
    """Fit with a sample of every second step."""
    torch.manual_seed(0)
    model = module(seed=seed)
    collector = SampleCollector(store)
    trainer = quiet_trainer(max_steps=steps, callbacks=[SamplingSchedule(every_n_steps=2), collector, *callbacks])
    trainer.fit(model, loader(), **options)
    return model


def in_step(step: int, do: Any) -> Each:
    """A callback that does something once, after a step."""

    def after(trainer: pl.Trainer, *_: Any) -> int:
        if trainer.global_step == step:
            do()
        return 0

    return Each("on_train_batch_end", after)


def states(path: Path) -> dict[int, torch.Tensor]:
    """Return a store's samples by step; reading checks their checksums."""
    found = Posterior.load(path)
    return {s.step: torch.cat([t.flatten() for t in s.parameters.values()]) for s in found}


def assert_is_run(path: Path, expected: dict[int, torch.Tensor]) -> None:
    found = states(path)
    assert list(found) == list(expected)
    assert all(torch.equal(found[step], expected[step]) for step in found)


# -- `sgmcmc fit` twice ------------------------------------------------------------------------------------------------


def configuration(folder: Path, collector: dict[str, Any], data: str = "Data", steps: int = 30) -> str:
    """Write a configuration with a fixed version, as of a job that is submitted twice; return its file."""
    one = "lightning_sgmcmc"
    callbacks = [
        {"class_path": "tests.fit.test_one_folder.Slow"},
        {"class_path": f"{one}.callbacks.SamplingSchedule", "init_args": {"every_n_steps": 10}},
        {"class_path": f"{one}.callbacks.SampleCollector", "init_args": collector},
    ]
    net = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 2}}
    model = {"net": net, "likelihood": {"class_path": f"{one}.Categorical"}, "lr": 0.01}
    content = {
        "model": {"class_path": f"{one}.BayesianModule", "init_args": model},
        "data": {"class_path": f"tests.fit.test_one_folder.{data}"},
        "trainer": {
            "max_steps": steps,
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": {
                "class_path": "pytorch_lightning.loggers.CSVLogger",
                "init_args": {"save_dir": str(folder / "runs"), "name": "exp", "version": 7},
            },
            "callbacks": callbacks,
        },
    }
    path = folder / f"{data}-{len(os.listdir(folder))}.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


class Slow(pl.Callback):
    """Makes a fit long enough for another one to begin meanwhile."""

    def on_train_batch_end(self, *_: Any) -> None:
        threading.Event().wait(0.02)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()


class Missing(Data):
    """Data that cannot be read, as those of a second job with a wrong path."""

    def setup(self, stage: str) -> None:
        go = Path(os.environ["GO"])
        while not go.exists():  # until the other run is under way
            threading.Event().wait(0.01)
        raise FileNotFoundError("there are no data")


def started_together(configurations: list[str]) -> list[int | None]:
    """Run `sgmcmc fit` in processes that come to their run's folder at the same moment; return the exit codes."""
    context = multiprocessing.get_context("fork")
    barrier, own_folder = context.Barrier(len(configurations)), command._own_folder

    def run(path: str) -> None:
        def together(trainer: pl.Trainer) -> Any:
            barrier.wait(60)
            return own_folder(trainer)

        torch.set_num_threads(1)
        command._own_folder = together
        raise SystemExit(main(["fit", "--config", path]))

    processes = [context.Process(target=run, args=(path,)) for path in configurations]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


@pytest.mark.parametrize(
    "times", [pytest.param(2, id="2 times"), pytest.param(20, id="20 times", marks=pytest.mark.slow)]
)
def test_two_commands_at_one_folder(tmp_path: Path, times: int, capfd: pytest.CaptureFixture[str]) -> None:
    """One of them runs to its end, whichever, and the other one is refused and removes nothing.

    20 times: `uv run pytest -m slow -n 0 tests/fit/test_one_folder.py`.
    """
    for trial in range(times):
        folder = tmp_path / str(trial)
        folder.mkdir()
        path = configuration(folder, {})
        codes = started_together([path, path])
        said = capfd.readouterr()
        assert sorted(code == 0 for code in codes) == [False, True], (codes, said)
        assert "in use" in said.err + said.out
        run = folder / "runs/exp/version_7"
        assert list(states(run / "samples")) == [10, 20, 30]
        assert (run / "config.yaml").exists()
        assert [entry.name for entry in run.glob("samples*")] == ["samples"]


@pytest.mark.by_default("collector0")
@pytest.mark.parametrize("collector", [{}, {"in_memory": True}])
def test_a_command_that_fails_leaves_another_ones_folder(
    tmp_path: Path, collector: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second job with wrong data: it may even have made the folder, but a run is in it."""
    monkeypatch.setenv("GO", str(tmp_path / "runs/exp/version_7/config.yaml"))
    codes = started_together([configuration(tmp_path, collector), configuration(tmp_path, collector, "Missing")])
    assert codes[0] == 0
    assert codes[1] != 0
    assert (tmp_path / "runs/exp/version_7/config.yaml").exists()


def test_a_command_that_fails_alone_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GO", str(tmp_path))
    assert in_a_process(lambda: os._exit(main(["fit", "--config", configuration(tmp_path, {}, "Missing")]) or 0)) != 0
    assert not (tmp_path / "runs").exists()
    kept = tmp_path / "runs/exp/version_7"
    kept.mkdir(parents=True)
    assert in_a_process(lambda: os._exit(main(["fit", "--config", configuration(tmp_path, {}, "Missing")]) or 0)) != 0
    assert kept.exists(), "another process may have made it for its own run"


# -- fits of one process -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "times", [pytest.param(3, id="3 times"), pytest.param(20, id="20 times", marks=pytest.mark.slow)]
)
def test_two_threads_at_one_folder(tmp_path: Path, times: int) -> None:
    """Both at once: one is refused, and the store has all of the other one's samples."""
    for trial in range(times):
        store, refused, barrier = tmp_path / str(trial), dict[int, str](), threading.Barrier(2)
        in_the_middle = threading.Event()

        def run(
            seed: int, store: Path = store, refused: Any = refused, barrier: Any = barrier, other: Any = in_the_middle
        ) -> None:
            barrier.wait(60)
            try:
                fit(store, in_step(3, lambda: other.wait(60)), seed=seed)
            except RuntimeError as error:
                refused[seed] = str(error)
                other.set()

        threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(refused) == 1
        (sentence,) = refused.values()
        assert str(store) in sentence
        assert "dirpath" in sentence
        assert list(states(store)) == [2, 4, 6, 8]
        assert not lock.is_in_use(store)


def dirpath_of(model: Any) -> Path:
    return Path(model.posterior.store.path)


def test_a_fit_within_a_fit_is_refused(tmp_path: Path) -> None:
    expected = states(dirpath_of(fit(tmp_path / "alone")))
    store, said = tmp_path / "store", list[str]()

    def nested() -> None:
        with pytest.raises(RuntimeError, match=r"in use by another fit of this process.*dirpath") as raised:
            fit(store, seed=5)
        said.append(str(raised.value))

    fit(store, in_step(3, nested))
    assert len(said) == 1
    assert_is_run(store, expected)


@pytest.mark.parametrize("touch", ["copy", "read", "move away and back"])
def test_nothing_in_the_process_drops_the_lock(tmp_path: Path, touch: str) -> None:
    """A backup of the run, or a checksum of its files, by a callback."""
    store, codes = tmp_path / "store", list[int]()

    def do() -> None:
        if touch == "copy":
            shutil.copytree(store, tmp_path / "backup")
        elif touch == "read":
            assert all(file.read_bytes() is not None for file in store.iterdir())
        else:
            store.rename(tmp_path / "elsewhere").rename(store)

        def refused() -> None:
            with pytest.raises(RuntimeError, match="in use by another process"):
                fit(store, seed=5)

        codes.append(in_a_process(refused))
        assert lock.is_in_use(store)

    fit(store, in_step(3, do))
    assert codes == [0]
    assert list(states(store)) == [2, 4, 6, 8]
    assert not lock.is_in_use(store)


def test_loader_workers_of_a_killed_run_do_not_hold_its_folder(tmp_path: Path) -> None:
    """Processes that a run has forked may outlive it for some seconds."""
    store, pids = tmp_path / "store", tmp_path / "pid"

    def fork_and_die() -> None:
        pid = os.fork()
        if not pid:
            threading.Event().wait(60)
            os._exit(0)
        pids.write_text(str(pid))
        os.kill(os.getpid(), 9)

    run = os.fork()
    if not run:
        torch.set_num_threads(1)
        fit(store, in_step(3, fork_and_die))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(run, 0)[1]) == -9
    try:
        fit(store, seed=1)
    finally:
        os.kill(int(pids.read_text()), 9)
    assert list(states(store)) == [2, 4, 6, 8]


def test_where_files_cannot_be_locked_fits_of_this_process_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="cannot be locked"):
        held = lock.StoreLock(tmp_path)
    with pytest.raises(RuntimeError, match="in use by another fit of this process"):
        lock.StoreLock(tmp_path)
    held.release()
    with pytest.warns(UserWarning, match="cannot be locked"):
        lock.StoreLock(tmp_path).release()


def test_runs_of_one_logger_apart(tmp_path: Path) -> None:
    """Two fits of one process with folders of their own go on beside each other, one within the other."""
    inner: list[int] = []

    def other() -> None:
        model = module()
        trainer = quiet_trainer(
            max_steps=4, callbacks=[SamplingSchedule(every_n_steps=2), SampleCollector()], logger=CSVLogger(tmp_path)
        )
        trainer.fit(model, loader())
        inner.append(len(states(dirpath_of(model))))

    fit(tmp_path / "outer", in_step(3, other))
    assert inner == [2]
    assert list(states(tmp_path / "outer")) == [2, 4, 6, 8]


def test_a_fit_that_begins_and_ends_while_another_moves_its_folder_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fits of a search in several processes come between the two locks, and between a folder and its lock."""
    path, real, calls = tmp_path / "s", lock.StoreLock, list[int]()

    def late(folder: Path) -> lock.StoreLock:
        calls.append(len(calls))
        if len(calls) == 2:
            fit(folder)
        return real(folder)

    def fit(folder: Path) -> None:
        held = real(folder)
        disk.DiskStore.create(folder)
        held.release()

    def forgetful(folder: Path) -> None:
        calls.append(len(calls))
        if len(calls) % 2:
            files.make_folder(folder)

    fit(path)
    monkeypatch.setattr(disk, "StoreLock", late)
    held = disk.begin_store(path, None)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["s", "s-1", "s-2"]
    with pytest.raises(lock.InUseError):
        real(path)
    held.release()

    calls.clear()
    calls.append(0)
    monkeypatch.setattr(lock, "make_folder", forgetful)
    real(tmp_path / "other").release()
    assert len(calls) == 3
