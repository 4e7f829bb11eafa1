"""Published sets of small images: MNIST, Fashion-MNIST, CIFAR, SVHN and notMNIST."""

from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lightning_sgmcmc.checks import check_within
from lightning_sgmcmc.datamodules.base import Split, random_split
from lightning_sgmcmc.datamodules.files import find_file, one_line, read_arrays, to_images, to_labels
from lightning_sgmcmc.datamodules.images import ImageDataModule, Normalise

NAMES = ("x_train", "y_train", "x_test", "y_test")
MNIST_MEAN = 0.1307
MNIST_STD = 0.3081


class TorchvisionDataModule(ImageDataModule):
    """Base of the image sets that come from an `.npz` file, or by download from a class of `torchvision.datasets`.

    The arguments are those of `MNISTDataModule`.
    """

    dataset: str
    """The class in `torchvision.datasets`; in lower case, the name of folder and `.npz` file."""
    num_classes = 10
    train_size = 60_000
    """Number of images that torchvision's training part has."""
    image_shape = (1, 28, 28)

    def __init__(self, root: str | Path = "data", batch_size: int = 100, val_size: int = 5000, **shared: Any) -> None:
        super().__init__(batch_size, **shared)
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
        """Return one part's images and labels, unprocessed."""
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

    The arguments are those of `CIFAR10DataModule`.
    """

    train_size = 50_000
    image_shape = (3, 32, 32)
    flips = True
    """Whether a mirror image has the same class."""

    def __init__(
        self,
        root: str | Path = "data",
        batch_size: int = 128,
        val_size: int = 5000,
        *,
        augment: bool = False,
        random_erasing: float = 0.0,
        **shared: Any,
    ) -> None:
        super().__init__(root, batch_size, val_size, flatten=False, **shared)
        check_within("random_erasing", random_erasing, "[0, 1]")
        self.augment = augment
        self.random_erasing = random_erasing

    def train_transform(self) -> Callable[[Tensor], Tensor]:
        return self._augmented(self.augment, self.flips, self.random_erasing)


def _labels(dataset: Any) -> Any:
    return dataset.targets if hasattr(dataset, "targets") else dataset.labels


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


class MNISTDataModule(TorchvisionDataModule):
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, 28×28 pixels.

    Images are kept as bytes and normalised batch by batch, by the training part's mean and standard deviation.

    Args:
        root: folder that holds `mnist/mnist.npz` (arrays `x_train`, `y_train`, `x_test`, `y_test`; images as bytes,
            labels from 0), or torchvision's `MNIST/raw`; otherwise torchvision downloads it there.
        batch_size: data per batch.
        val_size: number of training images held back for validation, 0 to 59,999.
        shared: `drop_last`, `seed`, `flatten`, `device_resident`, `order`, as in `ImageDataModule`.

    Raises:
        ValueError: for an argument out of range; at setup, if the files are damaged or hold something else.
        FileNotFoundError: if the data are not there and cannot be downloaded.
    """

    dataset = "MNIST"


class FashionMNISTDataModule(TorchvisionDataModule):
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothes in 10 classes, 28×28 pixels.

    Arguments and exceptions are those of `MNISTDataModule`. In `root` it looks for `fashionmnist/fashionmnist.npz`,
    then for torchvision's `FashionMNIST/raw`.

    Source: Xiao, Rasul & Vollgraf 2017.
    """

    dataset = "FashionMNIST"


class CIFAR10DataModule(AugmentedDataModule):
    """CIFAR-10: 50,000 training and 10,000 test images in colour, 32×32 pixels, 10 classes.

    Images are normalised batch by batch, by the training part's mean and standard deviation of each channel. Training
    images are augmented again in every batch, with torch's default generator, on their device. N stays the number of
    training images: the samples are of the posterior of that many data, each of which represents its random variants.

    Args:
        root: folder that holds `cifar10/cifar10.npz` (arrays `x_train`, `y_train`, `x_test`, `y_test`; images as bytes,
            (n, 3, 32, 32) or (n, 32, 32, 3); labels from 0), or torchvision's `cifar-10-batches-py` or
            `cifar-10-python.tar.gz`; otherwise torchvision downloads it there.
        batch_size: data per batch.
        val_size: number of training images held back for validation, 0 to 49,999.
        augment: crop each training image out of itself with 4 black pixels around it, and mirror half of them
            if a mirror image has the same class.
        random_erasing: probability that a training image loses a rectangle of 2 to 40 % of its area, which is 0 after
            normalisation (Zhong et al. 2020).
        shared: `drop_last`, `seed`, `device_resident`, `order`, as in `ImageDataModule`.

    Raises:
        ValueError: for an argument out of range; at setup, if the files are damaged or hold something else.
        FileNotFoundError: if the data are not there and cannot be downloaded.

    Source: Krizhevsky 2009.
    """

    dataset = "CIFAR10"


class CIFAR100DataModule(AugmentedDataModule):
    """CIFAR-100: 50,000 training and 10,000 test images in colour, 32×32 pixels, 100 (fine) classes.

    Arguments and exceptions are those of `CIFAR10DataModule`. In `root` it looks for `cifar100/cifar100.npz`, then for
    torchvision's `cifar-100-python` or `cifar-100-python.tar.gz`.

    Source: Krizhevsky 2009.
    """

    dataset = "CIFAR100"
    num_classes = 100


class SVHNDataModule(AugmentedDataModule):
    """SVHN: 73,257 training and 26,032 test images of house numbers' digits in colour, 32×32 pixels, 10 classes.

    Arguments and exceptions are those of `CIFAR10DataModule`; `augment` crops and does not mirror. In `root` it looks
    for `svhn/svhn.npz`, then for torchvision's `train_32x32.mat` and `test_32x32.mat`. The digit 0 is class 0.

    Source: Netzer et al. 2011.
    """

    dataset = "SVHN"
    train_size = 73_257
    flips = False

    def _open(self, train: bool, download: bool) -> Any:
        from torchvision.datasets import SVHN

        return SVHN(str(self.root), split="train" if train else "test", download=download)

    def _wanted(self) -> str:
        from torchvision.datasets import SVHN

        first, second = (SVHN.split_list[part] for part in ("train", "test"))
        return f"{first[1]} and {second[1]} (from {first[0].rsplit('/', 1)[0]}) into {self.root}"


class NotMNISTDataModule(ImageDataModule):
    """notMNIST: 10,000 images of the letters A to J in many fonts, 28×28 pixels, 1,000 of each letter.

    By default all of them are test data, normalised as MNIST is: out-of-distribution data for a network trained on
    MNIST. With `test_size` the rest is for training. 196 of the images repeat others, so a few may be in two parts.

    Args:
        root: folder that holds `notmnist/notmnist_test.npz` (arrays `x`, `y`).
        batch_size: data per batch.
        test_size: number of test images; None means all of them.
        val_size: number of images for validation.
        mean: mean to normalise by, of pixels in [0, 1]; MNIST's by default. None means the training part's.
        std: the standard deviation likewise; None if and only if the mean is None.
        shared: `drop_last`, `seed`, `flatten`, `device_resident`, `order`, as in `ImageDataModule`.

    Raises:
        ValueError: for an argument out of range; at setup, if the file is damaged or holds something else.
        FileNotFoundError: at setup, if the file is not there.

    Source: Bulatov 2011.
    """

    num_classes = 10
    image_shape = (1, 28, 28)

    def __init__(
        self,
        root: str | Path = "data",
        batch_size: int = 100,
        test_size: int | None = None,
        val_size: int = 0,
        mean: float | None = MNIST_MEAN,
        std: float | None = MNIST_STD,
        **shared: Any,
    ) -> None:
        super().__init__(batch_size, **shared)
        for name, size in (("test_size", test_size), ("val_size", val_size)):
            if size is not None and size < 0:
                raise ValueError(f"{name} must not be negative, got {size}")
        if test_size is None and val_size > 0:
            raise ValueError(f"val_size={val_size} needs a test_size: without one, all images are test data")
        if (mean is None) != (std is None):
            raise ValueError(f"mean and std must both be numbers or both None, got mean={mean} and std={std}")
        if mean is None and test_size is None:
            raise ValueError("mean=None means the training part's statistics, which needs a test_size: give one")
        if std is not None and std <= 0:
            raise ValueError(f"std must be positive, got {std}")
        self.root = Path(root)
        self.test_size = test_size
        self.val_size = val_size
        self.mean = mean
        self.std = std

    @property
    def num_data(self) -> int:
        """N, the number of training data, after `setup`.

        Raises:
            ValueError: if there is no training part.
        """
        if self.test_size is None:
            raise ValueError("all images of notMNIST are test data: give a test_size to train on the rest")
        return super().num_data

    @property
    def normalises(self) -> bool:
        return self.mean is None

    def load(self) -> tuple[Split, Split, Split]:
        path = find_file(self.root, "notmnist/notmnist_test.npz", "notmnist_test.npz", what="notMNIST")
        x, y = read_arrays(path, ("x", "y"))
        images = to_images(x, self.image_shape, f"x in {path}")
        labels = to_labels(y, len(images), 0, 9, f"the labels y in {path}")
        count = len(labels)
        test_size = count if self.test_size is None else self.test_size
        if test_size + self.val_size >= count and self.test_size is not None:
            raise ValueError(
                f"test_size={test_size} and val_size={self.val_size} leave none of the {count} images for "
                "training: choose smaller sizes"
            )
        parts = random_split(count, (self.val_size / count, test_size / count), self.seed, check=False)
        if self.mean is None or self.std is None:
            self._normalise_by(images[parts[0]])
        else:
            self._normalise = Normalise(self.mean, self.std)
        first, second, third = (self._split(images[part], labels[part]) for part in parts)
        return first, second, third
