"""Images that stand for CIFAR where a recipe should take minutes: random patterns, shifted, under noise."""

import torch
from torch import Tensor

from lightning_sgmcmc.datamodules import ArrayDataModule, Split
from lightning_sgmcmc.datamodules.augmentation import Augmentation

SIDE = 16
COARSE = 4
SHIFT = 4


class SyntheticImages(ArrayDataModule):
    """Images (3, 16, 16) of K classes: a smooth random pattern for each, moved by up to 4 pixels, and white noise.

    With `unknown` the patterns are K others, of the same kind: images of classes that no network was trained on.

    Args:
        batch_size: images in a batch.
        seed: of patterns and images.
        strength: the patterns' standard deviation; the noise's is 1.
        num_classes: K.
        sizes: training, validation and test images.
        unknown: draw other patterns.
        augment: crop each training image out of itself with 2 pixels around it, and erase a rectangle of half of them.
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
        return Augmentation(_as_they_are, padding=2, erasing=0.5) if self.augment else None

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


def _as_they_are(images: Tensor) -> Tensor:
    return images
