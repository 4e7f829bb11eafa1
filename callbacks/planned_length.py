"""The length of a run that a schedule must know in advance."""

import math
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from lightning_sgmcmc.callbacks.schedule import RunLength
from lightning_sgmcmc.run.trainer import callbacks_of, fit_steps


class PlannedLength:
    """The optimizer steps of a run, remembered in its checkpoints.

    Args:
        name: of the schedule, for messages.
        before: what a run that ends early misses, for messages; "{steps}" is the number of steps.
        planned: what the length determines, for messages: subject and verb.
        ends: what ends elsewhere in a run of another length, for messages: subject and verb.
    """

    def __init__(
        self, name: str, before: str | None = None, planned: str | None = None, ends: str = "step size ends"
    ) -> None:
        last = f"its last step, {{steps}}, after which {name} draws its samples, so they would be missing"
        self._name, self._before = name, before or last
        self._planned, self._ends = planned or f"{name} was", ends
        self._steps: int | None = None

    def steps_of(self, length: RunLength) -> int:
        """Return the schedule's number of steps.

        Raises:
            ValueError: if the run has no end.
        """
        if not math.isfinite(length.steps):
            raise ValueError(
                f"{self._name} needs a run with an end: set the trainer's max_steps, or max_epochs and a loader that "
                "has a length"
            )
        return int(length.steps)

    def begin(self, trainer: pl.Trainer) -> None:
        """Warn if the run may end early, or if its length is not the checkpoint's."""
        total, enders = int(fit_steps(trainer)), (pl.callbacks.EarlyStopping, pl.callbacks.Timer)
        ender = next((c for c in callbacks_of(trainer) if isinstance(c, enders)), None)
        if ender is not None:
            rank_zero_warn(f"{type(ender).__name__} may end the run before {self._before.format(steps=total)}.")
        if self._steps not in (None, total):
            rank_zero_warn(
                f"The checkpoint's {self._planned} planned for {self._steps} steps, this run has {total}, so its "
                f"{self._ends} elsewhere: resume with the same max_epochs or max_steps to continue the same schedule."
            )
        self._steps = total

    def reset(self) -> None:
        """Forget an earlier run."""
        self._steps = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain numbers."""
        return {"total_steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self._steps = state["total_steps"]
