"""Folders of runs: checked before a run, removed after one that did nothing; `config.yaml` in them."""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.cli import SaveConfigCallback

from lightning_sgmcmc import callbacks
from lightning_sgmcmc.chains.trainer import run_folder
from lightning_sgmcmc.cli.exits import Mistake
from lightning_sgmcmc.files import free_name, is_regular, replacing, write_output
from lightning_sgmcmc.posterior.lock import LOCK, InUseError, is_in_use, lock_alone, lock_shared

NAME = "config.yaml"


@contextmanager
def no_folder_left_behind(folder: Path, remedy: str, is_worthless: Callable[[], bool]) -> Iterator[None]:
    """Check that a run's folder can be written; remove it after a failure if this process made it and it is worthless.

    Loggers fill the folder before data, callbacks and network are checked. Another process may have been started with
    the same folder, before or after this one: then it stays.

    Args:
        is_worthless: called after a failure; returns whether the folder may be removed.
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


def with_public_names(configuration: str) -> str:
    """Return a configuration's text that names callbacks by the package of users, not by the module that holds them."""
    for name in callbacks.__all__:
        inner = re.escape(f"class_path: {getattr(callbacks, name).__module__}.{name}")
        configuration = re.sub(f"{inner}$", f"class_path: {callbacks.__name__}.{name}", configuration, flags=re.M)
    return configuration


class ConfigFile(SaveConfigCallback):
    """Writes the configuration to `config.yaml` in the run's folder when the run begins, after all checks.

    An earlier `config.yaml`, of a run that is resumed with other settings, is kept as `config-1.yaml`.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write nothing yet: the checks of callbacks and data come later."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.already_saved or trainer.sanity_checking:
            return
        self.already_saved = True
        folder = run_folder(trainer)
        if not trainer.is_global_zero:
            return
        folder.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"skip_none": False, "multifile": False, "overwrite": True}
        path = folder / NAME
        with replacing(path) as temporary:  # at every moment there is a whole file of this name
            self.parser.save(self.config, temporary, **options)
            temporary.write_text(with_public_names(temporary.read_text()))
            if is_regular(path) and (earlier := path.read_bytes()) != temporary.read_bytes():
                write_output(free_name(path), earlier)

    on_validation_start = on_test_start = on_predict_start = on_train_start
