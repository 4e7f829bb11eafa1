"""Step sizes by name pattern: parameter groups of a sampler."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import Tensor

from lightning_sgmcmc.checks import check_control
from lightning_sgmcmc.priors.base import check_patterns
from lightning_sgmcmc.tensors import Control

EachChain: TypeAlias = "float | Sequence[float]"
"""One number for all chains, or one for each chain of the run."""
StepSize: TypeAlias = "EachChain | Mapping[str, EachChain]"
"""A step size, or step sizes by name pattern."""


def check_step_size(lr: "StepSize | None") -> None:
    """Raise unless `lr` is None, a finite number ≥ 0, one for each chain, or such values by pattern.

    Raises:
        ValueError: for a value out of range, or no pattern.
        TypeError: for a value that is no number, or a pattern that is no text.
    """
    if not isinstance(lr, Mapping):
        check_control("lr", lr)
        return
    if not lr:
        raise ValueError("lr has no patterns: pass one number, or numbers by pattern")
    for pattern, value in lr.items():
        if not isinstance(pattern, str):
            raise TypeError(f"lr has the pattern {pattern!r}: patterns are texts such as '*.bias'")
        if value is None:
            raise TypeError(f"lr must be a number, got None for '{pattern}'")
        check_control(f"lr of '{pattern}'", value)


def values_of(lr: "StepSize | None") -> list[Any]:
    """Return the numbers of all patterns and chains."""
    each = list(lr.values()) if isinstance(lr, Mapping) else [lr]
    return [number for value in each for number in (value if isinstance(value, Sequence) else [value])]


def is_per_chain(lr: "StepSize | None") -> bool:
    """Return whether a step size has a number for each of several chains."""
    each = lr.values() if isinstance(lr, Mapping) else [lr]
    return any(isinstance(value, Sequence) and len(value) > 1 for value in each)


def groups_by_pattern(
    parameters: Mapping[str, Tensor],
    lr: "Mapping[str, EachChain]",
    own_control: "Callable[[str, EachChain], Control]",
) -> list[dict[str, Any]]:
    """Return parameter groups, one for each pattern, with the patterns as their names.

    Args:
        parameters: the sampled parameters by name.
        lr: step sizes by pattern (shell-style); the first one that matches a parameter's name applies.
        own_control: returns a value for this process's chains, by its name and the run's value.

    Raises:
        ValueError: if a parameter has no pattern, or a pattern other than "*" applies to no parameter.
    """
    groups: dict[str, dict[str, Any]] = {}
    for pattern, value in lr.items():
        control = own_control(f"lr of '{pattern}'", value)
        groups[pattern] = {"params": [], "lr": control, "name": pattern}
    for name, parameter in parameters.items():
        first = next((pattern for pattern in lr if fnmatchcase(name, pattern)), None)
        if first is None:
            raise ValueError(f"lr has no pattern for the parameter '{name}': add one, or '*' for the rest")
        groups[first]["params"].append(parameter)
    check_patterns("lr", list(lr), parameters)
    return [group for group in groups.values() if group["params"]]
