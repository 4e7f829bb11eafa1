"""Small files of images in the forms that datamodules read."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.datamodules import ImageDataModule


def colour_arrays(train: int = 60, test: int = 20, classes: int = 10) -> dict[str, np.ndarray]:
    """Images of distinct pixels, whose channels differ in mean and spread."""
    rng = np.random.default_rng(0)
    low, high = np.array([0, 100, 200])[:, None, None], np.array([256, 140, 210])[:, None, None]
    return {
        "x_train": rng.integers(low, high, (train, 3, 32, 32)).astype(np.uint8),
        "y_train": (np.arange(train) % classes).astype(np.uint8),
        "x_test": rng.integers(low, high, (test, 3, 32, 32)).astype(np.uint8),
        "y_test": (np.arange(test) % classes).astype(np.int64),
    }


def grey_arrays(train: int = 60, test: int = 20) -> dict[str, np.ndarray]:
    arrays = colour_arrays(train, test)
    return {name: value[:, 0, :28, :28] if name[0] == "x" else value for name, value in arrays.items()}


def write(root: Path, name: str, arrays: dict[str, np.ndarray]) -> Path:
    path = root / name / f"{name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


def prepared(module: ImageDataModule) -> ImageDataModule:
    module.prepare_data()
    module.setup("fit")
    return module


def batches(loader: Any) -> tuple[Tensor, Tensor]:
    inputs, labels = zip(*loader, strict=True)
    return torch.cat(inputs), torch.cat(labels)


def write_idx(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """The idx format: two zero bytes, the type (8 for bytes), the number of axes, the lengths, the data."""
    folder.mkdir(parents=True)
    for part, prefix in (("train", "train"), ("test", "t10k")):
        for name, kind in ((f"x_{part}", "images-idx3"), (f"y_{part}", "labels-idx1")):
            array = arrays[name].astype(np.uint8)
            header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (folder / f"{prefix}-{kind}-ubyte").write_bytes(header + array.tobytes())
