"""Folders of this run and of earlier ones: which samples and which checkpoint are the newest."""

import zipfile
from pathlib import Path

from lightning_sgmcmc.chains.trainer import EVALUATIONS, run_folder
from lightning_sgmcmc.files import free_name
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.posterior.manifest import MANIFEST


def folder_of_runs(trainer: pl.Trainer) -> Path:
    """Return the folder that holds the folders of this trainer's runs."""
    logger = next(iter(trainer.loggers), None)
    if isinstance(logger, pl.loggers.MLFlowLogger) and logger._run_id is None:  # its name would begin a run
        known = logger._mlflow_client.get_experiment_by_name(logger._experiment_name)
        name = logger._experiment_name if known is None else known.experiment_id
        return Path.cwd() / (logger.save_dir or trainer.default_root_dir) / name
    folder = run_folder(trainer)
    # W&B's folder of a run is named by the run, which has no name before it begins.
    is_unnamed = isinstance(logger, pl.loggers.WandbLogger) and logger.version is None
    return folder if is_unnamed else folder.parent


def newest_store(trainer: pl.Trainer, named: Path | None = None) -> Path | None:
    """Return the store with samples of this run's folder, else of the one that is named, else the newest one of the
    runs beside it, or None."""
    if trainer in EVALUATIONS:
        return EVALUATIONS[trainer][1]
    folder = run_folder(trainer)
    for own in (folder, named):
        if own is not None and has_samples(own / "samples"):
            return own / "samples"
    stores = [path.parent for path in folder_of_runs(trainer).glob(f"*/samples/{MANIFEST}") if has_samples(path.parent)]
    return max(stores, key=lambda store: (store / MANIFEST).stat().st_mtime, default=None)


def has_samples(store: Path) -> bool:
    """Return whether a folder is a store with a sample: its manifest has a complete line after the header."""
    manifest = store / MANIFEST
    return manifest.is_file() and manifest.read_bytes().count(b"\n") > 1


def evaluate_beside(trainer: pl.Trainer, store: Path, stage: str) -> None:
    """Make a trainer without a fit read a run's samples, and write to a new folder named by `stage` in that run's."""
    folder = free_name(store.parent / stage)
    parent = folder_of_runs(trainer)
    EVALUATIONS[trainer] = (folder, store)
    if folder.is_relative_to(parent):
        _use_folder(trainer, folder.relative_to(parent))


def _use_folder(trainer: pl.Trainer, version: Path) -> None:
    """Make loggers with one folder per run write to the folder `version`, below that of all their runs."""
    for logger in trainer.loggers:
        if hasattr(logger, "_version") and isinstance(getattr(logger, "log_dir", None), str):
            logger._version = str(version)  # loggers accept it only in the constructor


def newest_checkpoint(trainer: pl.Trainer, named: Path | None = None) -> Path | None:
    """Return the newest complete checkpoint of the callbacks' folders, else of the run's folder that is named, else of
    the runs beside this one, or None."""
    folders = {str(folder) for c in trainer.checkpoint_callbacks if (folder := getattr(c, "dirpath", None))}
    candidates = [path for folder in folders for path in Path(folder).glob("*.ckpt")]
    if not folders:
        candidates = list(named.glob("checkpoints/*.ckpt")) if named is not None else []
        candidates = candidates or list(folder_of_runs(trainer).glob("*/checkpoints/*.ckpt"))
    # A truncated file, such as an incomplete copy, is not a zip archive.
    complete = [path for path in candidates if path.is_file() and zipfile.is_zipfile(path)]
    return max(complete, key=lambda path: path.stat().st_mtime, default=None)


def continue_run_of(trainer: pl.Trainer, checkpoint: Path) -> None:
    """Make loggers with numbered folders write to that of a checkpoint's run, and move files in the way aside."""
    folder = checkpoint.parent.parent
    if folder.parent != folder_of_runs(trainer):
        return  # the checkpoints are kept elsewhere
    _use_folder(trainer, Path(folder.name))
    for logger in trainer.loggers:
        if isinstance(logger, pl.loggers.WandbLogger):
            logger._id = logger._wandb_init["id"] = folder.name  # W&B goes on with the run of this name
        if isinstance(logger, pl.loggers.MLFlowLogger):
            logger._run_id = folder.name
    metrics = folder / "metrics.csv"  # Lightning's CSVLogger overwrites its file
    if trainer.is_global_zero and metrics.exists():
        metrics.rename(free_name(metrics))
