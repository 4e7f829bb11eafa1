"""Small tables from the UCI Machine Learning Repository, as `.npz` files."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.batches.orders import BatchOrder, MakeOrder
from lightning_sgmcmc.datamodules.arrays import read_arrays
from lightning_sgmcmc.datamodules.base import (
    ArrayDataModule,
    Split,
    check_fractions,
    find_file,
    random_split,
    standardise,
    with_intercept,
)

REGRESSION = ("boston-housing", "concrete", "energy", "kin8nm", "power-plant", "wine-quality-red", "yacht")
CLASSIFICATION = ("australian", "german", "heart", "parkinsons", "pima")
SPLITS = 20


class UCIRegressionDataModule(ArrayDataModule):
    """A regression table with its 20 standard splits (90 % training, 10 % test).

    Inputs and targets are standardised by the training part; `target_mean` and `target_std` convert back to the
    target's units.

    Args:
        name: one of `REGRESSION`.
        root: folder that holds `uci_regression/<name>.npz`, or the file itself. The arrays: `x` (rows, columns), `y`
            (rows,), `test_indices` (20, test rows).
        split: index of the standard split, 0 to 19.
        batch_size: data per batch.
        val_fraction: share of the training rows held back for validation, in [0, 1).
        seed: seed of the validation rows.
        drop_last: leave out the last batch of an epoch if it is smaller.
        order: makes the order of the training data, such as `CyclicOrder` (see `ResumableLoader`).

    Raises:
        ValueError: for an argument out of range or an unknown name.
        FileNotFoundError: at setup, if the file is not there.

    Source: Hernández-Lobato & Adams 2015 (the splits).
    """

    def __init__(
        self,
        name: str,
        root: str | Path = "data",
        split: int = 0,
        batch_size: int = 50,
        val_fraction: float = 0.0,
        seed: int = 0,
        drop_last: bool = False,
        order: MakeOrder = BatchOrder,
    ) -> None:
        super().__init__(batch_size, drop_last, seed, order=order)
        _check_name(name, REGRESSION)
        check_fractions(val_fraction)
        if not 0 <= split < SPLITS:
            raise ValueError(f"split must be between 0 and {SPLITS - 1}, got {split}")
        self.table = name
        self.root = Path(root)
        self.split = split
        self.val_fraction = val_fraction

    def load(self) -> tuple[Split, Split, Split]:
        x, y, test = _read(self.root, "uci_regression", self.table, "test_indices")
        held_out = torch.zeros(len(y), dtype=torch.bool)
        held_out[torch.as_tensor(test[self.split], dtype=torch.int64)] = True
        rows = torch.arange(len(y))
        rest = rows[~held_out]
        train, val = (rest[part] for part in random_split(len(rest), (self.val_fraction,), self.seed))
        inputs, *scaling = standardise(x[train], x[val], x[held_out])
        self.input_scaling = (scaling[0], scaling[1])
        targets, mean, std = standardise(y[train, None], y[val, None], y[held_out, None])
        self.target_mean, self.target_std = float(mean), float(std)
        first, second, third = (Split(i, t) for i, t in zip(inputs, targets, strict=True))
        return first, second, third


class UCIClassificationDataModule(ArrayDataModule):
    """A table with two classes, 0 and 1, split at random within each class.

    Args:
        name: one of `CLASSIFICATION`.
        root: folder that holds `uci_classification/<name>.npz`, or the file itself. The arrays: `x` (rows, columns),
            `y` (rows,) of 0 and 1.
        batch_size: data per batch.
        val_fraction: share of the data for validation, in [0, 1).
        test_fraction: share of the data for testing, in [0, 1).
        seed: seed of the split.
        intercept: add a column of ones to the inputs.
        drop_last: leave out the last batch of an epoch if it is smaller.
        order: makes the order of the training data, such as `CyclicOrder` (see `ResumableLoader`).

    Raises:
        ValueError: for an argument out of range or an unknown name.
        FileNotFoundError: at setup, if the file is not there.
    """

    num_classes = 2

    def __init__(
        self,
        name: str,
        root: str | Path = "data",
        batch_size: int = 50,
        val_fraction: float = 0.0,
        test_fraction: float = 0.2,
        seed: int = 0,
        intercept: bool = False,
        drop_last: bool = False,
        order: MakeOrder = BatchOrder,
    ) -> None:
        super().__init__(batch_size, drop_last, seed, order=order)
        _check_name(name, CLASSIFICATION)
        check_fractions(val_fraction, test_fraction)
        self.table = name
        self.root = Path(root)
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.intercept = intercept

    def load(self) -> tuple[Split, Split, Split]:
        x, y, _ = _read(self.root, "uci_classification", self.table)
        labels = y.long()
        parts = random_split(len(labels), (self.val_fraction, self.test_fraction), self.seed, labels)
        inputs, *scaling = standardise(*(x[part] for part in parts))
        self.input_scaling = (scaling[0], scaling[1])
        if self.intercept:
            inputs, self.input_scaling = with_intercept(inputs, self.input_scaling)
        first, second, third = (Split(i, labels[part]) for i, part in zip(inputs, parts, strict=True))
        return first, second, third


def _check_name(name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ValueError(f"name must be one of {', '.join(known)}, got {name!r}")


def _read(root: Path, folder: str, name: str, extra: str | None = None) -> tuple[Tensor, Tensor, "np.ndarray"]:
    path = find_file(root, f"{folder}/{name}.npz", f"{name}.npz", what=f"the table '{name}'")
    x, y, *rest = read_arrays(path, ("x", "y") if extra is None else ("x", "y", extra))
    return torch.as_tensor(x).double(), torch.as_tensor(y).double(), rest[0] if rest else np.empty(0)
