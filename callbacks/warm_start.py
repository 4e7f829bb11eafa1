"""A warm start: the chains are optimized before they sample."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch.optim import AdamW, Optimizer

from lightning_sgmcmc.chains.callback import Place, Run, sampling_module
from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.schedule import FirstStage, epoch_length, schedule_of
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.chains.trainer import fit_steps, is_trial
from lightning_sgmcmc.chains.warm_start import BestStates, ChainOptimizers, check_optimizer, make_optimizer
from lightning_sgmcmc.checks import check_choice, check_count, check_kind, check_positive
from lightning_sgmcmc.namespace import pl, rank_zero_info, rank_zero_warn
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.schedules import Patience, cyclical_lr_factor


class WarmStart(FirstStage):
    """Optimizes every chain by a torch optimizer before the run's schedule begins.

    The loss is the one that the chains sample, Ũ/N with the prior, at temperature 0. Each chain has an optimizer of its
    own, so it is optimized as it would be alone; for several chains that is the training of an ensemble. Afterwards the
    sampler takes over: momenta are drawn from their stationary law at the controls of its first step (zero if that
    step has temperature 0), and the schedule counts its steps, cycles and burn-in from there. The run's length includes
    the warm start.

    With early stopping each chain keeps its best state on the validation data, by the mean of -log p(y|x,θ). It
    returns to that state when its patience is over, and waits there for the others. At the end of the warm start every
    chain is at its best state, and if all have stopped early, the schedule gets the steps that remain. Chains are
    validated when the trainer validates.

    Contours, replica exchange, control variates, `EWSG`'s choice and `ChainHealth` begin after it.

    Args:
        optimizer: a class of `torch.optim`, or a partial of one, whose `step` needs no closure. Its weight decay is 0,
            since the prior is in the loss.
        lr: step size of the optimizer.
        steps: the largest number of optimizer steps.
        epochs: the same in epochs; pass exactly one of the two.
        early_stopping: when a chain stops before that; None never stops it, and keeps its last state.
        lr_schedule: "cosine" lets lr fall as lr·[cos(π·(k-1)/K) + 1]/2 over the K steps, "constant" keeps it.

    Raises:
        ValueError: for an argument out of range; at the start of the fit, if the schedule has no step left, if early
            stopping has no validation data, or if a torch scheduler would count the warm start's steps.
        TypeError: for an optimizer that is none, or that needs a closure.

    Source: Sommer et al. 2024 (Connecting the dots: is mode-connectedness the key to feasible sample-based inference in
    Bayesian neural networks?), chains that start at the members of a deep ensemble.

    Example::

        warm_start = WarmStart(lr=1e-3, epochs=20, early_stopping=Patience(5))
        trainer = pl.Trainer(max_epochs=100, callbacks=[warm_start, CyclicalSchedule(num_cycles=4)])
    """

    changes_chain = True
    place = Place.FIRST_STAGE
    setting = "warm_start"
    claims: ClassVar[Mapping[str, str | None]] = {"draw momenta": "_draw_momenta"}

    def __init__(
        self,
        optimizer: Callable[..., Optimizer] = AdamW,
        lr: float = 1e-3,
        steps: int | None = None,
        epochs: int | None = None,
        early_stopping: Patience | None = None,
        lr_schedule: Literal["constant", "cosine"] = "constant",
    ) -> None:
        check_optimizer(optimizer)
        check_positive("lr", lr)
        if (steps is None) == (epochs is None):
            raise ValueError("pass exactly one of steps and epochs, the length of the warm start")
        check_count("steps", steps)
        check_count("epochs", epochs)
        check_kind("early_stopping", early_stopping, Patience)
        check_choice("lr_schedule", lr_schedule, ("constant", "cosine"))
        self.optimizer = optimizer
        self.lr = lr
        self.steps = steps
        self.epochs = epochs
        self.early_stopping = early_stopping
        self.lr_schedule = lr_schedule
        self.reset()

    def reset(self) -> None:
        self._planned = 0
        """Steps of the warm start without early stopping."""
        self._ended = self._draws_momenta = False
        self._optimizers: ChainOptimizers | None = None
        self._best: BestStates | None = None

    # -- the start ----------------------------------------------------------------------------------------------------

    def enter(self, trainer: pl.Trainer, module: ChainModel) -> None:
        if self._run is None:
            super().on_train_start(trainer, module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.enter(trainer, sampling_module(pl_module, self))

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        module, sampler = run.module, run.sampler
        self._check_run(run.trainer, sampler, saved)
        self._planned = self._length(run.trainer)
        saved = saved or {}
        progress = run.chains.progress
        progress.warm_steps = saved.get("warm_steps", self._planned)
        self._draws_momenta, self._ended = saved.get("draws_momenta", False), saved.get("ended", False)
        if self._ended:
            return
        progress.stage, progress.warm_lr = Stage.WARM_START, self.lr
        parameters = [p for group in sampler.param_groups for p in group["params"]]
        self._optimizers = ChainOptimizers(
            parameters, module.num_chains, lambda own: make_optimizer(self.optimizer, own, self.lr)
        )
        if self.early_stopping is not None:
            self._best = BestStates(module.chains, self.early_stopping)
        for index, chain in enumerate(module.chains.layout.chains) if saved else ():
            own = saved["chains"][chain]
            self._optimizers.load_state_dict(index, own["optimizer"])
            if self._best is not None and "watch" in own:
                self._best.load_state_dict(index, own)
        sampler.stand_in = self._update

    def _check_run(self, trainer: pl.Trainer, sampler: Sampler, saved: dict[str, Any] | None) -> None:
        if saved is None and sampler.step_count > 0:
            raise ValueError(
                f"the checkpoint's run has no WarmStart, and its chains have made {sampler.step_count} steps: remove "
                "WarmStart, or begin a new run with chain_start=[…]"
            )
        if trainer.lr_scheduler_configs:
            scheduler = type(trainer.lr_scheduler_configs[0].scheduler).__name__
            raise ValueError(
                f"the {scheduler} would count the steps of WarmStart as the sampler's: remove it, or let a schedule "
                "set the step size (CyclicalSchedule, SamplingSchedule(lr_decay=…))"
            )
        if self.early_stopping is not None and not trainer.enable_validation:
            raise ValueError(
                "WarmStart stops early by the validation data, and this run validates nothing: pass a validation "
                "loader and limit_val_batches above 0, or early_stopping=None"
            )

    def _length(self, trainer: pl.Trainer) -> int:
        """Return the planned number of steps."""
        total, schedule = fit_steps(trainer), schedule_of(trainer)
        if is_trial(trainer):
            return min(1, int(total) - 1)
        each = epoch_length(trainer)
        if self.epochs is not None and each == 0:
            raise ValueError("the training loader has no length, so epochs cannot be counted: pass WarmStart(steps=…)")
        length = self.steps if self.steps is not None else (self.epochs or 0) * each
        if schedule is not None and length >= total:
            raise ValueError(
                f"WarmStart takes {length} steps of a run of {total}, which leaves none to {type(schedule).__name__}: "
                "shorten it, or lengthen the run"
            )
        return int(min(length, total))

    # -- a step -------------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.advance(trainer, self.run.module, batch_idx)
        if not self._ended:
            self.run.sampler.set_control("temperature", 0.0)

    def _update(self) -> None:
        """Make the optimizers' step instead of the sampler's."""
        assert self._optimizers is not None
        factor = 1.0
        if self.lr_schedule == "cosine":
            factor = cyclical_lr_factor(self.run.sampler.step_count + 1, self._planned)
        self.run.chains.progress.warm_lr = self.lr * factor
        self._optimizers.step(self._active, factor)

    @property
    def _active(self) -> list[int]:
        """Indices of this process's chains that have not stopped."""
        return list(range(self.run.module.num_chains)) if self._best is None else self._best.active

    # -- early stopping -----------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._watches(trainer) and self._best is not None:
            self.run.chains.observed.validation.clear()
            for chain in set(range(self.run.module.num_chains)).difference(self._best.active):
                self._best.restore(chain)  # its buffers may have changed, since it still sees batches

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        best = self._best
        if not self._watches(trainer) or best is None:
            return
        module = self.run.module
        seen, layout = module.chains.observed.validation, module.chains.layout
        if seen.total is None:
            raise RuntimeError(
                f"WarmStart(early_stopping=…) reads the loss that BayesianModule.validation_step computes, and "
                f"{type(module).__name__} does not call it: call super().validation_step(batch, batch_idx)"
            )
        count = torch.full_like(seen.total, seen.count)
        losses = layout.mean_over_data(seen.total) / layout.mean_over_data(count)
        best.validated(losses.tolist(), module.sampler.step_count)
        stopped = torch.tensor([watch.stopped_at is not None for watch in best.watches], device=module.device)
        if layout.gather(stopped.float()).all():
            # An accumulated step that is under way ends without effect, since no chain moves.
            module.chains.progress.warm_steps = module.sampler.step_count + int(module.chains.accumulation.accumulating)
            schedule = schedule_of(trainer)
            if schedule is not None:
                schedule.plan(trainer, module)

    def _watches(self, trainer: pl.Trainer) -> bool:
        return not self._ended and trainer.state.fn == "fit" and not trainer.sanity_checking

    # -- the end ------------------------------------------------------------------------------------------------------

    def advance(self, trainer: pl.Trainer, module: ChainModel, batch_idx: int) -> None:
        over = module.sampler.step_count >= module.chains.progress.warm_steps
        if over and not self._ended and batch_idx % trainer.accumulate_grad_batches == 0:
            self._end(trainer, module)

    def _end(self, trainer: pl.Trainer, module: ChainModel) -> None:
        """Return the chains to their best states, and let the sampler make the next step."""
        self._ended = self._draws_momenta = True
        module.sampler.stand_in = self._optimizers = None
        module.sampler.set_control("temperature", module.target_temperature)
        progress = module.chains.progress
        progress.stage, progress.warm_lr = Stage.SAMPLING, None
        best, self._best = self._best, None
        if best is None:
            rank_zero_info(f"WarmStart ended after {progress.warm_steps} steps.")
            return
        if best.watches[0].best_loss is None and not is_trial(trainer):
            rank_zero_warn(
                f"WarmStart ended after {progress.warm_steps} steps without a validation, so early stopping had no "
                "effect: validate more often (val_check_interval), or pass early_stopping=None."
            )
        for chain in range(module.num_chains):
            best.restore(chain)
        found = ", ".join(str(watch) for watch in best.watches)
        rank_zero_info(f"WarmStart ended after {progress.warm_steps} steps; best validation NLL: {found}.")

    def _draw_momenta(self, trainer: pl.Trainer) -> None:
        """Draw the momenta of the sampler's first step, when its controls are known."""
        if self._draws_momenta:
            self._draws_momenta = False
            self.run.sampler.draw_momenta()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.advance(trainer, self.run.module, 0)

    def end(self) -> None:
        self.run.sampler.stand_in = self._optimizers = self._best = None

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def saves_alone(self) -> bool:
        return self._ended or super().saves_alone

    def state(self) -> dict[str, Any]:
        if self._run is None:
            return {}
        module, optimizers = self.run.module, self._optimizers
        state = {
            "warm_steps": module.chains.progress.warm_steps,
            "ended": self._ended,
            "draws_momenta": self._draws_momenta,
        }
        if optimizers is None:
            return state
        own: list[dict[str, Any]] = [{"optimizer": optimizers.state_dict(chain)} for chain in range(module.num_chains)]
        if self._best is not None:
            for chain, of_chain in enumerate(own):
                of_chain |= self._best.state_dict(chain)
        return state | {"chains": module.chains.layout.collect(own)}
