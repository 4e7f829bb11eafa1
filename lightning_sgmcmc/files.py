"""Atomic writing of files, and file sizes for messages."""

import os
import shutil
from pathlib import Path
from typing import Any


def megabytes(count: int) -> str:
    """Return a number of bytes as text, such as '12.3 MB'."""
    return f"{count / 1e6:.3g} MB"


def free_space(folder: Path) -> str:
    """Return ' (12.3 MB are free there)' for error messages about a folder, or '' if that is unknown."""
    try:
        return f" ({megabytes(shutil.disk_usage(folder).free)} are free there)"
    except OSError:
        return ""


def write_atomically(path: Path, content: bytes | memoryview, durable: bool = True) -> None:
    """Write a file under a temporary name and rename it, so that a reader sees either the old or the new content.

    Args:
        path: the file; its folder must exist.
        content: the bytes to write.
        durable: whether to flush file and folder to the disk, so that the file survives a power failure.

    Raises:
        OSError: if it cannot be written; an earlier file of this name is unchanged.
    """
    temporary = path.with_name(f".{path.name}.tmp")  # hidden, since callers look for files by the beginnings of names
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            if durable:
                flush(file)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        _flush_folder(path.parent)


def write_output(path: Path, content: bytes) -> None:
    """Write a file of a run's folder completely or not at all; the folder is made if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content, durable=False)


def flush(file: Any) -> None:
    """Flush an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
