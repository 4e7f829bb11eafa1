"""scikit-learn's handwritten digits."""

import torch

from lightning_sgmcmc.batches.orders import BatchOrder, MakeOrder
from lightning_sgmcmc.datamodules.base import ArrayDataModule, Split, check_fractions, random_split


class DigitsDataModule(ArrayDataModule):
    """The 1,797 real handwritten digits (8×8 pixels, 10 classes) that scikit-learn ships; nothing is downloaded.

    Args:
        batch_size: data per batch.
        val_fraction: share of the data for validation, in [0, 1); 0 means no validation data.
        test_fraction: share of the data for testing, in [0, 1).
        seed: seed of the split, which is stratified by class.
        flatten: inputs of shape (n, 64) instead of (n, 1, 8, 8).
        drop_last: leave out the last batch of an epoch if it is smaller.
        order: makes the order of the training data, such as `CyclicOrder` (see `ResumableLoader`).

    Raises:
        ValueError: for an argument out of range.
    """

    num_classes = 10

    def __init__(
        self,
        batch_size: int = 100,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        seed: int = 0,
        flatten: bool = True,
        drop_last: bool = False,
        order: MakeOrder = BatchOrder,
    ) -> None:
        super().__init__(batch_size, drop_last, seed, order=order)
        check_fractions(val_fraction, test_fraction)
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.flatten = flatten

    def load(self) -> tuple[Split, Split, Split]:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = torch.tensor(bunch.images, dtype=torch.float32)
        labels = torch.tensor(bunch.target, dtype=torch.int64)
        train, val, test = random_split(len(labels), (self.val_fraction, self.test_fraction), self.seed, labels)
        mean, std = images[train].mean(), images[train].std()  # pixels share a scale
        images = (images - mean) / std
        self.input_scaling = (mean, std)
        images = images.flatten(1) if self.flatten else images[:, None]
        first, second, third = (Split(images[part], labels[part]) for part in (train, val, test))
        return first, second, third
