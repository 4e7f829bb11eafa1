"""Short runs: the first stages of a run's schedule in fewer steps, their fits, and states kept in memory."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.callbacks import ContourGradient, MetropolisTest, SamplerCallback
from lightning_sgmcmc.callbacks.auto_sampling import AutoSampling
from lightning_sgmcmc.callbacks.schedule import SamplingSchedule
from lightning_sgmcmc.chains.chains import chains_of, sampler_of
from lightning_sgmcmc.chains.execution import graphs_kept
from lightning_sgmcmc.chains.schedule import FirstStage, RunLength, Schedule, StepControls, epoch_length, schedule_of
from lightning_sgmcmc.chains.state import NonFiniteEnergyError, Stage
from lightning_sgmcmc.chains.strategy import ChainStrategy
from lightning_sgmcmc.chains.trainer import callbacks_of
from lightning_sgmcmc.health.facts import chance_nll
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.process import silenced
from lightning_sgmcmc.samplers import MCLMC
from lightning_sgmcmc.seeding import unchanged_generators

MAX_SAMPLES = 5
"""Samples of a short run."""
EXPLORATION_SHARE, BURN_IN_SHARE = 0.5, 0.25
"""Shares of a short run before its sampling stage."""
COLD = StepControls(1.0, 0.0, Stage.BURN_IN)
"""The controls of optimization at the full lr."""
HOT = COLD._replace(temperature=None)
"""Those of a sampler that makes no step at temperature 0."""
STILL = HOT._replace(lr_factor=1e-15)
"""The controls of a step of practically no length."""
State = list[Tensor]
REPEATED = (f"{pl.__name__}.utilities.rank_zero", f"{pl.__name__}.trainer")
"""Loggers of Lightning's messages about a run, of which the run itself repeats those that matter."""
LOOK_STEPS = 20
"""Batches by which the energy of the start is measured."""


class FixedControls(Schedule):
    """A schedule with the controls of steps 1 to n given; later steps have those of the last one."""

    def __init__(
        self,
        steps: Sequence[StepControls],
        samples: Sequence[int],
        temperature: float | None = None,
        sets_lr: bool = True,
    ) -> None:
        self.steps, self.samples = tuple(steps), frozenset(samples)
        self.temperature = temperature
        self._sets_lr = sets_lr

    @property
    def sets_lr(self) -> bool:  # type: ignore[override]
        return self._sets_lr

    def lay_out(self, length: RunLength) -> None:
        """Do nothing: the controls do not depend on the run's length."""

    @property
    def first_sample(self) -> int:
        return min(self.samples)

    def controls(self, step: int) -> StepControls:
        return self.steps[min(step, len(self.steps)) - 1]

    def draws(self, step: int) -> bool:
        return step in self.samples


def optimization(steps: int, decays: bool = False, controls: StepControls = COLD) -> FixedControls:
    """Return the schedule of n steps that lower the energy, in which the step size may fall as a cosine."""
    factors = [(1 + math.cos(math.pi * step / steps)) / 2 if decays else 1.0 for step in range(steps)]
    return FixedControls([controls._replace(lr_factor=factor) for factor in factors], [steps])


class RunForm:
    """The stages of a run, from which short runs are made; without a schedule it samples at a constant step."""

    def __init__(self, schedule: Schedule | None, length: RunLength) -> None:
        if getattr(schedule, "lr_decay", None) is not None:
            raise ValueError(
                "SamplingSchedule(lr_decay=…) sets the step sizes itself, whatever the module's lr is: tune without "
                "it, and choose its a and b so that the first step is the proposed lr"
            )
        if isinstance(schedule, AutoSampling):
            raise ValueError("AutoSampling brings its own sampler and lr, so there is no step size to tune: just fit")
        self.schedule = SamplingSchedule(every_n_steps=1) if schedule is None else copy.deepcopy(schedule)
        self.schedule.lay_out(length)
        self._whole = min(length.steps, 10**6)
        total = int(self._whole)
        stride = max(1, total // 20000)
        steps = [*range(1, total + 1, stride)]
        noisy = [self.schedule.controls(step).stage is Stage.SAMPLING for step in steps]
        first = noisy.index(True) if True in noisy else 0
        after = noisy.index(False, first) if False in noisy[first:] else len(steps)
        self._first_sampling = steps[first]
        self.stage_end = min(steps[after - 1] + stride - 1, total)
        """The last step of the first sampling stage."""

    @property
    def explores(self) -> bool:
        """Whether the run begins with steps at temperature 0 and the full lr."""
        return self._first_sampling > 1 and self.schedule.controls(1).temperature == 0

    @property
    def is_steady(self) -> bool:
        """Whether the run ends in one stage of sampling at a constant step, as for samples of the posterior."""
        first, last = (self.schedule.controls(step).lr_factor for step in (self._first_sampling, self.stage_end))
        return self.stage_end == self._whole and first == last

    @property
    def lead(self) -> float:
        """Σ of the step sizes before the first sampling stage over the lr, in steps at the full lr."""
        last = self._first_sampling - 1 if self._first_sampling > 1 else self.schedule.first_sample
        stride = max(1, last // 2000)
        factors = [self.schedule.controls(step).lr_factor for step in range(1, last + 1, stride)]
        return sum(factors) / max(len(factors), 1) * last

    def steady(self, steps: int) -> FixedControls:
        """Return the schedule of n steps with the controls of the run's first sampling step."""
        controls = self.schedule.controls(self._first_sampling)
        return FixedControls([controls], [steps], self.schedule.temperature, self.schedule.sets_lr)

    def short(self, steps: int, first: Sequence[StepControls] = (), trajectory: int = 1) -> FixedControls:
        """Return the schedule of a short run: the run's first stages, linearly shortened."""
        lead, parts = self._first_sampling - 1, steps // trajectory
        share = EXPLORATION_SHARE if self.explores else BURN_IN_SHARE
        before = min(math.ceil(lead / trajectory), round(parts * share))
        noisy = parts - before
        places = [1 + j * lead // before for j in range(before)]
        places += [lead + 1 + j * (self.stage_end - lead) // noisy for j in range(noisy)]
        controls = [self.schedule.controls(place) for place in places for _ in range(trajectory)]
        count = min(MAX_SAMPLES, noisy)
        samples = [len(first) + trajectory * (before + round(noisy * (j + 1) / count)) for j in range(count)]
        return FixedControls([*first, *controls], samples, self.schedule.temperature, self.schedule.sets_lr)


class Energies(SamplerCallback):
    """Records each step's energies, with its stage."""

    is_probe = True
    """A short run, in which a step may cut the batches of an order, see `check_start`."""

    def __init__(self) -> None:
        self._total: list[Tensor] = []
        self._stages: list[Stage] = []
        self._step = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step:
            return
        chains = chains_of(pl_module)
        self._step = trainer.global_step
        self._total.append(chains.observed.energy.detach())
        self._stages.append(chains.progress.stage)

    def of(self, *stages: Stage) -> Tensor:
        """Return Ũ of the steps of some stages (of all without any), shape (n, C), on the CPU."""
        pairs = zip(self._total, self._stages, strict=True)
        found = [energy for energy, stage in pairs if not stages or stage in stages]
        return torch.stack(found).float().cpu() if found else torch.zeros(0, 1)


class HotMomenta(SamplerCallback):
    """Begins with momenta of their law, since they take long to heat up, and a test rejects few cold ones."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        sampler_of(pl_module).draw_momenta()


class ShortRuns:
    """Makes short fits with the run's trainer, in one process.

    Attributes:
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
        """Fit for some steps from the module's present state; return the energies."""
        energies = Energies()
        chosen = [c for c in self._gradient if tested or not isinstance(c, MetropolisTest)] if with_noise else []
        own = [copy.copy(callback) for callback in chosen]
        with silenced(*REPEATED):
            momenta = [HotMomenta()] if any(isinstance(c, MetropolisTest) for c in own) else []
            trainer = self._make(
                max_steps=steps,
                max_epochs=-1,
                max_time=None,
                callbacks=[schedule, *momenta, *own, *callbacks, energies],
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
            trainer.fit(self.module, **self._data)
        self.steps_made += steps
        self._learn(trainer)
        rates = next((c.acceptance_rate for c in own if isinstance(c, MetropolisTest)), None)
        self.acceptance = None if rates is None else float(rates.mean())
        return energies

    def try_fit(self, schedule: Schedule, steps: int, *callbacks: pl.Callback) -> Tensor:
        """Return `fit`'s energies (n, C), none for a run that diverged or a step that the sampler refuses."""
        try:
            return self.fit(schedule, steps, *callbacks).of()
        except (NonFiniteEnergyError, ValueError):
            self.steps_made += steps
            return torch.zeros(0, 1)

    def look(self) -> tuple[Tensor, Any]:
        """Learn N, the run's length and labels by steps of practically no length; return energies (n, C) and the lr."""
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
        found = chance_nll(self.module.chains)
        self.chance = None if found is None else found * (self.module.num_data or 1)
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
        """Restore at the end what a fit sets: a copy is not safe, since compiled networks may not copy."""
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
    """Return whether a callback changes the gradient's noise or the chains' temperatures; a contour is left out, since
    short runs have no range of energies."""
    if isinstance(callback, Schedule | FirstStage | ContourGradient) or not isinstance(callback, SamplerCallback):
        return False
    return callback.changes_chain


def _one_process(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the trainer's arguments for a run in one process with the same data in a step."""
    if trainer.world_size == 1:
        return {}
    strategy = trainer.strategy
    ranks = strategy.ranks_per_chain if isinstance(strategy, ChainStrategy) else trainer.world_size
    accumulated = trainer.accumulate_grad_batches * int(ranks or 1)
    return {"devices": 1, "num_nodes": 1, "strategy": "auto", "accumulate_grad_batches": accumulated}
