"""Which runs have blocks of steps (`blocks`), and which of these compile them."""

import math
from typing import Any

from torch import nn

from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.trainer import callbacks_of
from lightning_sgmcmc.compiling import has_compiler
from lightning_sgmcmc.fit.passes import LIGHTNING, OWN, SEEN, definer, is_known
from lightning_sgmcmc.namespace import pl

Timer = pl.callbacks.Timer
_TrainingEpochLoop = pl.loops.training_epoch_loop._TrainingEpochLoop
Precision = pl.plugins.precision.Precision
PassThroughProfiler = pl.profilers.PassThroughProfiler
SingleDeviceStrategy = pl.strategies.SingleDeviceStrategy

LARGEST = 1_000_000
"""Sampled numbers of all chains above which a step's time is that of its arithmetic."""
COMPILATION, AGAIN, SAVED = 15, 5, 1.8e-4
"""Seconds in which a step is compiled, first and by a later process from torch's cache, and what a compiled step saves
of a listed one."""
WORTH_COMPILING = 50_000
"""Steps of a run from which compiled ones save more than that in all processes but the first."""
FEWEST = 1_000
"""Steps of a run, times its chains, from which blocks save more than the second in which one is traced."""


OF_A_STEP = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
OF_A_GRAPH = ("on_before_zero_grad", "on_before_backward", "on_after_backward")
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
CHANGING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RNNBase)
"""Layers that draw numbers or change their buffers in training, or that `torch.vmap` cannot run."""
COMPUTING = {"forward", "log_likelihood", "log_prior", "inputs_and_target", "output_of", "output_and_target"}
"""Methods of a user's module that compute an energy."""
CHANGES = {"trainer", "_trainer", "current_epoch", "global_step", "random"}
"""Names of what differs between steps without being a tensor."""


def has_blocks(trainer: Any, module: ChainModel) -> bool:
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
    moves = [definer(data, name) for name in OF_A_BATCH if hasattr(data, name)]  # this library's only moves batches
    if not all(kind.__module__.startswith((LIGHTNING, OWN)) for kind in moves):
        return False
    return all(map(_allows_blocks, callbacks_of(trainer)))


def _is_small(trainer: Any, module: ChainModel) -> bool:
    """Return whether blocks save time; it depends on sizes alone, not on times that are measured, so a run repeats."""
    chains = module.chains
    chosen = chains.compiled != True and chains.chosen_execution in ("auto", "vmap") and not module._compiled_net  # noqa: E712
    steps = trainer.estimated_stepping_batches
    pays = steps * chains.num_chains >= FEWEST
    return chosen and pays and numbers_of(module) <= LARGEST and all(map(_is_traceable, module.modules()))


def numbers_of(module: ChainModel) -> int:
    """Return how many numbers all chains of a process sample."""
    return sum(tensor.numel() for tensor in module.chains.trainable.values())


def _is_traceable(part: nn.Module) -> bool:
    """Return whether a part of a network only computes, as far as its class, its code and its hooks show."""
    hooks = part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks
    if (isinstance(part, CHANGING) and getattr(part, "p", 1) != 0) or any(hooks):  # dropout of nothing is no change
        return False
    own = [kind for kind in type(part).__mro__ if not kind.__module__.startswith(("torch.", LIGHTNING, OWN))]
    methods = COMPUTING if isinstance(part, pl.LightningModule) else {name for kind in own for name in vars(kind)}
    codes = [getattr(vars(kind).get(name), "__code__", None) for kind in own for name in methods]
    return not any(CHANGES & set(code.co_names) for code in codes if code is not None)


def _allows_blocks(callback: pl.Callback) -> bool:
    """Return whether a callback's part in a step is called in a block, or lies in the steps that Lightning sees."""
    kinds = SEEN if type(callback).__module__.startswith(LIGHTNING) else ()
    return isinstance(callback, kinds) or all(_is_known_in_steps(callback, name) for name in OF_A_STEP)


def _is_known_in_steps(callback: pl.Callback, name: str) -> bool:
    """Return whether a callback's hook of a step is known, and none of this library's that needs a graph."""
    return is_known(callback, name) and (name not in OF_A_GRAPH or definer(callback, name) in (pl.Callback, Timer))


def compiles(module: ChainModel, steps: float) -> bool:
    """Return whether the steps of a run are compiled, which saves more than it takes."""
    return module.chains.compiled == "auto" and has_compiler() and steps >= WORTH_COMPILING
