"""Factories of samplers and optimizers: their names, what a user has chosen in them, and whether they are sound."""

import functools
import inspect
from typing import Any

from lightning_sgmcmc.checks import check_names, is_of_library, names_of
from lightning_sgmcmc.samplers.sampler import Sampler

SET_BY_MODULE = ("lr", "temperature", "num_data", "num_chains", "seed", "first_chain")
"""Arguments that a `BayesianModule` passes to its sampler."""


def check_sampler(sampler: Any, lr: Any = None) -> None:
    """Raise unless `sampler` is a sampler factory that leaves the module's own arguments to it; one without lr may set
    it."""
    made = sampler.func if isinstance(sampler, functools.partial) else sampler
    if isinstance(sampler, Sampler):
        raise TypeError(
            f"sampler={type(sampler).__name__}(…) has its parameters already, and a module passes its own: pass the "
            f"class, sampler={type(sampler).__name__}, or functools.partial with its other arguments"
        )
    if not callable(made):
        raise TypeError(
            "sampler should be a class or function that returns a sampler for parameters, got a "
            f"{type(made).__name__} object: pass the class, with its arguments in functools.partial"
        )
    if isinstance(made, type) and not issubclass(made, Sampler):
        raise TypeError(
            f"sampler={made.__name__} adds no noise: use one of lightning_sgmcmc.samplers (at temperature 0 they "
            "equal torch's optimizers)"
        )
    if isinstance(sampler, functools.partial) and "weight_decay" in sampler.keywords:
        raise ValueError(
            "weight decay is a Gaussian prior, which the potential energy already contains: omit weight_decay, "
            "and pass prior=GaussianPrior(std=…) with std² = 1/(N·weight_decay)"
        )
    if isinstance(sampler, functools.partial) and isinstance(made, type) and is_of_library(made):
        check_names(made.__name__, sampler.keywords, names_of(made))
    for name, value in _set_twice(sampler, lr).items():
        raise ValueError(
            f"sampler=partial({name_of(sampler)}, {name}={value!r}) has no effect, since the module sets {name}: pass "
            f"{'seed' if name == 'first_chain' else name}=… to the module instead"
        )


def _set_twice(sampler: Any, lr: Any) -> dict[str, Any]:
    """Return the keyword arguments of a partial that the module overrides."""
    chosen = chosen_options(sampler, Sampler)
    return {n: v for n, v in chosen.items() if n in SET_BY_MODULE and (n != "lr" or lr is not None)}


def chosen_options(factory: Any, base: type | None = None) -> dict[str, Any]:
    """Return the keyword arguments that a user has chosen in a partial; {} for other factories."""
    if not isinstance(factory, functools.partial):
        return {}
    if isinstance(factory.func, type):
        return dict(factory.keywords)
    # The command line's partial holds all arguments, those that the user left out by their defaults.
    cls = next((part for part in factory.args if isinstance(part, type)), None)
    signatures = [inspect.signature(kind).parameters for kind in (cls, base) if kind is not None]
    defaults = {n: p.default for parameters in reversed(signatures) for n, p in parameters.items()}
    return {n: v for n, v in factory.keywords.items() if n not in defaults or v != defaults[n]}


def name_of(factory: Any) -> str:
    """Return the name of a class or function, unwrapping a `functools.partial`."""
    if isinstance(factory, functools.partial):
        # The command line's partial calls a parser helper that takes the class as an argument.
        factory = next((part for part in factory.args if isinstance(part, type)), factory.func)
    return getattr(factory, "__name__", type(factory).__name__)
