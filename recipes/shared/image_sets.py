"""The photographs of the CIFAR recipes: CIFAR, or a folder of the user's, and images of unknown classes."""

from pathlib import Path

import torch

from lightning_sgmcmc.datamodules import (
    ArrayDataModule,
    CIFAR10DataModule,
    CIFAR100DataModule,
    ImageDataModule,
    ImageFolderDataModule,
    Split,
    SVHNDataModule,
)
from lightning_sgmcmc.datamodules.image_folder import SUFFIXES, read_images
from lightning_sgmcmc.recipes.shared.options import Options

CIFAR = {"CIFAR-10": CIFAR10DataModule, "CIFAR-100": CIFAR100DataModule}


def photographs(
    data: str,
    options: Options,
    batch: int,
    held_out: float = 0.0,
    augment: bool = True,
    erasing: float = 0.0,
    size: int = 32,
    limit: int | None = None,
) -> ArrayDataModule:
    """Return CIFAR, or the images of a folder.

    Args:
        data: "CIFAR-10", "CIFAR-100", or a folder with `train/<class>/` and perhaps `test/<class>/`.
        options: the recipe's options.
        batch: images per batch.
        held_out: share of the training images for validation.
        augment: crop and mirror training images.
        erasing: probability that a training image loses a rectangle.
        size: height and width of a folder's images.
        limit: number of training images that are read of a folder; None reads all.
    """
    if data in CIFAR:
        kind = CIFAR[data]
        val_size = round(held_out * kind.train_size)
        return kind(
            options.data_root,
            batch,
            val_size=val_size,
            augment=augment,
            random_erasing=erasing,
            device_resident=True,
        )
    return ImageFolderDataModule(
        data,
        batch,
        size,
        val_fraction=held_out,
        seed=options.seed,
        augment=augment,
        random_erasing=erasing,
        device_resident=True,
        limit=limit,
    )


class Outside(ImageDataModule):
    """Test images without classes: all images of a folder and of the folders in it.

    Args:
        folder: the folder.
        size: height and width of the images.
        limit: number of images, the first in the order of their paths; None reads all.

    Raises:
        FileNotFoundError: at setup, if the folder has no images.
    """

    def __init__(self, folder: str | Path, size: int, limit: int | None = None) -> None:
        super().__init__(batch_size=1000, device_resident=True)
        self.folder = Path(folder)
        self.image_shape = (3, size, size)
        self.limit = limit

    def load(self) -> tuple[Split, Split, Split]:
        paths = sorted(path for path in self.folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
        if not paths:
            raise FileNotFoundError(f"{self.folder} has no images: put some there, or choose another outside_folder")
        images = read_images(paths[: self.limit], self.image_shape)
        self._normalise_by(images)
        none = Split(images[:0], torch.zeros(0, dtype=torch.int64))
        return none, none, Split(images, torch.zeros(len(images), dtype=torch.int64))


class ResizedSVHN(SVHNDataModule):
    """SVHN's test images.

    Args:
        root: folder of the data sets.
        size: height and width of the images.
        limit: number of images, the first ones; None takes all.
    """

    def __init__(self, root: Path, size: int, limit: int | None = None) -> None:
        super().__init__(root, 1000, val_size=0, device_resident=True)
        self.size = size
        self.limit = limit

    def load(self) -> tuple[Split, Split, Split]:
        train, _, test = super().load()
        images = test.inputs[: self.limit]
        if self.size != images.shape[-1]:
            sides = (self.size, self.size)
            resized = torch.nn.functional.interpolate(images.float(), sides, mode="bilinear", antialias=True)
            images = resized.round().clamp(0, 255).byte()
        none = Split(images[:0], train.targets[:0])
        return none, none, Split(images, test.targets[: self.limit])


def unknown_images(options: Options, folder: str | None, size: int, limit: int | None = None) -> ArrayDataModule | None:
    """Return images of classes that a network does not know; None for a quick run without SVHN's files.

    Args:
        options: the recipe's options.
        folder: take all images in this folder instead of SVHN.
        size: height and width of the images.
        limit: number of images; None takes all.
    """
    if folder is not None:
        return Outside(folder, size, limit)
    return ResizedSVHN(options.data_root, size, limit) if options.full or svhn_is_in(options.data_root) else None


def svhn_is_in(root: Path) -> bool:
    """Return whether SVHN's files are in a folder of data sets.

    Args:
        root: the folder.
    """
    return any((root / name).is_file() for name in ("svhn/svhn.npz", "test_32x32.mat"))
