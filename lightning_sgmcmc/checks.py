"""Checks of arguments: each raises with argument, value and remedy."""

import math
import numbers
from collections.abc import Sequence
from typing import Any


def check_number(name: str, value: Any) -> None:
    """Raise unless `value` is None or a finite number ≥ 0."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    if not (float(value) >= 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number and not negative, got {value}")


def check_positive(name: str, value: Any) -> None:
    """Raise unless `value` is a finite number > 0."""
    if value is None:
        raise TypeError(f"{name} must be a number, got None")
    check_number(name, value)
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


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise unless `value` is None or a whole number ≥ `least`."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r} of type {type(value).__name__}")
    if int(value) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def is_of_other_namespace(value: Any) -> bool:
    """Return whether an object's class, or one of its base classes, comes from `lightning.pytorch`."""
    return any(f"{cls.__module__}.".startswith("lightning.pytorch.") for cls in type(value).__mro__)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is among the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")
