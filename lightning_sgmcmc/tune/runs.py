"""Short fits of a module, and its states kept in memory."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc.callbacks import ContourGradient, MetropolisTest, SamplerCallback
from lightning_sgmcmc.callbacks.schedule import FirstStage, RunLength, Schedule, epoch_length, schedule_of
from lightning_sgmcmc.chains.execution import graphs_kept
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.chains.strategy import ChainStrategy
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.process import silenced
from lightning_sgmcmc.run.facts import chance_nll
from lightning_sgmcmc.run.guard import NonFiniteEnergyError
from lightning_sgmcmc.run.trainer import callbacks_of
from lightning_sgmcmc.samplers import MCLMC
from lightning_sgmcmc.seeding import unchanged_generators
from lightning_sgmcmc.tune.short_form import COLD, HOT, STILL, FixedControls

State = list[Tensor]

REPEATED = ("pytorch_lightning.utilities.rank_zero", "pytorch_lightning.trainer")
"""Loggers of Lightning's messages about a run, of which the run itself repeats those that matter."""
LOOK_STEPS = 20
"""Batches by which the energy of the start is measured."""


class Energies(SamplerCallback):
    """Records each step's energies and likelihood, with its stage."""

    is_probe = True
    """A short run, in which a step may cut the batches of an order, see `check_data`."""

    def __init__(self) -> None:
        self._total: list[Tensor] = []
        self._likelihood: list[Tensor] = []
        self._stages: list[Stage] = []
        self._step = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == self._step:
            return
        self._step, seen = trainer.global_step, pl_module.chains.observed
        self._total.append(seen.energy.detach())
        self._likelihood.append((seen.energy + seen.log_prior.reshape(-1)).detach())
        self._stages.append(pl_module.chains.progress.stage)

    def of(self, *stages: Stage) -> Tensor:
        """Return Ũ of the steps of some stages (of all without any), shape (n, C), on the CPU."""
        return self._chosen(self._total, stages)

    def likelihood(self, *stages: Stage) -> Tensor:
        """Return -log p(data|θ) by the steps' batches, shape (n, C), on the CPU."""
        return self._chosen(self._likelihood, stages)

    def _chosen(self, values: list[Tensor], stages: Sequence[Stage]) -> Tensor:
        found = [v for v, stage in zip(values, self._stages, strict=True) if not stages or stage in stages]
        return torch.stack(found).float().cpu() if found else torch.zeros(0, 1)


class HotMomenta(SamplerCallback):
    """Begins with momenta of their law, since they take long to heat up, and a test rejects few cold ones."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.sampler.draw_momenta()


class ShortRuns:
    """Makes short fits with the run's trainer, in one process.

    Args:
        module: the module.
        data: keyword arguments of `Trainer.fit` with the data.
        make_trainer: makes the run's trainer from keyword arguments, which replace its own.

    Attributes:
        schedule: the run's, None without.
        warm_start: the run's warm start, None without.
        steps_made: optimizer steps of all fits.
        num_data: N, once a fit has begun.
        has_preconditioner: whether the sampler's state has an average of squared gradients, after `look`.
        is_microcanonical: whether the sampler is MCLMC, whose energies choose its step size, after `look`.
        training_controls: of the steps that lower the energy: at temperature 0, if the sampler makes such steps.
        acceptance: mean acceptance probability of the last fit's `MetropolisTest`, None without.
    """

    def __init__(self, module: BayesianModule, data: dict[str, Any], make_trainer: Callable[..., pl.Trainer]) -> None:
        self.module, self._data, self._make = module, data, make_trainer
        with silenced(*REPEATED):
            trainer = make_trainer()
        callbacks = callbacks_of(trainer)
        self.schedule: Schedule | None = schedule_of(trainer)
        self.warm_start = next((c for c in callbacks if isinstance(c, FirstStage)), None)
        self._gradient = [c for c in callbacks if _changes_the_noise(c)]
        self._limits = (trainer.max_steps, trainer.max_epochs)
        self._one_process = _one_process(trainer)
        self.steps_made = 0
        self.length = RunLength(math.inf)
        self.chance: float | None = None
        self.num_data = 1
        self.has_preconditioner = False
        self.is_microcanonical = False
        self.training_controls = COLD
        self.acceptance: float | None = None
        self._test = next((c for c in self._gradient if isinstance(c, MetropolisTest)), None)

    @property
    def is_tested(self) -> bool:
        """Whether the run has a `MetropolisTest`."""
        return self._test is not None

    @property
    def trajectory(self) -> int:
        """Steps of a trajectory of the run's `MetropolisTest`, after a fit; 1 without."""
        test = self._test
        return 1 if test is None else test.every_n_steps or max(1, self.length.steps_per_epoch)

    def fit(
        self,
        schedule: Schedule,
        steps: int,
        *callbacks: pl.Callback,
        with_noise: bool = False,
        clips: bool = True,
        tested: bool = True,
    ) -> Energies:
        """Fit for some steps from the module's present state; return the energies.

        Args:
            schedule: the fit's.
            steps: optimizer steps.
            callbacks: of the fit, besides.
            with_noise: whether the run's callbacks that change the gradient take part.
            clips: whether the run's clipping of gradients takes part.
            tested: whether a `MetropolisTest` is among the callbacks that take part.
        """
        energies = Energies()
        chosen = [c for c in self._gradient if tested or not isinstance(c, MetropolisTest)] if with_noise else []
        own = [copy.copy(callback) for callback in chosen]
        with silenced(*REPEATED):
            momenta = [HotMomenta()] if any(isinstance(c, MetropolisTest) for c in own) else []
            trainer = self._trainer(steps, [schedule, *momenta, *own, *callbacks, energies], clips)
            trainer.fit(self.module, **self._data)
        self.steps_made += steps
        self._learn(trainer)
        rates = next((c.acceptance_rate for c in own if isinstance(c, MetropolisTest)), None)
        self.acceptance = None if rates is None else float(rates.mean())
        return energies

    def _trainer(self, steps: int, callbacks: list[pl.Callback], clips: bool) -> pl.Trainer:
        return self._make(
            max_steps=steps,
            max_epochs=-1,
            max_time=None,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            check_val_every_n_epoch=10**9,
            val_check_interval=None,
            fast_dev_run=False,
            **self._one_process,
            **({} if clips else {"gradient_clip_val": None}),
        )

    def try_fit(self, schedule: Schedule, steps: int, *callbacks: pl.Callback) -> Energies | None:
        """Return `fit`'s energies, None for a run that diverged or a step that the sampler refuses."""
        try:
            return self.fit(schedule, steps, *callbacks)
        except (NonFiniteEnergyError, ValueError):
            self.steps_made += steps
            return None

    def look(self) -> tuple[Tensor, Any]:
        """Make steps of practically no length to learn N, the run's length and the labels.

        Returns:
            the energies of the start by several batches, shape (n, C), and the lr.
        """
        given = self.module.lr
        energies = self.fit(FixedControls([STILL], [LOOK_STEPS]), LOOK_STEPS)
        sampler = self.module.sampler
        self.has_preconditioner = any(sampler.preconditioner(group["params"]) for group in sampler.param_groups)
        self.is_microcanonical = isinstance(sampler, MCLMC)
        self.training_controls = COLD if sampler.has_cold_limit else HOT
        lr = sampler.defaults["lr"] if given is None else given
        return energies.of(), lr

    def _learn(self, trainer: pl.Trainer) -> None:
        if math.isfinite(self.length.steps) or self.chance is not None:
            return
        self.num_data = self.module.num_data or 1
        found = chance_nll(self.module.chains)
        self.chance = None if found is None else found * self.num_data
        each, (most, epochs) = epoch_length(trainer), self._limits
        by_steps = most if most >= 0 else math.inf
        if epochs is None:
            epochs = 1000 if most < 0 else -1  # Lightning's default
        by_epochs = epochs * each if epochs >= 0 and each else math.inf
        self.length = RunLength(min(by_steps, by_epochs), each)

    # -- states -------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Return a copy of the module's parameters and buffers."""
        return [t.detach().clone() for t in [*self.module.parameters(), *self.module.buffers()]]

    def set_state(self, state: State) -> None:
        """Set the module's parameters and buffers."""
        with torch.no_grad():
            for tensor, value in zip([*self.module.parameters(), *self.module.buffers()], state, strict=True):
                tensor.copy_(value)
                tensor.grad = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the module's tensors and the attributes that a fit sets at the end.

        Copying the module is not safe: compiled networks and attributes of a subclass may not copy.
        """
        module, kept = self.module, self.state()
        names = ("lr", "num_data", "posterior", "evaluations", "health", "plan")
        plain = {name: getattr(module, name) for name in names}
        chains, seeds, trainable = module.chains, copy.copy(module.chains.seeds), module.chains.trainable
        training = module.training
        try:
            with graphs_kept(), unchanged_generators([module.device]):
                yield
        finally:
            self.set_state(kept)
            for name, value in plain.items():
                setattr(module, name, value)
            chains.reset()
            chains.seeds, chains.trainable = seeds, trainable
            module.train(training)


def _changes_the_noise(callback: pl.Callback) -> bool:
    """Return whether a callback changes the gradient's noise or the chains' temperatures.

    A contour needs a learned range of energies, which short runs have not.
    """
    if isinstance(callback, Schedule | FirstStage | ContourGradient) or not isinstance(callback, SamplerCallback):
        return False
    return callback.setting is not None or type(callback).__name__ == "EWSG"


def _one_process(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the trainer's arguments for a run in one process with the same data in a step."""
    if trainer.world_size == 1:
        return {}
    strategy = trainer.strategy
    ranks = strategy.ranks_per_chain if isinstance(strategy, ChainStrategy) else trainer.world_size
    accumulated = trainer.accumulate_grad_batches * int(ranks or 1)
    return {"devices": 1, "num_nodes": 1, "strategy": "auto", "accumulate_grad_batches": accumulated}
