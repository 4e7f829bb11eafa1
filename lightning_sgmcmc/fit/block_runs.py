"""Which runs have blocks of steps (`blocks`), and which of these compile them."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from lightning_sgmcmc.chains.callback import RunCallback
from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.compiled_step import captures
from lightning_sgmcmc.chains.trainer import callbacks_of, declared, instances_of
from lightning_sgmcmc.compiling import has_compiler, why_not_compiled
from lightning_sgmcmc.fit.passes import LIGHTNING, OWN, SEEN, definer, defines, is_known
from lightning_sgmcmc.namespace import pl, rank_zero_info
from lightning_sgmcmc.samplers.noise import WHOLE
from lightning_sgmcmc.samplers.rows import FlatParameters

GradientAccumulationScheduler = pl.callbacks.GradientAccumulationScheduler
Timer = pl.callbacks.Timer
_TrainingEpochLoop = pl.loops.training_epoch_loop._TrainingEpochLoop
DoublePrecision = pl.plugins.precision.DoublePrecision
Precision = pl.plugins.precision.Precision
PassThroughProfiler = pl.profilers.PassThroughProfiler
SingleDeviceStrategy = pl.strategies.SingleDeviceStrategy

LARGEST = {"cpu": 1_000_000, "cuda": 16_000_000}
"""Sampled numbers of all chains, on a CPU of one, above which a step's time is that of its arithmetic, by the type of
device; others have no blocks."""
CACHED = 1_000_000
"""Sampled numbers of all chains above which one after another makes many steps on a CPU."""
COMPILATION, AGAIN = 15, 5
"""Seconds in which a step is compiled, first and by a later process from torch's cache."""
SAVED, SAVED_OF_A_NUMBER, SAVED_LEARNING = 1.8e-4, 2.4e-9, 1.5e-3
"""Seconds that a compiled step saves of a listed one, with each number that all chains sample, and of a single one in
which a callback learns."""
WORTH_COMPILING, WORTH_LEARNING = 50_000, 20_000
"""Steps of a run from which compiled ones save more than that in all processes but the first, without and with such a
callback; in a network of few numbers."""
TIMED, TIMED_OF_A_NUMBER = 6e-4, 1e-8
"""Seconds of a run's `max_time` that count as a step, with each number that all chains sample: in 30 s compiled steps
make up for twice their compilation."""
MOST_CONVOLUTIONS = 32
"""Convolutions of a step, those of all chains that are written out one by one, with which it is compiled in 30 s."""
SAVED_CAPTURED, WORTH_CAPTURED = 9e-5, 100_000
"""The same of captured steps on a GPU, with and without a callback."""
FEWEST = 1_000
"""Steps of a run, times its chains, from which it has blocks."""
NOT_MADE = "Steps are not made in blocks"

OF_A_STEP = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
ACTIONS = ("step_part", "step_variate", "step_choice")
"""Methods by which a callback says what it does in each of many steps."""
OF_A_GRAPH = ("on_before_zero_grad", "on_before_backward")
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
REMEDIES = {
    **dict.fromkeys(OF_A_STEP, "which is called at every step: use a hook of epochs, or on_posterior_sample"),
    **dict.fromkeys(OF_A_BATCH, "which is called at every step: prepare the data before"),
}
"""What to do about a method that is called at every step, by its name."""
OTHERWISE = "which is called at every step: override log_likelihood or log_prior instead"
CHANGING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RNNBase)
"""Layers that draw numbers or change their buffers in training, or that `torch.vmap` cannot run."""
COMPUTING = {"forward", "log_likelihood", "log_prior", "inputs_and_target", "output_of", "output_and_target"}
"""Methods of a user's module that compute an energy."""
CHANGES = {"trainer", "_trainer", "current_epoch", "global_step", "random"}
"""Names of what differs between steps without being a tensor."""


def has_blocks(trainer: Any, module: ChainModel) -> bool:
    """Return whether a run makes its steps in blocks; if something prevents it where it would save time, report it."""
    if not _saves_time(trainer, module):
        return False
    cause = why_no_blocks(trainer, module)
    if cause is not None:
        rank_zero_info(f"{NOT_MADE}, since {cause}.")
    return cause is None


def _saves_time(trainer: Any, module: ChainModel) -> bool:
    """Return whether blocks save time and are wanted; it depends on sizes alone, not on measured times, so a run
    repeats."""
    chains = module.chains
    kind = trainer.strategy.root_device.type
    each = chains.num_chains if runs_apart(trainer, module) else 1
    is_small = numbers_of(module) <= LARGEST.get(kind, -1) * each
    if kind == "cuda" and any(map(_changes, module.modules())):
        return False  # of a residual network's step most is arithmetic, so no other layers are advised
    if not is_small or chains.chosen_execution not in ("auto", "vmap"):
        return False
    return bool(trainer.estimated_stepping_batches * chains.num_chains >= FEWEST)


def why_no_blocks(trainer: Any, module: ChainModel) -> str | None:
    """Return what a run has now that needs each step of Lightning's loop, and what to do about it; None for nothing."""
    return next(_causes_of_no_blocks(trainer, module), None)


def _causes_of_no_blocks(trainer: Any, module: ChainModel) -> Iterator[str]:
    """Return, one by one, what a run has that needs each step of Lightning's loop, and what to do about it."""
    name, chains = type(module).__name__, module.chains
    for scheduler in instances_of(trainer, GradientAccumulationScheduler):
        if scheduler.going_to_accumulate_grad_batches():
            yield "a GradientAccumulationScheduler accumulates batches: remove it, and use larger batches"
    for callback in callbacks_of(trainer):
        if (hook := _hook_of_each_step(callback)) is not None:
            is_users = not definer(callback, hook).__module__.startswith(LIGHTNING)
            remedy = REMEDIES[hook] if is_users else "which is called at every step: leave it out of long runs"
            yield f"{type(callback).__name__} has its own {hook}, {remedy}"
    for method in OF_THE_MODULE:
        if module.replaces(method):
            yield f"{name} has its own {method}, {REMEDIES.get(method, OTHERWISE)}"
    data = getattr(trainer, "datamodule", None)
    for method in OF_A_BATCH:  # this library's datamodules only move batches
        if hasattr(data, method) and not definer(data, method).__module__.startswith((LIGHTNING, OWN)):
            yield f"{type(data).__name__} has its own {method}, {REMEDIES[method]}"
    for weight, parameter in chains.trainable.items():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield f"'{weight}' has a hook, which is called at every step: remove it for long runs"
    for path, part in module.named_modules():
        if (what := _what_is_more(part)) is not None:
            yield f"'{path}' ({type(part).__name__}) {what}" if path else f"{name} {what}"
    if chains.flat is None and not FlatParameters.suits([*chains.trainable.values()], module.num_chains):
        yield "some parameters share memory, or are empty: give each its own"
    if module.chains.compiled == True or module._compiled_net:  # noqa: E712
        yield "the network is compiled by itself: leave compile at 'auto', and pass the plain network"
    yield from _causes_in_trainer(trainer, module)


def _causes_in_trainer(trainer: Any, module: ChainModel) -> Iterator[str]:
    """Return, one by one, which of a trainer's parts need each step of Lightning's loop, and what to do about it."""
    if type(trainer.strategy) is not SingleDeviceStrategy:
        strategy = type(trainer.strategy).__name__
        yield f"the strategy is {strategy}: pass devices=1, with which one process makes all chains' steps"
    if type(trainer.precision_plugin) not in (Precision, DoublePrecision):
        yield f"precision={trainer.precision!r}: leave it at '32-true', or pass '64-true'"
    if not isinstance(trainer.profiler, PassThroughProfiler):
        yield f"{type(trainer.profiler).__name__} measures each step: leave it out of long runs"
    if trainer._detect_anomaly:
        yield "detect_anomaly=True looks at each step: leave it out of long runs"
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        yield "val_check_interval is a time: pass a number of steps"
    each, every = trainer.accumulate_grad_batches, trainer.val_check_batch
    if each > 1 and trainer.enable_validation and _is_within_steps(trainer, each, every):
        epoch = f", and an epoch of {trainer.num_training_batches}" if trainer.check_val_every_n_epoch is None else ""
        yield f"validation every {every} batches{epoch} comes within steps of {each}: pass a multiple of {each}"
    if not math.isfinite(trainer.num_training_batches):
        yield "the loader has no length: pass one with a length, or limit_train_batches"
    if not module.automatic_optimization:
        yield "automatic_optimization=False: leave it at True"
    if trainer.lr_scheduler_configs:
        yield "a learning-rate scheduler acts in each: use SamplingSchedule(lr_decay=…) or CyclicalSchedule"
    if type(trainer.fit_loop.epoch_loop) is not _TrainingEpochLoop:
        yield "the trainer has a loop of its own: leave Lightning's in its place"


def _is_within_steps(trainer: Any, each: int, every: float | None) -> bool:
    """Return whether some validations, one after every so many batches, come before a step's last batch."""
    if every is None or not math.isfinite(every):
        return False
    ends_epochs = trainer.num_training_batches % each > 0  # the last step of an epoch has fewer batches
    if trainer.check_val_every_n_epoch is None:  # counted over all epochs
        return every % each > 0 or ends_epochs
    return every % each > 0 and every != trainer.num_training_batches


def numbers_of(module: ChainModel) -> int:
    """Return how many numbers all chains of a process sample."""
    return sum(tensor.numel() for tensor in module.chains.trainable.values())


def runs_apart(trainer: Any, module: ChainModel) -> bool:
    """Return whether steps are those of one chain after another, since all together have no room in a processor's
    cache; no callback does something in each."""
    if trainer.strategy.root_device.type != "cpu" or not CACHED < numbers_of(module) <= WHOLE:
        return False
    acting = any(overrides(own, name) for own in declared(trainer) for name in ACTIONS)
    return module.num_chains > 1 and not acting


def _changes(part: nn.Module) -> bool:
    """Return whether a layer draws numbers or changes its buffers in training, or is recurrent."""
    if isinstance(part, nn.modules.instancenorm._InstanceNorm):
        return bool(part.track_running_stats)
    return isinstance(part, CHANGING) and getattr(part, "p", 1) != 0  # dropout of nothing is no change


def _what_is_more(part: nn.Module) -> str | None:
    """Return what a part of a network does beside computing, as far as its class, its code and its hooks show."""
    if any((part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)):
        return "has a hook: remove it for long runs"
    if isinstance(part, nn.RNNBase):
        return "is a recurrent layer, which blocks cannot compute"
    if _changes(part):
        return "draws numbers or changes its statistics in training: use another layer to have blocks"
    own = [kind for kind in type(part).__mro__ if not kind.__module__.startswith(("torch.", LIGHTNING, OWN))]
    methods = COMPUTING if isinstance(part, pl.LightningModule) else {name for kind in own for name in vars(kind)}
    codes = [getattr(vars(kind).get(name), "__code__", None) for kind in own for name in methods]
    read = sorted({name for code in codes if code is not None for name in CHANGES & set(code.co_names)})
    return f"reads {read[0]!r} where it computes, which differs between steps: make it a tensor" if read else None


class Attributes:
    """The attributes of a module and its parts, of which some may be numbers that traced operations hold."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [vars(part) for part in module.modules()]
        self._before = [dict(own) for own in self._parts]

    def have_changed(self) -> bool:
        """Return whether an attribute is another object than at the last look."""
        before, self._before = self._before, [dict(own) for own in self._parts]
        return any(
            now.keys() != then.keys() or any(now[name] is not then[name] for name in now)
            for now, then in zip(self._before, before, strict=True)
        )


def _hook_of_each_step(callback: pl.Callback) -> str | None:
    """Return the name of a callback's hook that is not known in blocks, nor lies in the steps that Lightning sees."""
    if type(callback).__module__.startswith(LIGHTNING) and isinstance(callback, SEEN):
        return None
    return next((name for name in OF_A_STEP if not _is_known_in_steps(callback, name)), None)


def _is_known_in_steps(callback: pl.Callback, name: str) -> bool:
    """Return whether a callback's hook of a step is known, and called in blocks."""
    return is_known(callback, name) and (name not in OF_A_GRAPH or definer(callback, name) in (pl.Callback, Timer))


def acts_in_steps(callback: RunCallback) -> bool:
    """Return whether a callback has a hook in each step, or a claim on it."""
    return bool(callback.claims) or any(defines(callback, name) for name in OF_A_STEP)


def has_hooks(sampler: Any, *known: Any) -> bool:
    """Return whether functions are called before or after each update of a sampler, but methods of known objects."""
    hooks = *sampler._optimizer_step_pre_hooks.values(), *sampler._optimizer_step_post_hooks.values()
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    return any([owner is None or all(owner is not one for one in known) for owner in owners])


def overrides(callback: RunCallback, name: str) -> bool:
    """Return whether a callback may return something by a method, such as its part in compiled steps."""
    return getattr(type(callback), name) is not getattr(RunCallback, name)


def _learn(acting: Sequence[RunCallback]) -> bool:
    return any(overrides(callback, "step_part") for callback in acting)


def expected_steps(trainer: pl.Trainer, module: ChainModel) -> float:
    """Return the steps of a run, infinite if unknown; no more than its `max_time` or its schedule's time lets it
    make."""
    limits = [
        timer.time_elapsed() + left  # its whole time, so that a resumed run makes the same steps
        for timer in instances_of(trainer, Timer)
        if (left := timer.time_remaining()) is not None
    ]
    schedules = [found for callback in declared(trainer) if (found := callback.as_schedule()) is not None]
    limits += [schedule.seconds for schedule in schedules if schedule.seconds is not None]
    each = TIMED + TIMED_OF_A_NUMBER * numbers_of(module)
    return min([trainer.estimated_stepping_batches, *(limit / each for limit in limits)])


def compiles(module: ChainModel, steps: float, acting: Sequence[RunCallback]) -> bool:
    """Return whether the steps of a run are compiled, which saves more than it takes; some callbacks act in them."""
    if captures(module.device):
        return module.chains.compiled == "auto" and steps >= WORTH_CAPTURED and why_not_compiled("cuda") is None
    fewest = WORTH_COMPILING * SAVED / _saved(module)
    if _learn(acting):
        fewest = min(fewest, WORTH_LEARNING)
    return module.chains.compiled == "auto" and has_compiler() and steps >= fewest


def _saved(module: ChainModel) -> float:
    """Return the seconds that a compiled step saves of a listed one."""
    return SAVED + SAVED_OF_A_NUMBER * numbers_of(module)


def say_compilation(module: ChainModel, steps: float, acting: Sequence[RunCallback], are_captured: bool) -> None:
    """Say what compiling the coming steps takes and saves."""
    each = SAVED_CAPTURED if are_captured else SAVED_LEARNING if _learn(acting) else _saved(module)
    saved = f"{steps * each:,.0f} s" if math.isfinite(steps) else f"{each * 1e6:,.0f} µs a step"
    rank_zero_info(
        f"Steps are compiled, in about {COMPILATION} s the first time and {AGAIN} s in later processes, which saves "
        f"about {saved}."
    )
