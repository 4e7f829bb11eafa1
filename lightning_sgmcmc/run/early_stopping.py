"""Early stopping that waits for samples, and the reason why a run ended without any."""

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping, Timer

from lightning_sgmcmc.chains.state import Progress
from lightning_sgmcmc.run.trainer import callbacks_of, said_by


class PatientStopping:
    """Lets `EarlyStopping` check a metric of the samples' average only when there are new samples.

    Before the first sample the metric is NaN, which would end the run; in an exploration stage it does not change,
    which would use up the patience.

    Args:
        monitors: the beginnings of the names of the metrics.

    Attributes:
        samples: number of samples in the metrics that were logged last; set by the callback that logs them.
    """

    def __init__(self, monitors: tuple[str, ...]) -> None:
        self._monitors = monitors
        self._patched: list[EarlyStopping] = []
        self.samples = 0

    def begin(self, trainer: pl.Trainer, samples: int) -> None:
        """Make the trainer's `EarlyStopping` callbacks wait.

        Args:
            trainer: the run's.
            samples: number of samples at the start of the run.
        """
        self.samples = samples
        for callback in callbacks_of(trainer):
            if isinstance(callback, EarlyStopping) and str(said_by(callback, "monitor")).startswith(self._monitors):
                vars(callback)["_should_skip_check"] = self._waiting(callback._should_skip_check)
                self._patched.append(callback)

    def _waiting(self, skips: Callable[[pl.Trainer], bool]) -> Callable[[pl.Trainer], bool]:
        checked = self.samples

        def skips_or_waits(trainer: pl.Trainer) -> bool:
            nonlocal checked
            if skips(trainer) or self.samples == checked:
                return True
            checked = self.samples
            return False

        return skips_or_waits

    def end(self) -> None:
        """Restore the callbacks."""
        for callback in self._patched:
            vars(callback).pop("_should_skip_check", None)
        self._patched = []


def why_without_samples(trainer: pl.Trainer, progress: Progress, updates: int = 0) -> str:
    """Return why a fit draws no sample and what to change, as the end of a sentence.

    Args:
        trainer: the run's.
        progress: the run's position in its schedule.
        updates: the steps so far that have updated the chains.
    """
    if progress.schedule is None:
        return "it has no schedule; add a CyclicalSchedule or a SamplingSchedule to the trainer's callbacks"
    if progress.first_sample is not None and updates < progress.first_sample <= trainer.global_step:
        return (
            f"{trainer.global_step - updates} of {trainer.global_step} steps were skipped, since their energy or "
            "gradient was not finite; use a smaller lr (`sgmcmc tune` finds one), clip the gradients, or use "
            "precision='bf16-mixed' instead of "
            "'16-mixed'"
        )
    stopper = next((reason for c in callbacks_of(trainer) if (reason := _why_stopped(c))), "it stopped")
    first = "" if progress.first_sample is None else f" after step {progress.first_sample}"
    return (
        f"{stopper} after step {trainer.global_step}, and {progress.schedule} draws the first one{first}; let the run "
        "last longer, or make the cycles or the burn-in shorter"
    )


def _why_stopped(callback: Any) -> str:
    if isinstance(callback, EarlyStopping) and (callback.stopped_epoch or callback.wait_count >= callback.patience):
        return f"EarlyStopping(monitor={callback.monitor!r}) ended it"
    if isinstance(callback, Timer) and (callback.time_remaining() or 0) < 0:
        return "the Timer (max_time) ended it"
    return ""
