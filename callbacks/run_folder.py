"""Where a run's files go."""

from pathlib import Path

import pytorch_lightning as pl

from lightning_sgmcmc.store import MANIFEST


def run_folder(trainer: pl.Trainer) -> Path:
    """Return the folder of this run, the same on all ranks: the first logger's, else `sgmcmc` in `default_root_dir`.

    Loggers with a folder of their own for each run (CSV, TensorBoard) name it; others (W&B) have `save_dir`, name and
    version.
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
