"""A table in memory: inputs and targets as arrays."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.datamodules.base import ArrayDataModule, Split, check_fractions, random_split, standardise


class TableDataModule(ArrayDataModule):
    """Rows of numbers with one target each, split at random and standardised by the training part.

    Integer targets are classes, split within each class. Other targets are those of a regression: they are
    standardised too, and `target_mean` and `target_std` convert back to their units.

    Args:
        x: inputs, shape (n, columns): a tensor, a NumPy array, or what NumPy converts to one (a data frame).
        y: targets, shape (n,) or (n, 1).
        batch_size: data per batch.
        standardise: whether to standardise the columns of x and, in regression, y; otherwise they are used as they are.
        val_fraction, test_fraction: shares of the rows for validation and testing, in [0, 1).
        seed: seed of the split.
        drop_last: leave out the last batch of an epoch if it is smaller.

    Raises:
        ValueError: for arrays of other shapes or lengths, values that are not finite, labels below 0, or a fraction out
            of range.

    >>> data = TableDataModule([[1.0], [2.0], [3.0]], [10.0, 20.0, 30.0], val_fraction=0, test_fraction=0)
    >>> data.setup("fit")
    >>> data.num_data, data.target_mean, data.inputs([[2.0]])
    (3, 20.0, tensor([[0.]]))
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        batch_size: int = 100,
        standardise: bool = True,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(batch_size, drop_last, seed)
        check_fractions(val_fraction, test_fraction)
        self.x, self.y = _table(x), _targets(y)
        if len(self.x) != len(self.y):
            raise ValueError(f"x has {len(self.x)} rows and y has {len(self.y)} targets: pass one target for each row")
        self.standardise = standardise
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        if not self.y.is_floating_point():
            self.num_classes = int(self.y.max()) + 1
        self._mean, self._std = torch.zeros(()), torch.ones(())

    def load(self) -> tuple[Split, Split, Split]:
        labels = None if self.y.is_floating_point() else self.y
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
        """Return new inputs as the network was trained on them, shape (n, columns), float32; after `setup`."""
        _ = self.splits
        return ((_table(x) - self._mean) / self._std).float()


def _table(x: Any) -> Tensor:
    table = torch.as_tensor(x if isinstance(x, Tensor) else np.asarray(x)).double()
    if table.dim() != 2 or len(table) == 0:
        raise ValueError(f"x should have shape (n, columns), got {tuple(table.shape)}")
    _check_finite("x", table)
    return table


def _targets(y: Any) -> Tensor:
    targets = torch.as_tensor(y if isinstance(y, Tensor) else np.asarray(y))
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
