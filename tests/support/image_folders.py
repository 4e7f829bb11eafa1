"""Folders of small images that tests write."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200), "pink": (250, 150, 150)}


def write_folder(
    root: Path, counts: Mapping[str, int], suffix: str = ".png", classes: Iterable[str] = ("red", "green", "blue")
) -> None:
    """Write noisy images of one colour for each class, of different sizes, into `root/<part>/<class>/`.

    Args:
        root: the folder.
        counts: images of each class, by part ("train", "test", "val").
        suffix: the images' format.
        classes: names of colours.
    """
    rng = np.random.default_rng(0)
    for part, count in counts.items():
        for name in classes:
            folder = root / part / name
            folder.mkdir(parents=True, exist_ok=True)
            for index in range(count):
                noise = rng.normal(0, 20, (20 + index % 3, 24, 3))
                pixels = (np.array(COLOURS[name]) + noise).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}{suffix}")
