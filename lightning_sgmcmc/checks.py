"""Checks of what a `BayesianModule` is made of."""

import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any

from lightning_sgmcmc.samplers import Sampler


def check_part(name: str, value: Any, kind: type) -> None:
    """Refuse a class where an object belongs, and objects of another kind."""
    if value is None or isinstance(value, kind):
        return
    if isinstance(value, type):
        raise TypeError(f"{name}={value.__name__} is a class: pass an object of it, {name}={value.__name__}(…)")
    raise TypeError(f"{name} should be a {kind.__name__}, got a {type(value).__name__}")


def check_sampler(sampler: Any) -> None:
    """Refuse what cannot make a sampler, and a weight decay beside the prior."""
    made = sampler.func if isinstance(sampler, functools.partial) else sampler
    if not callable(made):
        raise TypeError(
            "sampler should be a class or function that makes a sampler from parameters, got a "
            f"{type(made).__name__} object: pass the class, and its arguments by functools.partial"
        )
    if isinstance(made, type) and not issubclass(made, Sampler):
        raise TypeError(
            f"sampler={made.__name__} adds no noise: take one of lightning_sgmcmc.samplers (at temperature 0 they "
            "are torch's optimizers)"
        )
    if isinstance(sampler, functools.partial) and "weight_decay" in sampler.keywords:
        raise ValueError(
            "weight decay is the Gaussian prior, and that is in the potential energy already: leave weight_decay "
            "out, and give prior=GaussianPrior(std=…) with std² = 1/(N·weight_decay)"
        )


def check_number(name: str, value: Any) -> None:
    """Refuse what is no finite number ≥ 0; None passes."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    if not (float(value) >= 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number and not negative, got {value}")


def check_positive(name: str, value: Any) -> None:
    """Refuse what is no finite number > 0."""
    if value is None:
        raise TypeError(f"{name} must be a number, got None")
    check_number(name, value)
    if value == 0:
        raise ValueError(f"{name} must be positive, got {value}")


def check_control(name: str, value: Any) -> None:
    """Refuse what is neither a finite number ≥ 0 nor a sequence of such, one for each chain; None passes."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        check_number(name, value)
        return
    if len(value) == 0:
        raise ValueError(f"{name} has no values: give one for each chain")
    for one in value:
        check_number(name, one)


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse what is no whole number ≥ `least`; None passes."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r} of type {type(value).__name__}")
    if int(value) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def is_of_other_namespace(value: Any) -> bool:
    """Return whether an object's class, or one that it derives from, is of `lightning.pytorch`."""
    return any(f"{cls.__module__}.".startswith("lightning.pytorch.") for cls in type(value).__mro__)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not among the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


def name_of(factory: Any) -> str:
    """Return the name of a class or function, also inside a `functools.partial`."""
    if isinstance(factory, functools.partial):
        # The command line's partial calls a helper of its parser with the class as an argument.
        factory = next((part for part in factory.args if isinstance(part, type)), factory.func)
    return getattr(factory, "__name__", type(factory).__name__)
