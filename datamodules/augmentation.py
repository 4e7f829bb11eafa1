"""Augmentation of whole batches of images, without a loop over the images and without waiting for the device.

Each function draws independently for each image, from the default generator of the images' device. On a GPU all random
numbers of a batch are one draw, and the augmentation is one compiled function of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_sgmcmc.compiling import compiled_if_possible

ERASED_AREA = (0.02, 0.4)
"""Least and largest share of an image that is erased."""
ERASED_ASPECT = (0.3, 1 / 0.3)
"""Of the erased rectangle's height to its width."""
ATTEMPTS = 10


def random_crop(images: Tensor, padding: int) -> Tensor:
    """Pad images (n, C, H, W) with pixels of 0, and return a random window of the original size of each."""
    count, _, height, width = images.shape
    top, left = torch.randint(2 * padding + 1, (2, count), device=images.device)
    windows = pad(images, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(count, device=images.device), :, top, left]


def random_flip(images: Tensor) -> Tensor:
    """Return each image of (n, C, H, W), or its mirror image (left to right) with probability 1/2."""
    count = len(images)
    flipped = torch.rand(count, device=images.device) < 0.5
    both = torch.cat([images, images.flip(3)])  # indexing whole images is several times faster than torch.where
    return both.index_select(0, torch.arange(count, device=images.device) + count * flipped)


def random_erase(images: Tensor, probability: float) -> Tensor:
    """Return the images (n, C, H, W), each with one random rectangle set to 0, with the given probability.

    Its share and aspect are drawn until it is smaller than the image in both directions; after ten failed attempts
    (fewer than one image in a million) the image is left unchanged.

    Source: Zhong et al. 2020, Random erasing data augmentation, algorithm 1.
    """
    count = len(images)
    shapes = torch.rand(2, count, ATTEMPTS, device=images.device)
    places = torch.rand(3, count, 1, device=images.device)
    return images * _kept(images, shapes, places, probability)


def _kept(images: Tensor, shapes: Tensor, places: Tensor, probability: float) -> Tensor:
    """Return which pixels of (n, C, H, W) `random_erase` keeps, shape (n, 1, H, W).

    Args:
        shapes: uniform numbers for area and aspect of each attempt, shape (2, n, attempts).
        places: uniform numbers that choose the image and the rectangle's position, shape (3, n, 1).
    """
    height, width = images.shape[2:]
    share, ratio = shapes
    pixels = (ERASED_AREA[0] + (ERASED_AREA[1] - ERASED_AREA[0]) * share) * (height * width)
    ratio = ERASED_ASPECT[0] + (ERASED_ASPECT[1] - ERASED_ASPECT[0]) * ratio
    heights, widths = (pixels * ratio).sqrt().round(), (pixels / ratio).sqrt().round()
    fits = (heights < height) & (widths < width)
    first = fits.byte().argmax(1, keepdim=True)
    chosen, down, right = places
    erased = (chosen < probability) & fits.gather(1, first)
    rows = _span(heights.gather(1, first), down, height)
    columns = _span(widths.gather(1, first), right, width)
    return ~((erased & rows)[:, None, :, None] & columns[:, None, None, :])


def _span(length: Tensor, place: Tensor, size: int) -> Tensor:
    """Return which of `size` pixels lie in a span of this length; `length` and `place` in [0, 1) are (n, 1)."""
    free = size - length
    start = torch.minimum((place * (free + 1)).floor(), free)
    pixel = torch.arange(size, device=length.device)
    return (pixel >= start) & (pixel < start + length)


class Augmentation:
    """Transforms a training batch of bytes: crop, flip, normalise, erase, each where it is asked for.

    The crop sees black (0) around an image; erased pixels are 0 after normalisation, the training part's mean.
    """

    def __init__(
        self, normalise: Callable[[Tensor], Tensor], padding: int = 0, flip: bool = False, erasing: float = 0.0
    ) -> None:
        self.normalise = normalise
        self.padding = padding
        self.flip = flip
        self.erasing = erasing
        self.compiles = True
        """Whether it is compiled on a GPU."""
        self._compiled: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    @property
    def augments(self) -> bool:
        """Whether two passes differ; without crop, flip and erasing it normalises alone."""
        return bool(self.padding or self.flip or self.erasing)

    def __call__(self, images: Tensor) -> Tensor:
        if images.device.type == "cuda":
            return self.of_rows(images, torch.arange(len(images), device=images.device))
        if self.padding:
            images = random_crop(images, self.padding)
        if self.flip:
            images = random_flip(images)
        images = self.normalise(images)
        return random_erase(images, self.erasing) if self.erasing else images

    def of_rows(self, images: Tensor, index: Tensor) -> Tensor:
        """Return the augmented images with the indices (n,), of all images (N, C, H, W)."""
        if images.device.type != "cuda":
            return self(images[index])
        if self._compiled is None:
            name, remedy = "the augmentation", "device_resident=False"
            self._compiled = compiled_if_possible(name, self.apply, remedy) if self.compiles else self.apply
        return self._compiled(images, index, torch.rand(3 + 2 * ATTEMPTS + 3, len(index), device=images.device))

    def apply(self, images: Tensor, index: Tensor, uniform: Tensor) -> Tensor:
        """Return the augmented images with the indices (n,), of all (N, C, H, W), as a function of uniform numbers.

        Args:
            uniform: in [0, 1), shape (26, n): the window's row and column, the flip, area and aspect of ten attempts at
                a rectangle, whether it is erased, its row and its column.
        """
        count, (channels, height, width) = len(index), images.shape[1:]
        row, column = (torch.arange(size, device=images.device)[None] for size in (height, width))
        if self.flip:
            column = torch.where(uniform[2, :, None] < 0.5, width - 1 - column, column)
        if self.padding:
            top, left = ((2 * self.padding + 1) * uniform[:2, :, None]).long()
            row, column = row + top - self.padding, column + left - self.padding
        if self.padding or self.flip:
            inside = ((row >= 0) & (row < height))[:, :, None] & ((column >= 0) & (column < width))[:, None]
            row, column = row.clamp(0, height - 1)[:, None, :, None], column.clamp(0, width - 1)[:, None, None]
            channel = torch.arange(channels, device=images.device)[None, :, None, None]
            images = images[index[:, None, None, None], channel, row, column] * inside[:, None]
        else:
            images = images[index]
        images = self.normalise(images)
        if self.erasing:
            shapes = uniform[3 : 3 + 2 * ATTEMPTS].view(2, ATTEMPTS, count).transpose(1, 2)
            images = images * _kept(images, shapes, uniform[-3:, :, None], self.erasing)
        return images

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_compiled": None}  # compiled functions cannot be copied
