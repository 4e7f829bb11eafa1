"""Blocks of steps: those between two steps that Lightning must see are made by a loop of a few calls.

Lightning's loop around a step takes longer than a step of a small network. A block makes the same steps, with the same
calls of module, sampler and this library's callbacks in the same order, so their bits are the same. It leaves out what
has no effect in such a step: contexts of profilers, hooks that nobody defines, the collection of metrics that nobody
logs. Lightning's counts of batches and steps go on in it.

Lightning itself makes the steps at which it acts: an epoch's last, those after which it validates, logs, saves or ends,
and those whose states are samples. A run with a part that acts at every step, such as a user's callback with
`on_train_batch_end`, has no blocks.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint, ProgressBar, Timer
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from lightning_sgmcmc.chains.callback import PlannedSchedule
from lightning_sgmcmc.chains.chains import ChainModel, sampler_of
from lightning_sgmcmc.chains.trainer import callbacks_of, declared, log_interval
from lightning_sgmcmc.samplers import Sampler

LONGEST = 0.25
"""Seconds after which a block ends, so that progress bars and signals are attended to."""

OF_A_STEP = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
OF_A_BATCH = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
SEEN = (ModelCheckpoint, ProgressBar, LearningRateMonitor)
"""Lightning's callbacks that act in the steps that Lightning makes."""
OWN = f"{__name__.partition('.')[0]}."
OF_THE_MODULE = (
    *OF_A_STEP,
    *OF_A_BATCH,
    "training_step",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
)


class StepBlocks:
    """Makes a fit's steps that Lightning need not see, after each step that it makes."""

    def __init__(self) -> None:
        self._loop: Any = None
        self.count = 0
        """Steps made in blocks."""

    def begin(self, trainer: pl.Trainer, module: ChainModel) -> None:
        """Let blocks follow Lightning's steps, if the run has no part that acts at every step."""
        self.end()
        self.count = 0
        if not has_blocks(trainer, module):
            return
        self._trainer, self._module, self._sampler = trainer, module, sampler_of(module)
        self._schedule: PlannedSchedule | None = next(
            (plan for callback in declared(trainer) if (plan := callback.as_schedule()) is not None), None
        )
        self._hooks = {name: _hooks_of(trainer, name) for name in OF_A_STEP}
        self._keepers = [c._every_n_train_steps for c in callbacks_of(trainer) if isinstance(c, ModelCheckpoint)]
        self._moves = module.device.type != "cpu"
        self._clip = trainer.gradient_clip_val, _text(trainer.gradient_clip_algorithm)
        self._loop = trainer.fit_loop.epoch_loop
        after = self._loop.on_advance_end

        def on_advance_end(fetcher: Any) -> None:
            after(fetcher)
            self._make_block(fetcher)

        self._loop.on_advance_end = on_advance_end

    def end(self) -> None:
        """Give Lightning's loop its own method back."""
        if self._loop is not None:
            vars(self._loop).pop("on_advance_end", None)
        self._loop = self._trainer = self._module = self._sampler = self._schedule = None
        self._hooks: dict[str, list[Callable[..., Any]]] = {}

    def _make_block(self, fetcher: Any) -> None:
        """Make steps up to the next one that is Lightning's."""
        begun = time.monotonic()
        self._update = _step_of(self._sampler)
        gather_rows(fetcher)
        while not self._is_seen() and time.monotonic() - begun < LONGEST:
            self._make_step(fetcher)

    def _is_seen(self) -> bool:
        """Return whether Lightning makes the coming step."""
        trainer, loop = self._trainer, self._loop
        coming = loop.batch_progress.current.ready + 1
        step = trainer.global_step + 1
        if trainer.should_stop or trainer.received_sigterm or coming >= trainer.num_training_batches:
            return True
        if 0 <= trainer.max_steps <= step or any(every >= 1 and step % every == 0 for every in self._keepers):
            return True
        if trainer.loggers and (loop._batches_that_stepped + 1) % log_interval(trainer) == 0:
            return True
        if trainer.enable_validation and _validates(trainer, loop, coming):
            return True
        warm = self._module.chains.progress.warm_steps
        own = self._sampler.step_count + 1 - warm
        return self._schedule is not None and (own <= 0 or self._schedule.draws(own))

    def _make_step(self, fetcher: Any) -> None:
        """Make a step as Lightning does."""
        trainer, module, sampler, hooks = self._trainer, self._module, self._sampler, self._hooks
        batches, optimizer = self._loop.batch_progress, self._loop.automatic_optimization.optim_progress.optimizer
        batch, _, _ = next(fetcher)
        index = self._loop.batch_idx + 1
        batches.is_last_batch = fetcher.done
        if self._moves:
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        batches.increment_ready()
        for hook in hooks["on_train_batch_start"]:
            hook(trainer, module, batch, index)
        batches.increment_started()
        optimizer.step.increment_ready()
        loss = module.training_step(batch, index)
        optimizer.zero_grad.increment_ready()
        for hook in hooks["on_before_zero_grad"]:
            hook(trainer, module, sampler)
        optimizer.zero_grad.increment_started()
        module.optimizer_zero_grad(trainer.current_epoch, index, sampler)
        optimizer.zero_grad.increment_completed()
        for hook in hooks["on_before_backward"]:
            hook(trainer, module, loss)
        module.backward(loss)
        for hook in hooks["on_after_backward"]:
            hook(trainer, module)
        for hook in hooks["on_before_optimizer_step"]:
            hook(trainer, module, sampler)
        if self._clip[0]:
            module.configure_gradient_clipping(sampler, self._clip[0], self._clip[1])
        self._update()
        optimizer.step.increment_completed()
        batches.increment_processed()
        for hook in hooks["on_train_batch_end"]:
            hook(trainer, module, {"loss": loss.detach()}, batch, index)
        batches.increment_completed()
        self._loop._batches_that_stepped += 1
        self.count += 1


def _step_of(sampler: Sampler) -> Callable[[], Any]:
    """Return the sampler's step, without what torch does around it for profilers if no hook waits there."""
    step: Any = type(sampler).step
    hooks: Any = sampler
    if hooks._optimizer_step_pre_hooks or hooks._optimizer_step_post_hooks or not hasattr(step, "hooked"):
        return sampler.step
    return partial(step.__wrapped__, sampler)


# -- rows --------------------------------------------------------------------------------------------------------------


class RowsOfTensors:
    """Gathers the rows of a batch of a `TensorDataset` at once, in place of item by item; the batch is the same."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._tensors = dataset.tensors

    def fetch(self, rows: list[int]) -> list[Tensor]:
        """Return the batch of some rows."""
        at = torch.tensor(rows)
        return [tensor[at] for tensor in self._tensors]


def gather_rows(fetcher: Any) -> None:
    """Let a pass of a plain loader over tensors in memory gather each batch at once."""
    passes = getattr(fetcher.combined_loader._iterator, "iterators", [])
    loader = fetcher.combined_loader.flattened[0]
    if len(passes) != 1 or type(passes[0]) is not _SingleProcessDataLoaderIter or type(loader) is not DataLoader:
        return
    is_plain = loader.collate_fn is default_collate and type(loader.dataset) is TensorDataset and not loader.pin_memory
    if is_plain and loader.batch_sampler is not None and not isinstance(passes[0]._dataset_fetcher, RowsOfTensors):
        passes[0]._dataset_fetcher = RowsOfTensors(loader.dataset)


# -- which runs --------------------------------------------------------------------------------------------------------


def has_blocks(trainer: pl.Trainer, module: ChainModel) -> bool:
    """Return whether no part of a run acts at every step beside module, sampler and this library's callbacks."""
    plain = (
        type(trainer.fit_loop.epoch_loop) is _TrainingEpochLoop
        and type(trainer.strategy) is SingleDeviceStrategy
        and type(trainer.precision_plugin) is Precision
        and isinstance(trainer.profiler, PassThroughProfiler)
        and trainer.accumulate_grad_batches == 1
        and not trainer.lr_scheduler_configs
        and not trainer._detect_anomaly
        and getattr(trainer, "_val_check_time_interval", None) is None
        and math.isfinite(trainer.num_training_batches)
    )
    if not plain or any(module.replaces(name) for name in OF_THE_MODULE):
        return False
    data = getattr(trainer, "datamodule", None)
    if data is not None and any(_defines(data, name, pl.LightningDataModule) for name in OF_A_BATCH):
        return False
    return all(map(_allows_blocks, callbacks_of(trainer)))


def _allows_blocks(callback: pl.Callback) -> bool:
    """Return whether a callback's part in a step is called in a block, or lies in Lightning's own steps."""
    if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
        return False
    kinds = () if type(callback).__module__.partition(".")[0] != pl.__name__ else SEEN
    return isinstance(callback, kinds) or all(_is_known(callback, name) for name in OF_A_STEP)


def _is_known(callback: pl.Callback, name: str) -> bool:
    """Return whether a callback's hook is Lightning's empty one, or one of this library or of its timer."""
    if name in vars(callback):
        return False
    definer = next((kind for kind in type(callback).__mro__ if name in vars(kind)), object)
    return definer in (pl.Callback, Timer) or definer.__module__.startswith(OWN)


def _hooks_of(trainer: pl.Trainer, name: str) -> list[Callable[..., Any]]:
    """Return the callbacks' hooks that are called in each step of a block."""
    called = [callback for callback in callbacks_of(trainer) if not isinstance(callback, SEEN)]
    return [getattr(callback, name) for callback in called if _defines(callback, name, pl.Callback)]


def _defines(part: Any, name: str, base: type) -> bool:
    """Return whether an object's class has a method of its own in place of a base class's."""
    return getattr(type(part), name, None) is not getattr(base, name)


def _validates(trainer: Any, loop: Any, coming: int) -> bool:
    """Return whether validation follows the coming batch of the epoch."""
    every = trainer.val_check_batch
    if every is None or math.isinf(every):
        return False
    batches = loop.total_batch_idx + 2 if trainer.check_val_every_n_epoch is None else coming
    return bool(batches % every == 0)


def _text(algorithm: Any) -> str | None:
    return None if algorithm is None else str(getattr(algorithm, "value", algorithm))
