"""A schedule as the rest of a run sees it: the controls of each step, which states are samples, and how long it is."""

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from lightning_sgmcmc.chains.callback import Place, PlannedSchedule, Run, SamplerCallback, sampling_module
from lightning_sgmcmc.chains.chains import ChainModel, chains_of
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.chains.trainer import (
    GradientAccumulationScheduler,
    fit_steps,
    instances_of,
    is_trial,
    pass_on,
)
from lightning_sgmcmc.namespace import pl, rank_zero_info, rank_zero_warn
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.sampler import NO_COLD_LIMIT, Control
from lightning_sgmcmc.samplers.sgld import PreconditionedSampler
from lightning_sgmcmc.tensors import mean_of


class StepControls(NamedTuple):
    """The controls of a step: its step size over the configured lr, τ (None for the target's) and τ's factor."""

    lr_factor: float
    temperature: float | None
    stage: Stage
    temperature_factor: float = 1.0


class RunLength(NamedTuple):
    """What a schedule depends on: its steps, infinite if unknown, those of an epoch, 0 if unknown, and the first lr."""

    steps: float
    steps_per_epoch: int = 0
    lr: Control = 1.0
    is_trial: bool = False


class FirstStage(SamplerCallback):
    """Base class of a stage of the run before its schedule begins; a run has at most one."""

    def enter(self, trainer: pl.Trainer, module: ChainModel) -> None:
        """Set `progress.warm_steps`, the steps after which the schedule begins; repeated calls do nothing."""
        raise NotImplementedError

    def advance(self, trainer: pl.Trainer, module: ChainModel, batch_idx: int) -> None:
        """Let the schedule begin with the coming micro-batch, if the stage is over; repeated calls do nothing."""
        raise NotImplementedError


class Schedule(SamplerCallback):
    """Base class of schedules, which decide when samples are drawn; a run has exactly one.

    Subclasses implement `lay_out`, `controls` and `draws`, which need no trainer: after
    `schedule.lay_out(RunLength(steps))`, `schedule.controls(k)` are the controls of step k = 1, …, steps. In a run, k
    is the number of the next optimizer step, less those of a warm start, from the sampler's own counter: it survives a
    resume, and excludes steps that a loss scaler skipped.
    """

    changes_chain = True
    place = Place.SCHEDULE
    setting = "schedule"
    entries: ClassVar[Mapping[str, Any]] = {"warm_steps": int}
    plans_whole_run: ClassVar[bool] = False
    """Whether it is laid out for a certain number of steps."""
    needs_trainer: ClassVar[bool] = False
    """Whether it does more in a run than set controls and say when samples are drawn."""

    temperature: float | None = None
    """τ of the target; None uses the module's."""

    _first_stage: FirstStage | None = None
    _saved_warm_steps: int = 0
    _step: int = 0
    _planned: float = math.inf
    """Steps that the schedule was laid out for, if it needs to know them."""
    _target_temperature: Control = 1.0
    _is_set_up = False

    @property
    def state_key(self) -> str:
        # A trainer refuses equal keys when it is made, in words about keys; `setup` refuses a second schedule by name.
        return super().state_key if self._is_set_up else f"{super().state_key} {id(self)}"

    def reset(self) -> None:
        self._saved_warm_steps = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        sampling_module(pl_module, self)
        schedules = instances_of(trainer, Schedule)
        if len(schedules) > 1:
            names = " and ".join(type(c).__name__ for c in schedules)
            raise ValueError(f"a run has one schedule, got {names}: remove one of them")
        self._is_set_up = True
        super().setup(trainer, pl_module, stage)

    def lay_out(self, length: RunLength) -> None:
        """Compute the parts that depend on the run's length; raise if it is too short, or has no end."""
        raise NotImplementedError

    def controls(self, step: int) -> StepControls:
        """Return the controls of step k, a pure function once the schedule is laid out."""
        raise NotImplementedError

    def draws(self, step: int) -> bool:
        """Return whether the states after step k are samples."""
        raise NotImplementedError

    def cycle_of(self, step: int) -> int:
        """Return the cycle of step k, from 0; 0 throughout without cycles."""
        return 0

    def steps_alike(self, step: int) -> int:
        """Return how many steps, from step k on, have its controls and its cycle; 1 if that is not known."""
        return 1

    @property
    def has_length(self) -> bool:
        """Whether the run's length is known; a time of the run gives it in the first steps."""
        return True

    @property
    def seconds(self) -> float | None:
        """The time of the run, None if it has none."""
        return None

    @property
    def first_sample(self) -> int:
        """The step after which the first sample is drawn, once the schedule is laid out."""
        raise NotImplementedError

    def plan(self, trainer: pl.Trainer, module: ChainModel) -> None:
        """Lay the schedule out over the run, before the first step."""
        sampler, progress = self.run.sampler, module.chains.progress
        lr = sampler.param_groups[0]["initial_lr"]
        self._saved_warm_steps = progress.warm_steps
        steps = fit_steps(trainer) - progress.warm_steps
        self._planned = steps if self.plans_whole_run else math.inf
        self.lay_out(RunLength(steps, epoch_length(trainer), lr, is_trial(trainer)))
        progress.first_sample = progress.warm_steps + self.first_sample
        self._target_temperature = module.target_temperature if self.temperature is None else self.temperature
        self.check_sampler(sampler, self._target_temperature, is_trial(trainer))

    def check_sampler(self, sampler: Sampler, target: Control, is_trial: bool = False) -> None:
        """Raise if a sampler cannot make the first step of the schedule, once it is laid out; `target` is the target's
        temperature."""
        name, first = type(sampler).__name__, self.controls(1)
        temperature = target if first.temperature is None else first.temperature
        if not sampler.has_cold_limit and not isinstance(temperature, torch.Tensor) and temperature == 0:
            raise ValueError(NO_COLD_LIMIT.format(name))
        adapts = isinstance(sampler, PreconditionedSampler) and sampler.needs_burn_in
        if adapts and first.stage is Stage.SAMPLING and not is_trial:
            raise ValueError(
                f"{name}(adapt={sampler.param_groups[0]['adapt']!r}) estimates its preconditioner before the sampling "
                f"stage, and {type(self).__name__} begins with that: give it a burn-in "
                "(SamplingSchedule(burn_in_steps=…), CyclicalSchedule(exploration=…)), or pass adapt='always'"
            )

    def apply(self, step: int, module: ChainModel, sampler: Sampler) -> None:
        """Set the controls for step k."""
        progress = module.chains.progress
        progress.stage = self.set_controls(step, sampler, self._target_temperature).stage
        progress.cycle = self.cycle_of(step)

    def set_controls(self, step: int, sampler: Sampler, target: Control) -> StepControls:
        """Set a sampler's controls for step k, and return them; `target` is the target's temperature."""
        controls = self.controls(step)
        temperature = target if controls.temperature is None else controls.temperature
        if controls.temperature_factor != 1:
            temperature = temperature * controls.temperature_factor
        for group in sampler.param_groups:
            group["temperature"] = temperature
            if self.sets_lr:
                group["lr"] = self._lr(group, step, controls)
        if isinstance(sampler, PreconditionedSampler):
            sampler.set_adapting(controls.stage is not Stage.SAMPLING)
        return controls

    def _lr(self, group: dict[str, Any], step: int, controls: StepControls) -> Control:
        """Return the step size of a parameter group at step k."""
        return group["initial_lr"] * controls.lr_factor  # type: ignore[no-any-return]

    def trace(self, steps: Iterable[int], group: dict[str, Any]) -> list[tuple[float, float, int]]:
        """Return step size, τ and cycle at the run's steps after a warm start, for one of the sampler's groups."""
        found = []
        for step in steps:
            controls = self.controls(step)
            temperature = self._target_temperature if controls.temperature is None else controls.temperature
            lr = self._lr(group, step, controls) if self.sets_lr else group["lr"]
            found.append((mean_of(lr), mean_of(temperature) * controls.temperature_factor, self.cycle_of(step)))
        return found

    sets_lr = True

    def as_schedule(self) -> PlannedSchedule:
        return self

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        trainer, module = run.trainer, run.module
        if saved is not None:
            self._saved_warm_steps = saved["warm_steps"]
        if self.sets_lr and trainer.lr_scheduler_configs:
            scheduler = type(trainer.lr_scheduler_configs[0].scheduler).__name__
            raise ValueError(
                f"both {type(self).__name__} and the {scheduler} set the step size: remove one of them (the schedules' "
                "own ways are CyclicalSchedule and SamplingSchedule(lr_decay=…) or lr_annealing=…)"
            )
        for group in run.sampler.param_groups:
            group.setdefault("initial_lr", group["lr"])
        module.chains.progress.schedule = type(self).__name__
        self._first_stage = begin_first_stage(trainer, module)
        if self._first_stage is None:
            if self._saved_warm_steps > run.sampler.step_count:
                raise ValueError(
                    f"the checkpoint is in the middle of a WarmStart of {self._saved_warm_steps} steps, and this run "
                    "has none: add the same WarmStart to the trainer's callbacks"
                )
            module.chains.progress.warm_steps = self._saved_warm_steps
        self.plan(trainer, module)
        if is_optimization(trainer, module):
            self.announce_optimization(module)

    def announce_optimization(self, module: ChainModel) -> None:
        """Say what a run at temperature 0 collects, since its states are not samples of the posterior."""
        rank_zero_warn(
            "temperature=0 is optimization: the states that this run collects are not samples of the posterior, "
            "and their average is a snapshot ensemble."
        )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        module: ChainModel = pl_module  # type: ignore[assignment]
        if self._first_stage is not None:
            self._first_stage.advance(trainer, module, batch_idx)
        self._step = self.run.sampler.step_count + 1 - module.chains.progress.warm_steps
        if self._step > self._planned:
            self._planned = math.inf
            rank_zero_warn(
                f"The fit goes on after the {self._step - 1} steps that {type(self).__name__} has planned for, since "
                "epochs have become longer or max_epochs was raised: pass max_steps to plan for the whole run."
            )
        if self._step > 0:
            self.apply(self._step, module, self.run.sampler)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self.has_stepped(pl_module) and self.draws(self._step):
            chains_of(pl_module).progress.sample_due = True

    def acts_in(self, step: int) -> bool:
        return type(self).on_train_batch_end is not Schedule.on_train_batch_end or self._acts_before(step)

    def free_steps(self, first: int, most: int) -> int:
        if type(self).acts_in is not Schedule.acts_in:
            return super().free_steps(first, most)
        # If it acts in a step, it does so in all that follow.
        return most if most > 0 and not self.acts_in(first + most - 1) else super().free_steps(first, most)

    def _acts_before(self, step: int) -> bool:
        """Return whether it does more before a step than to set the controls."""
        progress = self.run.chains.progress
        own = step - progress.warm_steps
        # Otherwise `apply` is called for the step, if it is one of the schedule's.
        return (own > 0 and progress.stage is Stage.WARM_START) or own > self._planned

    def has_stepped(self, module: pl.LightningModule) -> bool:
        """Return whether the batch that ends has completed a step, which a loss scaler has not skipped."""
        warm_steps = chains_of(module).progress.warm_steps
        return self._step > 0 and self.run.sampler.step_count == self._step + warm_steps

    def state(self) -> dict[str, Any]:
        return {"warm_steps": self._saved_warm_steps}

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        pass_on(trainer, exception)  # the process that started the ranks has only the user's callbacks


def begin_first_stage(trainer: pl.Trainer, module: ChainModel) -> FirstStage | None:
    """Begin the run's first stage, if it has one, and return it."""
    stage = next(iter(instances_of(trainer, FirstStage)), None)
    if stage is not None:
        stage.enter(trainer, module)
    return stage


def is_warming_up(trainer: pl.Trainer, module: ChainModel, batch_idx: int) -> bool:
    """Return whether the step of a coming micro-batch belongs to the run's first stage."""
    for stage in instances_of(trainer, FirstStage) if module.chains.progress.stage is Stage.WARM_START else ():
        stage.advance(trainer, module, batch_idx)
    return module.chains.progress.stage is Stage.WARM_START


def is_optimization(trainer: pl.Trainer, module: ChainModel) -> bool:
    """Return whether a run collects its states at temperature 0, so that they are not samples of a posterior."""
    temperature = target_of(trainer, module)
    return temperature == 0 or (isinstance(temperature, tuple) and not any(temperature))


def target_of(trainer: pl.Trainer, module: ChainModel) -> float | tuple[float, ...]:
    """Return the target's temperature, or that of each chain: the schedule's, else the module's."""
    schedule = schedule_of(trainer)
    own = None if schedule is None else schedule.temperature
    return module.temperature if own is None else own


def epoch_length(trainer: pl.Trainer) -> int:
    """Return the number of optimizer steps in the present epoch, 0 if unknown."""
    batches, each = trainer.num_training_batches, trainer.accumulate_grad_batches
    for scheduler in instances_of(trainer, GradientAccumulationScheduler):  # sets it when the epoch begins
        each = scheduler.get_accumulate_grad_batches(trainer.current_epoch)
    return math.ceil(batches / each) if math.isfinite(batches) else 0


def schedule_of(trainer: pl.Trainer) -> Schedule | None:
    """Return the run's schedule, if it has one."""
    return next(iter(instances_of(trainer, Schedule)), None)


def require_schedule(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Raise for a run that would never draw a sample."""
    if schedule_of(trainer) is None:
        raise ValueError(
            f"{type(callback).__name__} would never see a sample: add a CyclicalSchedule or a SamplingSchedule, which "
            "decide when samples are drawn"
        )


# -- a time of the run -------------------------------------------------------------------------------------------------

UNITS = {"s": 1, "m": 60, "h": 3600}
SKIPPED, TIMED = 10, 60
"""Steps before the timing, and up to its first look; each later look is after twice as many."""
SHARE = 0.8
"""Of the time, for steps; draws are evaluated and written in the rest."""
FOR_A_LOOK = 0.05
"""Of the time, for the steps up to a further look."""


class RunBudget:
    """Sets the trainer's number of steps from a time, such as "10m", and the speed of the run's first steps.

    Later steps may be many times as fast as the first ones, since they are made in blocks and may be compiled. So the
    speed is looked at after 60, 120, 240, … steps, until it stays or the time for a look is short.
    """

    def __init__(self, text: str | None, lengths: Sequence[Sequence[int]] | None = None) -> None:
        found = None if text is None else re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", str(text).strip())
        if text is not None and (found is None or float(found[1]) == 0):
            raise ValueError(f"budget must be a time such as '90s', '10m' or '2h', got {text!r}")
        self.seconds = None if found is None else float(found[1]) * UNITS[found[2]]
        """The time, None without a budget."""
        self._given = None if lengths is None else {int(step): int(steps) for step, steps in lengths}
        if self._given is not None and (
            self.seconds is None or not self._given or not all(map(_is_a_look, self._given))
        ):
            raise ValueError(
                f"lengths are the [step, steps of the run] pairs of a run with a budget, as its auto.yaml has them, of "
                f"the steps {TIMED}, {2 * TIMED}, {4 * TIMED}, …, got {lengths!r}"
            )
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.steps: int | None = None
        """The number of steps, None without a budget or before the speed is known."""
        self.lengths: list[tuple[int, int]] = []
        """The step of each look, and the number of steps by the speed there."""
        self._begun: float | None = None
        self._before = 0, 0.0
        """The step of the last look, and its time."""
        self._least = math.inf
        """The least seconds of a step between two looks."""

    def restore(self, steps: int | None, lengths: Sequence[tuple[int, int]]) -> None:
        """Go on from a checkpoint."""
        before = [] if steps is None else [(TIMED, steps)]  # of checkpoints that have no lengths
        self.steps, self.lengths = steps, [*lengths] or before

    @property
    def expected(self) -> int | None:
        """The number of steps by the speed at the last look."""
        return self.lengths[-1][1] if self.lengths else None

    def begin(self, trainer: pl.Trainer) -> None:
        """Give the trainer an end, the real one as soon as it is known."""
        if self.seconds is None:
            return
        steps = self.steps if self.steps is not None else 10**6
        trainer.fit_loop.max_epochs = math.ceil(steps / epoch_length(trainer)) if epoch_length(trainer) else -1
        trainer.fit_loop.epoch_loop.max_steps = steps

    @property
    def is_timing(self) -> bool:
        """Whether the run's length is not known yet."""
        return self.seconds is not None and self.steps is None

    def looks_at(self, step: int) -> bool:
        """Return whether the time after a step is taken."""
        return self.is_timing and (step <= TIMED or _is_a_look(step))

    def after_step(self, trainer: pl.Trainer, step: int, warm_steps: int) -> bool:
        """Time the first steps; return whether the run's expected length is another one now.

        Args:
            warm_steps: the steps of the warm-up in the expected length, in which the length is to become known.
        """
        if self.seconds is None or not self.looks_at(step):
            return False
        if self._given is not None:
            if step in self._given:
                self.lengths.append((step, self._given[step]))
                self.steps = self.expected if step == max(self._given) else None
            return step in self._given
        now = time.monotonic()
        if self._begun is None or step <= SKIPPED:
            self._begun, self._before = now, (step, now)
        if step < TIMED or step == self._before[0]:
            return False
        (before, then), least = self._before, self._least
        seconds = (now - then) / (step - before), now - self._begun
        each, elapsed = (float(trainer.strategy.broadcast(own)) for own in seconds)
        self._before, self._least = (step, now), min(least, each)
        stays = step > 2 * TIMED and 0.7 * least <= each <= 1.5 * self._least  # blocks begin after 64 steps
        is_short = step * self._least > FOR_A_LOOK * self.seconds or 2 * step > warm_steps / 2
        each = each if stays else self._least
        within = step + max(0, int((SHARE * self.seconds - elapsed) / each))
        steps = max(within, 4 * TIMED)
        self.lengths.append((step, steps))
        if stays or is_short:
            self.steps = steps
            said = f"AutoSampling: {steps:,} steps of {1000 * each:.3g} ms in {self.seconds:g} seconds."
            if within < steps:
                said = (
                    f"AutoSampling: budget={self.seconds:g}s holds {within:,} steps of {1000 * each:.3g} ms, and a run "
                    f"has {steps} at least, so this one takes about {steps * each:.2g} seconds."
                )
            rank_zero_info(said)
        return True


def _is_a_look(step: int) -> bool:
    """Return whether a step is 60·2ᵏ."""
    return step % TIMED == 0 and (step // TIMED).bit_count() == 1
