"""MNIST."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.datamodules.base import ArrayDataModule, Split, random_split


class MNISTDataModule(ArrayDataModule):
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, 28×28 pixels.

    Images are kept as bytes and normalised batch by batch, by the training part's mean and standard deviation.

    Args:
        root: folder that holds `mnist/mnist.npz` (arrays `x_train`, `y_train`, `x_test`, `y_test`), or torchvision's
            `MNIST/raw`; with neither, torchvision downloads it there.
        batch_size: data in a batch.
        val_size: number of training images held back for validation, 0 to 59,999.
        seed: seed of the validation images.
        flatten: inputs of shape (n, 784) in place of (n, 1, 28, 28).
        drop_last: leave out the last batch of an epoch where it is short.

    Raises:
        ValueError: for an argument out of range.
        FileNotFoundError: if the data are not there and cannot be downloaded.
    """

    num_classes = 10
    train_size = 60_000

    def __init__(
        self,
        root: str | Path = "data",
        batch_size: int = 100,
        val_size: int = 5000,
        seed: int = 0,
        flatten: bool = False,
        drop_last: bool = False,
    ) -> None:
        super().__init__(batch_size, drop_last, seed)
        if not 0 <= val_size < self.train_size:
            raise ValueError(f"val_size must be between 0 and {self.train_size - 1}, got {val_size}")
        self.root = Path(root)
        self.val_size = val_size
        self.flatten = flatten
        self._pixel_mean = 0.0
        self._pixel_std = 1.0

    @property
    def _file(self) -> Path:
        return self.root / "mnist" / "mnist.npz"

    def prepare_data(self) -> None:
        """Download the data with torchvision, if they are not there."""
        if self._file.is_file():
            return
        from torchvision.datasets import MNIST

        try:
            MNIST(str(self.root), download=True)
        except (RuntimeError, OSError) as error:
            raise FileNotFoundError(
                f"MNIST is not at {self._file} and could not be downloaded ({error}): put the file mnist.npz there"
            ) from error

    def load(self) -> tuple[Split, Split, Split]:
        x_train, y_train, x_test, y_test = self._read()
        train, val = random_split(len(y_train), (self.val_size / len(y_train),), self.seed)
        pixels = x_train[train].double() / 255
        self._pixel_mean, self._pixel_std = float(pixels.mean()), float(pixels.std())
        return (
            Split(self._shaped(x_train[train]), y_train[train]),
            Split(self._shaped(x_train[val]), y_train[val]),
            Split(self._shaped(x_test), y_test),
        )

    def _read(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self._file.is_file():
            with np.load(self._file, allow_pickle=False) as arrays:
                names = ("x_train", "y_train", "x_test", "y_test")
                x_train, y_train, x_test, y_test = (torch.as_tensor(arrays[name]) for name in names)
        else:
            from torchvision.datasets import MNIST

            train, test = (MNIST(str(self.root), train=part) for part in (True, False))
            x_train, y_train, x_test, y_test = train.data, train.targets, test.data, test.targets
        return x_train, y_train.long(), x_test, y_test.long()

    def _shaped(self, images: Tensor) -> Tensor:
        return images.flatten(1) if self.flatten else images[:, None]

    def transform(self) -> "Normalise":
        return Normalise(self._pixel_mean, self._pixel_std)


class Normalise:
    """Turns bytes into floats: (x/255 - mean)/std.

    Args:
        mean, std: of the pixels in [0, 1].
    """

    def __init__(self, mean: float, std: float) -> None:
        self.mean = mean
        self.std = std

    def __call__(self, images: Tensor) -> Tensor:
        return images.float().sub_(255 * self.mean).div_(255 * self.std)
