"""Typed access to attributes that Lightning's trainer leaves untyped."""

import inspect
import math
from typing import Any, cast

import pytorch_lightning as pl

from lightning_sgmcmc.chains.chains import chains_of

NOTHING = object()


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return the trainer's callbacks, in their order."""
    return cast("list[pl.Callback]", cast(Any, trainer).callbacks)


def said_by(callback: Any, name: str, default: Any = None) -> Any:
    """Return an attribute of a callback or its class; a mock has every attribute when asked, and says nothing."""
    return default if inspect.getattr_static(callback, name, NOTHING) is NOTHING else getattr(callback, name)


def log_interval(trainer: pl.Trainer) -> int:
    """Return `log_every_n_steps`."""
    return int(cast(Any, trainer).log_every_n_steps)


def is_trial(trainer: pl.Trainer) -> bool:
    """Return whether this is a `fast_dev_run`, which writes no files."""
    return bool(cast(Any, trainer).fast_dev_run)


def is_probe(trainer: pl.Trainer) -> bool:
    """Return whether this is a short fit of a tuner."""
    return any(said_by(callback, "is_probe", False) for callback in callbacks_of(trainer))


def fit_steps(trainer: pl.Trainer) -> float:
    """Return the optimizer steps of the present fit, infinite if unknown; the trainer may have made others before."""
    steps = trainer.estimated_stepping_batches
    if steps < 0:  # epochs of a loader without length
        return math.inf
    return steps - chains_of(trainer.lightning_module).progress.steps_before


def is_finished(trainer: pl.Trainer) -> bool:
    """Return whether a fit without a checkpoint makes no step, because the trainer has reached its limit; known from
    `configure_optimizers` on."""
    by_steps = 0 <= trainer.max_steps <= trainer.global_step
    epochs = trainer.max_epochs
    processed: int = cast(Any, trainer.fit_loop.epoch_progress.current).processed
    by_epochs = epochs is not None and 0 <= epochs <= processed
    return not trainer.ckpt_path and (by_steps or by_epochs)


def repeated_batches(trainer: pl.Trainer) -> float:
    """Return `overfit_batches`."""
    return float(cast(Any, trainer).overfit_batches)


def was_terminated(trainer: pl.Trainer) -> bool:
    """Return whether the trainer has received SIGTERM."""
    return bool(cast(Any, trainer).received_sigterm)


def resume_command(trainer: pl.Trainer) -> str | None:
    """Return the shell's command that continues the run, None for a run that Python code has started."""
    command = getattr(trainer, "resume_command", None)
    return None if command is None else str(command)
