"""Atomic checkpoints: a file is complete or absent."""

import io
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from fsspec.implementations.local import LocalFileSystem
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning_fabric.utilities.cloud_io import get_filesystem

from lightning_sgmcmc.files import free_space, megabytes, write_atomically


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file in the same folder, flushes it to disk, and then renames it.

    Lightning's own plugin writes through the system's temporary folder. If that is on another disk, the checkpoint is
    copied over the one with the same name (`last.ckpt`), and a full disk or a kill loses both.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint.

        Raises:
            OSError: if it cannot be written; an earlier checkpoint of this name is kept.
        """
        if storage_options is not None or not isinstance(get_filesystem(path), LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = Path(str(path).removeprefix("file://"))
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(place, buffer.getbuffer())
        except OSError as error:
            raise OSError(
                error.errno,
                f"the checkpoint {place} of {megabytes(buffer.getbuffer().nbytes)} could not be written: "
                f"{error.strerror}{free_space(place.parent)}; earlier checkpoints and samples are complete: free "
                "or repair the disk, and resume from the last one",
            ) from error


def protect_checkpoints(trainer: pl.Trainer) -> None:
    """Make a trainer write checkpoints with `AtomicCheckpointIO`, unless the user chose another plugin."""
    strategy = trainer.strategy
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = AtomicCheckpointIO()


def last_good_checkpoint(trainer: pl.Trainer) -> Path | None:
    """Return the newest checkpoint file of this run, else the one that it resumed from, else None."""
    names: set[str] = {str(trainer.ckpt_path)} if trainer.ckpt_path else set()
    for callback in trainer.checkpoint_callbacks:
        for attribute in ("last_model_path", "best_model_path", "_last_checkpoint_saved"):
            names.add(str(getattr(callback, attribute, "") or ""))
        names.update(getattr(callback, "best_k_models", ()))
    paths = [Path(name) for name in names if name and Path(name).is_file()]
    return max(paths, key=lambda path: path.stat().st_mtime, default=None)


def describe_checkpoint(trainer: pl.Trainer) -> str:
    """Return a clause that names the checkpoint to resume from, for error messages."""
    path = last_good_checkpoint(trainer)
    return f"the last good checkpoint is {path}" if path is not None else "there is no checkpoint to resume from"
