"""Folders of runs: checked before a run, and removed after one that did nothing."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_sgmcmc.cli.exits import Mistake
from lightning_sgmcmc.posterior.writing import LOCK, InUseError, is_in_use, lock_alone, lock_shared


@contextmanager
def no_folder_left_behind(folder: Path, remedy: str, is_worthless: Callable[[], bool]) -> Iterator[None]:
    """Check that a run's folder can be written, and remove it if this process made it, the run fails, it is worthless,
    and no other process has a run there.

    Loggers fill the folder before data, callbacks and network are checked. Another process may have been started with
    the same folder, before or after this one.

    Args:
        folder: the run's folder, which may exist.
        remedy: how to choose another one.
        is_worthless: called after a failure; returns whether the folder may be removed.

    Raises:
        Mistake: if the folder cannot be written.
    """
    made: list[Path] = []
    try:
        use = _enter(folder, made)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _remove_empty(made)
        raise Mistake(f"the run's folder {folder} cannot be written ({error.strerror}): {remedy}") from error
    try:
        yield
    except Exception as error:
        is_ours = folder in made and not isinstance(error, InUseError) and lock_alone(use)
        if is_ours and is_worthless() and not any(is_in_use(path.parent) for path in folder.rglob(LOCK)):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if use is not None:
            os.close(use)
        _remove_empty(made)


def _enter(folder: Path, made: list[Path]) -> int | None:
    """Make a folder, note what of it this process has made, and return the lock that says that it is in use."""
    while True:
        for path in [path for path in (folder, *folder.parents) if not path.exists()][::-1]:
            try:
                path.mkdir()
                made.insert(0, path)
            except FileExistsError:  # another process was faster
                continue
        try:
            use = lock_shared(folder)
            if use is None or os.path.samestat(os.fstat(use), os.stat(folder)):
                return use
            os.close(use)
        except FileNotFoundError:
            pass
        made.clear()  # another process has removed it meanwhile


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # it is not empty
            continue
