"""What the targets of a table are: numbers, classes or counts, as the user says, or as their values suggest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_sgmcmc.tables.arrays import as_frame, as_tensor, is_categorical, is_table
from lightning_sgmcmc.tables.inputs import plain, some

Task = Literal["regression", "classes", "counts"]
TASKS = ("regression", "classes", "counts")
FEW_VALUES = 20
"""Whole numbers of at most so many values, as floats, could be classes."""


@dataclass(frozen=True)
class Targets:
    """The targets of a table.

    Attributes:
        values: float64 (n, D) of numbers and counts, int64 (n,) of classes.
        task: what they are.
        names: of their columns, if they have any.
        classes: the classes' names in the order of their labels, if the values were names.
        is_said: whether the user has said the task.
    """

    values: Tensor
    task: Task
    names: tuple[Any, ...] = ()
    classes: tuple[Any, ...] = ()
    is_said: bool = True

    @property
    def num_classes(self) -> int | None:
        """K, None of numbers and counts."""
        if self.task != "classes":
            return None
        return len(self.classes) or int(self.values.max()) + 1


def read_targets(y: Any, task: str | None, classes: Sequence[Any] = ()) -> Targets:
    """Return the targets of a table.

    Args:
        y: numbers, (n,) or (n, D), or of classes also their names, (n,).
        task: one of `TASKS`, or None to guess it.
        classes: the names of an earlier fit's classes.

    Raises:
        ValueError: for another task, values that it does not have, or None where the values suggest several.
        TypeError: for values that are no numbers.
    """
    if task is not None and task not in TASKS:
        raise ValueError(f"task must be 'regression', 'classes' or 'counts', got {task!r}")
    names = tuple(map(plain, as_frame(y).columns)) if is_table(y) else ()
    names = () if names == (0,) and not hasattr(y, "columns") else names  # a series without a name
    if task == "classes":
        named = _named_labels(y, classes)
        if named is not None:
            return Targets(named[0], "classes", names, named[1])
    values = as_tensor("y", _numeric(y))
    if values.dim() == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.dim() == 0 or len(values) == 0:
        raise ValueError(f"y should have shape (n,) or (n, targets), got {tuple(values.shape)}")
    if values.is_floating_point():
        _check_observed(values, task)
    if task is None:
        return _guessed(values, names)
    if values.dim() > 2:
        raise ValueError(f"y should have shape (n,) or (n, targets), got {tuple(values.shape)}")
    if task == "regression":
        return Targets(_columns(values), "regression", names)
    if task == "counts":
        _check_whole(values, "counts")
        return Targets(_columns(values), "counts", names)
    return replace(_labels(values), names=names)


def _guessed(values: Tensor, names: tuple[Any, ...]) -> Targets:
    """Return the targets as their type and values suggest, and say so.

    Raises:
        ValueError: if that is not plausible.
    """
    known = values[~values.isnan()] if values.is_floating_point() else values
    count = len(known.unique())
    whole = not values.is_floating_point() or bool((known == known.round()).all())
    remedy = "say which they are by task='classes', 'regression' or 'counts'"
    if values.dim() > 2:
        raise ValueError(f"y should have shape (n,) or (n, targets), got {tuple(values.shape)}")
    if values.dim() != 1 and not values.is_floating_point():
        raise ValueError(
            f"y has shape {tuple(values.shape)} and whole numbers, which could be several classes or numbers of each "
            f"row: {remedy}"
        )
    if values.is_floating_point():
        if whole and count <= min(FEW_VALUES, len(values) // 2):
            raise ValueError(
                f"y has {count} different whole numbers in {len(values)} rows, as floats, which could be classes, "
                f"counts or numbers: {remedy}"
            )
        if whole:
            rank_zero_info("TableDataModule takes the whole numbers of y as those of a regression (task='regression').")
        return Targets(_columns(values), "regression", names, is_said=False)
    found = _labels(values, remedy)
    fewest = int(values.long().bincount()[values.long().unique()].min())
    if fewest < 2 or count > len(values) // 3:
        raise ValueError(
            f"y has {count} different whole numbers in {len(values)} rows, of which the rarest has {fewest}, so they "
            f"are hardly classes: {remedy}"
        )
    rank_zero_info(
        f"TableDataModule takes the whole numbers of y as {found.num_classes} classes (task='classes'); pass "
        "task='regression' or 'counts' if they are numbers."
    )
    return replace(found, names=names, is_said=False)


def _labels(values: Tensor, remedy: str = "pass pandas.factorize(y)[0]") -> Targets:
    """Return labels as classes.

    Raises:
        ValueError: if they are none.
    """
    if values.dim() != 1:
        raise ValueError(f"y of classes should have shape (n,) or (n, 1), got {tuple(values.shape)}")
    _check_whole(values, "classes")
    labels = values.long()
    count, last = len(labels.unique()), int(labels.max())
    if last + 1 > 2 * count and last > 1:
        raise ValueError(
            f"y has {count} different labels up to {last}, so {last + 1 - count} of {last + 1:,} classes would have no "
            f"row: {remedy}"
        )
    return Targets(labels, "classes")


def _named_labels(y: Any, classes: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]] | None:
    """Return labels of named classes and their names, or None if y has numbers.

    Names that are categories of pandas keep their order, others are sorted.

    Raises:
        ValueError: for a missing name, or one that an earlier fit's classes lack.
    """
    series = y if is_table(y) and not hasattr(y, "columns") else None
    found = np.asarray(y, dtype=object if series is not None else None).reshape(-1)
    are_categories = series is not None and is_categorical(series)
    if not are_categories and not (found.dtype.kind in "OUS" and any(isinstance(v, str) for v in found[:1])):
        return None
    values = [plain(value) for value in found]
    missing = sum(value is None or value != value for value in values)
    if missing:
        raise ValueError(f"y has {missing} rows without a class: leave out their rows")
    own = None
    if series is not None and are_categories:
        own = tuple(map(plain, series.cat.remove_unused_categories().cat.categories))
    names = tuple(classes) or (sorted(set(values)) if own is None else own)
    unknown = [value for value in dict.fromkeys(values) if value not in names]
    if unknown:
        raise ValueError(f"y has the class {unknown[0]!r}, which the fit's data lack: they have {some(tuple(names))}")
    places = {name: place for place, name in enumerate(names)}
    return torch.tensor([places[value] for value in values]), tuple(names)


def _numeric(y: Any) -> Any:
    """Return a series of whole numbers without its nullable type, whose dtype says whether they are whole."""
    if is_table(y) and not hasattr(y, "columns") and getattr(y.dtype, "kind", "O") in "biu" and not y.isna().any():
        return y.to_numpy(dtype=f"{y.dtype.kind}{getattr(y.dtype, 'itemsize', 8)}")
    if is_table(y) and hasattr(y, "columns") and all(getattr(kind, "kind", "O") in "biu" for kind in y.dtypes):
        return y.to_numpy(dtype=np.int64) if not y.isna().to_numpy().any() else y
    return y


def _columns(values: Tensor) -> Tensor:
    return (values if values.dim() == 2 else values[:, None]).double()


def _check_whole(values: Tensor, task: str) -> None:
    """Raise unless values are whole numbers from 0.

    Raises:
        ValueError: naming the first that is not.
    """
    numbers = values.double().reshape(-1)
    numbers = numbers[~numbers.isnan()]
    odd = numbers[numbers != numbers.round()]
    if len(odd):
        raise ValueError(
            f"y has {float(odd[0]):g}, which is no whole number, so it is not of {task}: pass another task"
        )
    if len(numbers) and int(numbers.min()) < 0:
        what = "label" if task == "classes" else "count"
        raise ValueError(f"y has the {what} {int(numbers.min())}: {what}s count from 0")


def _check_observed(values: Tensor, task: str | None) -> None:
    """Raise unless numbers are finite, or NaN where a target is not observed.

    Raises:
        ValueError: for infinite numbers, a target without any observed value, or NaN among classes.
    """
    infinite, missing = int(values.isinf().sum()), values.isnan()
    if infinite:
        raise ValueError(f"y has {infinite} infinite values: correct them, or leave out their rows")
    if bool(missing.all(0).any()):
        raise ValueError("y has a target whose values are all NaN: leave it out")
    if task == "classes" and bool(missing.any()):
        raise ValueError(f"y has {int(missing.sum())} rows without a class: leave out their rows")
