"""UCI Airfoil Self-Noise: the sound of a wing."""

from pathlib import Path

import numpy as np
import torch

from lightning_sgmcmc.batches.orders import BatchOrder, MakeOrder
from lightning_sgmcmc.datamodules.arrays import one_line
from lightning_sgmcmc.datamodules.base import (
    ArrayDataModule,
    Split,
    check_fractions,
    find_file,
    random_split,
    standardise,
)

COLUMNS = ("frequency", "angle", "length", "velocity", "thickness")
ROWS = 1503


class AirfoilDataModule(ArrayDataModule):
    """The 1,503 measurements of UCI's Airfoil Self-Noise: five numbers of a wing and its flow, and the sound in dB.

    The split is scikit-learn's `train_test_split(test_size=0.2, random_state=seed)`, as in published comparisons.
    Inputs and target are standardised by the training part; `target_mean` and `target_std` convert back to dB.

    Args:
        root: folder that holds `airfoil/airfoil.csv`, whose columns are frequency, angle, length, velocity, thickness
            and the target, with or without a header line.
        batch_size: data per batch.
        val_fraction: share of the training rows held back for validation, in [0, 1).
        seed: seed of the split.
        drop_last: leave out the last batch of an epoch if it is smaller.
        order: makes the order of the training data, such as `CyclicOrder` (see `ResumableLoader`).

    Raises:
        ValueError: for an argument out of range; at setup, if the file holds something else.
        FileNotFoundError: at setup, if the file is not there.

    Source: Brooks et al. 1989, UCI Machine Learning Repository; the split of arXiv 2605.14146.
    """

    def __init__(
        self,
        root: str | Path = "data",
        batch_size: int = 200,
        val_fraction: float = 0.0,
        seed: int = 0,
        drop_last: bool = False,
        order: MakeOrder = BatchOrder,
    ) -> None:
        super().__init__(batch_size, drop_last, seed, order=order)
        check_fractions(val_fraction)
        self.root = Path(root)
        self.val_fraction = val_fraction

    def load(self) -> tuple[Split, Split, Split]:
        from sklearn.model_selection import train_test_split

        table = torch.as_tensor(_read(find_file(self.root, "airfoil/airfoil.csv", "airfoil.csv", what="Airfoil")))
        rest, test = (
            torch.as_tensor(part) for part in train_test_split(range(ROWS), test_size=0.2, random_state=self.seed)
        )
        train, val = (rest[part] for part in random_split(len(rest), (self.val_fraction,), self.seed))
        inputs, *scaling = standardise(*(table[part, :-1] for part in (train, val, test)))
        self.input_scaling = (scaling[0], scaling[1])
        targets, mean, std = standardise(*(table[part, -1:] for part in (train, val, test)))
        self.target_mean, self.target_std = float(mean), float(std)
        first, second, third = (Split(i, t) for i, t in zip(inputs, targets, strict=True))
        return first, second, third


def _read(path: Path) -> np.ndarray:
    """Return the table, shape (1503, 6).

    Raises:
        ValueError: if the file has other rows or columns.
    """
    try:
        text = path.read_text(encoding="ascii").splitlines()
        rows = text[1:] if text and text[0].lower().startswith(COLUMNS[0]) else text
        table = np.loadtxt(rows, delimiter=",", ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({one_line(error)}): replace it") from error
    if table.shape != (ROWS, len(COLUMNS) + 1) or not np.isfinite(table).all():
        raise ValueError(f"{path} should have {ROWS} rows of {len(COLUMNS) + 1} numbers, got {table.shape}")
    return table
