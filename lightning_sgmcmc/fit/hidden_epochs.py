"""Ends of epochs that Lightning need not see.

What Lightning does between two epochs takes longer than an epoch of a small network with few data. Where no callback,
logger, validation or checkpoint acts there, the next epoch begins within a block: the counts go on, this library's
callbacks are called, and the loader's next pass begins, as in Lightning's own loop.
"""

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities.data import _set_sampler_epoch
from pytorch_lightning.callbacks import ModelCheckpoint, ProgressBar, Timer

from lightning_sgmcmc.chains.callback import RunCallback
from lightning_sgmcmc.chains.trainer import callbacks_of

START, END = "on_train_epoch_start", "on_train_epoch_end"
OWN = f"{__name__.partition('.')[0]}."


class HiddenEpochs:
    """Ends epochs of a fit and begins the next ones, where nothing else acts between them."""

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer = trainer
        self._module = module
        callbacks = callbacks_of(trainer)
        self._hooks = {name: [hook for c in callbacks if (hook := _hook(c, name)) is not None] for name in (START, END)}
        self._keepers = [c._every_n_epochs for c in callbacks if isinstance(c, ModelCheckpoint)]
        self._may_turn = (
            trainer.reload_dataloaders_every_n_epochs == 0
            and not module.replaces(START)
            and not module.replaces(END)
            and all(_is_known(callback, name) for callback in callbacks for name in (START, END))
        )

    def hides(self) -> bool:
        """Return whether the present epoch's end may be one that Lightning does not see."""
        trainer, loops = self._trainer, self._trainer.fit_loop
        loop, coming = loops.epoch_loop, trainer.current_epoch + 1
        if not self._may_turn or loops.restarting or loop.restarting or loops.is_resuming:
            return False
        if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= coming:
            return False
        if any(every >= 1 and coming % every == 0 for every in self._keepers):
            return False
        if validates(trainer) and loop._should_check_val_epoch():
            return False
        return not any(True for _ in loop._results.valid_items())  # what is logged of an epoch is reduced at its end

    def turn(self, fetcher: Any) -> None:
        """End the epoch whose last batch is made, and begin the next one."""
        trainer, module, loops = self._trainer, self._module, self._trainer.fit_loop
        loop, epochs = loops.epoch_loop, loops.epoch_progress
        trainer._logger_connector.epoch_end_reached()
        epochs.increment_processed()
        for hook in self._hooks[END]:
            hook(trainer, module)
        epochs.increment_completed()
        for loader in fetcher.combined_loader.flattened:
            _set_sampler_epoch(loader, epochs.current.processed)
        epochs.increment_ready()
        for hook in self._hooks[START]:
            hook(trainer, module)
        epochs.increment_started()
        loop.batch_progress.reset_on_run()
        loop.scheduler_progress.reset_on_run()
        loop.automatic_optimization.optim_progress.reset_on_run()
        loop.val_loop.batch_progress.total.reset()
        iter(fetcher)


def validates(trainer: Any) -> bool:
    """Return whether a fit has batches to validate with, as far as that is known."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    return trainer.enable_validation and (loop._combined_loader is None or not loop.skip)


def _hook(callback: pl.Callback, name: str) -> Callable[..., Any] | None:
    """Return a callback's hook, if it does something beside progress and checkpoints."""
    own = getattr(type(callback), name, None) is not getattr(pl.Callback, name)
    return getattr(callback, name) if own and not isinstance(callback, ModelCheckpoint | ProgressBar) else None


def _is_known(callback: pl.Callback, name: str) -> bool:
    """Return whether it is known what a callback does between epochs."""
    if name in vars(callback):
        return False
    definer = next(kind for kind in type(callback).__mro__ if name in vars(kind))
    if isinstance(callback, ModelCheckpoint | ProgressBar):
        return definer.__module__.startswith(f"{pl.__name__}.")
    return definer in (pl.Callback, Timer) or (isinstance(callback, RunCallback) and definer.__module__.startswith(OWN))
