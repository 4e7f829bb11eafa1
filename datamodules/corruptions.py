"""Standard corruptions of images at five severities, for tests under a shift of the inputs."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sgmcmc.checks import check_choice, check_count
from lightning_sgmcmc.datamodules.base import ArrayDataModule, TensorBatches, evaluation_loader, evaluation_size
from lightning_sgmcmc.datamodules.images import ImageDataModule
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.seeding import derive_seed

CHUNK = 1000
"""Images that are corrupted at once."""


def gaussian_noise(x: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Return x + std·N(0, 1)."""
    return x + std * torch.randn(x.shape, generator=generator)


def shot_noise(x: Tensor, photons: float, generator: torch.Generator) -> Tensor:
    """Return Poisson(photons·x)/photons."""
    return torch.poisson(x * photons, generator=generator) / photons


def impulse_noise(x: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Return x with a share of its numbers set to 0 or 1, each with the same probability."""
    u = torch.rand(x.shape, generator=generator)
    return torch.where(u < share / 2, 0.0, torch.where(u < share, 1.0, x))


def gaussian_blur(x: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Return x averaged with Gaussian weights of a standard deviation in pixels; edges are repeated."""
    radius = max(1, round(4 * std))
    places = torch.arange(-radius, radius + 1, dtype=x.dtype)
    weights = (-(places / std).square() / 2).exp()
    weights = (weights / weights.sum()).expand(x.shape[1], 1, -1)
    for axis, pad in ((-1, (radius, radius, 0, 0)), (-2, (0, 0, radius, radius))):
        kernel = weights[:, :, None, :] if axis == -1 else weights[:, :, :, None]
        x = F.conv2d(F.pad(x, pad, mode="replicate"), kernel, groups=x.shape[1])
    return x


def brightness(x: Tensor, added: float, generator: torch.Generator) -> Tensor:
    """Return x with an added value V = max over channels (of hue, saturation and value), at most 1."""
    value = x.amax(1, keepdim=True)
    brighter = (value + added).clamp(0, 1)
    return torch.where(value > 0, x * (brighter / value.clamp_min(1e-12)), brighter)


def contrast(x: Tensor, factor: float, generator: torch.Generator) -> Tensor:
    """Return the mean of each image's channel plus a factor times the difference to it."""
    mean = x.mean((2, 3), keepdim=True)
    return mean + factor * (x - mean)


def pixelate(x: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Return x averaged to a share of its height and width, and enlarged again."""
    size = [max(1, int(side * share)) for side in x.shape[2:]]
    return F.interpolate(F.interpolate(x, size, mode="area"), x.shape[2:], mode="nearest-exact")


CORRUPTIONS: dict[str, tuple[Callable[[Tensor, float, torch.Generator], Tensor], tuple[float, ...]]] = {
    "gaussian_noise": (gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": (shot_noise, (500, 250, 100, 75, 50)),
    "impulse_noise": (impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "gaussian_blur": (gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1.0)),
    "brightness": (brightness, (0.05, 0.10, 0.15, 0.20, 0.30)),
    "contrast": (contrast, (0.75, 0.50, 0.40, 0.30, 0.15)),
    "pixelate": (pixelate, (0.95, 0.90, 0.85, 0.75, 0.65)),
}
"""Each corruption with its parameter at severities 1 to 5: those of CIFAR-10-C, for small images."""


def corrupted(images: Tensor, corruption: str, severity: int, seed: int = 0) -> Tensor:
    """Return corrupted images (n, C, H, W) in [0, 1], a function of the arguments alone; severity 0 changes nothing.

    Source: Hendrycks & Dietterich 2019.
    """
    _check(corruption, severity)
    if images.dim() != 4:
        raise ValueError(f"corruptions need images of shape (n, C, H, W), got {tuple(images.shape)}")
    if severity == 0:
        return images.clone()
    function, parameters = CORRUPTIONS[corruption]
    generator = torch.Generator().manual_seed(derive_seed(seed, "corruption", corruption, severity))
    found = [function(part, parameters[severity - 1], generator) for part in images.float().split(CHUNK)]
    return torch.cat(found).clamp_(0, 1)


def _check(corruption: str, severity: int) -> None:
    """Raise for an unknown corruption or severity."""
    check_choice("corruption", corruption, tuple(CORRUPTIONS))
    check_count("severity", severity, least=0, optional=False)
    if severity > 5:
        raise ValueError(f"severity must be 0 to 5, got {severity}")


class CorruptedDataModule(pl.LightningDataModule):
    """Another datamodule's data with corrupted test images; training and validation data are unchanged.

    For a test of how predictions and their uncertainty behave under a shift: `trainer.test(module, datamodule=
    CorruptedDataModule(data, "gaussian_blur", severity=3))`. Images are corrupted in their original units, [0, 1], and
    then normalised as the network saw them in training. The corruption is a function of the seed and the data, not of
    batches. All other attributes are the other datamodule's.

    Args:
        datamodule: an `ImageDataModule`, or an `ArrayDataModule` with images (n, C, H, W).
        corruption: "gaussian_noise", "shot_noise", "impulse_noise", "gaussian_blur", "brightness", "contrast" or
            "pixelate".
        severity: 1 to 5; 0 changes nothing.
        seed: of the noise.
        image_shape: (C, H, W) of one image, for data that are flattened; None reads it from the datamodule.

    Raises:
        TypeError: if the datamodule is of another kind.
        ValueError: for an unknown corruption or severity; at the first test, if the data are no images.

    Source: Hendrycks & Dietterich 2019 (CIFAR-10-C's severities).
    """

    def __init__(
        self,
        datamodule: ArrayDataModule,
        corruption: str,
        severity: int = 3,
        seed: int = 0,
        image_shape: tuple[int, int, int] | None = None,
    ) -> None:
        if not isinstance(datamodule, ArrayDataModule):
            raise TypeError(
                f"datamodule should be an ArrayDataModule with images, got a {type(datamodule).__name__}: use "
                "lightning_sgmcmc.datamodules.corruptions.corrupted(images, …) on your own data"
            )
        super().__init__()
        _check(corruption, severity)
        self.datamodule = datamodule
        self.corruption = corruption
        self.severity = severity
        self.seed = seed
        self._shape = image_shape
        self._test: TensorBatches | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "datamodule":
            raise AttributeError(name)
        return getattr(self.datamodule, name)

    def prepare_data(self) -> None:
        self.datamodule.prepare_data()

    def setup(self, stage: str) -> None:
        """Set up the other datamodule."""
        self.datamodule.trainer = self.trainer
        self.datamodule.setup(stage)

    def train_dataloader(self) -> Any:
        return self.datamodule.train_dataloader()

    def val_dataloader(self) -> Any:
        return self.datamodule.val_dataloader()

    def test_dataloader(self) -> Any:
        if self._test is None:
            self._test = self._corrupted()
        return evaluation_loader(self._test, evaluation_size(self.datamodule.batch_size))

    def predict_dataloader(self) -> Any:
        return self.test_dataloader()

    def _corrupted(self) -> TensorBatches:
        data = self.datamodule
        split, transform = data.splits[2], data.transform()
        shape: tuple[int, ...] = self._shape or getattr(data, "image_shape", None) or data.input_shape
        if len(shape) != 3 or math.prod(shape) != math.prod(data.input_shape):
            raise ValueError(
                f"corruptions need images of shape (C, H, W), and the inputs of {type(data).__name__} have "
                f"{tuple(data.input_shape)}: pass their image_shape=(C, H, W)"
            )
        inputs = split.inputs.cpu().reshape(-1, *shape).float()
        if isinstance(data, ImageDataModule):  # bytes, which `transform` normalises
            low, width = torch.zeros(()), torch.full((), 255.0)
        else:  # normalised: the training images' smallest and largest numbers were 0 and 1
            train = data.splits[0].inputs.cpu().reshape(-1, *shape).float()
            low = train.amin((0, 2, 3))[:, None, None]
            width = (train.amax((0, 2, 3))[:, None, None] - low).clamp_min(1e-12)
        pixels = ((inputs - low) / width).clamp(0, 1)
        changed = corrupted(pixels, self.corruption, self.severity, self.seed) * width + low
        return TensorBatches(changed.reshape(split.inputs.shape), split.targets.cpu(), transform=transform)
