"""Checks of the trainer's settings before the first step, what early stopping may watch, and data that grow."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sgmcmc.batches.inputs import digest
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.batches.orders import BatchOrder
from lightning_sgmcmc.batches.rows import TrainingRows, repetitions, resolve_num_data, stream_of, training_rows
from lightning_sgmcmc.chains.callback import RunCallback, has_loss_scaler
from lightning_sgmcmc.chains.chains import ChainModel, Chains, chains_of, is_per_chain, sampler_of
from lightning_sgmcmc.chains.layout import dist_is_used, layout_of, new_group
from lightning_sgmcmc.chains.state import Progress
from lightning_sgmcmc.chains.trainer import (
    baseline_of,
    callbacks_of,
    declared,
    fit_steps,
    instances_of,
    is_probe,
    is_trial,
    repeated_batches,
)
from lightning_sgmcmc.fit.passes import LIGHTNING, OWN, definer
from lightning_sgmcmc.likelihoods import Censored, ClassLikelihood, Gaussian, Ordinal, StudentT
from lightning_sgmcmc.likelihoods.numbers import doubt_of_noise
from lightning_sgmcmc.model import check_methods
from lightning_sgmcmc.namespace import OTHER, PACKAGES, is_of_other_namespace, pl, rank_zero_warn, way_out
from lightning_sgmcmc.priors import GaussianPrior
from lightning_sgmcmc.priors.centers import is_centered
from lightning_sgmcmc.samplers import SGNHT, Sampler
from lightning_sgmcmc.samplers.reversible import ReversibleLangevin
from lightning_sgmcmc.tables.columns import some

lightning_callbacks = pl.callbacks
EarlyStopping = pl.callbacks.EarlyStopping
GradientAccumulationScheduler = pl.callbacks.GradientAccumulationScheduler
LearningRateMonitor = pl.callbacks.LearningRateMonitor
Timer = pl.callbacks.Timer

SHARDING = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")

TARGETS = {"regression": "numbers", "classes": "classes", "counts": "counts", "censored": "bounds of numbers"}

REFUSED: dict[str, str] = {
    "StochasticWeightAveraging": "{} averages weights and sets the step size, so the chain samples nothing: remove it",
    "WeightAveraging": "{} evaluates averaged weights, whereas a posterior averages predictions: remove it",
    "BaseFinetuning": "{} freezes and unfreezes parameters during the run, so the chain's state space changes: "
    "remove it",
    "ModelPruning": "{} sets weights to zero during the run, so the chain samples nothing: remove it",
    "LearningRateFinder": "LearningRateFinder (Tuner.lr_find) ranks step sizes by how fast they optimize, not by "
    "whether they sample the posterior: use lightning_sgmcmc.tune.propose_lr(module, datamodule=…)",
    "BatchSizeFinder": "BatchSizeFinder (Tuner.scale_batch_size) trains without the run's callbacks, so no energy is "
    "computed, and the batch size sets the noise of the gradients: pass batch_size to the datamodule",
}
"""Lightning's callbacks that a sampling run refuses, and why; a newer Lightning has more of them than an older one."""


def check_run(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise for settings with which the chain would not sample its posterior, and warn about biased ones."""
    check_methods(module, type(module))
    _check_strategy(trainer.strategy)
    _check_callbacks(trainer)
    _check_chains(trainer, module)
    _check_task(trainer, module)
    if repeated_batches(trainer) > 0:
        raise ValueError(
            f"overfit_batches={repeated_batches(trainer):g} repeats a few batches, whereas N counts all training "
            "data: use a smaller data set, or fast_dev_run"
        )
    if trainer.limit_train_batches == 0:
        raise ValueError("limit_train_batches=0 leaves no data to train with: pass a number above 0, or omit it")
    if trainer.gradient_clip_val:
        rank_zero_warn(
            f"gradient_clip_val={trainer.gradient_clip_val} bounds the drift of the chain: where it acts, the samples "
            "are biased. Raise it until few gradients reach it, or omit it."
        )


def _check_task(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise if a datamodule's targets are of another kind than the likelihood's."""
    data, likelihood = getattr(trainer, "datamodule", None), getattr(module, "likelihood", None)
    task, wanted = str(getattr(data, "task", "")), task_of(likelihood)
    if data is not None and isinstance(likelihood, Ordinal) and not getattr(data, "are_classes_ordered", True):
        raise ValueError(
            f"Ordinal needs the order of the classes, and the names {some(data.classes)} have that of their letters: "
            "pass y as pandas.Categorical(y, categories=[…], ordered=True), or as numbers from 0 in their order"
        )
    is_said, is_scaled = getattr(data, "task_is_said", True), getattr(data, "target_std", None) is not None
    if not task or not wanted or task == wanted or (task == "regression" and not is_said and not is_scaled):
        return
    guessed = "" if is_said else ", as their values suggest"
    raise ValueError(
        f"{type(likelihood).__name__} is a likelihood of {TARGETS[wanted]}, and {type(data).__name__} has "
        f"{TARGETS[task]} (task={task!r}{guessed}): pass task={wanted!r} to it, or a likelihood of {TARGETS[task]}"
    )


def task_of(likelihood: Any) -> str:
    """Return the task of a likelihood of the library's kinds, "" for others."""
    if isinstance(likelihood, ClassLikelihood):
        return "classes"
    law = getattr(likelihood, "distribution", None)
    if law is None:
        return ""
    if isinstance(likelihood, Censored):
        return "censored"
    return "counts" if bool(getattr(getattr(law, "support", None), "is_discrete", False)) else "regression"


def check_namespace(trainer: pl.Trainer) -> None:
    """Raise if a callback, logger or datamodule is of the other package of Lightning."""
    parts: list[Any] = [*callbacks_of(trainer), *trainer.loggers, getattr(trainer, "datamodule", None)]
    for part in parts:
        if is_of_other_namespace(part):
            raise TypeError(f"{type(part).__name__} comes from {PACKAGES[OTHER]}: {way_out()}")


def _check_strategy(strategy: Any) -> None:
    names = {cls.__name__ for cls in type(strategy).__mro__}
    if names & set(SHARDING):
        raise ValueError(
            f"{type(strategy).__name__} shards the parameters, but a chain's noise, prior and samples are of whole "
            "ones: use strategy='chains' for chains on several devices, or strategy='ddp' to share a chain's data; if "
            "memory is short, fewer chains in a process (num_chains)"
        )


def _check_chains(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    layout = layout_of(trainer, chains_of(module).num_chains)
    if layout.is_spread and has_loss_scaler(trainer):
        raise ValueError(
            "a loss scaler skips steps of one process's chains, so the chains' schedules diverge: use "
            "precision='bf16-mixed' for chains on several processes"
        )
    batch_norm = torch.nn.modules.batchnorm._BatchNorm
    pools = getattr(trainer.strategy, "_layer_sync", None) is not None
    if pools and chains_of(module).num_chains > 1 and any(isinstance(part, batch_norm) for part in module.modules()):
        raise ValueError(
            "sync_batchnorm=True pools the statistics of one network, and each process has several chains: leave it "
            "out, or take num_chains=1"
        )
    if is_per_chain(getattr(module, "lr", None)) and instances_of(trainer, LearningRateMonitor):
        raise ValueError("LearningRateMonitor logs one number, but lr has one per chain: remove it")


def _check_callbacks(trainer: pl.Trainer) -> None:
    for name, reason in REFUSED.items():
        kind = getattr(lightning_callbacks, name, None)
        for callback in instances_of(trainer, kind) if kind is not None else ():
            raise ValueError(reason.format(type(callback).__name__))
    if any(monitor.log_weight_decay for monitor in instances_of(trainer, LearningRateMonitor)):
        raise ValueError(
            "LearningRateMonitor(log_weight_decay=True) needs an optimizer with a weight decay, and a sampler has "
            "none, since the prior has its place: leave log_weight_decay out"
        )


def check_start(trainer: pl.Trainer, module: ChainModel, sampler: Sampler) -> None:
    """Warn about data, step sizes and samplers with which a fit does other than it seems to; called when it starts."""
    _check_data(trainer)
    _check_own_prior(module)
    _check_step_size(sampler)
    if is_trial(trainer):
        return
    _check_noise(trainer, module)
    _check_thermostat(trainer, sampler)
    if not is_probe(trainer):
        _check_schedulers(trainer, sampler)
        _check_tested(trainer, sampler)


def _check_noise(trainer: pl.Trainer, module: ChainModel) -> None:
    """Warn of noise that does not suit standardised targets."""
    likelihood, spread = module.likelihood, getattr(getattr(trainer, "datamodule", None), "target_std", None)
    if spread is not None and isinstance(likelihood, Gaussian | StudentT):
        doubt = doubt_of_noise(likelihood, torch.as_tensor(spread))
        if doubt is not None:
            rank_zero_warn(doubt)


def _check_step_size(sampler: Sampler) -> None:
    """Warn if no chain can move, or if some parameters cannot."""
    still = [group for group in sampler.param_groups if float(torch.as_tensor(group["lr"]).max()) == 0]
    if still:
        which = "no parameter moves" if len(still) == len(sampler.param_groups) else "a parameter group never moves"
        rank_zero_warn(f"lr=0: {which}, so its samples all equal its start: pass a positive lr.")


def _check_schedulers(trainer: pl.Trainer, sampler: Sampler) -> None:
    """Warn if a scheduler of torch changes the step size of a chain that samples."""
    if trainer.lr_scheduler_configs and any(map(sampler.is_noisy, sampler.param_groups)):
        scheduler = type(trainer.lr_scheduler_configs[0].scheduler).__name__
        rank_zero_warn(
            f"{scheduler} changes the step size while the chain samples, which no schedule of the library plans for: "
            "leave it out of configure_optimizers, and pass SamplingSchedule(lr_decay=…) or lr_annealing=…"
        )


def warn_of_other_loss(trainer: pl.Trainer, module: ChainModel, loss: torch.Tensor) -> bool:
    """Return whether the user's `training_step` returns another loss than the batch's energy, and warn of it."""
    accumulated = trainer.accumulate_grad_batches
    if has_loss_scaler(trainer) or loss.numel() != 1 or trainer.fit_loop.epoch_loop.batch_idx % accumulated:
        return False
    returned = float(loss.detach()) * accumulated
    energy = float(chains_of(module).observed.mean_potential.sum())
    if not math.isfinite(returned + energy) or abs(returned - energy) <= 1e-3 * max(abs(energy), 1.0):
        return False
    name = type(module).__name__
    rank_zero_warn(
        f"{name}.training_step returns {returned:.4g}, and its batch's energy is {energy:.4g}: what it adds moves "
        "the chain, but is in no energy, plan or weight. Put it into log_likelihood(batch) or log_prior() of "
        f"{name}, or return super().training_step as it is."
    )
    return True


OF_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")
"""Hooks that see a step's gradients before the sampler."""


def _hooks_of_users(trainer: pl.Trainer, module: ChainModel, names: Sequence[str]) -> list[tuple[Any, str]]:
    """Return the parts of a fit that have a hook of these names by a user's code, each with its class's and hook's."""
    return [
        (part, f"{type(part).__name__}.{name}")
        for part in (*callbacks_of(trainer), module)
        for name in names
        if name in vars(part)
        or (hasattr(part, name) and not definer(part, name).__module__.startswith((OWN, LIGHTNING)))
    ]


class OtherGradients:
    """Compares the gradients of a fit's first steps before and after the hooks of users that see them.

    Each of these steps copies the gradients and waits for the device.
    """

    def __init__(self, trainer: pl.Trainer, module: ChainModel, steps: int = 3) -> None:
        names = [
            who for part, who in _hooks_of_users(trainer, module, OF_GRADIENTS) if not isinstance(part, RunCallback)
        ]
        self._who = " or ".join(names)
        self._left = steps if names and not has_loss_scaler(trainer) else 0
        self._before: list[Tensor] = []

    def keep(self, chains: Chains) -> None:
        """Keep the gradients after a backward pass, before the hooks."""
        if self._left and chains.accumulation.batch_complete and chains.claims.holder("choose gradient") is None:
            self._before = [gradient.detach().clone() for gradient in chains.gradients()]

    def compare(self, chains: Chains) -> None:
        """Warn, once, if they are others before they are clipped."""
        before, self._before = self._before, []
        if not before:
            return
        after = chains.gradients()
        self._left -= 1
        if len(before) == len(after) and all(map(torch.equal, before, after)):
            return
        self._left = 0
        norms = [float(torch.stack([gradient.norm() for gradient in some]).norm()) for some in (before, after)]
        rank_zero_warn(
            f"{self._who} changes the gradients, in norm from {norms[0]:.4g} to {norms[1]:.4g}: the chain then follows "
            "another energy than U, which no plan or weight knows. Clip by the trainer's gradient_clip_val, if at all; "
            "terms of the energy belong into log_likelihood(batch) or log_prior()."
        )


BETWEEN_STEPS = (
    "optimizer_step",
    "on_train_batch_end",
    "on_posterior_sample",
    "on_posterior_samples",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_start",
    "on_train_batch_start",
    "training_step",
    "on_before_zero_grad",
    "on_before_backward",
    *OF_GRADIENTS,
)
"""Methods that are called between two updates."""


class OtherWeights:
    """Compares the weights after an update with those before the next one, where a user's code is called in between.

    It looks at a fit's first steps and at the ends of its first epochs. Each look copies the weights and waits for the
    device.
    """

    def __init__(self, trainer: pl.Trainer, module: ChainModel, looks: int = 3) -> None:
        found = _hooks_of_users(trainer, module, BETWEEN_STEPS)
        names = [who for part, who in found if not (isinstance(part, RunCallback) and part.changes_chain)]
        moves = any(callback.tests_trajectories for callback in declared(trainer)) or baseline_of(trainer) is not None
        self._who = " or ".join(names)
        self._steps = self._epochs = looks if names and not moves else 0
        """The last step of the sampler that is looked at, and the epochs that are left."""
        self._chains, self._before = chains_of(module), dict[str, Tensor]()

    @property
    def has_hooks(self) -> bool:
        """Whether a user's code is called between updates."""
        return bool(self._who)

    def keep(self, sampler: Sampler, ends_epoch: bool) -> None:
        """Keep the weights after an update, if it is one that is looked at."""
        if sampler.step_count > self._steps and not (ends_epoch and self._epochs):
            return
        self._epochs -= ends_epoch
        if sampler.stand_in is None:  # an optimizer samples nothing, and its best weights may be taken back
            self._before = {name: tensor.detach().clone() for name, tensor in self._chains.trainable.items()}

    def compare(self) -> None:
        """Warn, once, if they are others before the next update."""
        before, self._before = self._before, {}
        if self._who and self._chains.flat is not None:
            self._chains.flat.take_back()
        differ = [(tensor != self._chains.trainable[name]).any() for name, tensor in before.items()]
        for name, tensor in before.items() if differ and bool(torch.stack(differ).any()) else ():  # one wait for all
            if not torch.equal(tensor, self._chains.trainable[name]):
                self._steps = self._epochs = 0
                sizes = [float(some.detach().norm()) for some in (tensor, self._chains.trainable[name])]
                rank_zero_warn(
                    f"{self._who} changes the weights between two steps, '{name}' in norm from {sizes[0]:.4g} to "
                    f"{sizes[1]:.4g}: the samples are then of another law than the posterior. Leave the weights to the "
                    "sampler: a bound or a pull belongs into log_prior(), a constraint into the network "
                    "(torch.nn.utils.parametrize), and averages into a copy."
                )
                return


def _check_thermostat(trainer: pl.Trainer, sampler: Sampler) -> None:
    """Warn about a thermostat that cannot adapt within the run."""
    if not isinstance(sampler, SGNHT):
        return
    group = max(sampler.param_groups, key=sampler.adaptation_steps)
    needed, steps = sampler.adaptation_steps(group), fit_steps(trainer)
    if 0 < steps < needed:
        # In a tenth of the run, but not in fewer than 20/a steps, in which the momentum forgets: it would oscillate.
        wanted = group["thermal_inertia"] / needed * max(steps / 10, 20 / group["friction"])
        now = group["thermal_inertia"]
        is_smaller = float(f"{wanted:.1g}") < now
        remedy = (
            f"pass thermal_inertia={wanted:.1g} (now {now:g})" if is_smaller else f"run at least {needed:.2g} steps"
        )
        rank_zero_warn(
            f"At twice the temperature SGNHT's friction grows by its initial value in {needed:.2g} steps, and the run "
            f"has {steps:.0f}, so it does not adapt to the gradient noise: {remedy}."
        )


def _check_tested(trainer: pl.Trainer, sampler: Sampler) -> None:
    """Warn about a sampler for trajectories in a run that does not test them."""
    is_tested = any(callback.tests_trajectories for callback in declared(trainer))
    if isinstance(sampler, ReversibleLangevin) and not is_tested:
        rank_zero_warn(
            f"{type(sampler).__name__} takes the steps of OBABO without a MetropolisTest, so its law has their error: "
            "add MetropolisTest() to the trainer's callbacks."
        )


FAR = 4.0
"""Standard deviations of the prior beyond which a likelihood's parameter starts far out."""


def _check_own_prior(module: ChainModel) -> None:
    """Warn if a parameter of the likelihood, such as a learned log σ, starts far from where the prior holds it."""
    prior = module.prior
    if type(prior) is not GaussianPrior or module.likelihood is None:
        return
    for name, tensor in chains_of(module).trainable.items():
        if not name.startswith("likelihood.") or (prior.center is not None and is_centered(name, prior.centered)):
            continue
        shape = tuple(tensor.shape) if chains_of(module).stacked is None else tuple(tensor.shape[1:])
        std, start = prior.scale_of(name, shape), float(tensor.detach().abs().max())
        if start > FAR * std:
            rank_zero_warn(
                f"'{name}' starts at {start:.3g} in size, {start / std:.2g} standard deviations of its prior from 0, "
                f"which will pull it there: give it a scale of its own, GaussianPrior({{'likelihood.*': 3.0, '*': …}})"
            )


def _check_data(trainer: pl.Trainer) -> None:
    """Warn about training data that N counts but no batch contains."""
    loader: Any = trainer.train_dataloader
    if isinstance(loader, ResumableLoader):
        _check_windows(trainer, loader.order_of(loader.chains[0]))
    rows = training_rows(trainer)
    in_order = rows.in_order and rows.sizes is None
    if in_order and float(trainer.num_training_batches) < len(loader) and not is_trial(trainer):
        rank_zero_warn(
            f"Only the first {trainer.num_training_batches} of {len(loader)} batches are used, in the same order every "
            "epoch, whereas N counts all training data: shuffle the training loader, or give it fewer data."
        )
    size, length = rows.batch_size, rows.count or 0
    if in_order and rows.drop_last and size and length % size:
        rank_zero_warn(
            f"drop_last=True leaves out the last {length % size} of {length} training data in every epoch, because the "
            "loader does not shuffle, whereas N counts them: pass shuffle=True or drop_last=False."
        )
    repeated = 0 if is_trial(trainer) else repetitions(rows)
    if repeated:
        rank_zero_warn(
            f"{repeated:,} of the {length:,} training data that N counts repeat others (repeated indices, or a data "
            "set that is concatenated with itself), so the samples are of another, narrower posterior: give the loader "
            "each datum once, and weigh classes in decisions on the predicted probabilities."
        )


def _check_windows(trainer: pl.Trainer, order: BatchOrder) -> None:
    """Raise unless the accumulated batches of each step come again together, in an order that repeats its batches."""
    if not getattr(order, "repeats", False) or is_trial(trainer) or is_probe(trainer):
        return
    counts = {trainer.accumulate_grad_batches}
    for scheduler in instances_of(trainer, GradientAccumulationScheduler):
        counts |= set(scheduler.scheduling.values())
    for batches in (order.batches_per_epoch, int(trainer.num_training_batches)):
        for count in counts:
            if batches % count:
                raise ValueError(
                    f"{type(order).__name__} repeats its {order.batches_per_epoch} batches, but a step has {count} of "
                    f"the {batches} of an epoch (accumulate_grad_batches, times EWSG's candidates), so steps would mix "
                    f"or cut them: choose a number that divides {batches}, or another batch_size"
                )


# -- early stopping ----------------------------------------------------------------------------------------------------


def watches_samples(callback: EarlyStopping) -> bool:
    """Return whether early stopping watches a metric of the samples' average, rather than of the chains' states."""
    return str(callback.monitor).startswith(("val/bma_", "val/single_", "val/chain_disagreement"))


class PatientStopping:
    """Lets `EarlyStopping` check a metric of the samples' average only when there are new samples."""

    def __init__(self) -> None:
        self._checked: dict[EarlyStopping, int] = {}
        """The samples at each callback's last check."""
        self.samples = 0
        """Those in the metric; before the first one it is NaN, which would end the run."""

    def begin(self, trainer: pl.Trainer, samples: int) -> None:
        """Make the trainer's `EarlyStopping` callbacks wait."""
        self.samples = samples
        for callback in instances_of(trainer, EarlyStopping):
            if watches_samples(callback):
                self._checked[callback] = samples
                vars(callback)["_should_skip_check"] = partial(self._skips, callback)

    def _skips(self, callback: EarlyStopping, trainer: pl.Trainer) -> bool:
        if type(callback)._should_skip_check(callback, trainer) or self.samples == self._checked[callback]:
            return True
        self._checked[callback] = self.samples
        return False

    def end(self) -> None:
        """Restore the callbacks."""
        for callback in self._checked:
            vars(callback).pop("_should_skip_check", None)
        self._checked = {}


def why_without_samples(trainer: pl.Trainer, progress: Progress, updates: int = 0) -> str:
    """Return why a fit draws no sample and what to change, as the end of a sentence."""
    if progress.schedule is None:
        return "it has no schedule; add a CyclicalSchedule or a SamplingSchedule to the trainer's callbacks"
    if progress.first_sample is not None and updates < progress.first_sample <= trainer.global_step:
        return (
            f"{trainer.global_step - updates} of {trainer.global_step} steps were skipped, since their energy or "
            "gradient was not finite; use a smaller lr (`sgmcmc tune` finds one), clip the gradients, or use "
            "precision='bf16-mixed' instead of '16-mixed'"
        )
    stopper = "it stopped"
    if any((timer.time_remaining() or 0) < 0 for timer in instances_of(trainer, Timer)):
        stopper = "the Timer (max_time) ended it"
    for early in instances_of(trainer, EarlyStopping):
        if early.stopped_epoch or early.wait_count >= early.patience:
            stopper = f"EarlyStopping(monitor={early.monitor!r}) ended it"
    first = "" if progress.first_sample is None else f" after step {progress.first_sample}"
    return (
        f"{stopper} after step {trainer.global_step}, and {progress.schedule} draws the first one{first}; let the run "
        "last longer, or set a smaller max_epochs or a shorter burn-in"
    )


# -- streams, and data that grow ---------------------------------------------------------------------------------------


def follow_data(trainer: pl.Trainer, module: ChainModel) -> TrainingRows:
    """Read N again: energies, the prior's share and the noise follow it from the next step on; return the present
    rows."""
    chains, rows = module.chains, training_rows(trainer)
    num_data, _ = resolve_num_data(module.given_num_data, trainer, type(module).__name__, rows)
    followed = {module.num_data, chains.observed.num_data, sampler_of(module).num_data}
    if followed != {num_data} or (chains.energies is not None and chains.energies.num_data != num_data):
        take_num_data(module, num_data)
    if chains.weights is not None:
        chains.weights.follow(num_data, rows)
    return rows


def take_num_data(module: ChainModel, num_data: int) -> None:
    """Let energies, the prior's share and the noise of the coming steps have another N."""
    chains = module.chains
    module.num_data = chains.observed.num_data = sampler_of(module).num_data = num_data
    if chains.energies is not None:
        chains.energies.follow(num_data)


def begin_stream(trainer: pl.Trainer, rows: TrainingRows) -> None:
    """Tell a stream the number of the epoch, as Lightning tells samplers; otherwise it may repeat the first order."""
    stream = stream_of(trainer, rows)
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(trainer.current_epoch)


class StreamShares:
    """Compares a stream's first batches over the ranks that share a chain, and over its workers, and where its epochs
    end over all ranks."""

    def __init__(self) -> None:
        self._ranks = self._workers = 1
        self._first: int | None = None
        self._left = 0
        """Batches to come that are looked at."""
        self._alike = True
        self._group: Any = None
        """All ranks of a fit, if each reads a stream."""

    def begin(self, trainer: pl.Trainer, ranks_per_chain: int) -> None:
        """Look at this fit's first batches, if it reads a stream that several processes should divide."""
        workers = max(getattr(trainer.train_dataloader, "num_workers", 0), 1)
        self._ranks, self._workers = ranks_per_chain, workers
        is_stream = stream_of(trainer) is not None
        divided = ranks_per_chain * workers > 1 and is_stream
        self._group = new_group(None, None, "gloo") if is_stream and dist_is_used() else None
        self._first, self._left, self._alike = None, workers if divided else 0, True

    def look(self, batch: Any) -> None:
        """Look at a batch; all ranks do at the same."""
        if self._left == 0:
            return
        self._left -= 1
        own = digest(batch)
        if self._first is None:
            self._first = own
            self._compare_ranks(own)
        else:
            self._alike = self._alike and own == self._first
        if self._left == 0 and self._alike and self._workers > 1:
            self._refuse(f"the {self._workers} workers deliver the same batch", "torch.utils.data.get_worker_info()")

    def compare_ends(self, trainer: pl.Trainer) -> None:
        """Raise on all ranks if the epoch ends with this batch on some of them only."""
        if self._group is None:
            return
        ends = torch.tensor([trainer.is_last_batch, not trainer.is_last_batch], dtype=torch.uint8)
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self._group)
        if bool(ends.all()):
            raise ValueError(
                f"the stream ends on some ranks after {trainer.fit_loop.epoch_loop.batch_idx + 1} batches, and others "
                "have more and would wait for them: give all ranks equally many batches, or pass limit_train_batches"
            )

    def _compare_ranks(self, own: int) -> None:
        if self._ranks == 1 or not dist_is_used():
            return
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        for first in range(0, len(everyone), self._ranks):
            group = everyone[first : first + self._ranks]
            if len(set(group)) < len(group):
                part = "datasets.distributed.split_dataset_by_node, or by torch.distributed.get_rank()"
                self._refuse(f"some of the {self._ranks} ranks that share a chain read the same first batch", part)

    @staticmethod
    def _refuse(what: str, by: str) -> None:
        raise ValueError(
            f"{what} of the stream, so it is not divided and data would count several times: let its __iter__ yield a "
            f"part of the data ({by})"
        )
