"""`torch.compile` where it works."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Literal, TypeVar

import torch

from lightning_sgmcmc.namespace import rank_zero_info, rank_zero_warn
from lightning_sgmcmc.plain import parts_in

Result = TypeVar("Result")

MANY_SHAPES = 4
"""A regular batch, a last one and one of another length are three; torch gives up at eight."""
Compile = bool | Literal["auto"]
"""Whether to compile: "auto" compiles on a CUDA device where that works and the fit is long enough."""


def check_compile(value: Any) -> None:
    """Raise unless `value` is True, False or "auto"."""
    if not isinstance(value, bool) and value != "auto":
        raise TypeError(f"compile must be True, False or 'auto', got {value!r} of type {type(value).__name__}")


WORTH_ON_CUDA = 3_000
"""Steps of a fit on a GPU from which compilation saves about twice its time: for each tensor of a network it takes some
0.3 s and saves 0.2 ms a step, the launches of its operations (ResNet-20 on an H200)."""


def choice_for(choice: Compile, device: torch.device, trainer: Any) -> Compile:
    """Return the choice for a trainer's fit: "auto" does not compile for a short one, and says so."""
    if choice != "auto" or device.type != "cuda" or (steps := trainer.estimated_stepping_batches) >= WORTH_ON_CUDA:
        return choice
    rank_zero_info(
        f"The network is not compiled, since {steps:,.0f} steps would save less than it takes (from {WORTH_ON_CUDA:,} "
        "on they save more): compile=True compiles it."
    )
    return False


def is_compiled(choice: Compile, device: torch.device) -> bool:
    """Return whether a function on a device is to be compiled; "auto" warns if it cannot be."""
    if choice != "auto":
        return choice
    if device.type != "cuda":
        return False
    reason = why_not_compiled(device.type)
    if reason is not None:
        rank_zero_warn(f"torch.compile does not work here, so the run is slower than it could be: {reason}.")
    return reason is None


@cache
def why_not_compiled(device_type: str) -> str | None:
    """Return why `torch.compile` does not work on a type of device, by one addition in a process; None if it does."""
    try:
        torch.compile(_add_one, dynamic=False)(torch.zeros(8, device=device_type))
    except Exception as error:  # of Dynamo, Triton or a compiler that is missing
        return _first_line(error)
    return None


def has_compiler() -> bool:
    """Return whether there is a C++ compiler for compiled loops."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def compiled_if_possible(
    what: str,
    function: Callable[..., Result],
    remedy: str = "compile=False",
    needed: bool = False,
    varies: int | None = None,
    **options: Any,
) -> Callable[..., Result]:
    """Return a function compiled, which runs as it is from the first call on that cannot be compiled.

    `varies` is the place of the only argument whose shapes vary; None looks at all.
    """
    present: Callable[..., Result] = torch.compile(function, **options)
    shapes = Shapes(what)
    is_compiled, works = True, False

    def call(*args: Any) -> Result:
        nonlocal present, is_compiled, works
        if not is_compiled:
            return present(*args)
        is_new = shapes.meet(args if varies is None else args[varies])
        if needed:
            return present(*args)
        try:
            with _backward_at_once() if is_new else nullcontext():
                result = present(*args)
            works = True
            return result
        except Exception as error:  # the first call may fail in any way, a later one only in the compiler
            if works and not isinstance(error, torch._dynamo.exc.TorchDynamoException):
                raise
            reason = _first_line(error)
        # Outside of the handler, whose error holds all that the failed call has allocated.
        result = function(*args)  # raises what the user has to mend
        present, is_compiled = function, False
        rank_zero_warn(
            f"torch.compile fails on {what}, which runs uncompiled and slower: {reason}; {remedy} leaves it out."
        )
        return result

    return call


def _backward_at_once() -> AbstractContextManager[Any]:
    """Return a context in which a backward pass is compiled together with its forward pass, where torch can do so."""
    from torch._functorch import config  # torch does not import it by itself

    name = "force_non_lazy_backward_lowering"
    return config.patch(name, True) if hasattr(config, name) else nullcontext()


class Shapes:
    """The shapes that a compiled function has met: it is compiled once for each, up to a limit of torch."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._met: set[tuple[Any, ...]] = set()
        self._compiled: set[tuple[Any, ...]] = set()

    def meet(self, batch: Any) -> bool:
        """Return whether the function is compiled for a batch now; say so once of a second shape, and warn of many."""
        shape = tuple(tuple(tensor.shape) for tensor in parts_in(batch, torch.Tensor))
        key = (torch.is_grad_enabled(), shape)
        if key in self._compiled:
            return False
        self._compiled.add(key)
        before = len(self._met)
        self._met.add(shape)
        if len(self._met) == before:
            return True
        if before == 1:
            rank_zero_info(
                f"torch.compile compiles {self._what} again for a batch of another shape, such as a shorter last one, "
                "which drop_last=True in a training loader avoids."
            )
        elif before + 1 == MANY_SHAPES:
            rank_zero_warn(
                f"torch.compile compiles {self._what} anew for every shape of a batch, {MANY_SHAPES} so far, and gives "
                "up after a few more: let the collate function pad to a fixed length or to a few "
                "(pad_to_multiple_of=64 of a tokenizer), pass drop_last=True, or compile=False."
            )
        return True


def _add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _first_line(error: BaseException) -> str:
    """Return a message's first sentence: Dynamo breaks its own after "backend='inductor' raised:"."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    end = next((place for place, line in enumerate(lines) if not line.endswith(":")), 0)
    return " ".join(lines[: end + 1]).rstrip(".")
