"""Images of every depth and mode keep their values: half the pixels 51, half 178 of 255."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sgmcmc.datamodules import ImageFolderDataModule

Image: Any = pytest.importorskip("PIL.Image")

GREY = np.repeat([51, 178], 8).reshape(2, 8).repeat(4, 0)
"""The upper half is 51, the lower 178, shape (8, 8)."""


def coloured(mode: str) -> Any:
    return Image.fromarray(np.stack([GREY] * 3, -1).astype(np.uint8)).convert(mode)


def palette() -> Any:
    image = Image.fromarray((GREY > 100).astype(np.uint8)).convert("P")
    image.putpalette([51] * 3 + [178] * 3 + [0] * 762)
    return image


def with_alpha(mode: str) -> Any:
    image = Image.fromarray(GREY.astype(np.uint8)).convert(mode)
    image.putalpha(200)
    return image


IMAGES: dict[str, tuple[str, Callable[[], Any]]] = {
    "8 bits": ("png", lambda: Image.fromarray(GREY.astype(np.uint8))),
    "16 bits": ("png", lambda: Image.fromarray((GREY * 257).astype(np.uint16))),
    "16 bits, TIFF": ("tif", lambda: Image.fromarray((GREY * 257).astype(np.uint16))),
    "16 bits, PGM": ("pgm", lambda: Image.fromarray((GREY * 257).astype(np.int32))),
    "floats": ("tif", lambda: Image.fromarray((GREY / 255).astype(np.float32))),
    "palette": ("png", palette),
    "colours": ("png", lambda: coloured("RGB")),
    "CMYK": ("tif", lambda: coloured("CMYK")),
    "YCbCr": ("tif", lambda: coloured("YCbCr")),
    "grey and alpha": ("png", lambda: with_alpha("LA")),
    "colours and alpha": ("png", lambda: with_alpha("RGBA")),
}


def folder(path: Path, ending: str, image: Any) -> Path:
    for name in ("a", "b"):
        (path / "train" / name).mkdir(parents=True)
        for i in range(3):
            image.save(path / "train" / name / f"{i}.{ending}")
    return path


def loaded(path: Path, grey: bool) -> torch.Tensor:
    data = ImageFolderDataModule(path, size=8, grey=grey, val_fraction=0.34, test_fraction=0.0)
    data.setup("fit")
    images: torch.Tensor = data.splits[0].inputs
    return images


@pytest.mark.parametrize("grey", [True, False])
@pytest.mark.parametrize("name", IMAGES)
def test_values_are_kept(tmp_path: Path, name: str, grey: bool) -> None:
    ending, make = IMAGES[name]
    path = folder(tmp_path, ending, make())
    try:
        Image.open(path / "train" / "a" / f"0.{ending}").load()
    except OSError as error:
        pytest.skip(f"Pillow cannot read what it has written: {error}")
    images = loaded(path, grey)
    assert images.shape[1:] == (1 if grey else 3, 8, 8)
    expected = torch.from_numpy(GREY).to(torch.int64).expand(images.shape)
    assert (images.long() - expected).abs().max() <= (2 if name == "YCbCr" else 0)


def test_one_bit(tmp_path: Path) -> None:
    image = Image.fromarray(((GREY > 100) * 255).astype(np.uint8)).convert("1")
    assert loaded(folder(tmp_path, "png", image), True).unique().tolist() == [0, 255]


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (GREY.astype(np.int32), "has 32-bit integers, and which of them is white is not known"),
        (GREY.astype(np.float32), "has numbers from 51 to 178, and an image of floats should have them from 0 to 1"),
        (np.full((8, 8), np.nan, np.float32), "has numbers from nan to nan"),
        (-np.ones((8, 8), np.float32), "has numbers from -1 to -1"),
    ],
)
def test_an_unknown_range_is_refused(tmp_path: Path, values: np.ndarray, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        loaded(folder(tmp_path, "tif", Image.fromarray(values)), True)
