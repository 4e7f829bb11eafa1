"""The name of a baseline among a run's callbacks."""

from typing import Any

import pytorch_lightning as pl

from lightning_sgmcmc.run.trainer import callbacks_of


def baseline_of(trainer: pl.Trainer) -> str | None:
    """Return the name of the baseline that a run is, such as "deep ensemble" or "SWAG"; None for a run that samples.

    A callback that makes several networks of each of the schedule's names the run: dropout masks of a deep ensemble's
    members are an "MC dropout ensemble".
    """
    own: list[Any] = [c for c in callbacks_of(trainer) if hasattr(c, "setting")]  # the library's
    inner = next((c.kind for c in own if c.setting == "schedule"), None)
    outer = next((c.kind for c in own if c.setting != "schedule" and c.kind is not None), inner)
    return None if inner is None else outer
