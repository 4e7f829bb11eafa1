"""The name of a baseline among a run's callbacks."""

import pytorch_lightning as pl

from lightning_sgmcmc.callbacks.mc_dropout import MCDropout
from lightning_sgmcmc.callbacks.schedule import schedule_of
from lightning_sgmcmc.run.trainer import callbacks_of


def baseline_of(trainer: pl.Trainer) -> str | None:
    """Return the name of the baseline that a run is, such as "deep ensemble" or "SWAG"; None for other runs."""
    own = getattr(schedule_of(trainer), "kind", None)
    if own is not None and any(isinstance(callback, MCDropout) for callback in callbacks_of(trainer)):
        return MCDropout.kind
    return None if own is None else str(own)
