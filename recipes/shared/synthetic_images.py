"""Synthetic images instead of CIFAR for quick recipes: random patterns, shifted, with noise."""

import torch
from torch import Tensor

from lightning_sgmcmc.datamodules import ArrayDataModule, Split
from lightning_sgmcmc.datamodules.augmentation import Augmentation

SIDE = 16
COARSE = 4
SHIFT = 4


class SyntheticImages(ArrayDataModule):
    """Images (3, 16, 16) of K classes: a smooth random pattern by class, shifted by up to 4 pixels, plus white noise.

    With `unknown` there are K other patterns of the same kind: images of classes unknown to the network.

    Args:
        batch_size: images per batch.
        seed: seed of patterns and images.
        strength: the patterns' standard deviation; the noise's is 1.
        num_classes: K.
        sizes: training, validation and test images.
        unknown: use the other patterns.
        augment: crop each training image after padding it with 2 pixels, and erase a rectangle in half of them.
    """

    num_classes: int

    def __init__(
        self,
        batch_size: int,
        seed: int,
        strength: float = 0.25,
        num_classes: int = 10,
        sizes: tuple[int, int, int] = (1000, 0, 2000),
        unknown: bool = False,
        augment: bool = False,
    ) -> None:
        super().__init__(batch_size, seed=seed)
        self.strength = strength
        self.num_classes = num_classes
        self.sizes = sizes
        self.unknown = unknown
        self.augment = augment

    def train_transform(self) -> Augmentation | None:
        return Augmentation(_unchanged, padding=2, erasing=0.5) if self.augment else None

    def load(self) -> tuple[Split, Split, Split]:
        generator = torch.Generator().manual_seed(self.seed)
        coarse = torch.randn(2, self.num_classes, 3, COARSE, COARSE, generator=generator)[int(self.unknown)]
        patterns = torch.nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bicubic", align_corners=False)
        patterns = self.strength * patterns / patterns.std((1, 2, 3), keepdim=True)
        first, second, third = (self._draw(patterns, count, generator) for count in self.sizes)
        return first, second, third

    def _draw(self, patterns: Tensor, count: int, generator: torch.Generator) -> Split:
        labels = torch.randint(self.num_classes, (count,), generator=generator)
        down, right = torch.randint(-SHIFT, SHIFT + 1, (2, count, 1), generator=generator)
        places = torch.arange(SIDE)
        rows, columns = (places + down) % SIDE, (places + right) % SIDE
        moved = patterns[labels[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        return Split(moved + torch.randn(count, 3, SIDE, SIDE, generator=generator), labels)


def _unchanged(images: Tensor) -> Tensor:
    return images
