"""Safeguards: the callback that guards every sampling run."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.chains.callback import RunCallback
from lightning_sgmcmc.chains.chains import chain_model, chains_of, sampler_of
from lightning_sgmcmc.chains.execution import begin_fit, end_fit
from lightning_sgmcmc.chains.samples import check_replicas, check_trainable, draw_samples
from lightning_sgmcmc.chains.schedule import epoch_length
from lightning_sgmcmc.chains.starts import check_files
from lightning_sgmcmc.chains.state import Counters, Pulse
from lightning_sgmcmc.chains.trainer import callbacks_of, declared, instances_of, is_finished, is_trial
from lightning_sgmcmc.chains.weights import DataWeights
from lightning_sgmcmc.fit.block_runs import OF_A_STEP
from lightning_sgmcmc.fit.blocks import StepBlocks
from lightning_sgmcmc.fit.checkpoints import clean_checkpoints, keep_constructor_arguments, protect_checkpoints
from lightning_sgmcmc.fit.checks import (
    StreamShares,
    begin_stream,
    check_run,
    check_start,
    follow_data,
    why_without_samples,
)
from lightning_sgmcmc.fit.guard import EnergyGuard, NonFiniteEnergy
from lightning_sgmcmc.fit.passes import idle
from lightning_sgmcmc.fit.prior_state import PriorScales, take_centers
from lightning_sgmcmc.fit.ranks import Interruption, RankWatch, watch_ranks
from lightning_sgmcmc.namespace import pl, rank_zero_info, rank_zero_warn
from lightning_sgmcmc.planning.of_trainer import Planner
from lightning_sgmcmc.priors import HierarchicalPrior
from lightning_sgmcmc.process import end_recording
from lightning_sgmcmc.samplers import Sampler

PassThroughProfiler = pl.profilers.PassThroughProfiler
call = pl.trainer.call
TrainerFn = pl.trainer.states.TrainerFn
TrainerStatus = pl.trainer.states.TrainerStatus

# -- what a fit turns on or leaves out --------------------------------------------------------------------------------


class FastConvolutions:
    """Turns on `torch.backends.cudnn.benchmark` for a fit, by which cuDNN times its algorithms, and restores it."""

    def __init__(self) -> None:
        self._before: bool | None = None

    def begin(self, device: torch.device, loader: Any) -> None:
        """Turn the search on where it pays."""
        if pays(device, loader):
            self._before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True

    def end(self) -> None:
        """Restore the setting."""
        if self._before is not None:
            torch.backends.cudnn.benchmark, self._before = self._before, None


def pays(device: torch.device, loader: Any) -> bool:
    """Return whether the search is worth its time: on CUDA, for data of one shape, unless the run is deterministic."""
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return False
    return isinstance(loader, ResumableLoader) and hasattr(loader.dataset, "whole_batch")


# A step calls six hooks of every callback, and enters a profiler for each call, whether or not the callback defines
# the hook and the user has chosen a profiler. For a small network that takes longer than the network.


NOTHING = nullcontext()


class QuietProfiler(PassThroughProfiler):
    """Lightning's profiler that measures nothing, with one context for every action in place of a generator."""

    def profile(self, action_name: str) -> Any:
        return NOTHING


def _is_called(hook: Any) -> bool:
    """Return whether Lightning calls a callback's hook: it asks `callable`, in which this function stands."""
    return hook is not idle and callable(hook)


def leave_out(trainer: Any) -> None:
    """Replace a trainer's profiler if its user has chosen none, and hide the hooks that callbacks do not define."""
    if type(trainer.profiler) is PassThroughProfiler:
        trainer.profiler = QuietProfiler()
    vars(call)["callable"] = _is_called  # a hook that cannot be called is skipped, before a profiler is entered for it
    for callback in callbacks_of(trainer):
        for hook in OF_A_STEP:
            # Not the object's own hook: a mock makes one when it is asked.
            is_empty = getattr(type(callback), hook, None) is getattr(pl.Callback, hook)
            if is_empty and hook not in vars(callback):
                setattr(callback, hook, idle)


def restore(trainer: Any) -> None:
    """Give a trainer Lightning's own profiler back, and the callbacks their empty hooks."""
    if type(trainer.profiler) is QuietProfiler:
        trainer.profiler = PassThroughProfiler()
    for callback in callbacks_of(trainer):
        for hook in OF_A_STEP:
            if vars(callback).get(hook) is idle:
                delattr(callback, hook)


# -- safeguards --------------------------------------------------------------------------------------------------------


def samples_drawn(trainer: pl.Trainer) -> int:
    """Return the number of samples that the trainer's last fit has drawn, over all its chains and resumes."""
    return sum(callback.samples for callback in instances_of(trainer, Safeguards))


class Safeguards(RunCallback):
    """Checks the run at its start, guards the energy, passes samples on, and saves an interrupted run.

    `BayesianModule` adds it after the user's callbacks, so that all have seen a step before its samples are drawn, and
    before the checkpoint callbacks, so that a checkpoint of this step counts its samples. One callback does all of
    this, since each callback costs about 5 µs a step.

    Args:
        nonfinite_energy: "stop" or "skip", see `BayesianModule`.
        max_skipped_in_a_row: this many skipped steps in a row stop the run.
    """

    entries: ClassVar[Mapping[str, Any]] = {
        "samples": int,
        "skipped_steps": int,
        "gradient_evaluations": int,
        "weights": dict | None,
    }

    samples = 0
    """Samples that this run has drawn, over all its chains; a resumed run continues the count."""

    def __init__(self, nonfinite_energy: NonFiniteEnergy = "stop", max_skipped_in_a_row: int = 100) -> None:
        self._nonfinite_energy: NonFiniteEnergy = nonfinite_energy
        self._max_skipped_in_a_row = max_skipped_in_a_row
        self._interruption = Interruption()
        self._planner = Planner()
        self._convolutions = FastConvolutions()
        self._blocks: StepBlocks | None = None
        self._guard: EnergyGuard | None = None
        self._sampler: Sampler | None = None
        self._counters = Counters()
        self._pulse = Pulse()
        self._watch: RankWatch | None = None
        self._shares = StreamShares()
        self._shapes: set[tuple[int, ...]] = set()
        """Of the batches so far, if ranks are watched."""
        self._weights: DataWeights | None = None
        self._shown: dict[str, Any] | None = None
        """What a checkpoint's batches have shown of their weights."""
        self._scales: PriorScales | None = None
        self._has_trained = self._has_own_step = False
        self._by_epochs: list[RunCallback] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        protect_checkpoints(trainer)
        if stage == "fit":
            begin_fit(pl_module)
            self.samples, self._guard, self._counters, self._shown = 0, None, Counters(), None
            self._has_trained = False
            check_run(trainer, pl_module)
            self._shapes = set()
            self._pulse, self._pulse.busy = chains_of(pl_module).pulse, True
            self._end_watch(well=True)
            self._watch = watch_ranks(trainer, self._pulse)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        clean_checkpoints(trainer)
        self._pulse.count += 1
        chains, self._scales = chains_of(pl_module), None
        chains.counters, prior = self._counters, chains.model.prior
        if isinstance(prior, HierarchicalPrior):  # before the callbacks: replica exchange changes the temperature
            self._scales = PriorScales(prior, chains, sampler_of(pl_module))
        if is_finished(trainer) and trainer.global_step > 0:
            rank_zero_warn(
                f"This trainer has made its {trainer.global_step} steps in {trainer.current_epoch} epochs, so the fit "
                "makes no step and the last fit's samples stay: raise trainer.fit_loop.max_epochs, or make a Trainer."
            )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.ckpt_path and not self._has_trained:
            rank_zero_warn(
                f"The checkpoint's run has made its {trainer.global_step} steps in {trainer.current_epoch} epochs, so "
                "the fit makes no step and reports nothing: its samples and its summary.txt stay as they are."
            )

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._interruption.begin(trainer)  # the first hook after Lightning's handlers, of runs that validate

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._has_trained = True
        self._interruption.begin(trainer)
        chains, sampler = chains_of(pl_module), sampler_of(pl_module)
        self._has_own_step = chain_model(pl_module).replaces("training_step")
        take_centers(chains)
        if not trainer.ckpt_path:  # otherwise the states are the checkpoint's
            check_files(chains.start, chains.layout.chains)
        check_start(trainer, chain_model(pl_module), sampler)
        chains.begin_energies(trainer)
        self._weights = chains.weights
        if self._shown is not None and self._weights is not None:
            self._weights.load_state_dict(self._shown)
        self._convolutions.begin(pl_module.device, trainer.train_dataloader)
        self._guard = EnergyGuard(chains, sampler, trainer, self._nonfinite_energy, self._max_skipped_in_a_row)
        self._sampler, sampler.guard = sampler, self._guard
        self._pulse.count += 1
        is_noisy = any(map(sampler.is_noisy, sampler.param_groups))
        if chains.progress.schedule is None and is_noisy and not is_trial(trainer):
            rank_zero_warn(f"This fit draws no posterior samples: {why_without_samples(trainer, chains.progress)}.")
        if chains.progress.steps_before and not trainer.ckpt_path:
            rank_zero_info(
                f"The trainer goes on after {chains.progress.steps_before} steps: its chains continue, with a new "
                "sampler, and a schedule covers this fit's steps alone."
            )
        self._planner.begin(trainer, chain_model(pl_module))
        self._shares.begin(trainer, chains.layout.ranks_per_chain)
        if trainer.ckpt_path:  # Lightning calls no hook at the start of the epoch in which a run resumes
            follow_data(trainer, chain_model(pl_module))
        self._blocks = StepBlocks.begun(trainer, chain_model(pl_module), self._scales)
        self._by_epochs = [callback for callback in declared(trainer) if callback.epoch_steps]
        leave_out(trainer)

    @property
    def only_counts(self) -> bool:
        return self._scales is None or self._scales.distance == math.inf

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pulse.count += 1
        begin_stream(trainer, follow_data(trainer, chain_model(pl_module)))
        for callback in self._by_epochs:
            self._compare_epoch(trainer, callback)

    def _compare_epoch(self, trainer: pl.Trainer, callback: RunCallback) -> None:
        """Warn, once, if an epoch has another number of steps than those by which a callback counts epochs."""
        counted, each = callback.epoch_steps, epoch_length(trainer)
        if not counted or each in (0, counted):
            return
        callback.epoch_steps = 0
        steps = "1 step" if each == 1 else f"{each} steps"
        rank_zero_warn(
            f"Epoch {trainer.current_epoch} has {steps}, and {type(callback).__name__} counts each epoch of its "
            f"arguments as {counted} steps, as the first had: give them in steps."
        )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._pulse.count += 1
        if self._watch is not None:
            shape = next((tuple(t.shape) for t in tree_leaves(batch) if isinstance(t, Tensor)), ())
            self._pulse.busy = shape not in self._shapes  # its network may be compiled
            self._shapes.add(shape)
        self._shares.look(batch)
        if self._guard is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            self._guard.begin(batch)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        claims = chains_of(pl_module).claims
        claims.before_update(trainer)  # where no claimant has called it
        claims.end_update()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        if self._has_own_step and not outputs:
            name = type(pl_module).__name__
            raise TypeError(
                f"{name}.training_step returns None, so batch {trainer.fit_loop.epoch_loop.batch_idx} has no gradient, "
                "and N counts its data: return super().training_step(batch, batch_idx). Leave data out of the data "
                "set; nonfinite_energy='skip' skips energies that are not finite."
            )
        self._shares.compare_ends(trainer)
        chains = chains_of(pl_module)
        pulse = self._pulse
        if chains.progress.sample_due:
            chains.progress.sample_due, pulse.busy = False, True
            self._pass_samples_on(trainer, pl_module)
        pulse.count += 1
        pulse.busy = trainer.is_last_batch  # what comes after an epoch may take long
        is_ready = self._blocks is None or self._blocks.is_ready
        if self._planner.is_timing and is_ready and self._sampler is not None:
            self._planner.after_step(trainer, chain_model(pl_module), self._sampler.step_count)
        self._interruption.after_step(trainer)

    def free_steps(self, first: int, most: int) -> int:
        return most if self._watch is None else 0

    def _pass_samples_on(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Pass the samples of a step to every callback that has a hook for them, and to the module."""
        assert self._guard is not None
        assert self._sampler is not None
        receivers, of_module = callbacks_of(trainer), getattr(pl_module, "on_posterior_sample", None)
        together = [h for c in receivers if (h := getattr(c, "on_posterior_samples", None)) is not None]
        singly = [h for c in receivers if (h := getattr(c, "on_posterior_sample", None)) is not None]
        reads_all = chain_model(pl_module).reads_samples or any(
            getattr(c, "reads_all_samples", hasattr(c, "on_posterior_sample") or hasattr(c, "on_posterior_samples"))
            for c in receivers
        )
        chains, check = chains_of(pl_module), self._guard.check_sample
        for drawing in draw_samples(chains, self._sampler, check, reads_all):
            for hook in together:
                hook(trainer, pl_module, drawing)
            for sample in drawing.samples:
                self.samples += 1
                for hook in singly:
                    hook(trainer, pl_module, sample)
                if of_module is not None:
                    of_module(sample)
        for callback in receivers:
            if (end := getattr(callback, "end_posterior_samples", None)) is not None:
                end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pulse.count += 1
        check_trainable(chains_of(pl_module))
        weights = chains_of(pl_module).weights
        if weights is not None:
            weights.end_epoch()
        if self._scales is not None:
            self._scales.check()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pulse.busy = True
        self._pulse.count += 1
        if trainer.state.fn == TrainerFn.FITTING:
            chains_of(pl_module).share_buffers()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pulse.count += 1
        if trainer.state.fn != TrainerFn.FITTING:
            self._warn_without_metrics(trainer, pl_module)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._warn_without_metrics(trainer, pl_module)

    def _warn_without_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.callback_metrics and getattr(pl_module, "posterior", None):
            rank_zero_warn(
                "No metrics: after a fit its samples are evaluated, and no callback does so. Add "
                "BayesianModelAverage() to the trainer's callbacks, or call module.posterior.evaluate(data)."
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pulse.busy = True
        self._pulse.count += 1
        restore(trainer)
        self._interruption.end(well=True)  # all ranks together, before one of them may fail
        if self._guard is not None:
            self._guard.finish()
        progress = chains_of(pl_module).progress
        if self.samples == 0 and progress.schedule is not None:
            updates = sampler_of(pl_module).step_count
            why = why_without_samples(trainer, progress, updates)
            rank_zero_warn(f"The fit ended without a posterior sample: {why}.")
        self._end(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._pulse.busy = True
        end_recording()
        restore(trainer)
        self._interruption.save(trainer, exception)
        self._end_watch(well=False)
        for callback in declared(trainer):
            callback.release(failed=True)  # Lightning calls no other hook of them
        self._end(trainer, pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._end(trainer, pl_module)  # a fit that Lightning's tuner has left calls no other hook
        self._end_watch(well=True)

    def _end_watch(self, well: bool) -> None:
        if self._watch is not None:
            self._watch.end(well)
        self._watch = None

    def _end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave trainer, process and module as plain Lightning does; a second call does nothing."""
        end_fit(pl_module)
        restore(trainer)
        self._interruption.end()
        if self._sampler is not None:
            self._sampler.guard = None
        chains_of(pl_module).unflatten(self._sampler)
        if self._scales is not None:
            self._scales.release()
        if self._weights is not None:
            self._shown = self._weights.state_dict()
        self._guard = self._sampler = self._scales = self._weights = None
        self._convolutions.end()
        if self._blocks is not None:
            self._blocks.end()
            self._blocks = None
        chains_of(pl_module).end_energies()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._pulse.busy = True
        if self._guard is not None and trainer.state.fn == "fit":
            self._guard.check_state("it is not saved")
            if trainer.state.status == TrainerStatus.RUNNING and self._sampler is not None:  # else a rank may be alone
                check_replicas(chains_of(pl_module), self._sampler.step_count)
        keep_constructor_arguments(checkpoint, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "skipped_steps": self._counters.skipped_steps,
            "gradient_evaluations": self._counters.gradient_evaluations,
            "weights": self._shown if self._weights is None else self._weights.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = state_dict["samples"]
        self._counters.skipped_steps = state_dict["skipped_steps"]
        self._counters.gradient_evaluations = state_dict["gradient_evaluations"]
        self._shown = state_dict["weights"]
