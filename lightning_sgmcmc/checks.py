"""Checks of arguments: each raises with argument, value and remedy."""

import inspect
import math
import numbers
import sys
from collections.abc import Sequence
from typing import Any


def check_number(name: str, value: Any, optional: bool = True) -> None:
    """Raise unless `value` is a finite number ≥ 0, or None if it is optional."""
    if value is None and optional:
        return
    _check_real(name, value)
    if not (float(value) >= 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number and not negative, got {value}")


def _check_real(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")


def check_within(name: str, value: Any, interval: str) -> None:
    """Raise unless `value` is a number in an interval, written as in "(0, 1]" or "[0, inf)"."""
    _check_real(name, value)
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    if not (above and below):
        raise ValueError(f"{name} must be in {interval}, got {value}")


def check_flag(name: str, value: Any, optional: bool = False) -> None:
    """Raise unless `value` is True or False, or None if it is optional; a text such as "no" would count as True."""
    if not isinstance(value, bool) and not (value is None and optional):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")


def check_positive(name: str, value: Any) -> None:
    """Raise unless `value` is a finite number > 0."""
    check_number(name, value, optional=False)
    if value == 0:
        raise ValueError(f"{name} must be positive, got {value}")


def check_control(name: str, value: Any) -> None:
    """Raise unless `value` is None, a finite number ≥ 0 or a sequence of them, one for each chain."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        check_number(name, value)
        return
    if len(value) == 0:
        raise ValueError(f"{name} has no values: pass one for each chain")
    for one in value:
        check_number(name, one)


def check_count(name: str, value: Any, least: int = 1, optional: bool = True) -> None:
    """Raise unless `value` is a whole number ≥ `least`, or None if it is optional."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r} of type {type(value).__name__}")
    if int(value) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_kind(name: str, value: Any, kind: type, optional: bool = True) -> None:
    """Raise unless `value` is an object of a class, or None if it is optional."""
    if not isinstance(value, kind) and not (value is None and optional):
        raise TypeError(f"{name} must be an object of class {kind.__name__}, got {value!r}")


def is_of_other_namespace(value: Any) -> bool:
    """Return whether an object's class, or one of its base classes, comes from `lightning.pytorch`."""
    return any(f"{cls.__module__}.".startswith("lightning.pytorch.") for cls in type(value).__mro__)


def names_other_lightning(*modules: str) -> bool:
    """Return whether one of the modules, or the main program, imports from `lightning` and not from
    `pytorch_lightning`.

    Args:
        modules: names of the modules that use this library.
    """
    if "lightning.pytorch" not in sys.modules:
        return False
    for name in (*modules, "__main__"):
        values = list(vars(sys.modules.get(name, sys)).values())
        origins = {v.__name__ if inspect.ismodule(v) else v.__module__ for v in values if _is_named(v)}
        ours = any(f"{origin}.".startswith("pytorch_lightning.") for origin in origins)
        theirs = any(origin == "lightning" or f"{origin}.".startswith("lightning.pytorch.") for origin in origins)
        if theirs and not ours:
            return True
    return False


def _is_named(value: Any) -> bool:
    return inspect.ismodule(value) or inspect.isclass(value)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is among the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")
