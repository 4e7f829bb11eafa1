"""Image sets that torchvision knows how to download."""

from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lightning_sgmcmc.batches.orders import BatchOrder, MakeOrder
from lightning_sgmcmc.datamodules.arrays import one_line, read_arrays, to_images, to_labels
from lightning_sgmcmc.datamodules.augmentation import Augmentation, check_probability
from lightning_sgmcmc.datamodules.base import Split, random_split
from lightning_sgmcmc.datamodules.images import ImageDataModule, Resident

NAMES = ("x_train", "y_train", "x_test", "y_test")


class TorchvisionDataModule(ImageDataModule):
    """Base of the image sets that come from an `.npz` file, or by download from a class of `torchvision.datasets`.

    Images are kept as bytes and normalised batch by batch, by each channel's mean and standard deviation over the
    training part.

    Args:
        root: folder that holds `<name>/<name>.npz` (arrays `x_train`, `y_train`, `x_test`, `y_test`; images as bytes,
            labels from 0), or torchvision's files; otherwise torchvision downloads them there.
        batch_size: data per batch.
        val_size: number of training images held back for validation, 0 to the number of training images less one.
        seed: seed of the validation images.
        flatten: inputs of shape (n, C·H·W) instead of (n, C, H, W).
        drop_last: leave out the last batch of an epoch if it is smaller.
        device_resident: keep the images on the trainer's device; "auto" does on CUDA if they are small there.
        order: makes the order of the training data, such as `CyclicOrder` (see `ResumableLoader`).

    Raises:
        ValueError: for an argument out of range; at setup, if the files are damaged or hold something else.
        FileNotFoundError: if the data are not there and cannot be downloaded.
    """

    dataset: str
    """The class in `torchvision.datasets`; in lower case, the name of folder and `.npz` file."""
    train_size: int
    """Number of images that torchvision's training part has."""

    def __init__(
        self,
        root: str | Path = "data",
        batch_size: int = 100,
        val_size: int = 5000,
        seed: int = 0,
        flatten: bool = False,
        drop_last: bool = False,
        device_resident: Resident = "auto",
        order: MakeOrder = BatchOrder,
    ) -> None:
        super().__init__(batch_size, drop_last, seed, flatten, device_resident, order=order)
        if not 0 <= val_size < self.train_size:
            raise ValueError(f"val_size must be between 0 and {self.train_size - 1}, got {val_size}")
        self.root = Path(root)
        self.val_size = val_size

    @property
    def _file(self) -> Path:
        name = self.dataset.lower()
        return self.root / name / f"{name}.npz"

    def prepare_data(self) -> None:
        """Download the data with torchvision, if they are missing."""
        if not self._file.is_file():
            for train in (True, False):
                self._from_torchvision(train, download=True)

    def load(self) -> tuple[Split, Split, Split]:
        x_train, y_train, x_test, y_test = self._read()
        if self.val_size >= len(y_train):
            raise ValueError(
                f"val_size={self.val_size} leaves none of the {len(y_train)} training images: choose a smaller one"
            )
        train, val = random_split(len(y_train), (self.val_size / len(y_train),), self.seed)
        training = x_train[train]
        self._normalise_by(training)
        return (
            self._split(training, y_train[train]),
            self._split(x_train[val], y_train[val]),
            self._split(x_test, y_test),
        )

    def _read(self) -> tuple[Tensor, ...]:
        if self._file.is_file():
            origin = str(self._file)
            arrays = read_arrays(self._file, NAMES)
        else:
            origin = f"torchvision.datasets.{self.dataset}({str(self.root)!r})"
            arrays = [*self._from_torchvision(train=True), *self._from_torchvision(train=False)]
        parts: list[Tensor] = []
        for inputs, labels, (x, y) in zip(arrays[::2], arrays[1::2], (NAMES[:2], NAMES[2:]), strict=True):
            images = to_images(inputs, self.image_shape, f"{x} in {origin}")
            last = (self.num_classes or 0) - 1
            parts += [images, to_labels(labels, len(images), 0, last, f"the labels {y} in {origin}")]
        return tuple(parts)

    def _from_torchvision(self, train: bool, download: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return one part's images and labels, unprocessed.

        Raises:
            FileNotFoundError: naming the files and their places, if they are missing and were not downloaded.
            ImportError: if torchvision lacks a package that reads them.
            ValueError: if the files are damaged.
        """
        where = f"torchvision.datasets.{self.dataset}"
        try:
            dataset = self._open(train, download)
            return np.asarray(dataset.data), np.asarray(_labels(dataset))
        except ImportError as error:
            raise ImportError(
                f"{where} needs the package {error.name}: install it, or put the data at {self._file}"
            ) from error
        except (RuntimeError, OSError, HTTPException) as error:
            reason = f"could not download it ({one_line(error)})" if download else "has not downloaded it"
            raise FileNotFoundError(
                f"{self.dataset} is not at {self._file} and {where} {reason}: put {self._wanted()}, or put "
                f"{self._file.name} with the arrays {', '.join(NAMES)} at the former path"
            ) from error
        except Exception as error:
            raise ValueError(
                f"the files of {where} in {self.root} are damaged ({one_line(error)}): remove them, and put "
                f"{self._wanted()}"
            ) from error

    def _open(self, train: bool, download: bool) -> Any:
        from torchvision import datasets

        return getattr(datasets, self.dataset)(str(self.root), train=train, download=download)

    def _wanted(self) -> str:
        """Return the files that torchvision expects and their folder, as 'a and b into folder'."""
        from torchvision import datasets

        known = getattr(datasets, self.dataset)
        if hasattr(known, "resources"):  # MNIST and Fashion-MNIST
            return f"{_listed([name for name, _ in known.resources])} into {self.root / self.dataset / 'raw'}"
        return f"{known.filename} (from {known.url}) into {self.root}"


class AugmentedDataModule(TorchvisionDataModule):
    """Base of the image sets in colour, whose training images can be augmented; other images never are.

    Images are augmented again in every batch, with torch's default generator, on their device. N stays the number of
    training images: the samples are of the posterior of that many data, each of which represents its random variants.

    Args:
        root: folder that holds `<name>/<name>.npz` (arrays `x_train`, `y_train`, `x_test`, `y_test`; images as bytes,
            (n, 3, 32, 32) or (n, 32, 32, 3); labels from 0), or torchvision's files; otherwise torchvision
            downloads them there.
        batch_size: data per batch.
        val_size: number of training images held back for validation, 0 to the number of training images less one.
        seed: seed of the validation images.
        augment: crop each training image out of itself with 4 black pixels around it, and mirror half of them
            if a mirror image has the same class.
        random_erasing: probability that a training image loses a rectangle of 2 to 40 % of its area, which is 0 after
            normalisation (Zhong et al. 2020).
        drop_last: leave out the last batch of an epoch if it is smaller.
        device_resident: keep the images on the trainer's device; "auto" does on CUDA if they are small there.
        order: makes the order of the training data, such as `CyclicOrder` (see `ResumableLoader`).

    Raises:
        ValueError: for an argument out of range; at setup, if the files are damaged or hold something else.
        FileNotFoundError: if the data are not there and cannot be downloaded.
    """

    image_shape = (3, 32, 32)
    padding = 4
    flips: bool
    """Whether a mirror image has the same class."""

    def __init__(
        self,
        root: str | Path = "data",
        batch_size: int = 128,
        val_size: int = 5000,
        seed: int = 0,
        augment: bool = False,
        random_erasing: float = 0.0,
        drop_last: bool = False,
        device_resident: Resident = "auto",
        order: MakeOrder = BatchOrder,
    ) -> None:
        super().__init__(root, batch_size, val_size, seed, False, drop_last, device_resident, order=order)
        check_probability("random_erasing", random_erasing)
        self.augment = augment
        self.random_erasing = random_erasing

    def train_transform(self) -> Callable[[Tensor], Tensor]:
        padding, flips = (self.padding, self.flips) if self.augment else (0, False)
        return Augmentation(self.transform(), padding, flips, self.random_erasing)


def _labels(dataset: Any) -> Any:
    return dataset.targets if hasattr(dataset, "targets") else dataset.labels


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
