"""A run's length from the time that it may take."""

import math
import re
import time
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from lightning_sgmcmc.callbacks.schedule import RunLength, epoch_length

UNITS = {"s": 1, "m": 60, "h": 3600}
SKIPPED, TIMED = 10, 60
"""Steps before the timing, and up to its end."""
SHARE = 0.8
"""Of the time, for steps; draws are evaluated and written in the rest."""


class RunBudget:
    """Sets the trainer's number of steps from a time and the speed of the run's first steps.

    Args:
        text: a number with s, m or h, such as "10m"; None leaves the trainer's length.

    Raises:
        ValueError: for another text.
    """

    def __init__(self, text: str | None) -> None:
        found = None if text is None else re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", str(text).strip())
        if text is not None and (found is None or float(found[1]) == 0):
            raise ValueError(f"budget must be a time such as '90s', '10m' or '2h', got {text!r}")
        self._seconds = None if found is None else float(found[1]) * UNITS[found[2]]
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self._steps: int | None = None
        self._begun = 0.0

    def begin(self, trainer: pl.Trainer) -> None:
        """Give the trainer an end, the real one as soon as it is known."""
        if self._seconds is None:
            return
        steps = self._steps if self._steps is not None else 10**6
        trainer.fit_loop.max_epochs = math.ceil(steps / epoch_length(trainer)) if epoch_length(trainer) else -1
        trainer.fit_loop.epoch_loop.max_steps = steps

    def steps_of(self, length: RunLength) -> int | None:
        """Return the number of steps, None without a budget or before the speed is known."""
        return self._steps

    def after_step(self, trainer: pl.Trainer, step: int) -> bool:
        """Time the first steps; return whether the run's length has just become known."""
        if self._seconds is None or self._steps is not None:
            return False
        if step == SKIPPED:
            self._begun = time.monotonic()
        if step < TIMED:
            return False
        each = trainer.strategy.broadcast((time.monotonic() - self._begun) / (TIMED - SKIPPED))
        within, least = int(SHARE * self._seconds / each), 4 * TIMED
        self._steps = max(within, least)
        said = f"AutoSampling: {self._steps:,} steps of {1000 * each:.3g} ms in {self._seconds:g} seconds."
        if within < least:
            said = (
                f"AutoSampling: budget={self._seconds:g}s holds {within:,} steps of {1000 * each:.3g} ms, and a run "
                f"has {least} at least, so this one takes about {least * each:.2g} seconds."
            )
        rank_zero_info(said)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state: a plain number."""
        return {"budget_steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self._steps = state["budget_steps"]
