"""Checks of arguments: each raises with argument, value and remedy."""

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


def check_pairs(name: str, value: Any, what: str) -> None:
    """Raise unless `value` is None or a sequence of pairs, a number ≥ 0 and one > 0, called as in "[step, std]"."""
    pairs = () if value is None else value
    is_list = isinstance(pairs, Sequence) and not isinstance(pairs, str)
    if not is_list or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
        raise TypeError(f"{name} must be a list of {what} pairs, as in an earlier run's auto.yaml, got {value!r}")
    for first, second in pairs:
        check_within(name, first, "[0, inf)")
        check_within(name, second, "(0, inf)")


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


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is among the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


_SENSES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("learning_rate", "step_size", "stepsize", "eta"): ("lr",),
    ("burn_in", "burnin"): ("burn_in_steps", "warm_up", "exploration", "warm_up_steps"),
    ("warmup",): ("warm_up", "burn_in_steps", "exploration", "warm_up_steps"),
    ("thinning", "thin"): ("every_n_steps", "every_n_samples"),
    ("weight_decay",): ("prior",),
    ("prior_std",): ("prior", "std"),
    ("scale", "sigma"): ("std",),
    ("chains",): ("num_chains",),
    ("optimizer",): ("sampler",),
    ("model", "network", "module"): ("net",),
    ("loss", "loss_fn", "criterion"): ("likelihood",),
    ("momentum",): ("friction",),
    ("dataset_size", "train_size"): ("num_data",),
    ("samples", "num_samples"): ("num_draws", "max_samples", "samples_per_cycle"),
    ("cycles",): ("num_cycles",),
    ("folder", "path", "save_dir"): ("dirpath",),
}
OTHER_WORDS = {word: names for words, names in _SENSES.items() for word in words}
"""What other libraries call an argument, and its names here; a class has one of them."""


def similar(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean X?', or '' if nothing known is similar in letters or in sense."""
    names = list(known)
    in_sense = [word for word in OTHER_WORDS.get(name, ()) if word in names]
    close = in_sense or difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_names(owner: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError if an argument's name is unknown."""
    for name in given:
        if name not in known:
            raise TypeError(f"{owner} has no argument {name!r}{similar(name, known)}")


def is_of_library(cls: type) -> bool:
    """Return whether a class is this library's, and not a user's."""
    return f"{cls.__module__}.".startswith("lightning_sgmcmc.")


def names_of(cls: type) -> list[str]:
    """Return the names of a library class's arguments, with those that it passes on to its base classes."""
    inits = [vars(base)["__init__"] for base in cls.__mro__ if is_of_library(base) and "__init__" in vars(base)]
    return [p.name for init in inits for p in [*inspect.signature(init).parameters.values()][1:] if not _is_open(p)]


def _is_open(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def names_arguments(cls: type) -> None:
    """Let a constructor of the library say what a mistyped argument could have meant; for `__init_subclass__`."""
    init: Callable[..., None] | None = vars(cls).get("__init__")
    if init is None or not is_of_library(cls):
        return
    signature = inspect.signature(init)
    names = [p.name for p in signature.parameters.values() if not _is_open(p)][1:]
    passed_on = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    if passed_on == ["shared"]:
        names = names_of(cls)
    elif passed_on:
        return  # the constructor that gets them says it

    @functools.wraps(init)
    def checking_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not kwargs.keys() <= set(names):
            owner = next(base for base in type(self).__mro__ if is_of_library(base))
            refused: Mapping[str, str] = getattr(owner, "refused_arguments", {})
            if found := [name for name in kwargs if name in refused]:
                raise TypeError(f"{owner.__name__}: {refused[found[0]]}")
            check_names(owner.__name__, kwargs.keys() - set(names), names_of(owner))
        init(self, *args, **kwargs)

    vars(checking_init)["__signature__"] = signature  # Lightning reads it without following wrappers
    type.__setattr__(cls, "__init__", checking_init)
