"""What a callback declares about itself to the services of a run, which are on lower floors than the callbacks."""

import functools
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, Protocol, TypeGuard

import pytorch_lightning as pl
from torch import Tensor, nn

from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.samplers.factories import name_of
from lightning_sgmcmc.tensors import exact


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

    def apply(self, step: int, module: ChainModel, sampler: Any) -> None:
        """Set the controls for step k on a sampler's parameter groups."""

    def draws(self, step: int) -> bool:
        """Return whether the states after step k are samples."""


class SampledChains(NamedTuple):
    """The number of a run's chains that draw samples, and their step size and temperature over those of the
    schedule."""

    number: int
    lr: float
    temperature: float


@dataclass(frozen=True)
class ChainSizes:
    """Sizes of a process's chains: sampled parameters of one (`numel`, d), and the bytes of the sampled parameters, and
    of all tensors that chains do not share, of all."""

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
    """Subjects of a step (`chains.claims`) that it takes in a fit, each with the name of its method, if any."""

    place: ClassVar[Place | None] = None
    """Where it runs among the library's callbacks, whatever their order in the trainer's list; None leaves it where the
    list has it."""

    entries: ClassVar[Mapping[str, Any]] = {}
    """Entries of its state in a checkpoint that it reads without a check of its own, with their types."""

    tests_trajectories: ClassVar[bool] = False
    """Whether it tests the trajectories of a sampler that needs it."""

    is_probe: ClassVar[bool] = False
    """Whether it belongs to a short run of a tuner, in which a step may cut the batches of an order."""

    kind: str | None = None
    """What a run with this callback is called, if that is a baseline, from `setup` on; None for a run that samples."""

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

    def release(self, failed: bool = False) -> None:
        """Drop the fit; called after its last hook, and after an error when the run's state has been saved."""

    def as_schedule(self) -> PlannedSchedule | None:
        """Return the callback if it is the run's schedule."""
        return None

    @property
    def acceptance_rate(self) -> Tensor | None:
        """Mean acceptance probability of each chain of this process, if it tests trajectories; None before a test."""
        return None

    def sampled_chains(self, total: int) -> SampledChains | None:
        """Return the chains that draw samples if it changes their number, of this total of the run, None otherwise."""
        return None


def declares(callback: pl.Callback) -> TypeGuard[RunCallback]:
    """Return whether a callback's class declares what it is; a mock of one answers anything."""
    return issubclass(type(callback), RunCallback)


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
