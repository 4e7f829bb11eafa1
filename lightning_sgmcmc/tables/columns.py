"""What the columns of inputs and targets are: offered by a datamodule, kept by a store, read by predictions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.namespace import rank_zero_warn
from lightning_sgmcmc.tables.arrays import (
    as_frame,
    as_tensor,
    check_same_rows,
    column_numbers,
    is_categorical,
    is_frame,
    is_table,
)

FEW_ROWS = 10
"""Rows of a table whose categories may all differ; in more they name the rows, and say nothing of others."""


LOOKED_AT = 1000
"""Rows of a tensor that are looked at for the unit of its columns."""


@dataclass(frozen=True)
class InputColumns:
    """The columns of a run's inputs, and how they become what the network receives.

        network's input = (encoded column - mean) / std

    A missing number is the mean, and a further input says 1 where it is missing.

    Attributes:
        names: of a frame's columns, in the network's order; () if the inputs were an array.
        categories: for each column its values, each of which is an input of 0 or 1; () for a column of numbers. The
            value None is a missing one.
        mean, std: of the encoded inputs, flattened; () if they are used as they are.
        shape: of one encoded input.
        targets: names of the columns that a frame may have too: those of the targets, and one that splits the rows.
        missing: places of the encoded numbers that may be missing; their further inputs are the last ones.
    """

    IF_SET: ClassVar = ("missing",)

    names: tuple[Any, ...] = ()
    categories: tuple[tuple[Any, ...], ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()
    targets: tuple[Any, ...] = ()
    missing: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts = (0, int(np.prod(self.shape, dtype=int)))
        if len(self.mean) != len(self.std) or len(self.mean) not in counts:
            raise ValueError("the columns of the inputs have a scaling of another number")
        if len(self.categories) not in (0, len(self.names)):
            raise ValueError("the columns of the inputs have categories of another number")
        if self.missing and (len(self.shape) != 1 or not set(self.missing) <= set(range(self.width))):
            raise ValueError("the columns of the inputs have missing numbers in other places")

    @classmethod
    def of_table(cls, x: Any, targets: Sequence[Any] = ()) -> "InputColumns":
        """Return the columns of a frame or of an array (n, columns), not scaled."""
        if is_table(x):
            frame = as_frame(x)
            values = tuple(_values_in(frame[name]) if is_categorical(frame[name]) else () for name in frame.columns)
            for name, own in zip(frame.columns, values, strict=True):
                if len(own) == len(frame) > FEW_ROWS:
                    raise ValueError(f"x has another category in each row of column {name!r}: leave it out")
            width = sum(len(own) or 1 for own in values)
            found = cls(tuple(map(plain, frame.columns)), values, shape=(width,), targets=tuple(map(plain, targets)))
        else:
            found = cls(shape=tuple(as_tensor("x", x).shape[1:]))
        if len(found.shape) != 1:
            return found
        nan = found.encoded(x).isnan()
        places = tuple((nan.any(0) & ~nan.all(0)).nonzero()[:, 0].tolist())
        return replace(found, shape=(found.width + len(places),), missing=places)

    @property
    def width(self) -> int:
        """The number of encoded inputs without those that say what is missing."""
        return (self.shape[0] if self.shape else 0) - len(self.missing)

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
            ValueError: for a missing or an unknown column, a category that the training data lack, another number of
                columns, or an infinite number.
            TypeError: for values that are no numbers.
        """
        (mean, std), encoded = self.scaling, self.encoded(x, name)
        self.check_finite(encoded, name)
        return self.filled(((encoded - mean) / std).float())

    def check_finite(self, encoded: Tensor, name: str = "x") -> None:
        """Raise ValueError for an infinite number, or one that is missing where the training data have all."""
        bad = ~encoded.isfinite()
        places = list(self.missing)
        if places:
            bad[:, places] = encoded[:, places].isinf()
        if bool(bad.any()) and encoded.dim() == 2:
            where = ", ".join(map(self.called, bad.any(0).nonzero()[:6, 0].tolist()))
            raise ValueError(
                f"{name} has {int(bad.sum())} values that are NaN or infinite in {where}: fill them in, or leave out "
                "their rows"
            )

    def called(self, place: int) -> str:
        """Return what the column of an encoded input is called."""
        ends = np.cumsum([len(values) or 1 for values in self.categories])
        return f"column {self.names[int(np.searchsorted(ends, place, 'right'))]!r}" if self.names else f"column {place}"

    def filled(self, scaled: Tensor) -> Tensor:
        """Return scaled inputs (n, …) with the mean, 0, where a number is missing that may be."""
        places = list(self.missing)
        if places:
            scaled[:, places] = scaled[:, places].nan_to_num(0.0)
        return scaled

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
        if not isinstance(x, Tensor):
            return x
        self._say_if_not_standardised(x)
        return x if x.is_floating_point() else x.float()

    def _say_if_not_standardised(self, x: Tensor) -> None:
        """Warn of a tensor that is like the training data in their units, and far from them as it is."""
        if not self.is_standardised or tuple(x.shape[1:]) != self.shape:
            return
        found = in_units(x, *self.scaling)
        if found is not None:
            rank_zero_warn(
                f"x is a tensor, which counts as standardised, and it is like the training data in the data's units: "
                f"{self.called(found[0])} has {found[1]:.3g} on average. Pass posterior.inputs(x) of inputs in the "
                "data's units, or a data frame."
            )

    def encoded(self, x: Any, name: str = "x") -> Tensor:
        """Return the columns as numbers in the network's order, not scaled, float64 (n, …); missing ones are NaN."""
        numbers = self._numbers(x, name)
        return torch.cat([numbers, numbers[:, list(self.missing)].isnan().double()], 1) if self.missing else numbers

    def _numbers(self, x: Any, name: str) -> Tensor:
        """Return the columns as numbers, without those that say what is missing."""
        if is_table(x) and self.names:
            return self._of_frame(as_frame(x), name)
        if any(self.categories):
            raise ValueError(
                f"{name} has no names of columns, and those of the training data are categorical: pass a data frame "
                f"with the columns {some(self.names)}"
            )
        numbers, own = as_tensor(name, x).double(), (self.width,) if self.missing else self.shape
        if is_frame(x) and own == tuple(numbers.shape[1:]):
            rank_zero_warn(
                f"{name} is a data frame, and the training data had no names of columns: its columns are taken in "
                "their order."
            )
        if tuple(numbers.shape[1:]) != own or numbers.dim() == 0:
            if numbers.dim() == 2 and len(own) == 1:
                raise ValueError(
                    f"{name} has {numbers.shape[1]} columns, and the training data have {own[0]}: pass these"
                )
            shape = ", ".join(map(str, ("n", *own)))
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


def in_units(values: Tensor, mean: Any, std: Any) -> tuple[int, float] | None:
    """Return the largest column of the training data and its size, where a tensor (n, …) is like these before they were
    standardised by a mean and std, and far from standardised numbers; else None. They are the same for each batch."""
    if values.layout is not torch.strided or values.device.type != "cpu" or values.is_complex() or not values.numel():
        return None
    rows = values[:LOOKED_AT].double()
    rows = rows.flatten(1) if rows.dim() > 1 else rows[:, None]
    shift, factor = (torch.as_tensor(part).double().expand(values.shape[1:] or 1).flatten() for part in (mean, std))
    own, other = (part.abs().nanmean(0) for part in (rows, (rows - shift) / factor))
    is_far = float(own.max()) > 10 and float(other.max()) < 3
    spreads = (rows - rows.nanmean(0)).square().nanmean(0).sqrt()
    is_near = len(rows) >= 5 and bool((spreads < 0.01).all() & ((spreads / factor - 1).abs() < 0.9).all())
    if not is_far and not (is_near and float(other.max()) < 3):
        return None
    sizes = torch.maximum(shift.abs(), factor)
    place = int(sizes.argmax())
    return place, float(sizes[place])


def plain(name: Any) -> Any:
    """Return a column's name or a category as plain data, which a manifest keeps."""
    if isinstance(name, np.generic):
        name = name.item()
    if isinstance(name, tuple):
        return tuple(map(plain, name))
    return name if isinstance(name, str | int | float | bool | None) else str(name)


def _values_in(series: Any) -> tuple[Any, ...]:
    """Return the categories that a series has, in their order, and None if some are missing."""
    own = tuple(map(plain, series.cat.remove_unused_categories().cat.categories))
    return (*own, None) if bool(series.isna().any()) else own


def _indicators(name: str, column: Any, series: Any, values: tuple[Any, ...]) -> np.ndarray:
    """Return 0 or 1 for each row and value, shape (n, values)."""
    are_missing = series.isna()
    found = [None if lacks else plain(value) for value, lacks in zip(series.astype(object), are_missing, strict=True)]
    places = {value: place for place, value in enumerate(values)}
    unknown = next((value for value in found if value not in places), None)
    if any(value not in places for value in found):
        what = "a missing category" if unknown is None else f"the category {unknown!r}"
        raise ValueError(
            f"{name} has {what} in column {column!r}, which the training data lack: they have {some(values)}"
        )
    return np.eye(len(values))[[places[value] for value in found]].reshape(-1, len(values))


def some(names: Sequence[Any]) -> str:
    """Return the first names as text."""
    shown = ", ".join(map(repr, names[:6]))
    return f"{shown}, … ({len(names)})" if len(names) > 6 else shown


# -- inputs and targets together --------------------------------------------------------------------------------------


CLOSE = 1e-6
"""Relative difference of two scalings that is rounding."""
FAR = 1e3
"""Standard deviations from 0 beyond which predictions in the data's units are float64: float32 has 7 digits."""
SMALLEST, LARGEST = 1e-35, 1e35
"""Bounds of the targets' standard deviation, within which float32 holds predictions in the data's units."""


@dataclass(frozen=True)
class TargetScaling:
    """Mean and standard deviation by which targets were standardised: one number each, or one for each target.

    Attributes:
        mean, std: of the targets, flattened.
        names: of the targets' columns or channels; () if they are not known.
        shape: of mean and std as they broadcast to one target: (C, 1, 1) for the channels of fields (n, C, H, W); ()
            for one number, and for those of the last axis, (D,).
    """

    IF_SET: ClassVar = ("shape",)

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    names: tuple[Any, ...] = ()
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.shape and len(self.std) != math.prod(self.shape):
            raise ValueError(f"the scaling of the targets has {len(self.std)} numbers for the shape {self.shape}")

    @classmethod
    def of_datamodule(cls, datamodule: Any) -> "TargetScaling | None":
        """Return the scaling of a datamodule with a `target_std`, and a `target_mean` unless it is 0; else None.

        Raises:
            ValueError: if predictions in the data's units would be no numbers of float32.
        """
        std = getattr(datamodule, "target_std", None)
        if std is None:
            return None
        mean = getattr(datamodule, "target_mean", None)
        both = [torch.as_tensor(value, dtype=torch.float64) for value in (0.0 if mean is None else mean, std)]
        if any(value.dim() > 1 and value.numel() > 1 for value in both):
            both = list(torch.broadcast_tensors(*both))
        shape = tuple(both[1].shape) if both[1].dim() > 1 and both[1].numel() > 1 else ()
        means, stds = (tuple(value.reshape(-1).tolist()) for value in both)
        found = cls(means, stds, tuple(map(plain, getattr(datamodule, "target_names", ()))), shape)
        for one, own in found._pairs:
            if not (SMALLEST < own < LARGEST and abs(one) < LARGEST):
                raise ValueError(
                    f"{type(datamodule).__name__} has targets with mean {one:.3g} and standard deviation {own:.3g}, "
                    f"and predictions in float32 need a standard deviation from {SMALLEST:g} to {LARGEST:g}: measure "
                    "the targets in another unit"
                )
        return found

    @property
    def factor(self) -> float | Tensor:
        """The divisor of the targets: a number, or one for each target, float64 of `shape` or (D,)."""
        return self._shaped(self.std)

    @property
    def shift(self) -> float | Tensor:
        """What was subtracted from the targets before: a number, or one for each target, of the shape of `factor`."""
        return self._shaped(self.mean)

    @property
    def is_far(self) -> bool:
        """Whether targets are so many standard deviations from 0 that float32 would round their differences."""
        return any(abs(mean) > FAR * abs(std) for mean, std in self._pairs)

    @property
    def _pairs(self) -> list[tuple[float, float]]:
        """Mean and standard deviation of each target; one number is that of all."""
        count = max(len(self.mean), len(self.std))
        return [*zip(*(own * (count // len(own)) for own in (self.mean, self.std)), strict=True)]

    def _shaped(self, values: tuple[float, ...]) -> float | Tensor:
        return values[0] if len(values) == 1 else torch.tensor(values, dtype=torch.float64).reshape(self.shape or -1)

    @property
    def axis(self) -> int | None:
        """The axis of the targets, counted from the last, along which scalings differ; None if it is not one axis."""
        if len(self.std) == 1:
            return None
        places = [place - len(self.shape) for place, size in enumerate(self.shape) if size > 1] if self.shape else [-1]
        return places[0] if len(places) == 1 else None

    @property
    def labels(self) -> tuple[str, ...]:
        """What several targets or channels with a scaling each are called, by name or number; () of one."""
        if self.axis is None:
            return ()
        return tuple(map(str, self.names if len(self.names) == len(self.std) else range(len(self.std))))

    def received(self, y: Any) -> Any:
        """Return targets as in training: a series or a frame has the data's units, a tensor those of the training.

        Raises:
            ValueError: for an array without names, which could be either.
        """
        if is_table(y):
            values = as_tensor("y", y)
            return ((values.reshape(len(values), math.prod(values.shape[1:])) - self.shift) / self.factor).float()
        if isinstance(y, np.ndarray) and (any(self.mean) or any(value != 1 for value in self.std)):
            raise ValueError(
                "the targets are a NumPy array, and the run's targets were standardised, so their unit is unknown: "
                "pass a pandas series in the data's units, or a tensor of standardised targets"
            )
        is_row = isinstance(y, Tensor) and y.dim() in (1, 2) and {len(self.mean), len(self.std)} <= {1, y[:1].numel()}
        found = in_units(y, self.mean, self.std) if is_row else None
        if found is not None:
            rank_zero_warn(
                "the targets are a tensor, which counts as standardised, and they are like the training data in the "
                f"data's units, {found[1]:.3g} on average: pass a pandas series, or (y - mean)/std by "
                "`posterior.columns.targets.shift` and `factor`."
            )
        return y


@dataclass(frozen=True)
class Columns:
    """What the inputs and targets of a run are; a store keeps it as the fit's datamodule offers it.

    Attributes:
        inputs: the inputs' columns and scaling; None if they are not known.
        targets: the targets' scaling; None if they were not scaled, or if it is not known.
        classes: the classes' names, in the order of their labels; () if they have none.
        task: what the targets are: "regression", "classes", "counts" or "censored"; "" if it is not known.
    """

    IF_SET: ClassVar = ("inputs", "targets", "classes", "task")

    inputs: InputColumns | None = None
    targets: TargetScaling | None = None
    classes: tuple[Any, ...] = ()
    task: str = ""

    @classmethod
    def of_datamodule(cls, datamodule: Any) -> "Columns":
        """Return what a datamodule says by its `input_columns`, `target_mean`, `target_std` and `classes`."""
        inputs, classes = getattr(datamodule, "input_columns", None), getattr(datamodule, "classes", ())
        return cls(
            inputs if isinstance(inputs, InputColumns) else None,
            TargetScaling.of_datamodule(datamodule),
            tuple(map(plain, classes)) if isinstance(classes, list | tuple) else (),
            str(getattr(datamodule, "task", None) or ""),
        )

    @property
    def labels(self) -> tuple[Any, ...]:
        """The names of the classes, or of several targets; () if there are none."""
        return self.classes or (() if self.targets is None else self.targets.labels)

    def difference(self, other: "Columns") -> str | None:
        """Return in which way another run's or datamodule's data have other columns or units; None if they may agree.

        What one of the two does not say is not compared.
        """
        if self.inputs is not None and other.inputs is not None:
            ours, theirs = self.inputs, other.inputs
            if ours.names and theirs.names and ours.names != theirs.names:
                return f"columns {some(theirs.names)}, not {some(ours.names)}"
            if any(ours.categories) and ours.categories != theirs.categories:
                return "other categories"
            if ours.missing != theirs.missing:
                return "missing numbers in other columns"
            if ours.shape != theirs.shape:
                return f"inputs of shape {theirs.shape}, not {ours.shape}"
            if not (
                _close(ours.scaling[0], theirs.scaling[0], ours.scaling[1])
                and _close(*(o.scaling[1] for o in (ours, theirs)))
            ):
                return "inputs of another scaling"
        if self.classes and other.classes and self.classes != other.classes:
            return f"classes {some(other.classes)}, not {some(self.classes)}"
        are_known = (
            (self.targets is not None or self.inputs is not None),
            (other.targets is not None or other.inputs is not None),
        )
        ours_y, theirs_y = self.targets or TargetScaling(), other.targets or TargetScaling()
        if all(are_known) and not (
            _close(ours_y.factor, theirs_y.factor) and _close(ours_y.shift, theirs_y.shift, ours_y.factor)
        ):
            return "targets of another scaling"
        return None

    def check(self, datamodule: Any, targets: bool = True) -> None:
        """Raise ValueError if a datamodule's batches are in other units, or of other columns, than these.

        Args:
            datamodule: it is set up; None for loaders, whose batches are as in the fit.
            targets: whether its targets count.
        """
        theirs = self if datamodule is None else Columns.of_datamodule(datamodule)
        found = self.difference(theirs if targets else replace(theirs, targets=self.targets))
        if found is not None:
            raise ValueError(
                f"{type(datamodule).__name__} has other data than the samples' fit ({found}): pass "
                "TableDataModule(…, like=posterior), which takes columns and units of the fit, or a loader of data as "
                "in the fit"
            )

    def received(self, batch: Any) -> Any:
        """Return a batch as in training, (inputs, target): its frames are in the data's units, its tensors are not.

        Raises:
            ValueError: for an array without names whose unit is not known, or rows in two orders.
        """
        if isinstance(batch, Mapping) and self.inputs is not None:
            received = self.inputs.received
            return {name: value if isinstance(value, Tensor) else received(value) for name, value in batch.items()}
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            return batch
        x, y = batch
        check_same_rows(x, y)
        parts = (
            self.inputs.received(x) if self.inputs is not None else x,
            self.targets.received(y) if self.targets is not None else self.as_labels(y),
        )
        kind: Any = type(batch)
        return kind(*parts) if hasattr(batch, "_fields") else parts  # a module may take it apart by name

    def as_labels(self, y: Any) -> Any:
        """Return a series as labels (n,): the places of names among those of the fit, or its numbers; else as given.

        Raises:
            ValueError: for a name that the fit's data lack, or for an array where classes have numbers as names.
        """
        are_numbers = are_named_by_numbers(self.classes)
        if are_numbers and isinstance(y, np.ndarray | list):
            raise ValueError(
                f"y is a {type(y).__name__}, and the classes have the names {some(self.classes)}, so its numbers may "
                "be names or places: pass a pandas series of names, or a tensor of places, which count from 0"
            )
        if not is_table(y) or is_frame(y):
            return y
        if not are_numbers and (y.dtype.kind in "biuf" or not any(isinstance(name, str) for name in self.classes)):
            return as_tensor("y", y.to_numpy())
        places = {name: place for place, name in enumerate(self.classes)}
        labels = list(map(plain, y))
        unknown = [label for label in labels if label not in places]
        if unknown:
            raise ValueError(f"y has the class {unknown[0]!r}, which the fit's data lack: {some(self.classes)}")
        return torch.tensor([places[label] for label in labels])


def are_named_by_numbers(classes: Sequence[Any]) -> bool:
    """Return whether classes have numbers as names, other than their places, as categories of pandas may be."""
    return tuple(classes) != tuple(range(len(classes))) and not any(isinstance(name, str) for name in classes)


def check_broadcasts(name: str, scale: float | Sequence[float] | Tensor, target: Tensor) -> None:
    """Raise ValueError unless numbers are one for all targets (n, …), or broadcast to one of them."""
    shape, wanted = tuple(torch.as_tensor(scale).shape), tuple(target.shape[1:])
    pairs = list(zip(reversed(shape), reversed(wanted), strict=False))
    fits = len(shape) <= len(wanted) and all(own in (1, size) for own, size in pairs)
    if math.prod(shape) == 1 or (fits and not (len(shape) == 1 and len(wanted) >= 3)):
        return
    remedy = f", or {(*shape, *(1,) * (len(wanted) - 1))} for channels" if len(shape) == 1 and len(wanted) >= 3 else ""
    raise ValueError(
        f"{name} has shape {shape}, and a target has shape {wanted}: pass one number, or numbers "
        f"that broadcast to one target{remedy}"
    )


def _close(ours: float | Tensor, theirs: float | Tensor, unit: float | Tensor = 1.0) -> bool:
    a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (ours, theirs))
    if a.numel() > 1 and b.numel() > 1 and a.shape != b.shape:
        return False
    a, b = torch.broadcast_tensors(a, b)
    allowed = CLOSE * torch.maximum(a.abs(), torch.as_tensor(unit, dtype=torch.float64).abs())
    return bool(((a - b).abs() <= allowed).all())
