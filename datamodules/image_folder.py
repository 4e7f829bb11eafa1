"""Images in a folder for each class, as torchvision's `ImageFolder` reads them."""

import functools
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_count, check_within
from lightning_sgmcmc.datamodules.base import Split, check_fractions, random_split
from lightning_sgmcmc.datamodules.files import one_line
from lightning_sgmcmc.datamodules.images import ImageDataModule

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Of files that are read as images, in lower case."""
MOST_PIXELS = 2**25
"""Of images that are decoded at the same time."""


class ImageFolderDataModule(ImageDataModule):
    """Images in `root/train/<class>/` and `root/test/<class>/`, the form of torchvision's `ImageFolder`.

    The folders of `root/train` are the classes, and their labels follow the names' order. Without `root/test`,
    `root/val` is the test part; without both, a share of the training images is. `root/val` beside `root/test` is the
    validation part; otherwise a share of the training images is. Shares hold within each class.

    Images are cropped to a square around their centre, resized and kept as bytes, so all of them need
    count·C·size² bytes of memory; for more, pass torchvision's `ImageFolder` to `DatasetDataModule`. While they are
    read, those of at most 33 megapixels together are decoded at a time, some 0.3 GB, and larger ones one by one; one of
    more than 179 megapixels raises an error. They are
    normalised batch by batch, by each channel's mean and standard deviation over the training part. White is 65535 of
    16 bits and 1 of floats; files with 32-bit integers raise an error. Files that do not
    end like an image (`.jpg`, `.png`, …) and hidden ones are ignored. `classes` and `num_classes` are known after
    `setup`.

    Args:
        root: folder with `train`, and perhaps `test` and `val`.
        batch_size: data per batch.
        size: height and width of the resized images.
        grey: one channel instead of red, green and blue.
        val_fraction: share of the training images for validation, if `root/val` is not the validation part.
        test_fraction: share of the training images for the test, if there are neither `root/test` nor `root/val`.
        augment: crop each training image out of itself with size/8 black pixels around it, and mirror half of them if
            `flips`.
        flips: whether a mirror image has the same class.
        random_erasing: probability that a training image loses a rectangle of 2 to 40 % of its area, which is 0 after
            normalisation (Zhong et al. 2020).
        limit: number of images read of each folder, equally many of each class and chosen at random; None reads all.
        shared: `drop_last`, `seed` (of the shares), `device_resident`, `order`, as in `ImageDataModule`.

    Raises:
        ValueError: for an argument out of range; at setup for fewer than two classes, a class without images in one
            of the folders, an image that cannot be read, or a share without images.
        FileNotFoundError: at setup, if there is no `root/train`.

    Example::

        from lightning_sgmcmc.datamodules import ImageFolderDataModule

        data = ImageFolderDataModule("flowers", size=32, augment=True)  # flowers/train/rose/1.jpg, flowers/test/rose/…
    """

    classes: tuple[str, ...] = ()
    """The classes' names in the order of their labels, after `setup`."""

    def __init__(
        self,
        root: str | Path,
        batch_size: int = 128,
        size: int = 32,
        grey: bool = False,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        *,
        augment: bool = False,
        flips: bool = True,
        random_erasing: float = 0.0,
        limit: int | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(batch_size, flatten=False, **shared)
        check_count("size", size, optional=False)
        check_count("limit", limit)
        check_fractions(val_fraction, test_fraction)
        check_within("random_erasing", random_erasing, "[0, 1]")
        self.root = Path(root)
        self.image_shape = (1 if grey else 3, size, size)
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.augment = augment
        self.flips = flips
        self.random_erasing = random_erasing
        self.limit = limit

    def train_transform(self) -> Callable[[Tensor], Tensor]:
        return self._augmented(self.augment, self.flips, self.random_erasing)

    def load(self) -> tuple[Split, Split, Split]:
        files = files_by_class(self.root / "train")
        self.classes = tuple(files)
        self.num_classes = len(files)
        given = [folder for folder in (self.root / "test", self.root / "val") if folder.is_dir()]
        train, val, test = self._divided(self._read(files), (len(given) < 2, not given))
        if given:
            test = self._read(files_by_class(given[0], self.classes))
        if len(given) == 2:
            val = self._read(files_by_class(given[1], self.classes))
        self._normalise_by(train.inputs)
        return train, val, test

    def _read(self, files: dict[str, list[Path]]) -> Split:
        if self.limit is not None:
            most, generator = max(1, self.limit // len(files)), random.Random(self.seed)
            files = {name: sorted(generator.sample(paths, min(most, len(paths)))) for name, paths in files.items()}
        images = read_images((path for paths in files.values() for path in paths), self.image_shape)
        counts = torch.tensor([len(paths) for paths in files.values()])
        return Split(images, torch.arange(len(counts)).repeat_interleave(counts))

    def _divided(self, data: Split, wanted: tuple[bool, bool]) -> tuple[Split, Split, Split]:
        """Divide the images of `root/train` into those for training, validation and test, the latter two if wanted."""
        shares = tuple(f * w for f, w in zip((self.val_fraction, self.test_fraction), wanted, strict=True))
        parts = random_split(len(data.targets), shares, self.seed, data.targets, check=False)
        for name, share, part in zip(("val_fraction", "test_fraction"), shares, parts[1:], strict=True):
            if share and not len(part):
                raise ValueError(
                    f"{name}={share} of each class of {self.root / 'train'} is less than one image: choose a larger "
                    "share, or 0"
                )
        train, val, test = (Split(data.inputs[part], data.targets[part]) for part in parts)
        if train.targets.bincount(minlength=len(self.classes)).min() == 0:
            raise ValueError(f"a class of {self.root / 'train'} has no images left for training: choose smaller shares")
        return train, val, test


def files_by_class(folder: Path, classes: Iterable[str] | None = None) -> dict[str, list[Path]]:
    """Return the image files of each class's folder, in the names' order: of these classes, or at least two."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder: put the images of each class into {folder}/<class>, and those of the test "
            f"into {folder.parent / 'test'}/<class>"
        )
    found = {path.name: image_files(path) for path in _listed(folder) if path.is_dir()}
    if classes is None and len(found) < 2:
        raise ValueError(
            f"{folder} has {len(found)} class folders ({', '.join(found) or 'none'}), and at least two are needed: put "
            "the images of each class into a folder of their own"
        )
    unknown = [name for name in found if classes is not None and name not in classes]
    if unknown:
        raise ValueError(
            f"{folder} has the classes {', '.join(unknown)}, which the training images lack: remove them, or add them "
            "to the training images"
        )
    chosen = {name: found.get(name, []) for name in (found if classes is None else classes)}
    empty = [name for name, files in chosen.items() if not files]
    if empty:
        raise ValueError(f"{folder} has no images of the classes {', '.join(empty)}: add some, or remove these classes")
    return chosen


def image_files(folder: Path) -> list[Path]:
    """Return the image files of a folder, in the names' order."""
    return [path for path in _listed(folder) if path.suffix.lower() in SUFFIXES and path.is_file()]


def _listed(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def read_images(paths: Iterable[Path], shape: tuple[int, int, int]) -> Tensor:
    """Return images as bytes of shape (n, C, H, W), cropped to their centre and resized, where C is 1 or 3."""
    chosen = list(paths)
    images = np.empty((len(chosen), *shape), np.uint8)
    room = _Room(MOST_PIXELS)
    with ThreadPoolExecutor() as pool:
        for index, image in enumerate(pool.map(functools.partial(_read_image, shape=shape, room=room), chosen)):
            images[index] = image
    return torch.from_numpy(images)


class _Room:
    """Pixels that threads may decode at the same time: a small file can hold a picture of any size."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[None]:
        """Wait until there is room for this many pixels; a larger picture takes all of it."""
        count = min(count, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()


def _read_image(path: Path, shape: tuple[int, int, int], room: _Room) -> np.ndarray:
    from PIL import Image, ImageOps

    channels, height, width = shape
    try:
        with Image.open(path) as opened, room.taken(opened.width * opened.height):
            white = _white_of(opened.mode, opened.format, path)
            ImageOps.exif_transpose(opened, in_place=True)
            upright: Image.Image = opened
            if white is None:
                upright = upright.convert("L" if channels == 1 else "RGB")
            else:
                upright = Image.fromarray(_in_bytes(np.asarray(upright, np.float32), white, path))
            fitted = ImageOps.fit(upright, (width, height), Image.Resampling.BILINEAR)
    except _OtherRange:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as an image ({one_line(error)}): replace or remove it") from error
    values = np.asarray(fitted)
    if white is not None:
        values = np.broadcast_to(values.round().clip(0, 255).astype(np.uint8)[..., None], (height, width, channels))
    return values.reshape(height, width, channels).transpose(2, 0, 1)


class _OtherRange(ValueError):
    """Raised for an image of which it is not known what number is white."""


def _white_of(mode: str, kind: str | None, path: Path) -> float | None:
    """Return the number that is white in an image of over 8 bits, where Pillow cuts off at 255; None for others."""
    if mode.startswith("I;16") or (mode == "I" and kind in ("PNG", "PPM")):  # older versions read 16 bits as "I"
        return 65535.0
    if mode == "F":
        return 1.0
    if mode == "I":
        raise _OtherRange(
            f"{path} has 32-bit integers, and which of them is white is not known: save it with 8 or 16 bits"
        )
    return None


def _in_bytes(values: np.ndarray, white: float, path: Path) -> np.ndarray:
    """Return grey values as floats between 0 and 255."""
    if not (values.min() >= 0 and values.max() <= white):
        raise _OtherRange(
            f"{path} has numbers from {values.min():.3g} to {values.max():.3g}, and an image of floats should have "
            "them from 0 to 1: rescale it, or save it with 8 or 16 bits"
        )
    return values * np.float32(255 / white)
