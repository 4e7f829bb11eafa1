"""The columns of a run's inputs: names, categories, and the scaling to what the network receives."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sgmcmc.tables.arrays import as_frame, as_tensor, column_numbers, is_categorical, is_frame, is_table


@dataclass(frozen=True)
class InputColumns:
    """The columns of a run's inputs, and how they become what the network receives.

        network's input = (encoded column - mean) / std

    Attributes:
        names: of a frame's columns, in the network's order; () if the inputs were an array.
        categories: for each column its values, each of which is an input of 0 or 1; () for a column of numbers.
        mean, std: of the encoded inputs, flattened; () if they are used as they are.
        shape: of one encoded input.
        targets: names of the targets' columns, which a frame may have too.
    """

    names: tuple[Any, ...] = ()
    categories: tuple[tuple[Any, ...], ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()
    targets: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        counts = (0, int(np.prod(self.shape, dtype=int)))
        if len(self.mean) != len(self.std) or len(self.mean) not in counts:
            raise ValueError("the columns of the inputs have a scaling of another number")
        if len(self.categories) not in (0, len(self.names)):
            raise ValueError("the columns of the inputs have categories of another number")

    @classmethod
    def of_table(cls, x: Any, targets: Sequence[Any] = ()) -> "InputColumns":
        """Return the columns of a frame or of an array (n, columns), not scaled."""
        if not is_table(x):
            return cls(shape=tuple(as_tensor("x", x).shape[1:]))
        frame = as_frame(x)
        values = [_values_in(frame[name]) if is_categorical(frame[name]) else () for name in frame.columns]
        width = sum(len(own) or 1 for own in values)
        return cls(tuple(map(plain, frame.columns)), tuple(values), shape=(width,), targets=tuple(map(plain, targets)))

    def scaled_by(self, mean: Tensor, std: Tensor) -> "InputColumns":
        """Return these columns with a scaling, tensors that broadcast to one input."""
        parts = (part.detach().cpu().double().expand(self.shape).reshape(-1).tolist() for part in (mean, std))
        return replace(self, **dict(zip(("mean", "std"), map(tuple, parts), strict=True)))

    @property
    def scaling(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, float64, of the shape of one input; (0, 1) if inputs are used as they are."""
        if not self.mean:
            return torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
        mean, std = (torch.tensor(values, dtype=torch.float64).reshape(self.shape) for values in (self.mean, self.std))
        return mean, std

    @property
    def is_standardised(self) -> bool:
        """Whether the network receives other numbers than the data have."""
        return any(self.mean) or any(value != 1 for value in self.std)

    def inputs(self, x: Any, name: str = "x") -> Tensor:
        """Return inputs in the data's units as the network receives them, float32.

        Args:
            x: a frame, whose columns are taken by their names, or an array, a list or a tensor of the training data's
                columns in their order.
            name: the argument, for messages.

        Raises:
            ValueError: for a missing or an unknown column, a category that the training data lack, or another number
                of columns.
            TypeError: for values that are no numbers.
        """
        mean, std = self.scaling
        return ((self.encoded(x, name) - mean) / std).float()

    def received(self, x: Any) -> Any:
        """Return what the network receives for inputs of `predict`: a frame has the data's units, a tensor has its own.

        Raises:
            ValueError: for an array without names if the run's inputs were standardised or encoded, since it could be
                either; as `inputs` for a frame.
        """
        if is_table(x):
            return self.inputs(x)
        if isinstance(x, np.ndarray) and (self.is_standardised or any(self.categories)):
            known = f" with the columns {some(self.names)}" if self.names else ""
            raise ValueError(
                "x is a NumPy array, and the run's inputs were standardised, so its unit is unknown: pass "
                f"posterior.inputs(x) of inputs in the data's units, a data frame{known}, or torch.as_tensor(x) of "
                "standardised inputs"
            )
        if isinstance(x, np.ndarray):
            return self.inputs(x)
        return x.float() if isinstance(x, Tensor) and not x.is_floating_point() else x

    def encoded(self, x: Any, name: str = "x") -> Tensor:
        """Return the columns as numbers in the network's order, not scaled, float64 (n, …)."""
        if is_table(x) and self.names:
            return self._of_frame(as_frame(x), name)
        if any(self.categories):
            raise ValueError(
                f"{name} has no names of columns, and those of the training data are categorical: pass a data frame "
                f"with the columns {some(self.names)}"
            )
        numbers = as_tensor(name, x).double()
        if is_frame(x) and self.shape == tuple(numbers.shape[1:]):
            rank_zero_warn(
                f"{name} is a data frame, and the training data had no names of columns: its columns are taken in "
                "their order."
            )
        if tuple(numbers.shape[1:]) != self.shape or numbers.dim() == 0:
            if numbers.dim() == 2 and len(self.shape) == 1:
                raise ValueError(
                    f"{name} has {numbers.shape[1]} columns, and the training data have {self.shape[0]}: pass these"
                )
            shape = ", ".join(map(str, ("n", *self.shape)))
            raise ValueError(f"{name} should have shape ({shape}), got {tuple(numbers.shape)}")
        return numbers

    def _of_frame(self, frame: Any, name: str) -> Tensor:
        places = {plain(column): column for column in frame.columns}
        missing = [column for column in self.names if column not in places]
        if missing:
            raise ValueError(f"{name} has no column {missing[0]!r}, which the training data have: add it")
        unknown = [column for column in places if column not in self.names and column not in self.targets]
        if unknown:
            raise ValueError(f"{name} has the column {unknown[0]!r}, which the training data lack: drop it")
        parts = []
        for column, values in zip(self.names, self.categories or ((),) * len(self.names), strict=True):
            series = frame[places[column]]
            parts.append(_indicators(name, column, series, values) if values else column_numbers(name, column, series))
        return torch.as_tensor(np.column_stack(parts)).double()


def plain(name: Any) -> Any:
    """Return a column's name or a category as plain data, which a manifest keeps."""
    if isinstance(name, np.generic):
        name = name.item()
    if isinstance(name, tuple):
        return tuple(map(plain, name))
    return name if isinstance(name, str | int | float | bool | None) else str(name)


def _values_in(series: Any) -> tuple[Any, ...]:
    """Return the categories that a series has, in their order; with a missing one nothing is known of its row.

    Raises:
        ValueError: if one is missing.
    """
    missing = int(series.isna().sum())
    if missing:
        raise ValueError(
            f"x has {missing} rows without a category in column {series.name!r}: fill them in "
            "(x[…].cat.add_categories('missing').fillna('missing')), or leave them out"
        )
    return tuple(map(plain, series.cat.remove_unused_categories().cat.categories))


def _indicators(name: str, column: Any, series: Any, values: tuple[Any, ...]) -> np.ndarray:
    """Return 0 or 1 for each row and value, shape (n, values)."""
    found = [plain(value) for value in series.astype(object)]
    places = {value: place for place, value in enumerate(values)}
    unknown = next((value for value in found if value not in places), None)
    if any(value not in places for value in found):
        raise ValueError(
            f"{name} has the category {unknown!r} in column {column!r}, which the training data lack: they have "
            f"{some(values)}"
        )
    return np.eye(len(values))[[places[value] for value in found]].reshape(-1, len(values))


def some(names: Sequence[Any]) -> str:
    """Return the first names as text."""
    shown = ", ".join(map(repr, names[:6]))
    return f"{shown}, … ({len(names)})" if len(names) > 6 else shown
