"""`torch.compile` where it works."""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

Result = TypeVar("Result")

Compile = bool | Literal["auto"]
"""Whether to compile: "auto" compiles on a CUDA device where that works."""


def check_compile(value: Any) -> None:
    """Raise unless `value` is True, False or "auto".

    Raises:
        TypeError: naming the argument and its value.
    """
    if not isinstance(value, bool) and value != "auto":
        raise TypeError(f"compile must be True, False or 'auto', got {value!r} of type {type(value).__name__}")


def is_compiled(choice: Compile, device: torch.device) -> bool:
    """Return whether a function on a device is to be compiled; "auto" warns if it cannot be.

    Args:
        choice: True, False or "auto".
        device: of the function's tensors.
    """
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
    """Return why `torch.compile` does not work on a type of device, None if it does.

    It compiles one addition, once in a process.
    """
    try:
        torch.compile(_add_one, dynamic=False)(torch.zeros(8, device=device_type))
    except Exception as error:  # of Dynamo, Triton or a compiler that is missing
        return _first_line(error)
    return None


def compiled_if_possible(what: str, function: Callable[..., Result], **options: Any) -> Callable[..., Result]:
    """Return a function compiled, which runs as it is from the first call on if that call cannot be compiled.

    Args:
        what: the function's name in the warning.
        function: the function.
        options: those of `torch.compile`.
    """
    present: Callable[..., Result] = torch.compile(function, **options)
    works = False

    def call(*args: Any) -> Result:
        nonlocal present, works
        if works:
            return present(*args)
        try:
            result = present(*args)
        except Exception as error:
            result = function(*args)  # raises what the user has to mend
            present = function
            rank_zero_warn(
                f"torch.compile fails on {what}, which runs uncompiled and slower: {_first_line(error)}; compile=False "
                "leaves it out."
            )
        works = True
        return result

    return call


def _add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _first_line(error: BaseException) -> str:
    """Return a message's first sentence: Dynamo breaks its own after "backend='inductor' raised:"."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    end = next((place for place, line in enumerate(lines) if not line.endswith(":")), 0)
    return " ".join(lines[: end + 1]).rstrip(".")
