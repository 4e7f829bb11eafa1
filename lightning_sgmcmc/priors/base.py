"""The base classes of priors: log densities over parameters, and scales by name pattern."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from lightning_sgmcmc.checks import names_arguments
from lightning_sgmcmc.tensors import exact

Scale: TypeAlias = "float | Mapping[str, float]"

RowDensity: TypeAlias = Callable[[Tensor, Mapping[str, Tensor]], Tensor]

STATE = "prior_state"
"""Under this name a module holds the tensors that its prior has for each chain (see `priors.state`)."""


class Prior(ABC):
    """A prior log p(θ) over all trainable parameters of one chain; subclass it for your own."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names_arguments(cls)

    @abstractmethod
    def log_prob(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return log p(θ), a tensor of shape ().

        Args:
            parameters: the trainable parameters of one chain by name, and after them the tensors of `initial_state`
                with their present values, by names that begin with "prior_state.".
        """

    def log_prob_of_chains(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return log p(θ) of several chains at once, a tensor of shape (C,).

        Args:
            parameters: as for `log_prob`, each with a leading axis of size C.
        """
        result: Tensor = torch.vmap(self.log_prob)(dict(parameters))
        return result

    def of_rows(self, parameters: Mapping[str, Tensor]) -> "RowDensity | None":
        """Return log p(θ) as a function of the chains' parameters as rows of one tensor, or None.

        It is faster than `log_prob_of_chains` on a GPU and in a compiled function, and equal up to rounding. The
        function takes the rows, shape (C, P), and the tensors of `initial_state` as `log_prob_of_chains` does, and
        returns log p(θ), shape (C,).

        Args:
            parameters: as for `log_prob_of_chains`, in the order of the columns.
        """
        return None

    def initial_state(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that the prior has for each chain, by name, at the chain's start; a fixed prior has none.

        Args:
            parameters: the trainable parameters of one chain by name.
        """
        return {}

    def check_names(self, names: Collection[str]) -> None:  # noqa: B027
        """Check the names of the parameters before a fit.

        Raises:
            ValueError: if the prior does not suit a network with these parameters.
        """


class ScalePrior(Prior):
    """Base of the independent priors with one scale for all parameters, or one for each name pattern.

    Args:
        scale: one positive number, or numbers by name pattern (`{"*.bias": 10.0, "net.0.*": 0.5, "*": 1.0}`,
            shell-style). The first pattern that matches a parameter's name applies. Every pattern except "*" has
            to apply to a parameter.
        name: the constructor's name for `scale`, for messages.

    Raises:
        ValueError: if a scale is not a positive number; when a fit begins, if a pattern applies to no parameter.
        TypeError: if a scale is not a number, or a pattern not a text.
    """

    words: ClassVar[tuple[str, ...]] = ()
    """Texts that a scale may be instead of a number."""

    def __init__(self, scale: Any, name: str) -> None:
        scales = scale if isinstance(scale, Mapping) else {"*": scale}
        if not scales:
            raise ValueError(f"the prior's {name} has no patterns: pass one number, or numbers by pattern")
        for pattern, value in scales.items():
            if not isinstance(pattern, str):
                raise TypeError(f"the prior's {name} has the pattern {pattern!r}: patterns are texts such as '*.bias'")
            if not (isinstance(value, str) and value in self.words):
                _check_scale(f"the prior's {name}", value, pattern, self.words)
        self._scales = {pattern: value if isinstance(value, str) else float(value) for pattern, value in scales.items()}
        self._scale_name = name

    def scale_of(self, parameter_name: str, shape: Sequence[int] | None = None) -> float:
        """Return the scale of the first pattern that matches a parameter's name.

        Args:
            parameter_name: its name in the module.
            shape: its shape in one chain, for scales that depend on it.

        Raises:
            ValueError: if none does.
        """
        for pattern, value in self._scales.items():
            if fnmatchcase(parameter_name, pattern):
                return value if isinstance(value, float) else self._scale_by(value, parameter_name, shape)
        raise ValueError(
            f"the prior's {self._scale_name} has no pattern for the parameter '{parameter_name}': add one, or '*' for "
            "the rest"
        )

    def _scale_by(self, word: str, parameter_name: str, shape: Sequence[int] | None) -> float:
        """Return the scale that one of `words` stands for."""
        raise NotImplementedError

    def scales_of_columns(self, parameters: Mapping[str, Tensor]) -> "float | Tensor":
        """Return the scale of each column of the chains' rows, shape (P,), or one number if all are equal.

        Args:
            parameters: as for `log_prob_of_chains`, in the order of the columns.
        """
        own = own_parameters(parameters)
        scales = [self.scale_of(name, value.shape[1:]) for name, value in own.items()]
        return columns_of(scales, list(own.values()))

    def check_names(self, names: Collection[str]) -> None:
        check_patterns(f"the prior's {self._scale_name}", list(self._scales), names)

    def __repr__(self) -> str:
        value: Any = self._scales["*"] if list(self._scales) == ["*"] else self._scales
        return f"{type(self).__name__}({self._scale_name}={value})"


def own_parameters(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters without the tensors of the prior."""
    return {name: value for name, value in parameters.items() if not name.startswith(STATE)}


def columns_of(values: Sequence[float], tensors: Sequence[Tensor]) -> "float | Tensor":
    """Return a value of each tensor (C, …) as one for each column of its rows, shape (P,), or one if all are equal."""
    if len(set(values)) == 1:
        return values[0]
    counts = torch.tensor([tensor[0].numel() for tensor in tensors])
    return torch.tensor(values, dtype=torch.float64).repeat_interleave(counts).to(tensors[0])


def log_of(values: "float | Tensor", count: int) -> float:
    """Return Σ log(value) over columns, from what `columns_of` returned, for a number of columns."""
    return float(exact(values).log().sum()) if isinstance(values, Tensor) else count * math.log(values)


def check_patterns(name: str, patterns: Sequence[str], names: Collection[str]) -> None:
    """Raise ValueError unless every pattern except "*" is the first that matches some parameter."""
    applied = {next((p for p in patterns if fnmatchcase(parameter, p)), None) for parameter in names}
    for pattern in patterns:
        if pattern in applied or pattern == "*":
            continue
        shadowed = next((parameter for parameter in names if fnmatchcase(parameter, pattern)), None)
        if shadowed is None:
            raise ValueError(
                f"{name} has the pattern '{pattern}', which no trainable parameter matches "
                f"({', '.join(list(names)[:4])}, …): correct or remove it"
            )
        first = next(p for p in patterns if fnmatchcase(shadowed, p))
        raise ValueError(
            f"{name} never uses the pattern '{pattern}', because '{first}' comes before it "
            f"and also matches '{shadowed}': put '{pattern}' first"
        )


def _check_scale(name: str, value: Any, pattern: str, words: Sequence[str]) -> None:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TypeError(f"{name} must be one number for each pattern, got {value.numel()} numbers for '{pattern}'")
    number = value.item() if isinstance(value, Tensor) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        kinds = " or ".join(["a number", *map(repr, words)])
        raise TypeError(f"{name} must be {kinds}, got {value!r} of type {type(value).__name__} for '{pattern}'")
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be a positive number, got {value} for '{pattern}'")
