"""The augmentation that a GPU compiles, as a function of uniform numbers, against loops over the images."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_sgmcmc.datamodules.augmentation import Augmentation, _kept

COUNT, HEIGHT, WIDTH = 40, 9, 12


def normalise(images: Tensor) -> Tensor:
    return (images.float() / 255 - 0.3) / 0.2


@pytest.mark.parametrize(
    ("padding", "flip", "erasing"),
    [(0, False, 0.0), (2, False, 0.0), (2, True, 0.0), (0, True, 0.7), (2, True, 0.5), (0, False, 0.9)],
)
def test_it_is_crop_flip_normalise_erase(padding: int, flip: bool, erasing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(256, (60, 3, HEIGHT, WIDTH), dtype=torch.uint8, generator=generator)
    index = torch.randperm(60, generator=generator)[:COUNT]
    uniform = torch.rand(26, COUNT, generator=generator)
    augmentation = Augmentation(normalise, padding, flip, erasing)
    expected = []
    for image, number in zip(data[index], uniform.unbind(1), strict=True):
        top, left = ((2 * padding + 1) * number[:2]).long().tolist()
        window = pad(image, (padding,) * 4)[:, top : top + HEIGHT, left : left + WIDTH]
        expected.append(window.flip(2) if flip and number[2] < 0.5 else window)
    images = normalise(torch.stack(expected))
    if erasing:
        shapes = torch.stack([uniform[3:13].T, uniform[13:23].T])
        kept = _kept(images, shapes, uniform[23:, :, None], erasing)
        assert 0.3 * erasing < (~kept).flatten(1).any(1).float().mean() < min(1.0, 2 * erasing)
        images = images * kept
    found = augmentation.apply(data, index, uniform)
    assert torch.equal(found, images)
    assert torch.equal(copy.deepcopy(augmentation).apply(data, index, uniform), images)


def test_every_window_can_be_drawn() -> None:
    """The largest uniform number gives the last window, not one beyond it."""
    data = torch.arange(25).view(1, 1, 5, 5).expand(3, 1, 5, 5).to(torch.uint8)
    uniform = torch.rand(26, 3)
    uniform[:2] = torch.tensor([0.0, 0.5, 1 - 2**-24])
    found = Augmentation(lambda images: images.float(), padding=1).apply(data, torch.arange(3), uniform)
    assert found[0, 0, 1, 1] == 0
    assert torch.equal(found[1, 0], data[0, 0].float())
    assert found[2, 0, 3, 3] == 24
