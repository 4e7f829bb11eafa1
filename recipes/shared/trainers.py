"""Trainers of recipes: silent, and with checkpoints from which a job continues."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_sgmcmc.recipes.shared.options import Options

if TYPE_CHECKING:
    from lightning_sgmcmc.callbacks import SampleCollector
    from lightning_sgmcmc.namespace import pl

BETWEEN_CHECKPOINTS = timedelta(minutes=2)


@dataclass
class _JobFolder:
    """Where the job of this process writes checkpoints and samples, and how many trainers it has made."""

    path: Path
    keeps_samples: bool
    trainers: int = 0


_FOLDER: ContextVar[_JobFolder | None] = ContextVar("folder of the job", default=None)


@contextmanager
def within_job(folder: Path, keeps_samples: bool) -> Iterator[None]:
    """Give the trainers that are made inside a folder for checkpoints.

    Args:
        folder: the folder; it is made with the first checkpoint.
        keeps_samples: write samples into it too.
    """
    token = _FOLDER.set(_JobFolder(folder, keeps_samples))
    try:
        yield
    finally:
        _FOLDER.reset(token)


def prepare_run(options: Options) -> None:
    """Silence Lightning, and keep a quick run on one thread."""
    import torch

    if not options.full:
        torch.set_num_threads(1)
    silence_lightning()


def silence_lightning() -> None:
    """Keep the trainer's remarks and warnings out of a recipe's output."""
    from lightning_sgmcmc.namespace import pl

    warnings.filterwarnings("ignore", module=pl.__name__.replace(".", r"\."))
    warnings.filterwarnings("ignore", message=".*(LeafSpec|across ranks is zero).*")
    warnings.filterwarnings("ignore", message=".*has no validation data to evaluate the samples on")  # meant so
    warnings.filterwarnings("ignore", message="This fit draws no posterior samples")  # meant so
    warnings.filterwarnings("ignore", message="temperature=0 is optimization")  # a baseline
    warnings.filterwarnings("ignore", message="RunPlan")  # the paper's setting, not ours
    logging.getLogger(pl.__name__).setLevel(logging.ERROR)


def kept_samples() -> "SampleCollector":
    """Return the collector of the next trainer's samples: in memory, or at the paper's setting in the job's folder."""
    from lightning_sgmcmc.callbacks import SampleCollector

    folder = _FOLDER.get()
    if folder is None or not folder.keeps_samples:
        return SampleCollector(in_memory=True)
    return SampleCollector(folder.path / f"fit-{folder.trainers}-samples")


def quiet_trainer(**options: Any) -> "pl.Trainer":
    """Return a trainer that writes and shows nothing, unless one of its options says otherwise.

    In a job (see `run_jobs`) it writes a checkpoint every two minutes, from which `resumed_fit` continues.

    Args:
        options: those of the trainer.
    """
    from lightning_sgmcmc.namespace import pl

    silent = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    folder = _FOLDER.get()
    if folder is not None and "enable_checkpointing" not in options:
        own = pl.callbacks.ModelCheckpoint(
            folder.path,
            filename=f"fit-{folder.trainers}",
            train_time_interval=BETWEEN_CHECKPOINTS,
            enable_version_counter=False,
        )
        folder.trainers += 1
        options["callbacks"] = [*options.get("callbacks", ()), own]
        silent["enable_checkpointing"] = True
    return pl.Trainer(**(silent | options))


def resumed_fit(trainer: "pl.Trainer", module: "pl.LightningModule", data: "pl.LightningDataModule") -> None:
    """Fit a module, from the checkpoint of an earlier attempt if this job has one.

    Args:
        trainer: one of `quiet_trainer`.
        module: the module.
        data: its data.
    """
    from lightning_sgmcmc.namespace import pl

    kind = pl.callbacks.ModelCheckpoint
    checkpoint = next((one for one in trainer.checkpoint_callbacks if isinstance(one, kind)), None)
    path = None
    if checkpoint is not None and checkpoint.dirpath is not None and checkpoint.filename is not None:
        path = Path(checkpoint.dirpath, f"{checkpoint.filename}{checkpoint.FILE_EXTENSION}")
    trainer.fit(module, datamodule=data, ckpt_path=str(path) if path is not None and path.exists() else None)
