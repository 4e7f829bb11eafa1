"""The posteriors: data, networks, and the module of a fit or of the reference."""

from typing import Any

import torch
from torch import nn

from lightning_sgmcmc import BayesianModule, Categorical, GaussianPrior, expand
from lightning_sgmcmc.datamodules import ArrayDataModule, CIFAR10DataModule, DigitsDataModule, Split
from lightning_sgmcmc.evaluation.reference import tfds_order
from lightning_sgmcmc.recipes.hmc_fidelity.settings import Settings
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.resnet import resnet20_frn
from lightning_sgmcmc.recipes.shared.synthetic_images import SyntheticImages

PUBLISHED_TRAIN = 40_960
"""Training images of the published reference: the first ones in the order of TensorFlow Datasets."""


class Digits(DigitsDataModule):
    """Digits, the first of each part.

    Args:
        sizes: number of training, validation and test data.
        batch_size: data per batch.
    """

    def __init__(self, sizes: tuple[int, int, int], batch_size: int) -> None:
        super().__init__(batch_size, val_fraction=0.2, test_fraction=0.5)
        self.sizes = sizes

    def load(self) -> tuple[Split, Split, Split]:
        return _first(super().load(), self.sizes)


class PublishedCIFAR10(CIFAR10DataModule):
    """CIFAR-10 with the training images of the published reference, and validation images among the others.

    Args:
        sizes: number of training, validation and test images, the first of each part.
        options: those of `CIFAR10DataModule`.
    """

    def __init__(self, sizes: tuple[int, int, int], **options: Any) -> None:
        super().__init__(val_size=0, augment=False, device_resident=True, **options)
        self.sizes = sizes

    def load(self) -> tuple[Split, Split, Split]:
        train, _, test = super().load()
        order = torch.tensor(tfds_order(len(train.targets), "train"))
        known, others = order[:PUBLISHED_TRAIN], order[PUBLISHED_TRAIN:]
        parts = (*(Split(train.inputs[rows], train.targets[rows]) for rows in (known, others)), test)
        return _first(parts, self.sizes)


def _first(parts: tuple[Split, ...], sizes: tuple[int, int, int]) -> tuple[Split, Split, Split]:
    first, second, third = (
        Split(part.inputs[:size], part.targets[:size]) for part, size in zip(parts, sizes, strict=True)
    )
    return first, second, third


def datamodule(settings: Settings, options: Options) -> ArrayDataModule:
    """Return the data, with as many training data as the reference has.

    Raises:
        ValueError: for an unknown name of the data.
    """
    sizes = (settings.train, *settings.sizes[1:])
    if settings.data == "digits":
        return Digits(sizes, settings.batch)
    if settings.data == "CIFAR-10":
        return PublishedCIFAR10(sizes, root=options.data_root, batch_size=settings.batch)
    if settings.data == "synthetic":
        return SyntheticImages(settings.batch, 0, sizes=sizes)
    raise ValueError(f"data must be 'digits', 'CIFAR-10' or 'synthetic', got {settings.data!r}")


def network(settings: Settings) -> nn.Module:
    """Return the network: one hidden layer with Swish on digits, ResNet-20-FRN-Swish on images."""
    if settings.data == "digits":
        return nn.Sequential(nn.Linear(64, settings.hidden), nn.SiLU(), nn.Linear(settings.hidden, 10))
    return resnet20_frn(10, settings.width)


def module_of(settings: Settings, expanded: bool = False, **options: Any) -> BayesianModule:
    """Return the module of the posterior at temperature 1.

    Args:
        settings: the recipe's.
        expanded: write each weight as a product, with a prior that gives its entries the same variance.
        options: those of `BayesianModule`: sampler, step size, chains, seed.
    """
    net = network(settings)
    prior = GaussianPrior(settings.prior_std)
    if expanded:
        prior = GaussianPrior(factor_stds(net, settings.prior_std))
        net = expand(net)
    return BayesianModule(
        net=net,
        likelihood=Categorical(),
        prior=prior,
        num_data=settings.train,
        chain_execution="vmap" if settings.data == "digits" else "auto",
        compile=settings.compile,
        **options,
    )


def factor_stds(net: nn.Module, std: float) -> dict[str, float]:
    """Return standard deviations of the factors P, V, Q of each weight W = P·V·Q by name pattern.

    V has the prior of W; an entry of W, of m outputs and n inputs, has the variance m·n·σ_P²·σ_V²·σ_Q², so σ_P² = 1/m
    and σ_Q² = 1/n give it that of V.

    Args:
        net: the network before its expansion.
        std: of the prior of W.
    """
    stds = {}
    for name, layer in net.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            outputs, inputs = layer.weight.shape[:2]
            for index, size in ((1, outputs), (2, inputs)):
                stds[f"net.{name}.parametrizations.weight.original{index}"] = size**-0.5
    return stds | {"*": std}
