"""Lightning's own counts of batches and epochs, which drift in a run that resumes several times, and their repair."""

from dataclasses import asdict, dataclass
from typing import Any

import pytorch_lightning as pl

from lightning_sgmcmc.run.checkpoints import PLACE, check_loops


@dataclass
class Place:
    """Where a run is, by its own counts.

    Attributes:
        epoch: index of the epoch, over all fits of the trainer.
        in_epoch: batches of the epoch that the run has trained on.
        is_over: whether the epoch has ended.
        before: batches of the trainer's earlier fits.
        steps_before: optimizer steps of the trainer's earlier fits.
        begins_epoch: whether the next batch is an epoch's first.
    """

    epoch: int = 0
    in_epoch: int = 0
    is_over: bool = False
    before: int = 0
    steps_before: int = 0
    begins_epoch: bool = True

    def count(self, trainer: pl.Trainer) -> None:
        """Count a batch that has ended; the first of an epoch begins it."""
        if self.begins_epoch:
            self.epoch, self.in_epoch, self.begins_epoch = trainer.current_epoch, 0, False
        self.in_epoch += 1
        self.is_over = trainer.is_last_batch

    def end_epoch(self, trainer: pl.Trainer) -> None:
        """End an epoch that a callback has cut short; a run that ends in mid-epoch may go on there."""
        by_steps = 0 <= trainer.max_steps <= trainer.global_step
        self.is_over = self.is_over or not (by_steps or trainer.should_stop)

    def state_dict(self) -> dict[str, int | bool]:
        """Return the place as plain data."""
        return {name: value for name, value in asdict(self).items() if name != "begins_epoch"}


def place_in(saved: dict[str, Any]) -> Place | None:
    """Return the place that a checkpoint's `ExactResume` has kept, None if it has none."""
    if "place" in saved:
        check_loops(saved["place"], Place().state_dict(), PLACE)
        own = {name: saved["place"][name] for name in Place().state_dict()}
        return Place(**own, begins_epoch=own["is_over"])
    batches, length = saved.get("batches", 0), saved.get("epoch_length")  # an earlier version's: of the first epoch
    if not length or batches <= 0:
        return None
    epoch, before = divmod(batches - 1, length)
    is_over = before + 1 == length
    return Place(epoch, before + 1, is_over, begins_epoch=is_over)


def repair_loop_counts(fit_loop: dict[str, Any], batches: int, place: Place, accumulating: bool) -> None:
    """Set the counts of a saved fit loop as if the run had never stopped, at the end of its last batch.

    Args:
        fit_loop: the loop's part of a checkpoint; changed in place.
        batches: batches that the fit has trained on, > 0.
        place: where it is.
        accumulating: whether the last batch was not the last of its step.
    """
    total, over = place.before + batches, place.is_over
    # Within an epoch as in the hook at a batch's end; after one as before the next, whose hooks are still to be called.
    pending = int(not over)
    within, epochs = (0, place.epoch + 1) if over else (place.in_epoch, place.epoch)
    progress = fit_loop["epoch_loop.batch_progress"]
    _set_counts(progress, "total", begun=total, processed=total, ended=total - pending)
    _set_counts(progress, "current", begun=within, processed=within, ended=within - pending)
    progress["is_last_batch"] = False
    for count in ("total", "current"):
        _set_counts(fit_loop["epoch_progress"], count, begun=epochs + pending, processed=epochs, ended=epochs)
    steps = fit_loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = steps if accumulating or over else steps - 1


def _set_counts(progress: dict[str, Any], count: str, begun: int, processed: int, ended: int) -> None:
    progress[count].update(ready=begun, started=begun, processed=processed, completed=ended)
