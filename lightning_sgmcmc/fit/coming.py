"""A fit's coming steps: their controls, and the next one that Lightning must see, so that many can be made at once.

A schedule sets step size and temperature by the number of a step alone. Those of the coming steps are therefore known
before the steps are made, and so is the next step whose states are samples.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

from lightning_sgmcmc.chains.callback import PlannedSchedule, RunCallback
from lightning_sgmcmc.chains.chains import ChainModel, sampler_of
from lightning_sgmcmc.chains.row_steps import Controls
from lightning_sgmcmc.chains.trainer import callbacks_of, declared, log_interval
from lightning_sgmcmc.fit.passes import HiddenEpochs, validates
from lightning_sgmcmc.namespace import pl

ModelCheckpoint = pl.callbacks.ModelCheckpoint
ProgressBar = pl.callbacks.ProgressBar


class ComingControls:
    """The controls of the steps that follow the sampler's last one.

    Args:
        acting: the callbacks that may change the schedule's controls.
    """

    def __init__(self, trainer: pl.Trainer, module: ChainModel, acting: Sequence[RunCallback]) -> None:
        self._module, self._sampler, self._acting = module, sampler_of(module), acting
        self._schedule: PlannedSchedule | None = next(
            (plan for callback in declared(trainer) if (plan := callback.as_schedule()) is not None), None
        )

    def apply(self, step: int) -> None:
        """Set the schedule's controls of a step, the sampler's so many-th."""
        own = self._own(step)
        if self._schedule is not None and own > 0:
            self._schedule.apply(own, self._module, self._sampler)

    def of_steps(self, count: int) -> tuple[list[Controls], int, Any]:
        """Return the controls of the coming steps, up to the first with others than numbers that differ, how many
        these are, and what the controls are."""
        sampler = self._sampler
        groups = sampler.param_groups
        controls = [Controls([], []) for _ in groups]
        first, form = sampler.step_count + 1, None
        ahead = 0
        while ahead < count:
            self.apply(first + ahead)
            changed = [self._changed(group) for group in groups]
            own = [(sampler.is_noisy(g), g.get("adapting"), type(g["lr"]), type(g["temperature"])) for g in changed]
            if form is not None and own != form:
                self.apply(first + ahead - 1)
                return controls, ahead, form
            form = own
            alike = min(self._steps_alike(first + ahead), count - ahead)
            for kept, group in zip(controls, changed, strict=True):
                kept.lr.extend([group["lr"]] * alike)
                kept.temperature.extend([group["temperature"]] * alike)
            ahead += alike
        return controls, count, form

    def until_samples(self, most: int) -> int | None:
        """Return how many of the coming steps come up to the next whose states are samples, None if it is not among
        so many."""
        schedule, own = self._schedule, self._own(self._sampler.step_count)
        if schedule is None:
            return None
        return next((ahead for ahead in range(max(1, 1 - own), most + 1) if schedule.draws(own + ahead)), None)

    def _changed(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group with the controls of the coming steps, which callbacks may change."""
        for callback in self._acting:
            group = {**group, **changed} if (changed := callback.step_controls(group)) else group
        return group

    def _steps_alike(self, step: int) -> int:
        """Return how many steps, from one on, have the same controls."""
        own = self._own(step)
        return self._schedule.steps_alike(own) if self._schedule is not None and own > 0 else 1

    def _own(self, step: int) -> int:
        """Return a step's number in the schedule, from 1; below that it belongs to a warm start."""
        return step - self._module.chains.progress.warm_steps


class NextSeen:
    """Finds the next step that Lightning must see: one that is logged, saved, shown, validated after, or a sample."""

    def __init__(self, trainer: Any, controls: ComingControls, epochs: HiddenEpochs) -> None:
        self._trainer, self._controls, self._epochs = trainer, controls, epochs
        self._loop: Any = trainer.fit_loop.epoch_loop
        keepers = [c for c in callbacks_of(trainer) if isinstance(c, ModelCheckpoint)]
        self._keepers = [keeper._every_n_train_steps for keeper in keepers]
        self._clocks = [(k, k._train_time_interval.total_seconds()) for k in keepers if k._train_time_interval]
        """Checkpoints by time, and their seconds."""
        self._rates = [getattr(c, "refresh_rate", 1) for c in callbacks_of(trainer) if isinstance(c, ProgressBar)]
        self._has_validation = False

    def begin(self) -> None:
        """Note whether the fit validates, before steps are made."""
        self._has_validation = validates(self._trainer)

    def within(self, most: int, late: bool) -> tuple[int, bool]:
        """Return how many of the coming steps, of so many, come up to the next that Lightning sees or that ends an
        epoch, and whether Lightning sees that.

        Args:
            late: whether progress bars wait for a step.
        """
        trainer, loop = self._trainer, self._loop
        step, stepped, batch = trainer.global_step, loop._batches_that_stepped, loop.batch_idx + 1
        each = trainer.accumulate_grad_batches
        now = time.monotonic() if self._clocks else 0.0
        is_time = any(now - (keeper._last_time_checked or 0.0) >= interval for keeper, interval in self._clocks)
        if trainer.should_stop or trainer.received_sigterm or is_time:
            return 1, True
        due = [every - step % every for every in self._keepers if every >= 1]
        if trainer.max_steps >= 0:
            due.append(max(1, trainer.max_steps - step))
        if trainer.loggers:
            interval = log_interval(trainer)
            due.append(interval - stepped % interval)
        every = trainer.val_check_batch
        may_validate = self._has_validation and loop._should_check_val_epoch()
        if may_validate and every is not None and not math.isinf(every):
            ahead = every - (loop.total_batch_idx + 1 if trainer.check_val_every_n_epoch is None else batch) % every
            due.append(math.ceil((batch % each + ahead) / each))
        end = math.ceil(trainer.num_training_batches / each) - batch // each
        if late:
            due.append(next((ahead for ahead in range(1, end) if self._shows((batch // each + ahead) * each)), end))
        count = min(most, end, *due)
        if (samples := self._controls.until_samples(count)) is not None:
            count = samples
            due.append(samples)
        is_seen = count in due or (count == end and not self._epochs.hides(self._has_validation))
        return count, is_seen

    def _shows(self, coming: int) -> bool:
        """Return whether progress bars show the coming step."""
        return all(rate < 1 or coming % rate == 0 for rate in self._rates)
