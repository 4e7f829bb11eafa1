"""The order in which the library's callbacks run, so that the order of the user's list does not matter."""

from enum import IntEnum
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import LearningRateMonitor

from lightning_sgmcmc.run.trainer import callbacks_of


class Place(IntEnum):
    """Where a callback runs: after those of the places before it, whose results of a step or of a fit it uses."""

    FIRST_STAGE = 0
    SCHEDULE = 1
    CHAIN = 2
    """Changes the chain by the schedule's controls."""
    STORE = 3
    AVERAGE = 4
    DIAGNOSIS = 5
    PICTURES = 6
    SUMMARY = 7


def put_in_place(trainer: pl.Trainer) -> None:
    """Sort the trainer's callbacks that have a place, among the positions of its list that they take.

    All others stay where they are, as does the order of those with one place and one name. Lightning's monitor of the
    step size reads what the schedule has set.
    """
    callbacks = callbacks_of(trainer)
    positions = [index for index, callback in enumerate(callbacks) if _place_of(callback) is not None]
    placed = sorted((callbacks[index] for index in positions), key=lambda c: (_place_of(c), type(c).__name__))
    for index, callback in zip(positions, placed, strict=True):
        callbacks[index] = callback


def _place_of(callback: Any) -> Place | None:
    if isinstance(callback, LearningRateMonitor):
        return Place.DIAGNOSIS
    place = getattr(type(callback), "place", None)  # not the object's: a mock has every attribute
    return place if isinstance(place, Place) else None
