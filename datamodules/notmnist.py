"""notMNIST: letters in the format of MNIST's digits."""

from pathlib import Path

from lightning_sgmcmc.batches.orders import BatchOrder, MakeOrder
from lightning_sgmcmc.datamodules.arrays import read_arrays, to_images, to_labels
from lightning_sgmcmc.datamodules.base import Split, find_file, random_split
from lightning_sgmcmc.datamodules.images import ImageDataModule, Normalise, Resident

MNIST_MEAN = 0.1307
MNIST_STD = 0.3081


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
        seed: seed of the split.
        flatten: inputs of shape (n, 784) instead of (n, 1, 28, 28).
        drop_last: leave out the last batch of an epoch if it is smaller.
        device_resident: keep the images on the trainer's device; "auto" does on CUDA if they are small there.
        order: makes the order of the training data, such as `CyclicOrder` (see `ResumableLoader`).

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
        seed: int = 0,
        flatten: bool = False,
        drop_last: bool = False,
        device_resident: Resident = "auto",
        order: MakeOrder = BatchOrder,
    ) -> None:
        super().__init__(batch_size, drop_last, seed, flatten, device_resident, order=order)
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
