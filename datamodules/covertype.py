"""UCI Covertype: the forest on a patch of land, from maps."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.batches.orders import BatchOrder, MakeOrder
from lightning_sgmcmc.datamodules.arrays import one_line, read_arrays, to_labels
from lightning_sgmcmc.datamodules.base import (
    ArrayDataModule,
    Split,
    check_fractions,
    find_file,
    random_split,
    standardise,
    with_intercept,
)
from lightning_sgmcmc.datamodules.pickled import read_dumped_array

NUMERIC = 10
INDICATORS = 44
COVER_TYPES = 7
LODGEPOLE_PINE = 2
"""The cover type of the two-class problem, the most frequent one (48.8 %)."""
FULL_BYTES = 581_012 * (NUMERIC + INDICATORS) * 8
"""Size of the full set's inputs in memory."""


class CovertypeDataModule(ArrayDataModule):
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
        seed: seed of the split, which is stratified by target.
        standardise_indicators: standardise the indicators as well.
        intercept: prepend a column of ones to the inputs.
        drop_last: leave out the last batch of an epoch if it is smaller.
        order: makes the order of the training data, such as `CyclicOrder` (see `ResumableLoader`).

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
        seed: int = 0,
        standardise_indicators: bool = False,
        intercept: bool = False,
        drop_last: bool = False,
        order: MakeOrder = BatchOrder,
    ) -> None:
        super().__init__(batch_size, drop_last, seed, order=order)
        check_fractions(val_fraction, test_fraction)
        self.root = Path(root)
        self.full = full
        self.binary = binary
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.standardise_indicators = standardise_indicators
        self.intercept = intercept
        self.num_classes = 2 if binary else COVER_TYPES

    def prepare_data(self) -> None:
        """Download the full set with scikit-learn, if it is requested and missing."""
        if self.full:
            self._fetch(download=True)

    def load(self) -> tuple[Split, Split, Split]:
        numeric, indicators, cover = self._fetch() if self.full else self._read()
        labels = (cover == LODGEPOLE_PINE).long() if self.binary else cover - 1
        parts = random_split(len(labels), (self.val_fraction, self.test_fraction), self.seed, labels)
        numbers, *scaling = standardise(*(numeric[part].double() for part in parts))
        flags = [indicators[part].float() for part in parts]
        of_flags = [torch.zeros(INDICATORS), torch.ones(INDICATORS)]
        if self.standardise_indicators:
            flags, *of_flags = standardise(*(flag.double() for flag in flags))
        inputs = [torch.cat(pair, 1) for pair in zip(numbers, flags, strict=True)]
        mean, std = (torch.cat(pair) for pair in zip(scaling, of_flags, strict=True))
        self.input_scaling = (mean, std)
        if self.intercept:
            inputs, self.input_scaling = with_intercept(inputs, self.input_scaling)
        first, second, third = (Split(i, labels[part]) for i, part in zip(inputs, parts, strict=True))
        return first, second, third

    def _read(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the numbers (n, 10), the indicators (n, 44) and the cover types (n,) of the file."""
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
        return torch.as_tensor(numeric.astype(np.int64)), torch.as_tensor(indicators), labels

    def _fetch(self, download: bool = False) -> tuple[Tensor, Tensor, Tensor]:
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
        return data[:, :NUMERIC], data[:, NUMERIC:], to_labels(targets, len(data), 1, COVER_TYPES, "the cover types")

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
