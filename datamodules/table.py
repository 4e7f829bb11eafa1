"""A table in memory: inputs and targets as arrays."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.datamodules.base import ArrayDataModule, Split, check_fractions, random_split, standardise
from lightning_sgmcmc.namespace import pl, rank_zero_info, rank_zero_warn
from lightning_sgmcmc.tables import Columns, InputColumns, is_frame
from lightning_sgmcmc.tables.arrays import (
    as_frame,
    as_series,
    as_tensor,
    check_same_rows,
    is_categorical,
    is_table,
    with_categories,
)
from lightning_sgmcmc.tables.columns import are_named_by_numbers, plain, some

Task = Literal["regression", "classes", "counts", "censored"]
TASKS = ("regression", "classes", "counts", "censored")
FEW_VALUES = 20
"""Whole numbers of at most so many values, as floats, could be classes."""


class TableDataModule(ArrayDataModule):
    """Rows of a table, split at random and standardised by the training part.

    `task` says what the targets are. Those of a regression are standardised too, each by itself, and `target_mean` and
    `target_std` convert back to their units. Classes are split within each class. Counts stay as they are, and so do
    the bounds (lower, upper) of `Censored`, task="censored". Names,
    categories and scaling are kept with a fit's samples, so `Posterior.predict(frame)` needs no datamodule.

    Args:
        x: inputs, shape (n, columns): a tensor, a NumPy array, a pandas frame, or what NumPy converts to an array; or
            the path of a CSV file with a header, whose columns of texts get the type "category". A column of pandas'
            type "category" becomes an input of 0 or 1 for each of its categories, a missing one included. A missing
            number (NaN) becomes the mean, and a further input says where it is missing.
        y: targets, shape (n,) or (n, D); bounds (n, 2); of classes (n,), labels from 0 or names; None with `target`.
        batch_size: data per batch.
        standardise: whether to standardise the columns of x and, in regression, y; otherwise they are used as they are.
        val_fraction: share of the rows for validation, in [0, 1).
        test_fraction: share of the rows for testing, likewise.
        target: the column of a pandas frame x with the targets, or a list of such columns; the others are the inputs.
        splits: the numbers of the training, validation and test rows, instead of random shares; any may be empty but
            the first, and rows in none are left out.
        task: "regression", "classes", "counts" or "censored"; None guesses by type and values, and says what: whole
            numbers of an integer type are classes, floats those of a regression.
        group: what rows have in common that must not be split, such as a patient: a column of the frame, which is then
            no input, or a value for each row. Rows of one group are in one part.
        time: when rows were observed: a column of the frame, which is then no input, or a value for each row. The last
            ones are for testing, those before them for validation; rows of one time are in one part.
        like: a `Posterior`, or the datamodule of its fit, whose columns, categories and scaling these data get, instead
            of statistics of their own; the training part may then be empty.
        shared: `drop_last`, `seed`, `order`, as in `ArrayDataModule`.

    Raises:
        ValueError: for arrays of other shapes or lengths, a frame and a series whose rows are in two orders, values
            that are not finite, labels below 0, a fraction out of range, a column that the frame has not, or splits
            with a row twice; for targets that do not have the task, or could have several if it is None; at setup, for
            a part with fewer than half of its share of rows.
        TypeError: for values that are not numbers, or `target` without a frame.

    >>> x, y = [[1.0], [2.0], [3.0]], [10.0, 20.0, 30.0]
    >>> data = TableDataModule(x, y, val_fraction=0, test_fraction=0, task="regression")
    >>> data.setup("fit")
    >>> data.num_data, data.target_mean, data.inputs([[2.0]])
    (3, 20.0, tensor([[0.]]))
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        batch_size: int = 100,
        standardise: bool = True,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        *,
        target: Any = None,
        splits: Sequence[Any] | None = None,
        task: Task | None = None,
        group: Any = None,
        time: Any = None,
        like: Any = None,
        **shared: Any,
    ) -> None:
        super().__init__(batch_size, **shared)
        check_fractions(val_fraction, test_fraction)
        x, y = _apart(x, y, target)
        names = list(x.columns) if is_frame(x) else []
        x, groups = _column("group", x, group)
        x, times = _column("time", x, time)
        split_by = [name for name in names if name not in x.columns]  # new data may have it
        if sum(value is not None for value in (groups, times, splits)) > 1:
            raise ValueError("group, time and splits each say which rows are in which part: pass one of them")
        self._like = _columns_of(like)
        known = Columns() if self._like is None else self._like
        self._inputs = InputColumns.of_table(x, (*_names(target), *split_by)) if known.inputs is None else known.inputs
        self.columns: tuple[Hashable, ...] | None = self._inputs.names or None
        """The names of the inputs, of a pandas frame."""
        self._index = np.asarray(x.index) if is_frame(x) else np.arange(len(x))
        self.x = _table(self._inputs, x)
        if len(self.x) != len(y):
            raise ValueError(f"x has {len(self.x)} rows and y has {len(y)} targets: pass one target for each row")
        self._targets = read_targets(y, task or known.task or None, known.classes)
        values = self._targets.values
        self.y = values[:, 0] if values.dim() == 2 and values.shape[1] == 1 else values
        self.task, self.task_is_said = self._targets.task, self._targets.is_said
        self.target_names, self.classes = self._targets.names, self._targets.classes
        self.num_classes, self.are_classes_ordered = self._targets.num_classes, self._targets.are_ordered
        self.standardise = standardise
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self._say_what_is_missing()
        self._say_what_numbers_the_rows()
        self._say_which_classes_are_absent()
        if len(self._inputs.names) not in (0, self.num_inputs):
            rank_zero_info(
                f"TableDataModule makes {self.num_inputs} inputs (`num_inputs`) of {len(self._inputs.names)} columns."
            )
        fractions = val_fraction, test_fraction
        if groups is not None:
            splits = _by_group(groups, fractions, self.seed)
        elif times is not None:
            splits = _by_time(times, fractions)
        self._rows = _rows(splits, len(self.y), like is not None) if splits is not None else None
        converted = [f"{name} from {kind}" for name, kind in (("x", _kind(x)), ("y", _kind(y))) if kind == "float64"]
        if converted:
            rank_zero_info(f"TableDataModule converts {' and '.join(converted)} to float32, in which networks compute.")

    def load(self) -> tuple[Split, Split, Split]:
        parts = self._parts()
        self._row_names = tuple(self._index[part.numpy()] for part in parts)
        if self._like is not None:
            self.input_scaling = mean, std = self._inputs.scaling
            inputs = [self._inputs.filled(((self.x[part] - mean) / std).float()) for part in parts]
        elif self.standardise:
            inputs, mean, std = standardise(*(self.x[part] for part in parts))
            if bool(mean.isnan().any()):
                lacking = self._inputs.called(int(mean.isnan().nonzero()[0]))
                raise ValueError(f"x has no number in {lacking} of the training rows: leave it out, or pass splits=…")
            self.input_scaling = mean, std
            inputs = [self._inputs.filled(part) for part in inputs]
        else:
            inputs = [self.x[part].float() for part in parts]
        first, second, third = (Split(i, t) for i, t in zip(inputs, self._targets_of(parts), strict=True))
        return first, second, third

    def _say_what_is_missing(self) -> None:
        """Say in which columns numbers are missing, and what becomes of them."""
        places = self._inputs.missing
        if not places or self._like is not None:
            return
        where = ", ".join(self._inputs.called(place) for place in places[:6]) + (", …" if len(places) > 6 else "")
        if not self.standardise:
            raise ValueError(
                f"x has missing numbers in {where}: fill them in, or pass standardise=True, which takes the mean"
            )
        rank_zero_info(
            f"TableDataModule takes the mean for missing numbers in {where}, and adds inputs that mark them."
        )

    def _say_what_numbers_the_rows(self) -> None:
        """Say which column of a frame counts its rows, as a file's index does: it tells the target of a sorted file."""
        count = len(self.x)
        if not self._inputs.names or self._like is not None or count <= 10:
            return
        for place in range(self._inputs.width):
            column = self.x[:, place]
            is_counted = bool(column[-1] - column[0] == count - 1) and bool((column.diff() == 1).all())
            if is_counted:
                rank_zero_info(
                    f"TableDataModule takes {self._inputs.called(place)} as an input, and it numbers the rows in their "
                    "order: leave it out if it is only an index."
                )

    def _say_which_classes_are_absent(self) -> None:
        """Say which classes no row has: labels from 1 on leave out class 0."""
        if self.task != "classes" or self._like is not None:
            return
        present = set(self.y.tolist())
        if absent := [label for label in range(self.num_classes or 0) if label not in present]:
            rank_zero_info(
                f"TableDataModule: y has labels up to {max(present)}, hence {self.num_classes} classes, and no row of "
                f"{some(absent)}. If there are {len(present)} classes, pass pandas.factorize(y, sort=True)[0]."
            )

    def _say_which_targets_are_equal(self, scaled: Tensor, mean: Tensor) -> None:
        """Say which targets have no spread by which they could be standardised."""
        observed = ~scaled.isnan()
        for place in (observed.any(0) & (scaled.eq(0) | ~observed).all(0)).nonzero().flatten().tolist():
            name = f" of {self._targets.names[place]!r}" if len(self._targets.names) == len(mean) > 1 else ""
            rank_zero_warn(
                f"TableDataModule: the targets{name} are {float(mean[place]):g} in all training rows ({len(scaled)}), "
                "so their spread is unknown and taken as 1 in their unit, which predictions then have. Add rows with "
                "other targets, or divide y by the spread that you expect."
            )

    def _parts(self) -> list[Tensor]:
        if self._rows is not None:
            return self._rows
        labels = self.y if self.task == "classes" else None
        parts = random_split(len(self.y), (self.val_fraction, self.test_fraction), self.seed, labels)
        if labels is not None:
            absent = sorted(set(labels.tolist()) - set(labels[parts[0]].tolist()))
            if absent:
                raise ValueError(
                    f"class {absent[0]} has no training row, since it has {int((labels == absent[0]).sum())} in all: "
                    "pass smaller fractions, or splits=…"
                )
        return parts

    def _targets_of(self, parts: list[Tensor]) -> list[Tensor]:
        targets = [self._targets.values[part] for part in parts]
        if self.task == "classes":
            return targets
        scaling = None if self._like is None else self._like.targets
        if self.task == "regression" and scaling is not None:
            self.target_mean, self.target_std = scaling.shift, scaling.factor
            return [((target - scaling.shift) / scaling.factor).float() for target in targets]
        if self.task == "regression" and self.standardise and self._like is None:
            scaled, mean, std = standardise(*targets)
            self._say_which_targets_are_equal(scaled[0], mean)
            self.target_mean, self.target_std = (mean, std) if len(mean) > 1 else (float(mean), float(std))
            return scaled
        return [target.float() for target in targets]

    @property
    def num_inputs(self) -> int:
        """The inputs of the network: one for each column of numbers, each category, and each column with gaps."""
        return int(self.x[0].numel())

    @property
    def input_columns(self) -> InputColumns:
        """What the columns of the inputs are, with their scaling after `setup`."""
        return self._inputs if self.input_scaling is None else self._inputs.scaled_by(*self.input_scaling)

    @property
    def row_names(self) -> tuple[np.ndarray, ...]:
        """What the rows of the training, validation and test part are called, in the order of their batches: by a
        frame's index, or numbered from 0; after `setup`."""
        _ = self.splits
        return self._row_names

    def inputs(self, x: Any) -> Tensor:
        """Return new inputs as the network was trained on them, shape (n, columns), float32; after `setup`.

        Of a pandas frame the columns are taken by their names, in the order of the training data.

        Raises:
            ValueError: if a column is missing or unknown, or the number of columns differs.
        """
        _ = self.splits
        return self.input_columns.inputs(x)


def _columns_of(like: Any) -> Columns | None:
    """Return the columns of an earlier fit: a posterior's, a datamodule's, or themselves."""
    if like is None:
        return None
    found = like if isinstance(like, Columns) else getattr(like, "columns", None)
    if isinstance(like, pl.LightningDataModule):
        like.setup("fit")
        found = Columns.of_datamodule(like)
    if not isinstance(found, Columns):
        raise TypeError(f"like={like!r} has no columns: pass a Posterior, or the datamodule of its fit")
    if found.inputs is None:
        raise ValueError("like has no columns of inputs, since its fit had loaders, or a datamodule that tells none")
    return found


def _names(target: Any) -> tuple[Hashable, ...]:
    """Return the names of the targets' columns."""
    return () if target is None else tuple(target) if isinstance(target, list) else (target,)


def _apart(x: Any, y: Any, target: Any) -> tuple[Any, Any]:
    """Return inputs and targets; with `target` they are columns of one frame."""
    if isinstance(x, str | Path):
        x = _read(x, _names(target))
    if isinstance(y, str):
        raise TypeError(f"y={y!r} is a text: pass target={y!r} if it is a column of x")
    if target is None:
        if y is None:
            raise TypeError("y is missing: pass the targets, or target=… if x is a pandas frame with them")
        check_same_rows(x, y)
        y = as_series(y)
        return x, y if is_table(y) or isinstance(y, Tensor) else np.asarray(y)
    if not is_frame(x) or y is not None:
        what = "y as well" if y is not None else f"x of {type(x).__name__}"
        raise TypeError(f"target={target!r} names a column of a pandas frame, got {what}: pass either y=… or target=…")
    names = _names(target)
    unknown = [name for name in names if name not in x.columns]
    if unknown or not names:
        what = repr(unknown[0]) if unknown else "[]"
        raise ValueError(f"x has no column {what}: it has {', '.join(map(repr, x.columns[:8]))}")
    return x.drop(columns=list(names)), x[list(names)] if isinstance(target, list) else x[target]


def _read(path: str | Path, targets: Sequence[Hashable]) -> Any:
    """Return the rows of a CSV file, whose columns of texts are categories except the targets."""
    import pandas

    frame = pandas.read_csv(path)
    inputs = with_categories(frame.drop(columns=[name for name in targets if name in frame]))
    return frame.assign(**{name: inputs[name] for name in inputs})


def _column(name: str, x: Any, given: Any) -> tuple[Any, np.ndarray | None]:
    """Return inputs without a column that splits the rows, and its values as ranks, (n,); None if none is given."""
    if given is None:
        return x, None
    is_name = is_frame(x) and isinstance(given, Hashable) and not isinstance(given, Tensor)
    if is_name and given not in x.columns:
        raise ValueError(f"x has no column {given!r} for {name}: it has {', '.join(map(repr, x.columns[:8]))}")
    if isinstance(given, str) and not is_name:
        raise TypeError(f"{name}={given!r} names a column of a pandas frame, got x of {type(x).__name__}")
    found = x[given] if is_name else given
    values = np.asarray(found)
    if values.shape != (len(x),):
        raise ValueError(f"{name} should have a value for each of the {len(x)} rows, got shape {values.shape}")
    missing = int(found.isna().sum()) if is_table(found) else int(np.sum(values != values))
    if missing:
        raise ValueError(f"{name} has {missing} rows without a value: fill them in, or leave out their rows")
    if name == "time" and any(isinstance(value, str) for value in values):
        raise TypeError(
            f"time has texts, such as {str(values[0])!r}, whose order is that of letters: pass dates, as by "
            "pandas.to_datetime, or numbers"
        )
    ranks = np.unique(values, return_inverse=True)[1]
    return (x.drop(columns=[given]) if is_name else x), ranks


def _by_group(groups: np.ndarray, fractions: tuple[float, float], seed: int) -> list[Tensor]:
    """Return rows of which those of one group are in one part, with about the shares of groups."""
    parts = random_split(int(groups.max()) + 1, fractions, seed, check=False)
    _check_parts("group", parts, fractions, int(groups.max()) + 1)
    return [torch.as_tensor(np.flatnonzero(np.isin(groups, part.numpy()))) for part in parts]


def _by_time(times: np.ndarray, fractions: tuple[float, float]) -> list[Tensor]:
    """Return the first rows in time, those after them, and the last ones; rows of one time are in one part."""
    shares = np.searchsorted(np.sort(times), times, side="right") / len(times)  # of the rows up to a row's time
    test, val = fractions[1], fractions[0] + fractions[1]
    first, last = shares <= 1 - val + 1e-9, shares > 1 - test + 1e-9
    parts = [torch.as_tensor(np.flatnonzero(rows)) for rows in (first, ~first & ~last, last)]
    _check_parts("time", parts, fractions, len(np.unique(times)))
    return parts


def _check_parts(name: str, parts: list[Tensor], fractions: tuple[float, float], count: int) -> None:
    """Raise if a part that should have rows has none."""
    if any(len(part) == 0 and share > 0 for part, share in zip(parts, (1.0, *fractions), strict=True)):
        raise ValueError(
            f"{name} has {count} different values, which leave a part without rows: pass other fractions (0 for none)"
        )


def _rows(splits: Sequence[Any], count: int, are_scaled: bool) -> list[Tensor]:
    """Return the rows of the three parts."""
    parts = [torch.as_tensor(np.asarray(part)).reshape(-1) for part in splits]
    is_odd = len(parts) != 3 or any(len(part) and part.is_floating_point() for part in parts)
    if is_odd or (len(parts[0]) == 0 and not are_scaled):
        raise ValueError(
            f"splits must be the row numbers of the training, validation and test part, got {len(parts)} parts of "
            f"{', '.join(str(len(part)) for part in parts)} rows"
        )
    parts = [torch.arange(count)[part] if part.dtype == torch.bool else part.long() for part in parts]
    rows = torch.cat(parts)
    if int(rows.min()) < 0 or int(rows.max()) >= count:
        raise ValueError(
            f"splits must be row numbers from 0 to {count - 1}, got {int(rows.min())} to {int(rows.max())}"
        )
    if len(rows.unique()) < len(rows):
        raise ValueError("splits have a row twice, so a part would not be independent of the others: remove one")
    return parts


def _kind(values: Any) -> str:
    kind = values.dtype if isinstance(values, Tensor) else np.asarray(values).dtype
    return str(kind).removeprefix("torch.") if isinstance(values, Tensor) or hasattr(values, "shape") else ""


def _table(columns: InputColumns, x: Any) -> Tensor:
    """Return the rows of the inputs, float64 (n, columns)."""
    if not is_table(x):
        shape = tuple(as_tensor("x", x).shape)
        if len(shape) != 2 or shape[0] == 0:
            raise ValueError(f"x should have shape (n, columns), got {shape}")
    table = columns.encoded(x)
    if len(table) == 0:
        raise ValueError(f"x should have shape (n, columns), got {tuple(table.shape)}")
    columns.check_finite(table)
    return table


# -- what the targets are: numbers, classes or counts -----------------------------------------------------------------


@dataclass(frozen=True)
class Targets:
    """The targets of a table: `values` are float64 (n, D) of numbers and counts, int64 (n,) of classes."""

    values: Tensor
    task: Task
    names: tuple[Any, ...] = ()
    classes: tuple[Any, ...] = ()
    is_said: bool = True
    are_ordered: bool = True

    @property
    def num_classes(self) -> int | None:
        """K, None of numbers and counts."""
        if self.task != "classes":
            return None
        return len(self.classes) or int(self.values.max()) + 1


def read_targets(y: Any, task: str | None, classes: Sequence[Any] = ()) -> Targets:
    """Return the targets of a table; `y` is numbers, (n,) or (n, D), or of classes also their names, (n,)."""
    if task is not None and task not in TASKS:
        raise ValueError(f"task must be 'regression', 'classes', 'counts' or 'censored', got {task!r}")
    names = tuple(map(plain, as_frame(y).columns)) if is_table(y) else ()
    names = () if names == (0,) and not hasattr(y, "columns") else names  # a series without a name
    named = _named_labels(y, classes) if task in (None, "classes") else None
    if named is not None:
        if task is None:
            _check_few(named[0], "names", "say that they are by task='classes', or pass numbers")
            rank_zero_info(f"TableDataModule takes the names in y as {len(named[1])} classes (task='classes').")
        is_ordered = is_table(y) and is_categorical(y) and bool(y.cat.ordered)
        return Targets(named[0], "classes", names, named[1], are_ordered=is_ordered or bool(classes))
    values = as_tensor("y", _numeric(y))
    if values.dim() == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.dim() not in (1, 2) or len(values) == 0:
        raise ValueError(f"y should have shape (n,) or (n, targets), got {tuple(values.shape)}")
    if task == "censored":
        if values.dim() != 2 or values.shape[1] != 2:
            raise ValueError(f"y of task='censored' should be (lower, upper), shape (n, 2), got {tuple(values.shape)}")
        return Targets(values.double(), "censored", names)
    if values.is_floating_point():
        _check_observed(values, task)
    if task is None:
        return _guessed(values, names)
    if task == "regression":
        return Targets(_columns(values), "regression", names)
    if task == "counts":
        _check_whole(values, "counts")
        return Targets(_columns(values), "counts", names)
    return replace(_labels(values), names=names)


def _guessed(values: Tensor, names: tuple[Any, ...]) -> Targets:
    """Return the targets as their type and values suggest, and say so."""
    known = values[~values.isnan()] if values.is_floating_point() else values
    count = len(known.unique())
    whole = not values.is_floating_point() or bool((known == known.round()).all())
    remedy = "say which they are by task='classes', 'regression' or 'counts'"
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
    _check_few(values.long(), "whole numbers", remedy)
    rank_zero_info(
        f"TableDataModule takes the whole numbers of y as {found.num_classes} classes (task='classes'); pass "
        "task='regression' or 'counts' if they are numbers."
    )
    return replace(found, names=names, is_said=False)


def _check_few(labels: Tensor, kind: str, remedy: str) -> None:
    """Raise unless labels repeat as those of classes do."""
    present, counts = labels.unique(return_counts=True)
    if counts.min() < 2 or not 2 <= len(present) <= len(labels) // 3:
        raise ValueError(
            f"y has {len(present)} different {kind} in {len(labels)} rows, of which the rarest has {counts.min()}, so "
            f"they are hardly classes: {remedy}"
        )


def _labels(values: Tensor, remedy: str = "pass pandas.factorize(y)[0]") -> Targets:
    """Return labels as classes."""
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
    """
    series = y if is_table(y) and not hasattr(y, "columns") else None
    found = np.asarray(y, dtype=object if series is not None else None).reshape(-1)
    are_categories = series is not None and is_categorical(series)
    are_names = are_categories or are_named_by_numbers(classes)
    if not are_names and not (found.dtype.kind in "OUS" and any(isinstance(v, str) for v in found[:1])):
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
    """Raise unless values are whole numbers from 0."""
    numbers = values.double().reshape(-1)
    numbers = numbers[~numbers.isnan()]
    odd = numbers[numbers != numbers.round()]
    if len(odd):
        raise ValueError(
            f"y has {float(odd[0]):g}, which is no whole number, so it is not of {task}: pass another task"
        )
    if len(numbers) and int(numbers.min()) < 0:
        what = "label" if task == "classes" else "count"
        remedy = ": pass y.astype(str), whose values are names, or pandas.factorize(y)[0]" if task == "classes" else ""
        raise ValueError(f"y has the {what} {int(numbers.min())}, and {what}s count from 0{remedy}")


def _check_observed(values: Tensor, task: str | None) -> None:
    """Raise unless numbers are finite, or NaN where a target is not observed."""
    infinite, missing = int(values.isinf().sum()), values.isnan()
    if infinite:
        raise ValueError(
            f"y has {infinite} infinite values: correct them, leave out their rows, or pass task='censored' for bounds"
        )
    if bool(missing.all(0).any()):
        raise ValueError("y has a target whose values are all NaN: leave it out")
    if task == "classes" and bool(missing.any()):
        raise ValueError(f"y has {int(missing.sum())} rows without a class: leave out their rows")
