"""UCI Mushroom: edible or poisonous."""

import csv
import gzip
import zlib
from pathlib import Path

import torch
from torch import Tensor

from lightning_sgmcmc.batches.orders import BatchOrder, MakeOrder
from lightning_sgmcmc.datamodules.arrays import one_line
from lightning_sgmcmc.datamodules.base import ArrayDataModule, Split, check_fractions, find_file, random_split
from lightning_sgmcmc.files import megabytes

ATTRIBUTES = (
    *("cap-shape", "cap-surface", "cap-color", "bruises", "odor", "gill-attachment", "gill-spacing", "gill-size"),
    *("gill-color", "stalk-shape", "stalk-root", "stalk-surface-above-ring", "stalk-surface-below-ring"),
    *("stalk-color-above-ring", "stalk-color-below-ring", "veil-type", "veil-color", "ring-number", "ring-type"),
    *("spore-print-color", "population", "habitat"),
)
LARGEST_TABLE = 2**24
"""Largest size of the table as text, in bytes; the real one has 0.4 MB."""


class MushroomDataModule(ArrayDataModule):
    """The 8,124 mushrooms of UCI's agaricus-lepiota: 22 categorical attributes; class 1 is edible, 0 is poisonous.

    Inputs are the attributes one-hot: a column of 0 and 1 for each value that occurs, in alphabetical order within
    each attribute. This makes 117 columns: a missing stalk-root ('?') is a value of its own, and veil-type has a single
    value, a constant column. Nothing is standardised.

    Args:
        root: folder that holds `mushroom/mushroom.csv.gz` (one header line; the first column is `edible`, e or p), or
            UCI's `mushroom/agaricus-lepiota.data`.
        batch_size: data per batch.
        val_fraction: share of the data for validation, in [0, 1).
        test_fraction: share of the data for testing, in [0, 1).
        seed: seed of the split, which is stratified by class.
        drop_last: leave out the last batch of an epoch if it is smaller.
        order: makes the order of the training data, such as `CyclicOrder` (see `ResumableLoader`).

    Raises:
        ValueError: for an argument out of range; at setup, if the file is damaged or holds something else.
        FileNotFoundError: at setup, if the file is not there.

    Source: Schlimmer 1981, UCI Machine Learning Repository.
    """

    num_classes = 2

    def __init__(
        self,
        root: str | Path = "data",
        batch_size: int = 100,
        val_fraction: float = 0.0,
        test_fraction: float = 0.2,
        seed: int = 0,
        drop_last: bool = False,
        order: MakeOrder = BatchOrder,
    ) -> None:
        super().__init__(batch_size, drop_last, seed, order=order)
        check_fractions(val_fraction, test_fraction)
        self.root = Path(root)
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.feature_names: tuple[str, ...] = ()
        """The columns' names, `attribute=value`, after `setup` or `table`."""

    def table(self) -> tuple[Tensor, Tensor]:
        """Return the whole table in the order of the file, for instance for a bandit that draws its own rows.

        Returns:
            the inputs (8124, 117), float32 of 0 and 1, and whether each mushroom is edible (8124,), bool.
        """
        path = find_file(
            self.root,
            *("mushroom/mushroom.csv.gz", "mushroom.csv.gz", "mushroom/agaricus-lepiota.data", "agaricus-lepiota.data"),
            what="the Mushroom table",
        )
        rows = _read(path)
        columns, names = [], []
        for attribute, values in zip(ATTRIBUTES, list(zip(*rows, strict=True))[1:], strict=True):
            known = sorted(set(values))
            index = torch.tensor([known.index(value) for value in values])
            columns.append(torch.nn.functional.one_hot(index, len(known)))
            names += [f"{attribute}={value}" for value in known]
        self.feature_names = tuple(names)
        return torch.cat(columns, 1).float(), torch.tensor([row[0] == "e" for row in rows])

    def load(self) -> tuple[Split, Split, Split]:
        inputs, edible = self.table()
        labels = edible.long()
        parts = random_split(len(labels), (self.val_fraction, self.test_fraction), self.seed, labels)
        first, second, third = (Split(inputs[part], labels[part]) for part in parts)
        return first, second, third


def _read(path: Path) -> list[list[str]]:
    """Return the rows, without the header line if there is one."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            content = file.read(LARGEST_TABLE + 1)
        if len(content) > LARGEST_TABLE:
            raise ValueError(f"{path} has more than {megabytes(LARGEST_TABLE)} of text: replace it")
        text = content.decode("ascii")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({one_line(error)}): replace it") from error
    rows = [row for row in csv.reader(text.splitlines()) if row]
    first = 1
    if rows and rows[0][0] not in ("e", "p"):
        if tuple(rows[0]) != ("edible", *ATTRIBUTES):
            raise ValueError(f"{path} should begin with the header edible,{ATTRIBUTES[0]},…, got {','.join(rows[0])}")
        rows, first = rows[1:], 2
    for number, row in enumerate(rows, start=first):
        if len(row) != 1 + len(ATTRIBUTES) or row[0] not in ("e", "p"):
            raise ValueError(
                f"row {number} of {path} should be e or p and {len(ATTRIBUTES)} attributes, got {','.join(row)!r}"
            )
    if not rows:
        raise ValueError(f"{path} has no rows: replace it")
    return rows
