"""Folders of runs: checked before a run, and removed after one that did nothing."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_sgmcmc.cli.exits import Mistake


@contextmanager
def no_folder_left_behind(folder: Path, remedy: str, is_worthless: Callable[[], bool]) -> Iterator[None]:
    """Check that a run's folder can be written, and remove it if the run that made it fails and it is worthless.

    Loggers make the folder before data, callbacks and network are checked.

    Args:
        folder: the run's folder, which may exist.
        remedy: how to choose another one.
        is_worthless: called after a failure; returns whether the folder may be removed.

    Raises:
        Mistake: if the folder cannot be written.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Mistake(f"the run's folder {folder} cannot be written ({error.strerror}): {remedy}") from error
    finally:
        _remove_empty(missing)
    try:
        yield
    except Exception:
        if missing and is_worthless():
            shutil.rmtree(folder, ignore_errors=True)
        _remove_empty(missing)
        raise


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # it is not empty, or was never made
            continue
