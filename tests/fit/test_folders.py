"""Folders of any kind: relative ones in a program that changes its working folder, and those on no local disk."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    ChainHealth,
    PosteriorDashboard,
    PredictionWriter,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
)
from lightning_sgmcmc.cli import main
from lightning_sgmcmc.cli.exits import MISTAKE
from lightning_sgmcmc.report import write_report
from tests.support.paths import RECIPE
from tests.support.recorders import Each
from tests.support.small_run import loader, module, tensors
from tests.support.trainers import quiet_trainer

Kind = Callable[[], dict[str, Any]]


def run(kind: Kind, in_step: Callable[[], Any] = lambda: None, interrupted: bool = False) -> Any:
    """Fit for 8 steps with all that writes files; return the trainer.

    Args:
        kind: makes options of the trainer; its callbacks come to the others.
        in_step: called after the third step.
        interrupted: whether Ctrl-C ends the fit after the sixth step.
    """

    def after(trainer: pl.Trainer, *_: Any) -> int:
        if trainer.global_step == 3:
            in_step()
        if trainer.global_step == 6 and interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        return 0

    options = kind()
    own = options.pop("callbacks", [])
    callbacks = [
        SamplingSchedule(every_n_steps=2),
        *([] if any(isinstance(callback, SampleCollector) for callback in own) else [SampleCollector()]),
        BayesianModelAverage(),
        ChainHealth(),
        PosteriorDashboard(every="end", figures=["tables"]),
        RunSummary(),
        PredictionWriter(),
        Each("on_train_batch_end", after),
        *own,
    ]
    trainer = quiet_trainer(max_steps=8, callbacks=callbacks, log_every_n_steps=1, **options)
    model = module(seed=1)
    try:
        trainer.fit(model, loader(), loader())
    except SystemExit:  # Lightning's, after Ctrl-C
        if not interrupted:
            raise
        return trainer
    trainer.test(model, loader(), verbose=False)
    trainer.predict(model, loader())
    return trainer


def files_in(folder: Path) -> set[str]:
    """Return the files below a folder; names of events contain a time."""
    paths = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {"events" if "events.out" in path else path for path in paths if "wandb/" not in path}


def checkpointing(*arguments: Any, **options: Any) -> dict[str, Any]:
    return {"callbacks": [ModelCheckpoint(*arguments, every_n_train_steps=2, save_last=True, **options)]} | {
        "enable_checkpointing": True
    }


def begun(logger: Any) -> Any:
    """A logger that its user has used before the fit."""
    assert logger.experiment is not None
    return logger


RELATIVE: dict[str, Kind] = {
    "dirpath of SampleCollector": lambda: {"callbacks": [SampleCollector("store")]},
    "default_root_dir": lambda: {"default_root_dir": "root"},
    "default_root_dir with the default logger": lambda: {"default_root_dir": "root", "logger": True},
    "CSVLogger": lambda: {"logger": CSVLogger("logs")},
    "CSVLogger that is in use": lambda: {"logger": begun(CSVLogger("logs"))},
    "TensorBoardLogger": lambda: {"logger": TensorBoardLogger("logs")},
    "WandbLogger": lambda: {"logger": WandbLogger(save_dir="logs", offline=True, version="one")},
    "two loggers": lambda: {"logger": [CSVLogger("logs"), TensorBoardLogger("other")]},
    "dirpath of ModelCheckpoint": lambda: checkpointing("saved"),
    "ModelCheckpoint in a logger's folder": lambda: {"logger": CSVLogger("logs")} | checkpointing(),
    "ModelCheckpoint in default_root_dir": lambda: {"default_root_dir": "root"} | checkpointing(),
}


def cases(kinds: dict[str, Kind]) -> list[Any]:
    """Return each kind, and those that save checkpoints again with Ctrl-C, which is slow but for one, as is W&B."""
    slow = {"WandbLogger": [pytest.mark.slow]}
    whole = [pytest.param(kind, False, id=kind, marks=slow.get(kind, [])) for kind in kinds]
    saving = [kind for kind in kinds if "Checkpoint" in kind]
    marks: list[Any] = [[], *([pytest.mark.slow] for _ in saving[1:])]
    again = zip(saving, marks, strict=True)
    return whole + [pytest.param(kind, True, id=f"{kind}, interrupted", marks=mark) for kind, mark in again]


@pytest.mark.parametrize(("kind", "interrupted"), cases(RELATIVE))
def test_a_program_that_changes_its_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, interrupted: bool
) -> None:
    """All files are where they are without `os.chdir`, and none in the other folder, where an older run may be.

    With W&B: `uv run pytest -m slow -n 0 tests/fit/test_folders.py`.
    """
    written = []
    for name in ("still", "moving"):
        home, elsewhere = tmp_path / name, tmp_path / f"{name}-elsewhere"
        for folder in (home, elsewhere):
            folder.mkdir()
        monkeypatch.chdir(home)
        monkeypatch.setenv("WANDB_MODE", "offline")
        run(
            RELATIVE[kind], (lambda other=elsewhere: os.chdir(other)) if name == "moving" else lambda: None, interrupted
        )
        assert not list(elsewhere.iterdir())
        written.append(files_in(home))
    assert written[0] == written[1]
    assert any("sample-00000006" in path for path in written[0])
    assert any(path.endswith("results.json") for path in written[0]) != interrupted


def test_an_open_posterior_in_a_program_that_changes_its_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(RELATIVE["dirpath of SampleCollector"])
    posterior, expected = Posterior.load("store"), Posterior.load("store").predict(tensors()[0])
    monkeypatch.chdir("/")
    assert torch.equal(posterior.predict(tensors()[0]).probabilities, expected.probabilities)


def test_a_run_goes_on_in_a_program_that_changes_its_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a relative checkpoint; its samples are found, and later ones are added to them."""
    monkeypatch.chdir(tmp_path)
    run(lambda: {"default_root_dir": "root"} | checkpointing("root/checkpoints"))
    (tmp_path / "elsewhere").mkdir()
    leave = Each("on_train_batch_end", lambda *_: os.chdir(tmp_path / "elsewhere") or 0)
    saver = ModelCheckpoint("root/checkpoints", every_n_train_steps=2)
    trainer = quiet_trainer(
        max_steps=12,
        default_root_dir="root",
        callbacks=[SamplingSchedule(every_n_steps=2), SampleCollector(), leave, saver],
        enable_checkpointing=True,
    )
    trainer.fit(module(seed=1), loader(), ckpt_path="root/checkpoints/last.ckpt")
    found = Posterior.load(tmp_path / "root/sgmcmc")
    assert [sample.step for sample in found] == [2, 4, 6, 8, 10, 12]
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "root/checkpoints/epoch=3-step=12.ckpt").exists()


# -- folders on no local disk ------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's file system in memory, which stands for those of clouds."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


REMOTE: dict[str, Kind] = {
    "TensorBoardLogger": lambda: {"logger": TensorBoardLogger("memory://logs")},
    "CSVLogger": lambda: {"logger": CSVLogger("memory://logs")},
    "default_root_dir": lambda: {"default_root_dir": "memory://logs"},
    "default_root_dir with the default logger": lambda: {"default_root_dir": "memory://logs", "logger": True},
    "ModelCheckpoint": lambda: checkpointing("memory://logs/checkpoints"),
    "ModelCheckpoint in a logger's folder": lambda: {"logger": CSVLogger("memory://logs")} | checkpointing(),
    "ModelCheckpoint in default_root_dir": lambda: {"default_root_dir": "memory://logs"} | checkpointing(),
    "with a local dirpath": lambda: {
        "logger": CSVLogger("memory://logs"),
        "callbacks": [SampleCollector("mine")],
    },
    "the second of two loggers": lambda: {"logger": [CSVLogger("here"), TensorBoardLogger("memory://logs")]},
}
LOCAL_RUN = ("ModelCheckpoint", "the second of two loggers")
"""Kinds whose run's own folder is on a local disk."""


@pytest.mark.parametrize(("kind", "interrupted"), cases(REMOTE))
def test_a_run_whose_folder_is_on_no_local_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Any, kind: str, interrupted: bool
) -> None:
    """Lightning's files go there; samples and results go to a local folder, which a sentence names."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(REMOTE[kind], interrupted=interrupted)
    assert not list(tmp_path.glob("memory*")), "a local folder of that name"
    sentences = [str(w.message) for w in said if "memory://" in str(w.message) and "local disk" in str(w.message)]
    assert len(set(sentences)) == (kind not in LOCAL_RUN), sentences
    if sentences:
        assert str(tmp_path / "sgmcmc") in sentences[0]
    stores = [path.parent for path in tmp_path.rglob("manifest.jsonl")]
    assert len(stores) == 1
    assert [sample.step for sample in Posterior.load(stores[0])] == ([2, 4, 6] if interrupted else [2, 4, 6, 8])
    assert interrupted != bool(list(tmp_path.rglob("results.json")))
    names = [name for name in memory.find("/") if name.startswith("/logs")]
    if "checkpoint" in kind.lower():
        assert any(name.endswith("last.ckpt") for name in names)
        assert interrupted == any(name.endswith("last-interrupted.ckpt") for name in names)


def test_a_run_goes_on_from_a_checkpoint_on_no_local_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    run(REMOTE["ModelCheckpoint in default_root_dir"])
    (path,) = [name for name in memory.find("/") if name.endswith("last.ckpt")]
    trainer = quiet_trainer(
        max_steps=12, default_root_dir="memory://logs", callbacks=[SamplingSchedule(every_n_steps=2), SampleCollector()]
    )
    trainer.fit(module(seed=1), loader(), ckpt_path=f"memory:/{path}")
    (store,) = {path.parent for path in tmp_path.rglob("manifest.jsonl")}
    assert [sample.step for sample in Posterior.load(store)] == [2, 4, 6, 8, 10, 12]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "SampleCollector": (lambda: SampleCollector("memory://samples"), "dirpath='memory://samples'.*pass a local folder"),
    "SampleCollector on S3": (lambda: SampleCollector("s3://bucket/run"), "dirpath='s3://bucket/run'.*local folder"),
    "Posterior.load": (lambda: Posterior.load("memory://samples"), "path='memory://samples'.*copy the folder"),
    "write_report": (lambda: write_report("memory://run"), "path='memory://run'.*copy the folder"),
}


@pytest.mark.parametrize(("make", "said"), REFUSED.values(), ids=REFUSED)
def test_samples_on_no_local_disk_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        make()
    assert not list(tmp_path.iterdir())


def test_a_local_address_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(
        lambda: {"callbacks": [SampleCollector(f"file://{tmp_path}/store")], "default_root_dir": f"file://{tmp_path}/r"}
    )
    assert len(Posterior.load(f"file://{tmp_path}/store")) == 4
    assert (tmp_path / "r/sgmcmc/results.json").exists()
    assert not list(tmp_path.glob("file*"))


def test_resume_on_the_command_line_says_that_it_searches_local_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    root = ["--trainer.logger=false", "--trainer.default_root_dir=memory://a"]
    with pytest.raises(SystemExit) as raised:
        main(["fit", "--config", RECIPE, "--resume", *root])
    assert raised.value.code == MISTAKE
    assert "--ckpt_path=memory://a" in capsys.readouterr().err
