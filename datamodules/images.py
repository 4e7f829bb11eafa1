"""The base of image datamodules: bytes in memory, normalised batch by batch."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sgmcmc.batches.orders import BatchOrder, MakeOrder
from lightning_sgmcmc.datamodules.augmentation import Augmentation
from lightning_sgmcmc.datamodules.base import ArrayDataModule, Split
from lightning_sgmcmc.files import megabytes
from lightning_sgmcmc.namespace import pl, rank_zero_info
from lightning_sgmcmc.process import room_for_data

Resident = bool | Literal["auto"]


class ImageDataModule(ArrayDataModule):
    """Base of the image datamodules: images are kept as bytes, in a quarter of the memory of floats.

    Subclasses implement `load`: they call `_normalise_by` (or set `_normalise`) and make each part with `_split`.

    Args:
        batch_size: data per batch.
        drop_last: leave out the last batch of an epoch if it is smaller.
        seed: seed of a random split.
        flatten: inputs of shape (n, C·H·W) instead of (n, C, H, W).
        device_resident: keep the images on the trainer's device, and index, augment and normalise batches there. Each
            part moves there when its loader is first created, and takes num_data·C·H·W bytes. "auto" does so on a CUDA
            device if all parts take less than a quarter of its free memory.
        order: makes the order of the training data, such as `CyclicOrder` (see `ResumableLoader`).

    Raises:
        ValueError: if batch_size is below 1.
        TypeError: for another device_resident.
    """

    image_shape: tuple[int, int, int]
    """(C, H, W)."""

    def __init__(
        self,
        batch_size: int,
        drop_last: bool = False,
        seed: int = 0,
        flatten: bool = False,
        device_resident: Resident = "auto",
        order: MakeOrder = BatchOrder,
    ) -> None:
        super().__init__(batch_size, drop_last, seed, order=order)
        if not isinstance(device_resident, bool) and device_resident != "auto":
            raise TypeError(f"device_resident must be True, False or 'auto', got {device_resident!r}")
        self.flatten = flatten
        self.device_resident = device_resident
        self._normalise = Normalise(0.0, 1.0)
        self._resident: dict[torch.device, bool] = {}
        """Whether "auto" keeps the images on a device."""
        self._loaded_on: torch.device | None = None

    @abstractmethod
    def load(self) -> tuple[Split, Split, Split]:
        """Return the training, validation and test parts, as bytes."""

    def transform(self) -> Callable[[Tensor], Tensor]:
        return self._normalise

    def normalise_as(self, training: pl.LightningDataModule | None) -> bool:
        if not isinstance(training, ImageDataModule) or training.image_shape[0] != self.image_shape[0]:
            return False
        self._normalise = training._normalise
        return True

    @property
    def normalises(self) -> bool:
        return True

    def _augmented(self, augment: bool, flips: bool, random_erasing: float) -> Augmentation:
        """Return the transform of training batches, which crops by an eighth of the height."""
        padding, flips = (self.image_shape[1] // 8, flips) if augment else (0, False)
        return Augmentation(self.transform(), padding, flips, random_erasing)

    def _normalise_by(self, images: Tensor) -> None:
        """Normalise by the statistics of these images, the training part."""
        mean, std = pixel_statistics(images)
        self._normalise = Normalise(mean, std)

    def _split(self, images: Tensor, labels: Tensor) -> Split:
        return Split(images.flatten(1) if self.flatten else images, labels)

    def _loader(self, part: int, train: bool = False) -> Any:
        strategy = getattr(self.trainer, "strategy", None)
        if strategy is not None:
            self._move(part, strategy.root_device)
        return super()._loader(part, train)

    def _move(self, part: int, device: torch.device) -> None:
        """Move a part to where it stays in a run on a device."""
        on_device = self._fits_on(device) if self.device_resident == "auto" else self.device_resident
        parts = list(self.splits)
        self._loaded_on = self._loaded_on or parts[part].inputs.device
        home = device if on_device else self._loaded_on
        if parts[part].inputs.device != home:
            parts[part] = Split(parts[part].inputs.to(home), parts[part].targets.to(home))
            self._splits = (parts[0], parts[1], parts[2])

    def _fits_on(self, device: torch.device) -> bool:
        """Return whether the images are to stay on a device; decide once for each device."""
        if device not in self._resident:
            room = room_for_data(device)
            size = sum(t.nbytes for split in self.splits for t in (split.inputs, split.targets))
            self._resident[device] = size < room
            if self._resident[device]:
                rank_zero_info(
                    f"The images ({megabytes(size)}) are kept on {device}, which has {megabytes(room)} for them: "
                    "device_resident=False keeps them in the host's memory."
                )
        return self._resident[device]


class Normalise:
    """Turns bytes into floats, (x/255 - mean)/std, by one number or one for each channel of images (n, C, H, W)."""

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        self.mean = mean
        self.std = std
        self._shift = _per_channel(mean)
        self._scale = _per_channel(std)

    def __call__(self, images: Tensor) -> Tensor:
        for name in ("_shift", "_scale"):  # move to another device once, not with every batch
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.device != images.device:
                setattr(self, name, value.to(images.device))
        return images.float().sub_(self._shift).div_(self._scale)


def _per_channel(value: float | Sequence[float]) -> float | Tensor:
    if isinstance(value, Sequence):
        return (255 * torch.tensor(value, dtype=torch.float64)).float()[:, None, None]
    return 255 * value


def pixel_statistics(images: Tensor) -> tuple[float | list[float], float | list[float]]:
    """Return the mean and the standard deviation of the pixels x/255 by channel; for a single channel, plain numbers.

    They come from the counts of the 256 values of images (n, C, H, W), without a copy as floats. A constant channel has
    the standard deviation 1, so that it is only centred.
    """
    counts = torch.stack([channel.reshape(-1).bincount(minlength=256) for channel in images.unbind(1)]).double()
    values = torch.arange(256, dtype=torch.float64) / 255
    number = counts.sum(1, keepdim=True)
    mean = (counts * values).sum(1, keepdim=True) / number
    variance = (counts * (values - mean).square()).sum(1) / (number.squeeze(1) - 1).clamp_min(1)
    means, stds = mean.squeeze(1).tolist(), [std if std > 0 else 1.0 for std in variance.sqrt().tolist()]
    return (means[0], stds[0]) if len(means) == 1 else (means, stds)
