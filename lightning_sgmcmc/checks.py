"""Checks of what a `BayesianModule` is made of."""

import functools
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
