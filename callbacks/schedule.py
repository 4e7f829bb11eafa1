"""Base class of schedules: when to draw samples, and with which controls."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from lightning_sgmcmc.callbacks.base import SamplerCallback, bayesian
from lightning_sgmcmc.chains.chains import chains_of
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.run.interruption import pass_on
from lightning_sgmcmc.run.trainer import callbacks_of
from lightning_sgmcmc.samplers import Sampler


class Schedule(SamplerCallback):
    """Base class of schedules, which decide when samples are drawn; a run has exactly one.

    Subclasses implement `plan`, `controls` and `draws`. The step k = 1, 2, … is the number of the next optimizer
    step, from the sampler's own counter: it survives a resume, and excludes steps that a loss scaler skipped.
    """

    setting = "schedule"

    _sampler: Sampler
    _step: int = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        schedules = [c for c in callbacks_of(trainer) if isinstance(c, Schedule)]
        if len(schedules) > 1:
            names = " and ".join(type(c).__name__ for c in schedules)
            raise ValueError(f"a run has one schedule, got {names}: remove one of them")

    def plan(self, trainer: pl.Trainer, module: BayesianModule) -> None:
        """Compute the parts that depend on the run's length, and set `module.chains.progress.first_sample`; called
        once, before the first step."""
        raise NotImplementedError

    def apply(self, step: int, module: BayesianModule, sampler: Sampler) -> None:
        """Set the controls for step k."""
        raise NotImplementedError

    def draws(self, step: int) -> bool:
        """Return whether the states after step k are samples."""
        raise NotImplementedError

    sets_lr = True
    """Whether the schedule sets the step size."""

    @property
    def sampling_lr_factor(self) -> float:
        """The largest step size of a sampling stage over the configured lr."""
        return 1.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = bayesian(pl_module, self)
        self._sampler = module.sampler
        if self.sets_lr and trainer.lr_scheduler_configs:
            scheduler = type(trainer.lr_scheduler_configs[0].scheduler).__name__
            raise ValueError(f"both {type(self).__name__} and the {scheduler} set the step size: remove one of them")
        for group in self._sampler.param_groups:
            group.setdefault("initial_lr", group["lr"])
        module.chains.progress.schedule = type(self).__name__
        self.plan(trainer, module)
        if is_optimization(trainer, module):
            self.announce_optimization(module)

    def announce_optimization(self, module: BayesianModule) -> None:
        """Say what a run at temperature 0 collects, since its states are not samples of the posterior."""
        rank_zero_warn(
            "temperature=0 is optimization: the states that this run collects are not samples of the posterior, "
            "and their average is a snapshot ensemble."
        )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step = self._sampler.step_count + 1
        self.apply(self._step, pl_module, self._sampler)  # type: ignore[arg-type]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Micro-batches that only accumulate, and steps that a loss scaler skipped, do not advance the counter.
        if self._sampler.step_count == self._step and self.draws(self._step):
            chains_of(pl_module).progress.sample_due = True

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        pass_on(trainer, exception)  # the process that started the ranks has only the user's callbacks


def is_optimization(trainer: pl.Trainer, module: BayesianModule) -> bool:
    """Return whether a run collects its states at temperature 0, so that they are not samples of a posterior."""
    own = getattr(schedule_of(trainer), "temperature", None)
    temperature = module.temperature if own is None else own
    return temperature == 0 or (isinstance(temperature, tuple) and not any(temperature))


def run_length(trainer: pl.Trainer) -> float:
    """Return the number of optimizer steps in the run, infinite if unknown."""
    steps = trainer.estimated_stepping_batches
    return steps if steps >= 0 else float("inf")  # -1 for epochs of a loader without length


def schedule_of(trainer: pl.Trainer) -> Schedule | None:
    """Return the run's schedule, if it has one."""
    return next((c for c in callbacks_of(trainer) if isinstance(c, Schedule)), None)


def require_schedule(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Raise for a run that would never draw a sample.

    Raises:
        ValueError: if the trainer has no schedule.
    """
    if schedule_of(trainer) is None:
        raise ValueError(
            f"{type(callback).__name__} would never see a sample: add a CyclicalSchedule or a SamplingSchedule, which "
            "decide when samples are drawn"
        )
