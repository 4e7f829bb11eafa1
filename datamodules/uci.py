"""Tables of the UCI Machine Learning Repository, split and standardised by the training part."""

import csv
import gzip
import os
import zlib
from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.datamodules.base import (
    ArrayDataModule,
    Split,
    check_fractions,
    random_split,
    standardise,
    with_intercept,
)
from lightning_sgmcmc.datamodules.files import find_file, one_line, read_arrays, read_dumped_array, to_labels
from lightning_sgmcmc.files import megabytes

Scaling = tuple[Tensor, Tensor] | None
"""Mean and standard deviation of the inputs; None if they are used as they are."""


class TableSource(ArrayDataModule):
    """Base of the tables that come from a file.

    Subclasses implement `read`. Targets of floating point are those of a regression, and are standardised.

    Args:
        val_fraction: share of the data for validation, in [0, 1).
        test_fraction: share of the data for testing, where the split is a random one.
    """

    intercept = False
    """Whether the inputs get a first column of ones."""

    def __init__(
        self, root: str | Path, batch_size: int, val_fraction: float, test_fraction: float = 0.0, **shared: Any
    ) -> None:
        super().__init__(batch_size, **shared)
        check_fractions(val_fraction, test_fraction)
        self.root = Path(root)
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction

    @abstractmethod
    def read(self) -> tuple[Tensor, Tensor]:
        """Return the inputs (n, columns), and the targets, float64 (n, 1) or int64 (n,)."""

    def divide(self, targets: Tensor) -> list[Tensor]:
        """Return the rows of the training, validation and test part; here a random split within each class."""
        return random_split(len(targets), (self.val_fraction, self.test_fraction), self.seed, targets)

    def scale(self, parts: list[Tensor]) -> tuple[list[Tensor], Scaling]:
        """Return the three parts' inputs as the network receives them, and their scaling."""
        scaled, mean, std = standardise(*parts)
        return scaled, (mean, std)

    def load(self) -> tuple[Split, Split, Split]:
        x, y = self.read()
        rows = self.divide(y)
        inputs, self.input_scaling = self.scale([x[part] for part in rows])
        if self.intercept and self.input_scaling is not None:
            inputs, self.input_scaling = with_intercept(inputs, self.input_scaling)
        targets = [y[part] for part in rows]
        if y.is_floating_point():
            targets, mean, std = standardise(*targets)
            self.target_mean, self.target_std = float(mean), float(std)
        first, second, third = (Split(i, t) for i, t in zip(inputs, targets, strict=True))
        return first, second, third

    def _with_validation(self, rest: Tensor, test: Tensor) -> list[Tensor]:
        """Return the rows of three parts, of which the test's are known."""
        train, val = (rest[part] for part in random_split(len(rest), (self.val_fraction,), self.seed))
        return [train, val, test]


# -- tables with their standard splits --------------------------------------------------------------------------------

REGRESSION = ("boston-housing", "concrete", "energy", "kin8nm", "power-plant", "wine-quality-red", "yacht")
CLASSIFICATION = ("australian", "german", "heart", "parkinsons", "pima")
SPLITS = 20


class UCIRegressionDataModule(TableSource):
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
        shared: `drop_last`, `seed` (of the validation rows) and `order`, as in `ArrayDataModule`.

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
        **shared: Any,
    ) -> None:
        super().__init__(root, batch_size, val_fraction, **shared)
        _check_name(name, REGRESSION)
        if not 0 <= split < SPLITS:
            raise ValueError(f"split must be between 0 and {SPLITS - 1}, got {split}")
        self.table = name
        self.split = split

    def read(self) -> tuple[Tensor, Tensor]:
        x, y, test = _read_npz(self.root, "uci_regression", self.table, ("x", "y", "test_indices"))
        self._test = torch.as_tensor(test[self.split], dtype=torch.int64)
        return torch.as_tensor(x).double(), torch.as_tensor(y).double()[:, None]

    def divide(self, targets: Tensor) -> list[Tensor]:
        held_out = torch.zeros(len(targets), dtype=torch.bool)
        held_out[self._test] = True
        return self._with_validation(torch.arange(len(targets))[~held_out], held_out)


class UCIClassificationDataModule(TableSource):
    """A table with two classes, 0 and 1, split at random within each class.

    Args:
        name: one of `CLASSIFICATION`.
        root: folder that holds `uci_classification/<name>.npz`, or the file itself. The arrays: `x` (rows, columns),
            `y` (rows,) of 0 and 1.
        batch_size: data per batch.
        val_fraction: share of the data for validation, in [0, 1).
        test_fraction: share of the data for testing, in [0, 1).
        intercept: add a column of ones to the inputs.
        shared: `drop_last`, `seed`, `order`, as in `ArrayDataModule`.

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
        *,
        intercept: bool = False,
        **shared: Any,
    ) -> None:
        super().__init__(root, batch_size, val_fraction, test_fraction, **shared)
        _check_name(name, CLASSIFICATION)
        self.table = name
        self.intercept = intercept

    def read(self) -> tuple[Tensor, Tensor]:
        x, y = _read_npz(self.root, "uci_classification", self.table, ("x", "y"))
        return torch.as_tensor(x).double(), torch.as_tensor(y).double().long()


def _check_name(name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ValueError(f"name must be one of {', '.join(known)}, got {name!r}")


def _read_npz(root: Path, folder: str, name: str, arrays: tuple[str, ...]) -> list[np.ndarray]:
    return read_arrays(find_file(root, f"{folder}/{name}.npz", f"{name}.npz", what=f"the table '{name}'"), arrays)


# -- airfoil ----------------------------------------------------------------------------------------------------------

COLUMNS = ("frequency", "angle", "length", "velocity", "thickness")
ROWS = 1503


class AirfoilDataModule(TableSource):
    """The 1,503 measurements of UCI's Airfoil Self-Noise: five numbers of a wing and its flow, and the sound in dB.

    The split is scikit-learn's `train_test_split(test_size=0.2, random_state=seed)`, as in published comparisons.
    Inputs and target are standardised by the training part; `target_mean` and `target_std` convert back to dB.

    Args:
        root: folder that holds `airfoil/airfoil.csv`, whose columns are frequency, angle, length, velocity, thickness
            and the target, with or without a header line.
        batch_size: data per batch.
        val_fraction: share of the training rows held back for validation, in [0, 1).
        shared: `drop_last`, `seed`, `order`, as in `ArrayDataModule`.

    Raises:
        ValueError: for an argument out of range; at setup, if the file holds something else.
        FileNotFoundError: at setup, if the file is not there.

    Source: Brooks et al. 1989, UCI Machine Learning Repository; the split of arXiv 2605.14146.
    """

    def __init__(
        self, root: str | Path = "data", batch_size: int = 200, val_fraction: float = 0.0, **shared: Any
    ) -> None:
        super().__init__(root, batch_size, val_fraction, **shared)

    def read(self) -> tuple[Tensor, Tensor]:
        path = find_file(self.root, "airfoil/airfoil.csv", "airfoil.csv", what="Airfoil")
        try:
            text = path.read_text(encoding="ascii").splitlines()
            rows = text[1:] if text and text[0].lower().startswith(COLUMNS[0]) else text
            table = np.loadtxt(rows, delimiter=",", ndmin=2)
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({one_line(error)}): replace it") from error
        if table.shape != (ROWS, len(COLUMNS) + 1) or not np.isfinite(table).all():
            raise ValueError(f"{path} should have {ROWS} rows of {len(COLUMNS) + 1} numbers, got {table.shape}")
        return torch.as_tensor(table[:, :-1]), torch.as_tensor(table[:, -1:])

    def divide(self, targets: Tensor) -> list[Tensor]:
        from sklearn.model_selection import train_test_split

        rest, test = train_test_split(range(ROWS), test_size=0.2, random_state=self.seed)
        return self._with_validation(torch.as_tensor(rest), torch.as_tensor(test))


# -- mushroom ---------------------------------------------------------------------------------------------------------

ATTRIBUTES = (
    *("cap-shape", "cap-surface", "cap-color", "bruises", "odor", "gill-attachment", "gill-spacing", "gill-size"),
    *("gill-color", "stalk-shape", "stalk-root", "stalk-surface-above-ring", "stalk-surface-below-ring"),
    *("stalk-color-above-ring", "stalk-color-below-ring", "veil-type", "veil-color", "ring-number", "ring-type"),
    *("spore-print-color", "population", "habitat"),
)
LARGEST_TABLE = 2**24
"""Largest size of the table as text, in bytes; the real one has 0.4 MB."""


class MushroomDataModule(TableSource):
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
        shared: `drop_last`, `seed` (of the split, which is stratified by class) and `order`, as in `ArrayDataModule`.

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
        **shared: Any,
    ) -> None:
        super().__init__(root, batch_size, val_fraction, test_fraction, **shared)
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
        rows = _mushrooms(path)
        columns, names = [], []
        for attribute, values in zip(ATTRIBUTES, list(zip(*rows, strict=True))[1:], strict=True):
            known = sorted(set(values))
            index = torch.tensor([known.index(value) for value in values])
            columns.append(torch.nn.functional.one_hot(index, len(known)))
            names += [f"{attribute}={value}" for value in known]
        self.feature_names = tuple(names)
        return torch.cat(columns, 1).float(), torch.tensor([row[0] == "e" for row in rows])

    def read(self) -> tuple[Tensor, Tensor]:
        inputs, edible = self.table()
        return inputs, edible.long()

    def scale(self, parts: list[Tensor]) -> tuple[list[Tensor], Scaling]:
        return parts, None


def _mushrooms(path: Path) -> list[list[str]]:
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


# -- covertype --------------------------------------------------------------------------------------------------------

NUMERIC = 10
INDICATORS = 44
COVER_TYPES = 7
LODGEPOLE_PINE = 2
"""The cover type of the two-class problem, the most frequent one (48.8 %)."""
FULL_BYTES = 581_012 * (NUMERIC + INDICATORS) * 8
"""Size of the full set's inputs in memory."""


class CovertypeDataModule(TableSource):
    """UCI Covertype: 10 numbers and 44 indicators of a patch of land, and which of 7 kinds of forest grows there.

    The numbers are standardised by the training part; the indicators stay 0 and 1. Targets are 1 for cover type 2
    (lodgepole pine) and 0 for the others, or the cover type less one.

    Args:
        root: folder that holds `covertype/covertype_subset.npz` (arrays `numeric` (n, 10) of integers, `binary` (n, 6)
            of bytes, the 44 indicators as packed bits, `y` (n,) of 1 to 7), or scikit-learn's files of the full set.
        full: all 581,012 rows, which scikit-learn downloads into `root` if they are missing.
        binary: cover type 2 against the others instead of 7 classes.
        batch_size: data per batch.
        val_fraction: share of the data for validation, in [0, 1).
        test_fraction: share of the data for testing, in [0, 1).
        standardise_indicators: standardise the indicators as well.
        intercept: prepend a column of ones to the inputs.
        shared: `drop_last`, `seed` (of the split, which is stratified by target) and `order`, as in `ArrayDataModule`.

    Raises:
        ValueError: for an argument out of range; at setup, if the file is damaged or holds something else.
        FileNotFoundError: if the data are not there and cannot be downloaded.

    Source: Blackard & Dean 1999, UCI Machine Learning Repository; copyright Jock A. Blackard and Colorado State
    University.
    """

    def __init__(
        self,
        root: str | Path = "data",
        full: bool = False,
        binary: bool = True,
        batch_size: int = 50,
        val_fraction: float = 0.0,
        test_fraction: float = 0.2,
        *,
        standardise_indicators: bool = False,
        intercept: bool = False,
        **shared: Any,
    ) -> None:
        super().__init__(root, batch_size, val_fraction, test_fraction, **shared)
        self.full = full
        self.binary = binary
        self.standardise_indicators = standardise_indicators
        self.intercept = intercept
        self.num_classes = 2 if binary else COVER_TYPES

    def prepare_data(self) -> None:
        """Download the full set with scikit-learn, if it is requested and missing."""
        if self.full:
            self._fetch(download=True)

    def read(self) -> tuple[Tensor, Tensor]:
        inputs, cover = self._fetch() if self.full else self._subset()
        return inputs, (cover == LODGEPOLE_PINE).long() if self.binary else cover - 1

    def scale(self, parts: list[Tensor]) -> tuple[list[Tensor], Scaling]:
        numbers, *scaling = standardise(*(part[:, :NUMERIC].contiguous() for part in parts))
        flags = [part[:, NUMERIC:].contiguous() for part in parts]
        of_flags = [torch.zeros(INDICATORS), torch.ones(INDICATORS)]
        if self.standardise_indicators:
            flags, *of_flags = standardise(*flags)
        mean, std = (torch.cat(pair) for pair in zip(scaling, of_flags, strict=True))
        return [torch.cat([n, f.float()], 1) for n, f in zip(numbers, flags, strict=True)], (mean, std)

    def _subset(self) -> tuple[Tensor, Tensor]:
        """Return the numbers and indicators, float64 (n, 54), and the cover types (n,) of the file."""
        path = find_file(
            self.root, "covertype/covertype_subset.npz", "covertype_subset.npz", what="the Covertype table"
        )
        numeric, packed, cover = read_arrays(path, ("numeric", "binary", "y"))
        count = len(cover) if cover.ndim else 0
        if numeric.shape != (count, NUMERIC) or numeric.dtype.kind not in "iu":
            raise ValueError(
                f"numeric in {path} should be integers of shape ({count}, {NUMERIC}), got {numeric.dtype} of shape "
                f"{numeric.shape}"
            )
        width = -(-INDICATORS // 8)
        if packed.shape != (count, width) or packed.dtype != np.uint8:
            raise ValueError(
                f"binary in {path} should be uint8 of shape ({count}, {width}), the {INDICATORS} indicators as packed "
                f"bits, got {packed.dtype} of shape {packed.shape}"
            )
        labels = to_labels(cover, count, 1, COVER_TYPES, f"the cover types y in {path}")
        indicators = np.unpackbits(packed, axis=1)[:, :INDICATORS]
        return torch.as_tensor(np.concatenate([numeric, indicators], 1).astype(np.float64)), labels

    def _fetch(self, download: bool = False) -> tuple[Tensor, Tensor]:
        """Return the same for the full set, from scikit-learn's files."""
        files = [self.root / "covertype" / name for name in ("samples_py3", "targets_py3")]
        if all(os.path.lexists(file) for file in files):
            try:
                # scikit-learn would unpickle them, which runs whatever a pickle asks for.
                inputs, targets = (read_dumped_array(file, FULL_BYTES) for file in files)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"scikit-learn's files in {self.root / 'covertype'} cannot be read ({one_line(error)}): remove them"
                ) from error
        else:
            inputs, targets = self._download(download)
        if inputs.ndim != 2 or inputs.shape[1] != NUMERIC + INDICATORS or inputs.dtype.kind not in "iuf":
            raise ValueError(
                f"the full set should be numbers of shape (n, {NUMERIC + INDICATORS}), got {inputs.dtype} of shape "
                f"{inputs.shape}: remove {files[0]}"
            )
        data = torch.as_tensor(np.asarray(inputs, np.float64))
        return data, to_labels(targets, len(data), 1, COVER_TYPES, "the cover types")

    def _download(self, download: bool) -> tuple[np.ndarray, np.ndarray]:
        from sklearn.datasets import fetch_covtype

        try:
            table = fetch_covtype(data_home=str(self.root), download_if_missing=download)
        except OSError as error:
            raise FileNotFoundError(
                f"the full Covertype set is not in {self.root / 'covertype'} and scikit-learn could not download it "
                f"({one_line(error)}): run sklearn.datasets.fetch_covtype(data_home=…) on a machine with a network "
                f"and copy its folder covertype into {self.root}, or set full=False"
            ) from error
        except Exception as error:
            raise ValueError(
                f"scikit-learn cannot read its files in {self.root / 'covertype'} ({one_line(error)}): remove them"
            ) from error
        return np.asarray(table.data), np.asarray(table.target)


# -- digits -----------------------------------------------------------------------------------------------------------


class DigitsDataModule(TableSource):
    """The 1,797 real handwritten digits (8×8 pixels, 10 classes) that scikit-learn ships; nothing is downloaded.

    Args:
        batch_size: data per batch.
        val_fraction: share of the data for validation, in [0, 1); 0 means no validation data.
        test_fraction: share of the data for testing, in [0, 1).
        flatten: inputs of shape (n, 64) instead of (n, 1, 8, 8).
        shared: `drop_last`, `seed` (of the split, which is stratified by class) and `order`, as in `ArrayDataModule`.

    Raises:
        ValueError: for an argument out of range.
    """

    num_classes = 10

    def __init__(
        self,
        batch_size: int = 100,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        *,
        flatten: bool = True,
        **shared: Any,
    ) -> None:
        super().__init__("", batch_size, val_fraction, test_fraction, **shared)
        self.flatten = flatten

    def read(self) -> tuple[Tensor, Tensor]:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = torch.tensor(bunch.images, dtype=torch.float32)
        return images.flatten(1) if self.flatten else images[:, None], torch.tensor(bunch.target, dtype=torch.int64)

    def scale(self, parts: list[Tensor]) -> tuple[list[Tensor], Scaling]:
        mean, std = parts[0].mean(), parts[0].std()  # pixels share a scale
        return [(part - mean) / std for part in parts], (mean, std)
