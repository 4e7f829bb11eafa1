"""The data sets of the comparison, split by seed, with their networks and their data of another distribution."""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sgmcmc import Categorical, Gaussian, Likelihood
from lightning_sgmcmc.datamodules import ArrayDataModule, CovertypeDataModule, Split
from lightning_sgmcmc.datamodules.base import standardise
from lightning_sgmcmc.datamodules.files import find_file, read_arrays
from lightning_sgmcmc.seeding import derive_seed

TABLES = dict.fromkeys(("german", "pima", "covertype"), "classification") | dict.fromkeys(
    ("energy", "concrete", "kin8nm", "power-plant"), "regression"
)
UNKNOWN_IMAGES = 2000
UNKNOWN_TYPES = (3, 4)
"""Cover types, from 0, that no method is trained on: cottonwood or willow, and aspen."""
UNKNOWN_STD = 2.0
"""Of the Gaussian noise that stands for other data of a table, in standardised inputs."""


class Source(NamedTuple):
    """Arrays as they are in their file.

    Attributes:
        x, y: inputs (n, …) and targets (n,) to split.
        test: inputs and targets of a fixed test set, if there is one.
        unknown: inputs of another distribution, in the units of x; None for noise.
    """

    x: Tensor
    y: Tensor
    test: tuple[Tensor, Tensor] | None = None
    unknown: Tensor | None = None


class Problem(ArrayDataModule):
    """A data set of the comparison: a split, a likelihood, networks, and a budget.

    Training, validation and (unless the source has its own) test data are drawn by the seed. Targets of a regression
    are standardised.

    Args:
        name: of the data set in the settings.
        setting: its settings.
        root: folder of the data sets.
        seed: of the split.

    Raises:
        FileNotFoundError: at setup, if a file is not there.
    """

    def __init__(self, name: str, setting: Mapping[str, Any], root: str | Path, seed: int = 0) -> None:
        super().__init__(setting["batch"], seed=seed)
        self.data_name = name
        self.setting = setting
        self.root = Path(root)
        self.kind = TABLES.get(setting["source"], "classification")
        self.has_fixed_test = setting["source"] == "mnist"
        self.unknown = torch.empty(0)
        """Inputs of another distribution, as the network sees them; after `setup`."""

    def load(self) -> tuple[Split, Split, Split]:
        source = read(self.setting["source"], self.root)
        train, val, test = self.setting["sizes"]
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "split", self.setting["source"]))
        order = torch.randperm(len(source.y), generator=generator)
        if len(order) < train + val + (0 if source.test is not None else test):
            raise ValueError(f"{self.data_name} has {len(order)} data, fewer than sizes={self.setting['sizes']}")
        rows = [order[:train], order[train : train + val], order[train + val : train + val + test]]
        inputs, targets = [source.x[part] for part in rows], [source.y[part] for part in rows]
        if source.test is not None:
            inputs[2], targets[2] = source.test[0][:test], source.test[1][:test]
        return self._normalised(inputs, targets, source.unknown, generator)

    def _normalised(
        self, inputs: list[Tensor], targets: list[Tensor], unknown: Tensor | None, generator: torch.Generator
    ) -> tuple[Split, Split, Split]:
        if unknown is not None and unknown.dim() > 2:
            mean, std = inputs[0].double().mean(), inputs[0].double().std()
            inputs = [((part.double() - mean) / std).float() for part in inputs]
            self.unknown = ((unknown.double() - mean) / std).float()
            if "hidden" in self.setting:
                inputs, self.unknown = [part.flatten(1) for part in inputs], self.unknown.flatten(1)
        else:
            noise = UNKNOWN_STD * torch.randn(inputs[2].shape, generator=generator)
            parts = inputs if unknown is None else [*inputs, unknown]
            inputs, mean, std = standardise(*(part.double() for part in parts))
            self.unknown = noise if unknown is None else inputs.pop()
        self.input_scaling = (mean, std)
        if self.kind == "regression":
            targets, mean, std = standardise(*(part.double()[:, None] for part in targets))
            self.target_mean, self.target_std = float(mean), float(std)
        else:
            self.num_classes = int(max(part.max() for part in targets)) + 1
        first, second, third = (Split(x, y) for x, y in zip(inputs, targets, strict=True))
        return first, second, third

    @property
    def steps(self) -> int:
        """The budget: optimizer steps of one network."""
        return int(self.setting["epochs"] * math.ceil(self.num_data / self.batch_size))

    @property
    def scale(self) -> float:
        """The divisor that standardised the targets; 1 for classes."""
        return self.target_std or 1.0

    def likelihood(self) -> Likelihood:
        """Return p(y | output): classes, or a Gaussian with a learned noise."""
        return Categorical() if self.kind == "classification" else Gaussian(std=0.5, learned=True)

    def net(self, dropout: float = 0.0) -> nn.Module:
        """Return a new network: an MLP, or a small CNN if the settings have channels."""
        shape, outputs = self.input_shape, self.num_classes or 1
        if "channels" in self.setting:
            return cnn(shape, self.setting["channels"], outputs, dropout)
        return mlp(shape[0], self.setting["hidden"], outputs, dropout)


def mlp(inputs: int, hidden: list[int], outputs: int, dropout: float) -> nn.Module:
    """Return Linear and ReLU layers, with dropout after each ReLU."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def cnn(shape: tuple[int, ...], channels: list[int], outputs: int, dropout: float) -> nn.Module:
    """Return 3x3 convolutions with ReLU and max-pooling to half the size, then dropout and a linear layer."""
    layers: list[nn.Module] = []
    inputs, side = shape[0], shape[1]
    for width in channels:
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        inputs, side = width, side // 2
    layers += [nn.Flatten(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers, nn.Linear(inputs * side * side, outputs))


# -- files ------------------------------------------------------------------------------------------------------------


@functools.cache
def read(source: str, root: Path) -> Source:
    """Return a data set's arrays, once in a process.

    Raises:
        FileNotFoundError: if a file is not there.
    """
    if source == "digits":
        return _digits(root)
    if source == "mnist":
        return _mnist(root)
    if source == "covertype":
        return _covertype(root)
    folder = f"uci_{TABLES[source]}"
    path = find_file(root, f"{folder}/{source}.npz", f"{source}.npz", what=f"the table '{source}'")
    x, y = (torch.as_tensor(array) for array in read_arrays(path, ("x", "y")))
    return Source(x, y.long() if TABLES[source] == "classification" else y)


def _digits(root: Path) -> Source:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.as_tensor(bunch.images, dtype=torch.float32)[:, None]
    unknown = nn.functional.adaptive_avg_pool2d(_letters(root), 8) * (16 / 255)  # the pixels of Digits are 0 to 16
    return Source(images, torch.as_tensor(bunch.target).long(), unknown=unknown)


def _mnist(root: Path) -> Source:
    path = find_file(root, "mnist/mnist.npz", "mnist.npz", what="MNIST")
    arrays = read_arrays(path, ("x_train", "y_train", "x_test", "y_test"))
    x, y, x_test, y_test = (torch.as_tensor(array) for array in arrays)
    return Source(x[:, None], y.long(), (x_test[:, None], y_test.long()), _letters(root))


def _letters(root: Path) -> Tensor:
    path = find_file(root, "notmnist/notmnist_test.npz", "notmnist_test.npz", what="notMNIST")
    return torch.as_tensor(read_arrays(path, ("x",))[0])[:UNKNOWN_IMAGES, None].float()


def _covertype(root: Path) -> Source:
    x, y = CovertypeDataModule(root, binary=False).read()
    unknown = torch.isin(y, torch.tensor(UNKNOWN_TYPES))
    _, labels = y[~unknown].unique(return_inverse=True)
    return Source(x[~unknown], labels, unknown=x[unknown])
