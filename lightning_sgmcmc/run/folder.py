"""Folders of this run and of earlier runs."""

import zipfile
from pathlib import Path

import pytorch_lightning as pl

from lightning_sgmcmc.posterior.disk import MANIFEST


def run_folder(trainer: pl.Trainer) -> Path:
    """Return the folder of this run, the same on all ranks: the first logger's, else `sgmcmc` in `default_root_dir`.

    Loggers with one folder per run (CSV, TensorBoard) provide it; for others (W&B) it is built from `save_dir`, name
    and version.
    """
    folder = Path(trainer.default_root_dir, "sgmcmc")
    for logger in trainer.loggers[:1]:
        own = getattr(logger, "log_dir", None)
        if isinstance(own, str | Path):
            folder = Path(own)
        else:
            parts = [str(part) for part in (logger.name, logger.version) if part]
            folder = Path(logger.save_dir or trainer.default_root_dir, *parts)
    return Path(trainer.strategy.broadcast(str(folder)))


def newest_store(trainer: pl.Trainer) -> Path | None:
    """Return the newest sample store among the runs beside this one, or None."""
    manifests = run_folder(trainer).parent.glob(f"*/samples/{MANIFEST}")
    newest = max(manifests, key=lambda path: path.stat().st_mtime, default=None)
    return newest.parent if newest is not None else None


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
    for logger in trainer.loggers:
        if hasattr(logger, "_version") and isinstance(getattr(logger, "log_dir", None), str):
            logger._version = folder.name  # loggers accept it only in the constructor
    metrics = folder / "metrics.csv"  # Lightning's CSVLogger overwrites its file
    if trainer.is_global_zero and metrics.exists():
        number = 1
        while (aside := folder / f"metrics-{number}.csv").exists():
            number += 1
        metrics.rename(aside)
