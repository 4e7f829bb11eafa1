"""Blocks of steps: what Lightning does around a step of a small network takes longer than the step.

A block makes the steps up to the next one that Lightning must see in a loop of its own. They are the steps that
Lightning would make: the same batches, controls, noise and calls of this library's callbacks, in the same order. What
has no effect in them is left out: contexts of profilers, hooks that nobody defines, the collection of metrics that
nobody logs. The gradient comes from traced operations (`chains.traced`), for all chains at once, so the numbers are
those of other steps up to rounding. Lightning's counts of batches and steps go on, and a block ends with the step after
which Lightning validates, logs, saves, shows its progress, or ends an epoch.

A run with a part that acts at every step, such as a user's callback with `on_train_batch_end`, has no blocks.
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
from pytorch_lightning.trainer import call
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from lightning_sgmcmc.chains.callback import PlannedSchedule
from lightning_sgmcmc.chains.chains import ChainModel, sampler_of
from lightning_sgmcmc.chains.traced import NotTraceableError
from lightning_sgmcmc.chains.trainer import callbacks_of, declared, log_interval
from lightning_sgmcmc.samplers import Sampler

LONGEST = 0.2
"""Seconds after which a block ends, so that progress bars and signals are attended to."""
LARGEST = 1_000_000
"""Sampled numbers of all chains above which a step's time is that of its arithmetic."""
FEWEST = 1_000
"""Steps of a run, times its chains, from which blocks save more than the seconds in which a step is traced."""

OF_A_STEP = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
OF_A_BATCH = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
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
SEEN = (ModelCheckpoint, ProgressBar, LearningRateMonitor)
"""Lightning's callbacks, which act in the steps that it sees."""
OWN = f"{__name__.partition('.')[0]}."
CLAIMS = ("snapshot gradients", "energy correction", "choose gradient")
"""Subjects whose claimants need the graph of a step's energies, or more gradients than one."""
CHANGING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RNNBase)
"""Layers that draw numbers or change their buffers in training, or that `torch.vmap` cannot run."""


class StepBlocks:
    """Makes a fit's steps in the place of Lightning's loop, if `has_blocks` and no claim forbids it."""

    def __init__(self) -> None:
        self._loop: Any = None
        self.hidden = 0
        """Steps of this fit that Lightning has not seen."""

    def begin(self, trainer: pl.Trainer, module: ChainModel) -> None:
        """Take the place of the loop's `advance`, when the chains' energies are ready."""
        self.end()
        self.hidden = 0
        chains = module.chains
        if not chains.traces:
            return
        if any(chains.claims.holder(subject) is not None for subject in CLAIMS):
            chains.stop_tracing(trainer)
            return
        self._trainer, self._module, self._sampler = trainer, module, sampler_of(module)
        self._schedule: PlannedSchedule | None = next(
            (plan for callback in declared(trainer) if (plan := callback.as_schedule()) is not None), None
        )
        self._hooks = {name: _hooks_of(trainer, name) for name in OF_A_STEP}
        self._keepers = [c._every_n_train_steps for c in callbacks_of(trainer) if isinstance(c, ModelCheckpoint)]
        self._rates = [getattr(c, "refresh_rate", 1) for c in callbacks_of(trainer) if isinstance(c, ProgressBar)]
        self._clip = trainer.gradient_clip_val, _text(trainer.gradient_clip_algorithm)
        self._update = _step_of(self._sampler)
        self._epoch = -1
        self._loop = trainer.fit_loop.epoch_loop
        self._plain = self._loop.advance
        self._loop.advance = self._advance

    def end(self) -> None:
        """Give Lightning's loop its own method back."""
        if self._loop is not None:
            vars(self._loop).pop("advance", None)
        self._loop = self._trainer = self._module = self._sampler = self._schedule = None
        self._hooks: dict[str, list[Callable[..., Any]]] = {}
        self._plain = self._update = lambda *_: None

    def _advance(self, fetcher: Any) -> None:
        """Make the steps up to the next one that Lightning sees, and this one too, with all its hooks."""
        loop = self._loop
        if loop.restarting and loop._should_check_val_fx(fetcher):
            if loop.val_loop.restarted_mid_evaluation or loop.restarted_on_last:
                self._plain(fetcher)  # which makes no step
                return
            loop.val_loop.increment_progress_to_evaluation_end()
        loop.val_loop.restarting = False
        gather_rows(fetcher)
        begun = time.monotonic()
        while True:
            batch, _, _ = next(fetcher)
            index = loop.batch_idx + 1
            loop.batch_progress.is_last_batch = fetcher.done
            if self._is_seen(index + 1) or (time.monotonic() - begun > LONGEST and self._shows(index + 1)):
                self._make_seen_step(batch, index)
                return
            self._make_hidden_step(batch, index)

    def _is_seen(self, coming: int) -> bool:
        """Return whether Lightning sees the coming step, the epoch's so many-th."""
        trainer, loop = self._trainer, self._loop
        step = trainer.global_step + 1
        if trainer.should_stop or trainer.received_sigterm or coming >= trainer.num_training_batches:
            return True
        if 0 <= trainer.max_steps <= step or any(every >= 1 and step % every == 0 for every in self._keepers):
            return True
        if trainer.loggers and (loop._batches_that_stepped + 1) % log_interval(trainer) == 0:
            return True
        if trainer.enable_validation and _validates(trainer, loop, coming):
            return True
        own = self._sampler.step_count + 1 - self._module.chains.progress.warm_steps
        return self._schedule is not None and own > 0 and self._schedule.draws(own)

    def _shows(self, coming: int) -> bool:
        """Return whether progress bars show the coming step."""
        return all(rate < 1 or coming % rate == 0 for rate in self._rates)

    def _make_seen_step(self, batch: Any, index: int) -> None:
        """Make a step with all that Lightning does around it."""
        trainer, batches = self._trainer, self._loop.batch_progress
        batches.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        call._call_callback_hooks(trainer, "on_train_batch_start", batch, index)
        batches.increment_started()
        loss = self._make_step(batch, index)
        batches.increment_processed()
        call._call_callback_hooks(trainer, "on_train_batch_end", {"loss": loss}, batch, index)
        trainer._logger_connector.on_batch_end()
        batches.increment_completed()
        trainer._logger_connector.update_train_step_metrics()

    def _make_hidden_step(self, batch: Any, index: int) -> None:
        """Make a step that Lightning does not see."""
        trainer, module, batches = self._trainer, self._module, self._loop.batch_progress
        batches.increment_ready()
        for hook in self._hooks["on_train_batch_start"]:
            hook(trainer, module, batch, index)
        batches.increment_started()
        loss = self._make_step(batch, index)
        batches.increment_processed()
        for hook in self._hooks["on_train_batch_end"]:
            hook(trainer, module, {"loss": loss}, batch, index)
        batches.increment_completed()
        self._loop._batches_that_stepped += 1
        self.hidden += 1

    def _make_step(self, batch: Any, index: int) -> Tensor:
        """Compute the gradient and make the update; return the loss."""
        trainer, module, sampler, hooks = self._trainer, self._module, self._sampler, self._hooks
        optimizer, chains = self._loop.automatic_optimization.optim_progress.optimizer, module.chains
        optimizer.step.increment_ready()
        optimizer.zero_grad.increment_ready()
        optimizer.zero_grad.increment_started()
        optimizer.zero_grad.increment_completed()
        if chains.traces:
            checks, self._epoch = trainer.current_epoch != self._epoch, trainer.current_epoch
            try:
                loss = chains.take_gradient(batch, index, trainer, checks)
            except NotTraceableError as error:
                rank_zero_info(f"The steps are not traced, since the network is more than tensor operations: {error}.")
                chains.stop_tracing(trainer)
        if not chains.traces:
            loss = module.training_step(batch, index)
            module.optimizer_zero_grad(trainer.current_epoch, index, sampler)
            module.backward(loss)
        for hook in hooks["on_before_optimizer_step"]:
            hook(trainer, module, sampler)
        if self._clip[0]:
            module.configure_gradient_clipping(sampler, self._clip[0], self._clip[1])
        self._update()
        optimizer.step.increment_completed()
        return loss.detach()


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
    """Return whether blocks pay in a run, and no part of it acts at every step beside module, sampler and this
    library's callbacks."""
    plain = (
        type(trainer.fit_loop.epoch_loop) is _TrainingEpochLoop
        and type(trainer.strategy) is SingleDeviceStrategy
        and type(trainer.precision_plugin) is Precision
        and isinstance(trainer.profiler, PassThroughProfiler)
        and trainer.accumulate_grad_batches == 1
        and not trainer._detect_anomaly
        and getattr(trainer, "_val_check_time_interval", None) is None
        and math.isfinite(trainer.num_training_batches)
        and module.automatic_optimization
        and trainer.strategy.root_device.type == "cpu"
    )
    if not plain or not _is_small(trainer, module) or any(module.replaces(name) for name in OF_THE_MODULE):
        return False
    data = getattr(trainer, "datamodule", None)
    if data is not None and any(_defines(data, name, pl.LightningDataModule) for name in OF_A_BATCH):
        return False
    return all(map(_allows_blocks, callbacks_of(trainer)))


def _is_small(trainer: pl.Trainer, module: ChainModel) -> bool:
    """Return whether blocks save time; it depends on sizes alone, not on times that are measured, so a run repeats."""
    chains = module.chains
    chosen = chains.compiled != True and chains.chosen_execution in ("auto", "vmap") and not module._compiled_net  # noqa: E712
    steps = trainer.estimated_stepping_batches * chains.num_chains
    numbers = sum(tensor.numel() for tensor in chains.trainable.values())
    return chosen and steps >= FEWEST and numbers <= LARGEST and all(map(_is_traceable, module.modules()))


def _is_traceable(part: nn.Module) -> bool:
    """Return whether a part of a network only computes, as far as its class and its hooks show."""
    hooks = part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks
    return not isinstance(part, CHANGING) and not any(hooks)


def _allows_blocks(callback: pl.Callback) -> bool:
    """Return whether a callback's part in a step is called in a block, or lies in the steps that Lightning sees."""
    if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
        return False
    kinds = () if type(callback).__module__.partition(".")[0] != pl.__name__ else SEEN
    return isinstance(callback, kinds) or all(_is_known(callback, name) for name in OF_A_STEP)


def _is_known(callback: pl.Callback, name: str) -> bool:
    """Return whether a callback's hook is Lightning's empty one, or one of this library or of its timer."""
    if name in vars(callback):
        return False
    definer = next((kind for kind in type(callback).__mro__ if name in vars(kind)), object)
    own = definer.__module__.startswith(OWN) and name not in ("on_before_zero_grad", "on_before_backward", "on_after_backward")
    return definer in (pl.Callback, Timer) or own


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
