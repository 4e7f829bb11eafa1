"""Typed access to attributes that Lightning's trainer leaves untyped."""

from typing import Any, cast

import pytorch_lightning as pl


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return the trainer's callbacks, in their order."""
    return cast("list[pl.Callback]", cast(Any, trainer).callbacks)


def log_interval(trainer: pl.Trainer) -> int:
    """Return `log_every_n_steps`."""
    return int(cast(Any, trainer).log_every_n_steps)


def is_trial(trainer: pl.Trainer) -> bool:
    """Return whether this is a `fast_dev_run`, which writes no files."""
    return bool(cast(Any, trainer).fast_dev_run)


def is_probe(trainer: pl.Trainer) -> bool:
    """Return whether this is a short fit of a tuner."""
    return any(getattr(callback, "is_probe", False) for callback in callbacks_of(trainer))


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
