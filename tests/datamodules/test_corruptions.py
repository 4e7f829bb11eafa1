"""Corrupted test images: what each corruption does, that it is reproducible, and that nothing else changes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_sgmcmc.datamodules import (
    CorruptedDataModule,
    DatasetDataModule,
    DigitsDataModule,
    ImageDataModule,
    Split,
)
from lightning_sgmcmc.datamodules.corruptions import CORRUPTIONS, corrupted, pixelate


def images() -> Tensor:
    """Return 100 smooth images in [0.2, 0.8]."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(100, 3, 6, 6, generator=generator)
    return 0.2 + 0.6 * torch.nn.functional.interpolate(coarse, (32, 32), mode="bilinear")


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_grows_with_its_severity_and_depends_on_its_arguments_alone(name: str) -> None:
    x = images()
    distances = [float((corrupted(x, name, severity) - x).square().mean()) for severity in range(6)]
    if name != "pixelate":  # whose sizes do not divide the image's
        assert distances == sorted(distances)
    assert distances[0] == 0 < distances[1]
    found = corrupted(x, name, 3)
    torch.manual_seed(5)
    assert torch.equal(found, corrupted(x, name, 3))
    assert found.shape == x.shape
    assert 0 <= float(found.min()) <= float(found.max()) <= 1


def test_the_noises_have_their_variances() -> None:
    """Of 307,200 numbers, with a relative error of 0.3 to 0.8 %: within 3 to 5 %, which no seed misses."""
    x = images()
    noise = corrupted(x, "gaussian_noise", 1) - x
    assert float(noise.std()) == pytest.approx(0.04, rel=0.03)
    shots = corrupted(x, "shot_noise", 1) - x
    assert float((shots.square() / x).mean()) == pytest.approx(1 / 500, rel=0.03)
    changed = corrupted(x, "impulse_noise", 5)
    assert float((changed != x).double().mean()) == pytest.approx(0.07, rel=0.05)
    assert float((changed == 1).double().mean()) == pytest.approx(0.035, rel=0.05)


def test_the_others_follow_their_formulas() -> None:
    x = images()
    mean = x.mean((2, 3), keepdim=True)
    torch.testing.assert_close(corrupted(x, "contrast", 5), mean + 0.15 * (x - mean))
    brighter = corrupted(x, "brightness", 2)
    torch.testing.assert_close(brighter.amax(1), (x.amax(1) + 0.1).clamp(max=1))
    torch.testing.assert_close(brighter[:, 0] * x[:, 1], brighter[:, 1] * x[:, 0])  # the hue is kept
    halves = x.unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2)).repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(pixelate(x, 0.5, torch.Generator()), halves)
    flat = torch.full((2, 3, 16, 16), 0.4)
    for name in ("gaussian_blur", "pixelate", "contrast"):
        torch.testing.assert_close(corrupted(flat, name, 5), flat)
    spike = torch.zeros(1, 1, 15, 15)
    spike[0, 0, 7, 7] = 1
    blurred = corrupted(spike, "gaussian_blur", 5)[0, 0]
    places = torch.arange(15.0) - 7
    assert float((blurred.sum(0) * places.square()).sum()) == pytest.approx(1.0, rel=0.01), "its variance in pixels"
    assert float(blurred.sum()) == pytest.approx(1.0)


class Bytes(ImageDataModule):
    """Forty colour images as bytes."""

    def load(self) -> tuple[Split, Split, Split]:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8, generator=generator)
        self._normalise_by(pixels[:20])
        y = torch.arange(40) % 3
        return Split(pixels[:20], y[:20]), Split(pixels[20:30], y[20:30]), Split(pixels[30:], y[30:])

    image_shape = (3, 8, 8)


def test_only_the_test_images_of_a_datamodule_change() -> None:
    makers: list[Any] = [
        (lambda: Bytes(batch_size=7), None),
        (lambda: DigitsDataModule(batch_size=50), (1, 8, 8)),
    ]
    for make, shape in makers:
        base = make()
        same, changed = (CorruptedDataModule(make(), "gaussian_noise", s, image_shape=shape) for s in (0, 5))
        for data in (base, same, changed):
            data.setup("fit")
        clean, equal, noisy = (torch.cat([x for x, _ in data.test_dataloader()]) for data in (base, same, changed))
        torch.testing.assert_close(equal, clean, rtol=0, atol=1e-4)
        assert float((noisy - clean).abs().mean()) > 0.01
        assert changed.num_data == base.num_data
        assert torch.equal(next(iter(changed.val_dataloader()))[0], next(iter(base.val_dataloader()))[0])
        labels = torch.cat([y for _, y in changed.test_dataloader()])
        np.testing.assert_array_equal(labels, torch.cat([y for _, y in base.test_dataloader()]))


def test_what_cannot_be_corrupted_is_refused() -> None:
    with pytest.raises(ValueError, match="corruption must be"):
        CorruptedDataModule(Bytes(batch_size=7), "snow")
    with pytest.raises(ValueError, match="severity must be 0 to 5, got 6"):
        CorruptedDataModule(Bytes(batch_size=7), "contrast", 6)
    flat = CorruptedDataModule(DigitsDataModule(), "contrast")
    flat.setup("test")
    with pytest.raises(ValueError, match="image_shape"):
        flat.test_dataloader()
    with pytest.raises(TypeError, match="ArrayDataModule"):
        CorruptedDataModule(DatasetDataModule(torch.utils.data.TensorDataset(torch.zeros(3, 1))), "contrast")  # type: ignore[arg-type]
