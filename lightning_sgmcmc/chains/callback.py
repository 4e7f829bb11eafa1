"""What a callback of a run is: what it declares to plans, checkpoints and the command line, and its life in a fit."""

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_sgmcmc.chains.chains import ChainModel, Chains, chains_of, sampler_of
from lightning_sgmcmc.chains.layout import ChainLayout
from lightning_sgmcmc.chains.row_steps import Controls, ControlVariate, GradientChoice, StepPart
from lightning_sgmcmc.chains.samples import Drawing, PosteriorSample
from lightning_sgmcmc.checks import names_arguments
from lightning_sgmcmc.namespace import OTHER, PACKAGES, is_of_other_namespace, pl, way_out
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.factories import name_of
from lightning_sgmcmc.tensors import Control, exact


class Place(IntEnum):
    """Where a callback runs: after those of the places before it, whose results of a step or of a fit it uses."""

    FIRST_STAGE = 0
    SCHEDULE = 1
    CHAIN = 2
    """Changes the chain by the schedule's controls."""
    STORE = 3
    AVERAGE = 4
    DIAGNOSIS = 5
    PICTURES = 6
    SUMMARY = 7


class PlannedSchedule(Protocol):
    """The part of a schedule that a plan of the run needs; see `lightning_sgmcmc.callbacks.schedule.Schedule`."""

    @property
    def has_length(self) -> bool:
        """Whether the run's length is known; a time of the run gives it in the first steps."""

    @property
    def seconds(self) -> float | None:
        """The time of the run, None if it has none."""

    def apply(self, step: int, module: ChainModel, sampler: Any) -> None:
        """Set the controls for step k on a sampler's parameter groups."""

    def draws(self, step: int) -> bool:
        """Return whether the states after step k are samples."""

    def steps_alike(self, step: int) -> int:
        """Return how many steps, from step k on, have its controls; 1 if that is not known."""


class SampledChains(NamedTuple):
    """How many of a run's chains draw samples, and their step size and temperature over the schedule's."""

    number: int
    lr: float
    temperature: float


@dataclass(frozen=True)
class ChainSizes:
    """Sampled parameters of one chain (d), and the bytes of all chains' sampled parameters and of all their tensors."""

    numel: int
    parameters: int
    tensors: int


@dataclass(frozen=True)
class RunCost:
    """The per-datum gradients of a run's mini-batches for each chain, its epochs (NaN if unknown), and N."""

    gradients: int
    epochs: float
    num_data: int


class RunCallback(pl.Callback):
    """A callback that declares what plans, checkpoints, tuners and the command line must know about it."""

    changes_chain: ClassVar[bool] = False
    """Whether the states that a chain visits depend on it."""

    setting: ClassVar[str | None] = None
    """Name of its part of the run's settings, which a resumed run must share; None without settings."""

    claims: ClassVar[Mapping[str, str | None]] = {}
    """Subjects of a step (`Claims`) that it takes in a fit, each with the name of its method, if any."""

    place: ClassVar[Place | None] = None
    """Where it runs among the library's callbacks, whatever their order in the trainer's list; None leaves it where the
    list has it."""

    entries: ClassVar[Mapping[str, Any]] = {}
    """Entries of its state in a checkpoint that it reads without a check of its own, with their types."""

    tests_trajectories: ClassVar[bool] = False
    """Whether it tests the trajectories of a sampler that needs it."""

    is_probe: ClassVar[bool] = False
    """Whether it belongs to a short run of a tuner, in which a step may cut the batches of an order."""

    epoch_steps: int = 0
    """Steps that it takes for those of each epoch of the fit, 0 if it counts none by epochs."""

    @property
    def only_counts(self) -> bool:
        """Whether its hooks at the start and end of epochs look at no state of the chains, so that an epoch may be
        ended before its last steps are made."""
        return False

    def acts_in(self, step: int) -> bool:
        """Return whether it acts in a coming step, the sampler's so many-th from 1, in which it sees no sample.

        Its hooks of a step are not called in others, so that several of them can be made at once.
        """
        return True

    def free_steps(self, first: int, most: int) -> int:
        """Return in how many of the coming steps it does not act, from one on and up to so many, see `acts_in`."""
        return next((ahead for ahead in range(most) if self.acts_in(first + ahead)), most)

    def step_controls(self, group: Mapping[str, Any]) -> Mapping[str, Control]:
        """Return the controls of a parameter group that it changes in the coming steps, if it does not act in them."""
        return {}

    def step_part(self) -> StepPart | None:
        """Return what it does in compiled steps, if it acts in all that it does not name by `acts_in`."""
        return None

    def step_variate(self) -> ControlVariate | None:
        """Return what corrects gradients or energies in steps that are made at once, in all that it does not name by
        `acts_in`."""
        return None

    def step_choice(self) -> GradientChoice | None:
        """Return what chooses each gradient in steps that are made at once, in all that it does not name by
        `acts_in`."""
        return None

    def pass_over(self, trainer: pl.Trainer, batches: int, controls: Sequence[Controls]) -> None:
        """Note the batches of steps in which it has not acted, and each parameter group's controls of these steps."""

    kinds: tuple[str, str] | None = None
    """What a run of one chain and one of several are called, if they are a baseline; None for a run that samples."""

    sets_lr: bool = False
    """Whether it sets the step size."""

    def settings(self) -> dict[str, Any]:
        """Return its part of the run's settings by name: its class and its constructor's arguments.

        A resumed run must have the same ones, so every argument that changes the draws is among them.
        """
        part = self.setting or (type(self).__name__ if self.changes_chain else None)
        if part is None:
            return {}
        return {part: type(self).__name__} | {f"{part}.{name}": value for name, value in arguments_of(self).items()}

    def memory(self, sizes: ChainSizes) -> int:
        """Return the bytes of what it keeps during a fit, of all chains of this process."""
        return 0

    def added_gradients(self, cost: RunCost) -> int | None:
        """Return the per-datum gradients of each chain that it adds to a run's; None if unknown."""
        return 0

    def plan_note(self) -> str | None:
        """Return a sentence on what the plan of a run leaves out because of it, None for nothing."""
        return None

    def remedy(self, kind: str, side: str | None) -> str | None:
        """Return what its user can do about a finding of `ChainHealth`, in place of the general remedy.

        Args:
            kind: the finding's `FindingKind`, such as "kinetic temperature".
            side: "above" or "below" the expected value; None if unknown.

        Returns:
            an imperative without a full stop, "" if there is nothing to do, None to keep the general remedy.
        """
        return None

    def release(self, failed: bool = False) -> None:
        """Drop the fit; called after its last hook, and after an error when the run's state has been saved."""

    def as_schedule(self) -> PlannedSchedule | None:
        """Return the callback if it is the run's schedule."""
        return None

    @property
    def acceptance_rate(self) -> Tensor | None:
        """Mean acceptance probability of each chain of this process, if it tests trajectories; None before a test."""
        return None

    @property
    def has_moved_target(self) -> bool:
        """Whether it changed the prior or the temperature in this run, so that energies are not compared."""
        return False

    def sampled_chains(self, total: int) -> SampledChains | None:
        """Return the chains that draw samples if it changes their number, of this total of the run, None otherwise."""
        return None


def arguments_of(callback: pl.Callback) -> dict[str, Any]:
    """Return the constructor arguments that a callback holds under their names."""
    names = inspect.signature(type(callback)).parameters
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}


def changed_arguments(callback: pl.Callback) -> list[tuple[str, str]]:
    """Return a callback's constructor arguments whose values are not the defaults, as text."""
    defaults = {name: text_of(p.default) for name, p in inspect.signature(type(callback)).parameters.items()}
    held = [(name, text_of(value)) for name, value in arguments_of(callback).items()]
    return [(name, text) for name, text in held if text != defaults[name]]


def text_of(value: Any) -> str:
    """Return an object as text that is the same in every process: its own `repr`, or its class and plain attributes."""
    if isinstance(value, Tensor):
        return f"tensor(shape={tuple(value.shape)}, sum={exact(value).sum().item():.9g})"
    if isinstance(value, functools.partial):
        chosen = ", ".join(f"{k}={text_of(v)}" for k, v in sorted(value.keywords.items()))
        return f"{name_of(value)}({chosen})" if chosen else name_of(value)
    if isinstance(value, type) or inspect.isroutine(value):
        return value.__qualname__
    cls = type(value)
    own = cls.extra_repr is not nn.Module.extra_repr if isinstance(value, nn.Module) else True
    if own and cls.__repr__ is not object.__repr__:
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    public = {k: v for k, v in vars(value).items() if not k.startswith("_") and k != "training"}
    # An argument that is left out may be newer than a checkpoint's settings.
    public = {k: v for k, v in public.items() if v is not None or getattr(cls, k, ...) is not None}
    return f"{cls.__name__}({', '.join(f'{k}={text_of(v)}' for k, v in public.items())})"


# -- the life of a fit -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A fit in progress, as its callbacks see it."""

    trainer: pl.Trainer
    module: ChainModel
    chains: Chains
    sampler: Sampler

    @property
    def layout(self) -> ChainLayout:
        """Which chains of the run this process holds."""
        return self.chains.layout


class SamplerCallback(RunCallback):
    """A callback of a sampling run: it may set the sampler's controls, and it sees every posterior sample.

    The order in a step: `on_train_batch_start` (schedules set `lr` and `temperature`), `on_before_optimizer_step`
    (the energy of the batch is known; multipliers are set), the update, `on_train_batch_end` (schedules decide
    whether the states are samples), and then `on_posterior_samples` and, once per chain, `on_posterior_sample`.

    The life of a fit: `reset`, the `claims`, `check`, `begin` with the state of a checkpoint, the steps, `end`. From
    `begin` to `end` the fit's parts are in `run`; whatever ends a fit, the callback holds nothing of it afterwards.

    Example::

        class Watch(SamplerCallback):
            def begin(self, run, saved):
                self.energies = [] if saved is None else saved["energies"]

            def on_posterior_sample(self, trainer, pl_module, sample):
                self.energies.append(sample.energy)

            def state(self):
                return {"energies": list(self.energies)}
    """

    _run: Run | None = None
    _saved: dict[str, Any] | None = None
    """The state of a checkpoint before `begin`, and that of the fit after its end."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names_arguments(cls)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in changed_arguments(self))})"

    # -- what a subclass defines --------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Clear the state of an earlier fit; a checkpoint's state is loaded afterwards."""

    def check(self, trainer: pl.Trainer, module: ChainModel) -> None:
        """Raise for a fit that the callback cannot be part of; chains and loaders are not made yet."""

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        """Begin a fit, before its first step.

        Args:
            run: the fit's parts, which `self.run` holds until its end.
            saved: what `state` returned, of the checkpoint that the fit continues from; None without one.
        """

    def end(self) -> None:
        """Release what belongs to the fit, after its last hook; `self.run` is dropped afterwards."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: plain data and tensors of all chains of the run."""
        return {}

    @property
    def reads_all_samples(self) -> bool:
        """Whether it reads the tensors of samples of other processes' chains, which are sent only to who does."""
        own = type(self)
        return (
            own.on_posterior_sample is not SamplerCallback.on_posterior_sample
            or own.on_posterior_samples is not SamplerCallback.on_posterior_samples
        )

    def on_posterior_samples(self, trainer: pl.Trainer, pl_module: Any, drawing: Drawing) -> None:
        """Called with all samples of a step, for work that is done together; `on_posterior_sample` follows with each.

        The module is a `BayesianModule`. A step with more samples than the process has chains has several drawings.
        """

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: Any, sample: PosteriorSample) -> None:
        """Called with each sample when it is drawn; the module is a `BayesianModule`."""

    @property
    def state_key(self) -> str:
        """The key of the state in a checkpoint; two callbacks of a class may have one only where they have no state."""
        own = type(self)
        has_state = own.state is not SamplerCallback.state or own.state_dict is not SamplerCallback.state_dict
        return super().state_key if has_state else f"{super().state_key} {id(self)}"

    # -- the life of a fit --------------------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The parts of the fit in progress."""
        if self._run is None:
            raise AttributeError(f"{type(self).__name__} is in no fit: `run` has its parts from `begin` to `end`")
        return self._run

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise for a module that does not sample; reset, claim and check at the start of a fit."""
        module = sampling_module(pl_module, self)
        if stage != "fit":
            return
        self._run = self._saved = None
        self.reset()
        for subject, method in self.claims.items():
            module.chains.claims.claim(subject, self, None if method is None else getattr(self, method))
        self.check(trainer, module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = sampling_module(pl_module, self)
        saved, self._saved = self._saved, None
        self._run = Run(trainer, module, module.chains, sampler_of(module))
        self.begin(self._run, saved)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.release()

    def release(self, failed: bool = False) -> None:
        """Drop the fit, so that module and callback can be copied; after an error the state may be lost with it."""
        for name in ("log", "log_dict"):  # methods of the module, which Lightning lends to callbacks for a run
            vars(self).pop(name, None)
        if self._run is None:
            return
        try:
            self._saved = self.state_dict() if self.saves_alone else None
        except Exception:
            if not failed:
                raise
        finally:
            self.end()
            self._run = None

    @property
    def saves_alone(self) -> bool:
        """Whether `state` needs nothing of other processes, which may have failed."""
        return not self.run.layout.is_spread

    def state_dict(self) -> dict[str, Any]:
        return self.state() if self._saved is None else self._saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict


class StepClaimant(SamplerCallback):
    """A callback with a claim that is called before an update; it calls all such claims in the order of a step."""

    # Only these callbacks have the hook, since each call of it costs a microsecond or two in every step.
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        chains_of(pl_module).claims.before_update(trainer)


def sampling_module(module: pl.LightningModule, callback: pl.Callback) -> ChainModel:
    """Return the module of a callback, typed as one with chains."""
    if is_of_other_namespace(module):
        raise TypeError(f"{type(module).__name__} comes from {PACKAGES[OTHER]}: {way_out()}")
    if not isinstance(module, ChainModel):
        raise TypeError(
            f"{type(callback).__name__} works with a BayesianModule, got {type(module).__name__}: derive it from "
            "lightning_sgmcmc.BayesianModule, or wrap the network as BayesianModule(net=…)"
        )
    return module


def has_loss_scaler(trainer: pl.Trainer) -> bool:
    """Return whether the trainer's precision scales the loss."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def refuse_loss_scaler(trainer: pl.Trainer, why: str) -> None:
    """Raise for a run with a loss scaler."""
    if has_loss_scaler(trainer):
        raise ValueError(
            f"{why}, but a loss scaler rescales them and makes some infinite: use "
            "precision='bf16-mixed' instead of '16-mixed'"
        )
