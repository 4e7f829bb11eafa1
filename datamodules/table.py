"""A table in memory: inputs and targets as arrays."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_sgmcmc.batches.order import BatchOrder, MakeOrder
from lightning_sgmcmc.datamodules.base import ArrayDataModule, Split, check_fractions, random_split, standardise


class TableDataModule(ArrayDataModule):
    """Rows of numbers with one target each, split at random and standardised by the training part.

    Integer targets are classes, split within each class. Other targets are those of a regression: they are
    standardised too, and `target_mean` and `target_std` convert back to their units.

    Args:
        x: inputs, shape (n, columns): a tensor, a NumPy array, a pandas frame, or what NumPy converts to an array.
        y: targets, shape (n,) or (n, 1); None with `target`.
        batch_size: data per batch.
        standardise: whether to standardise the columns of x and, in regression, y; otherwise they are used as they are.
        val_fraction: share of the rows for validation, in [0, 1).
        test_fraction: share of the rows for testing, likewise.
        seed: seed of the split.
        drop_last: leave out the last batch of an epoch if it is smaller.
        target: the column of a pandas frame x with the targets; the others are the inputs.
        splits: the numbers of the training, validation and test rows, instead of random shares; any may be empty but
            the first, and rows in none are left out.
        order: makes the order of the training data, such as `CyclicOrder` (see `ResumableLoader`).

    Raises:
        ValueError: for arrays of other shapes or lengths, values that are not finite, labels below 0, a fraction out
            of range, a column that the frame has not, or splits with a row twice.
        TypeError: for values that are not numbers, or `target` without a frame.

    >>> data = TableDataModule([[1.0], [2.0], [3.0]], [10.0, 20.0, 30.0], val_fraction=0, test_fraction=0)
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
        seed: int = 0,
        drop_last: bool = False,
        target: Hashable | None = None,
        splits: Sequence[Any] | None = None,
        order: MakeOrder = BatchOrder,
    ) -> None:
        super().__init__(batch_size, drop_last, seed, order=order)
        check_fractions(val_fraction, test_fraction)
        x, y = _apart(x, y, target)
        self.columns: tuple[Hashable, ...] | None = tuple(x.columns) if _is_frame(x) else None
        """The names of the inputs, of a pandas frame."""
        self.x, self.y = _table(x), _targets(y)
        if len(self.x) != len(self.y):
            raise ValueError(f"x has {len(self.x)} rows and y has {len(self.y)} targets: pass one target for each row")
        self.standardise = standardise
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self._rows = _rows(splits, len(self.y)) if splits is not None else None
        if not self.y.is_floating_point():
            self.num_classes = int(self.y.max()) + 1
        self._mean, self._std = torch.zeros(()), torch.ones(())
        converted = [f"{name} from {kind}" for name, kind in (("x", _kind(x)), ("y", _kind(y))) if kind == "float64"]
        if converted:
            rank_zero_info(f"TableDataModule converts {' and '.join(converted)} to float32, in which networks compute.")

    def load(self) -> tuple[Split, Split, Split]:
        labels = None if self.y.is_floating_point() else self.y
        parts = self._rows
        if parts is None:
            parts = random_split(len(self.y), (self.val_fraction, self.test_fraction), self.seed, labels)
        inputs, targets = [self.x[part].float() for part in parts], [self.y[part] for part in parts]
        if self.standardise:
            inputs, self._mean, self._std = standardise(*(self.x[part] for part in parts))
        if labels is None:
            targets = [target[:, None].float() for target in targets]
        if labels is None and self.standardise:
            targets, mean, std = standardise(*(self.y[part, None] for part in parts))
            self.target_mean, self.target_std = float(mean), float(std)
        first, second, third = (Split(i, t) for i, t in zip(inputs, targets, strict=True))
        return first, second, third

    def inputs(self, x: Any) -> Tensor:
        """Return new inputs as the network was trained on them, shape (n, columns), float32; after `setup`.

        Of a pandas frame the columns are taken by their names, in the order of the training data.

        Raises:
            ValueError: if a column is missing, or the number of columns differs.
        """
        _ = self.splits
        if _is_frame(x) and self.columns is not None:
            missing = [name for name in self.columns if name not in x.columns]
            if missing:
                raise ValueError(f"x has no column {missing[0]!r}, which the training data have: add it")
            x = x[list(self.columns)]
        table = _table(x)
        if table.shape[1] != self.x.shape[1]:
            raise ValueError(f"x has {table.shape[1]} columns, and the training data have {self.x.shape[1]}")
        return ((table - self._mean) / self._std).float()


def _is_frame(x: Any) -> bool:
    """Return whether x is a data frame of pandas, which need not be installed."""
    return type(x).__module__.split(".")[0] == "pandas" and hasattr(x, "columns")


def _apart(x: Any, y: Any, target: Hashable | None) -> tuple[Any, Any]:
    """Return inputs and targets; with `target` they are columns of one frame."""
    if isinstance(y, str):
        raise TypeError(f"y={y!r} is a text: pass target={y!r} if it is a column of x")
    if target is None:
        if y is None:
            raise TypeError("y is missing: pass the targets, or target=… if x is a pandas frame with them")
        return x, y
    if not _is_frame(x) or y is not None:
        what = "y as well" if y is not None else f"x of {type(x).__name__}"
        raise TypeError(f"target={target!r} names a column of a pandas frame, got {what}: pass either y=… or target=…")
    if target not in x.columns:
        raise ValueError(f"x has no column {target!r}: it has {', '.join(map(repr, x.columns[:8]))}")
    return x.drop(columns=[target]), x[target]


def _rows(splits: Sequence[Any], count: int) -> list[Tensor]:
    """Return the rows of the three parts.

    Raises:
        ValueError: if there are not three, a row is in two, or none of `count`, or there are no training rows.
    """
    parts = [torch.as_tensor(np.asarray(part)).reshape(-1) for part in splits]
    if len(parts) != 3 or len(parts[0]) == 0 or any(len(p) and p.is_floating_point() for p in parts):
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


def _numbers(name: str, values: Any) -> Tensor:
    """Return values as a tensor.

    Raises:
        TypeError: if they are not numbers.
    """
    if _is_frame(values):
        odd = [f"column {n!r} of {kind}" for n, kind in values.dtypes.items() if kind.kind not in "biuf"]
        if odd:
            raise TypeError(
                f"x has the {odd[0]}, which is not numeric: encode it (pandas.get_dummies), or leave it out"
            )
    array = values if isinstance(values, Tensor) else np.asarray(values)
    if isinstance(array, np.ndarray) and array.dtype.kind not in "biuf":
        raise TypeError(
            f"{name} has values of type {array.dtype}, which are no numbers: encode them (pandas.factorize for labels, "
            "pandas.get_dummies for inputs)"
        )
    if isinstance(array, np.ndarray) and not array.flags.writeable:  # as those of pandas 3, of which torch warns
        array = array.copy()
    return torch.as_tensor(array)


def _kind(values: Any) -> str:
    kind = values.dtype if isinstance(values, Tensor) else np.asarray(values).dtype
    return str(kind).removeprefix("torch.") if isinstance(values, Tensor) or hasattr(values, "shape") else ""


def _table(x: Any) -> Tensor:
    table = _numbers("x", x).double()
    if table.dim() != 2 or len(table) == 0:
        raise ValueError(f"x should have shape (n, columns), got {tuple(table.shape)}")
    _check_finite("x", table)
    return table


def _targets(y: Any) -> Tensor:
    targets = _numbers("y", y)
    if targets.dim() == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    if targets.dim() != 1:
        raise ValueError(f"y should have shape (n,) or (n, 1), got {tuple(targets.shape)}")
    if targets.is_floating_point():
        _check_finite("y", targets)
        return targets.double()
    if len(targets) and int(targets.min()) < 0:
        raise ValueError(f"y has the label {int(targets.min())}: labels count from 0")
    return targets.long()


def _check_finite(name: str, values: Tensor) -> None:
    bad = int((~values.isfinite()).sum())
    if bad:
        raise ValueError(f"{name} has {bad} values that are NaN or infinite: fill them in, or leave out their rows")
