"""Folders of this run and of earlier runs."""

import os
import zipfile
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from lightning_sgmcmc.files import free_name, is_remote
from lightning_sgmcmc.posterior.manifest import MANIFEST
from lightning_sgmcmc.run.trainer import is_trial

_EVALUATIONS: "WeakKeyDictionary[pl.Trainer, tuple[Path, Path]]" = WeakKeyDictionary()
"""Of trainers that evaluate another run's samples: their folder, and the samples."""


_STARTED_IN: "WeakKeyDictionary[pl.Trainer, Path]" = WeakKeyDictionary()
"""The working folders in which trainers began to run, to which relative paths refer."""
OF_A_TRAINER = ("_default_root_dir",)
OF_A_LOGGER = ("_root_dir", "_save_dir")
OF_AN_EXPERIMENT = ("log_dir", "metrics_file_path")
"""Attributes of Lightning's objects that may be relative paths; its checkpoint callbacks' `dirpath` follows them."""


def settle_folders(trainer: pl.Trainer) -> None:
    """Make a trainer's relative folders absolute when it begins, so that a later `os.chdir` changes nothing.

    It warns if the run's folder is not on a local disk.
    """
    _STARTED_IN[trainer] = Path.cwd()
    _make_absolute(vars(trainer), OF_A_TRAINER)
    for logger in trainer.loggers:
        _make_absolute(vars(logger), OF_A_LOGGER)
        _make_absolute(vars(logger).get("_wandb_init"), ("dir",))
        _make_absolute(getattr(vars(logger).get("_experiment"), "__dict__", None), OF_AN_EXPERIMENT)
    for callback in trainer.checkpoint_callbacks:
        _make_absolute(vars(callback), ("dirpath",))
    remote = remote_root(trainer)
    if remote is not None and not is_trial(trainer):
        rank_zero_warn(
            f"The run's folder is in {remote}, not on a local disk. Checkpoints and the logger's own files go there; "
            f"samples, results and pictures are written below {_STARTED_IN[trainer] / 'sgmcmc'}: copy them afterwards, "
            "or pass a local default_root_dir or save_dir."
        )


def _make_absolute(attributes: dict[str, Any] | None, names: tuple[str, ...]) -> None:
    if attributes is None:
        return
    for name in names:
        value = attributes.get(name)
        local = str(value).removeprefix("file://")
        if isinstance(value, str | Path) and local[:1] not in ("", "~", "$") and not is_remote(local):
            attributes[name] = type(value)(os.path.abspath(local))


def remote_root(trainer: pl.Trainer) -> str | None:
    """Return the address of the folder of this trainer's runs if it is not on a local disk (`s3://…`), else None."""
    folder = next((logger.save_dir for logger in trainer.loggers[:1]), None) or trainer.default_root_dir
    return str(folder) if is_remote(folder) else None


def _folder_of(trainer: pl.Trainer) -> str:
    for logger in trainer.loggers[:1]:
        own = getattr(logger, "log_dir", None)
        if isinstance(own, str | Path):
            return str(own)
        parts = [str(part) for part in (logger.name, logger.version) if part]
        return os.path.join(str(logger.save_dir or trainer.default_root_dir), *parts)
    return os.path.join(trainer.default_root_dir, "sgmcmc")


def run_folder(trainer: pl.Trainer) -> Path:
    """Return the folder of this run, the same on all ranks: the first logger's, else `sgmcmc` in `default_root_dir`.

    Loggers with one folder per run (CSV, TensorBoard) provide it; for others (W&B) it is built from `save_dir`, name
    and version. A trainer that evaluates another run's samples has a folder in that run's (see `evaluate_beside`).
    It is absolute. That of a run whose folder is not on a local disk (`s3://bucket/run`) is `sgmcmc/bucket/run`.
    """
    if trainer in _EVALUATIONS:
        return Path(trainer.strategy.broadcast(str(_EVALUATIONS[trainer][0])))
    folder = _folder_of(trainer).removeprefix("file://")
    if is_remote(folder):
        parts = folder.partition("://")[2].replace("..", "").split("/")
        folder = os.path.join("sgmcmc", *(part for part in parts if part))
    return Path(trainer.strategy.broadcast(os.path.join(_STARTED_IN.get(trainer) or Path.cwd(), folder)))


def newest_store(trainer: pl.Trainer) -> Path | None:
    """Return the store with samples of this run's folder, else the newest one of the runs beside it, or None."""
    if trainer in _EVALUATIONS:
        return _EVALUATIONS[trainer][1]
    folder = run_folder(trainer)
    if has_samples(folder / "samples"):
        return folder / "samples"
    stores = [path.parent for path in folder.parent.glob(f"*/samples/{MANIFEST}") if has_samples(path.parent)]
    return max(stores, key=lambda store: (store / MANIFEST).stat().st_mtime, default=None)


def has_samples(store: Path) -> bool:
    """Return whether a folder is a store with a sample: its manifest has a complete line after the header."""
    manifest = store / MANIFEST
    return manifest.is_file() and manifest.read_bytes().count(b"\n") > 1


def evaluate_beside(trainer: pl.Trainer, store: Path, stage: str) -> None:
    """Make a trainer without a fit read a run's samples, and write to a new folder in that run's.

    Args:
        trainer: the trainer of the evaluation.
        store: the samples, in a run's folder.
        stage: name of the new folder; if it exists, `-1`, `-2`, … is appended.
    """
    folder = free_name(store.parent / stage)
    parent = run_folder(trainer).parent
    _EVALUATIONS[trainer] = (folder, store)
    if folder.is_relative_to(parent):
        _use_folder(trainer, folder.relative_to(parent))


def _use_folder(trainer: pl.Trainer, version: Path) -> None:
    """Make loggers with one folder per run write to the folder `version`, below that of all their runs."""
    for logger in trainer.loggers:
        if hasattr(logger, "_version") and isinstance(getattr(logger, "log_dir", None), str):
            logger._version = str(version)  # loggers accept it only in the constructor


def newest_checkpoint(trainer: pl.Trainer) -> Path | None:
    """Return the newest complete checkpoint of the runs beside this one, or None.

    It searches the folders of the trainer's checkpoint callbacks, and the `checkpoints` folders of earlier runs.
    """
    folders = {str(folder) for c in trainer.checkpoint_callbacks if (folder := getattr(c, "dirpath", None))}
    candidates = [path for folder in folders for path in Path(folder).glob("*.ckpt")]
    if not folders:
        candidates = list(run_folder(trainer).parent.glob("*/checkpoints/*.ckpt"))
    # A truncated file, such as an incomplete copy, is not a zip archive.
    complete = [path for path in candidates if path.is_file() and zipfile.is_zipfile(path)]
    return max(complete, key=lambda path: path.stat().st_mtime, default=None)


def continue_run_of(trainer: pl.Trainer, checkpoint: Path) -> None:
    """Make loggers with numbered folders write to the folder of the checkpoint's run.

    Files that would be overwritten are moved aside first.
    """
    folder = checkpoint.parent.parent
    if folder.parent != run_folder(trainer).parent:
        return  # the checkpoints are kept elsewhere
    _use_folder(trainer, Path(folder.name))
    metrics = folder / "metrics.csv"  # Lightning's CSVLogger overwrites its file
    if trainer.is_global_zero and metrics.exists():
        metrics.rename(free_name(metrics))
