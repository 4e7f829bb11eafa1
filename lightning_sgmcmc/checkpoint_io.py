"""Checkpoints that are complete or not there."""

import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from fsspec.implementations.local import LocalFileSystem
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning_fabric.utilities.cloud_io import get_filesystem


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place, flushes it to the disk, and then renames it.

    Lightning's own goes by way of the system's folder for temporary files. Where that is another disk, the checkpoint
    is copied over the one of the same name (`last.ckpt`), and a full disk or a kill leaves neither.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint.

        Raises:
            OSError: if it cannot be written; an earlier one of this name is still there.
        """
        if storage_options is not None or not isinstance(get_filesystem(path), LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = Path(str(path).removeprefix("file://"))
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        temporary = place.with_name(f".{place.name}.tmp")  # hidden: `last…` names are searched for
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(buffer.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, place)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise OSError(
                error.errno,
                f"the checkpoint {place} of {megabytes(buffer.getbuffer().nbytes)} could not be written: "
                f"{error.strerror}{free_space(place.parent)}; the checkpoints and samples before it are complete, so "
                "mend the disk and resume from the last one",
            ) from error


def protect_checkpoints(trainer: pl.Trainer) -> None:
    """Let a trainer write its checkpoints by `AtomicCheckpointIO`, unless the user chose a way of his own."""
    strategy = trainer.strategy
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = AtomicCheckpointIO()


def megabytes(count: int) -> str:
    """Return a number of bytes in words."""
    return f"{count / 1e6:.3g} MB"


def free_space(folder: Path) -> str:
    """Return the half sentence on the room that is left in a folder, empty where that is not known."""
    try:
        return f" ({megabytes(shutil.disk_usage(folder).free)} are free there)"
    except OSError:
        return ""
