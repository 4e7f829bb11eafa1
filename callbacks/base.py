"""What the library's callbacks share."""

from typing import Any

import pytorch_lightning as pl

from lightning_sgmcmc.checks import is_of_other_namespace
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.store import PosteriorSample


class SamplerCallback(pl.Callback):
    """A callback of a sampling run: it may set the sampler's controls, and it sees every posterior sample.

    The order in a step: `on_train_batch_start` (schedules set `lr` and `temperature`), `on_before_optimizer_step`
    (the energy of the batch is known; multipliers are set), the update, `on_train_batch_end` (schedules say whether
    the states are samples), and then `on_posterior_sample`, once for each chain.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse modules that do not sample; begin anew at the start of a fit.

        Raises:
            TypeError: if the module is not a `BayesianModule`.
        """
        bayesian(pl_module, self)
        if stage == "fit":
            self.reset()

    def reset(self) -> None:
        """Forget an earlier fit; a checkpoint's state is loaded after it."""

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: BayesianModule, sample: PosteriorSample) -> None:
        """Called with each sample when it is drawn."""


class Schedule(SamplerCallback):
    """Base of the callbacks that say when samples are drawn; a run has exactly one.

    Subclasses implement `plan`, `controls` and `draws`. The step k = 1, 2, … is the number of the coming optimizer
    step, from the sampler's own counter: it survives a resume, and does not count steps that a loss scaler skipped.
    """

    _sampler: Sampler
    _step: int = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        schedules = [c for c in trainer.callbacks if isinstance(c, Schedule)]  # type: ignore[attr-defined]
        if len(schedules) > 1:
            names = " and ".join(type(c).__name__ for c in schedules)
            raise ValueError(f"a run has one schedule, got {names}: remove one of them")

    def plan(self, trainer: pl.Trainer, module: BayesianModule) -> None:
        """Work out what depends on the run's length; called once, before the first step."""
        raise NotImplementedError

    def apply(self, step: int, module: BayesianModule, sampler: Sampler) -> None:
        """Set the controls for step k."""
        raise NotImplementedError

    def draws(self, step: int) -> bool:
        """Return whether the states after step k are samples."""
        raise NotImplementedError

    sets_lr = True
    """Whether the schedule sets the step size."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = bayesian(pl_module, self)
        self._sampler = module.sampler
        if self.sets_lr and trainer.lr_scheduler_configs:
            scheduler = type(trainer.lr_scheduler_configs[0].scheduler).__name__
            raise ValueError(f"both {type(self).__name__} and the {scheduler} set the step size: remove one of them")
        for group in self._sampler.param_groups:
            group.setdefault("initial_lr", group["lr"])
        module.chain_state.cycle, module.chain_state.num_cycles = 0, None  # of an earlier fit with another schedule
        self.plan(trainer, module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step = self._sampler.step_count + 1
        self.apply(self._step, pl_module, self._sampler)  # type: ignore[arg-type]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Micro-batches that only accumulate, and steps that a loss scaler skipped, leave the counter where it was.
        if self._sampler.step_count == self._step and self.draws(self._step):
            pl_module.chain_state.sample_due = True  # type: ignore[union-attr]


def bayesian(module: pl.LightningModule, callback: pl.Callback) -> BayesianModule:
    """Return the module if it is one that samples.

    Raises:
        TypeError: if not.
    """
    if is_of_other_namespace(module):
        raise TypeError(
            f"{type(module).__name__} is of lightning.pytorch, and {type(callback).__name__} is of pytorch_lightning: "
            "the two do not mix, so import Trainer and modules from pytorch_lightning"
        )
    if not isinstance(module, BayesianModule):
        raise TypeError(
            f"{type(callback).__name__} works with a BayesianModule, got {type(module).__name__}: derive it from "
            "lightning_sgmcmc.BayesianModule, or wrap the network as BayesianModule(net=…)"
        )
    return module


def refuse_loss_scaler(trainer: pl.Trainer, why: str) -> None:
    """Refuse a run whose gradients a loss scaler scales.

    Args:
        trainer: the run's.
        why: what is done with gradients, the beginning of the message.

    Raises:
        ValueError: if there is one.
    """
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            f"{why}, and a loss scaler keeps them at another scale, or makes some infinite: take "
            "precision='bf16-mixed' in place of '16-mixed'"
        )


def name_behind(trainer: pl.Trainer, callback: pl.Callback, kinds: tuple[type, ...]) -> str | None:
    """Return the class name of the first callback of these kinds that stands behind a callback, None if none does."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    behind = callbacks[callbacks.index(callback) :]
    return next((type(c).__name__ for c in behind if isinstance(c, kinds)), None)


def run_length(trainer: pl.Trainer) -> float:
    """Return the optimizer steps that the run will make, infinite where that is not known."""
    steps = trainer.estimated_stepping_batches
    return steps if steps >= 0 else float("inf")  # -1 for epochs of a loader without length


def schedule_of(trainer: pl.Trainer) -> Schedule | None:
    """Return the run's schedule, if it has one."""
    return next((c for c in trainer.callbacks if isinstance(c, Schedule)), None)  # type: ignore[attr-defined]


def require_schedule(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Refuse a run in which no sample would ever be drawn.

    Raises:
        ValueError: if the trainer has no schedule.
    """
    if schedule_of(trainer) is None:
        raise ValueError(
            f"{type(callback).__name__} would never see a sample: add a CyclicalSchedule or a SamplingSchedule, which "
            "say when samples are drawn"
        )
