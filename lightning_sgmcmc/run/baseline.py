"""The name of a baseline among a run's callbacks."""

import pytorch_lightning as pl

from lightning_sgmcmc.run.trainer import callbacks_of, said_by


def baseline_of(trainer: pl.Trainer) -> str | None:
    """Return the name of the baseline that a run is, such as "deep ensemble" or "SWAG"; None for a run that samples.

    A callback that makes several networks of each of the schedule's names the run: dropout masks of a deep ensemble's
    members are an "MC dropout ensemble".
    """
    named = [(said_by(c, "setting"), said_by(c, "kind")) for c in callbacks_of(trainer)]
    inner = next((kind for setting, kind in named if setting == "schedule"), None)
    outer = next((kind for setting, kind in named if setting != "schedule" and kind is not None), inner)
    return None if inner is None else outer
