"""The data sets of the comparison, split by seed, with their networks and their data of another distribution."""

import functools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_sgmcmc import Categorical, Gaussian, Likelihood
from lightning_sgmcmc.datamodules import ArrayDataModule, CIFAR10DataModule, CovertypeDataModule, Split
from lightning_sgmcmc.datamodules.augmentation import Augmentation
from lightning_sgmcmc.datamodules.base import standardise
from lightning_sgmcmc.datamodules.files import find_file, read_arrays
from lightning_sgmcmc.recipes.lora_text.texts import token_ids
from lightning_sgmcmc.recipes.shared.resnet import resnet
from lightning_sgmcmc.seeding import derive_seed

TABLES = dict.fromkeys(("german", "pima", "covertype"), "classification") | dict.fromkeys(
    ("energy", "concrete", "kin8nm", "power-plant", "bikes"), "regression"
)
FIXED_TEST = ("mnist", "cifar10", "bikes")
"""Sources whose seeds share their test data."""
WORDS, VOCABULARY = 40, 2000
"""First words of a message, and the tokens that their checksums share."""
TRAINING_HOURS, VALIDATION_HOURS = 0.6, 0.2
"""Shares of the hours of `bikes` in the order of time: the last fifth is the test."""
UNKNOWN_IMAGES = 2000
UNKNOWN_TYPES = (3, 4)
"""Cover types, from 0, that no method is trained on: cottonwood or willow, and aspen."""
UNKNOWN_STD = 2.0
"""Of the Gaussian noise that stands for other data of a table, in standardised inputs."""


class Source(NamedTuple):
    """Arrays as they are in their file.

    Attributes:
        x, y: inputs (n, …) and targets (n,) to split; integers are tokens.
        test: inputs and targets of a fixed test set, if there is one.
        unknown: inputs of another distribution, in the units of x; None for noise, or for random tokens.
        val: inputs and targets of which the validation data are drawn, if they are not of x and y.
    """

    x: Tensor
    y: Tensor
    test: tuple[Tensor, Tensor] | None = None
    unknown: Tensor | None = None
    val: tuple[Tensor, Tensor] | None = None


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
        self.has_fixed_test = setting["source"] in FIXED_TEST
        self.unknown = torch.empty(0)
        """Inputs of another distribution, as the network sees them; after `setup`."""

    def load(self) -> tuple[Split, Split, Split]:
        source = read(self.setting["source"], self.root)
        train, val, test = self.setting["sizes"]
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "split", self.setting["source"]))
        order = torch.randperm(len(source.y), generator=generator)
        needed = train + (0 if source.val else val) + (0 if source.test else test)
        if len(order) < needed:
            raise ValueError(f"{self.data_name} has {len(order)} data, fewer than sizes={self.setting['sizes']}")
        rows = [order[:train], order[train : train + val], order[train + val : train + val + test]]
        inputs, targets = [source.x[part] for part in rows], [source.y[part] for part in rows]
        if source.val is not None:
            chosen = torch.randperm(len(source.val[1]), generator=generator)[:val]
            inputs[1], targets[1] = source.val[0][chosen], source.val[1][chosen]
        if source.test is not None:
            inputs[2], targets[2] = source.test[0][:test], source.test[1][:test]
        return self._normalised(inputs, targets, source.unknown, generator)

    def _normalised(
        self, inputs: list[Tensor], targets: list[Tensor], unknown: Tensor | None, generator: torch.Generator
    ) -> tuple[Split, Split, Split]:
        if "embedding" in self.setting:
            self.unknown = torch.randint(1, VOCABULARY, inputs[2].shape, generator=generator) * (inputs[2] > 0)
        elif unknown is not None and unknown.dim() > 2:
            if "side" in self.setting:
                *inputs, unknown = (_resized(part, self.setting["side"]) for part in (*inputs, unknown))
            mean, std = inputs[0].double().mean(), inputs[0].double().std()
            inputs = [((part.double() - mean) / std).float() for part in inputs]
            self.unknown = ((unknown.double() - mean) / std).float()
            if "hidden" in self.setting:
                inputs, self.unknown = [part.flatten(1) for part in inputs], self.unknown.flatten(1)
            self.input_scaling = (mean, std)
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

    def train_transform(self) -> Callable[[Tensor], Tensor] | None:
        return Augmentation(_same, self.input_shape[1] // 8, flip=True) if self.setting.get("augment") else None

    def net(self, dropout: float = 0.0) -> nn.Module:
        """Return a new network: an MLP, or as the settings say a CNN, a residual network, or one of averaged words."""
        shape, outputs = self.input_shape, self.num_classes or 1
        if "embedding" in self.setting:
            size = self.setting["embedding"]
            return nn.Sequential(AveragedWords(VOCABULARY, size), *mlp(size, self.setting["hidden"], outputs, dropout))
        if "blocks" in self.setting:
            *body, last = resnet(self.setting["blocks"], self.setting["width"], outputs).children()
            return nn.Sequential(*body, *([nn.Dropout(dropout)] if dropout else []), last)
        if "channels" in self.setting:
            return cnn(shape, self.setting["channels"], outputs, dropout)
        return mlp(shape[0], self.setting["hidden"], outputs, dropout)


def mlp(inputs: int, hidden: list[int], outputs: int, dropout: float) -> nn.Sequential:
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


class AveragedWords(nn.Module):
    """The mean embedding of the tokens of rows (n, length), where 0 is no token; 0 for a row without tokens."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)

    def forward(self, tokens: Tensor) -> Tensor:
        known = (tokens > 0).to(self.embedding.weight.dtype)[..., None]
        return (self.embedding(tokens) * known).sum(-2) / known.sum(-2).clamp_min(1)


def _same(images: Tensor) -> Tensor:
    return images


def _resized(images: Tensor, side: int) -> Tensor:
    """Return images (n, C, H, W) with this height and width, of averaged or repeated pixels, and three channels."""
    return nn.functional.adaptive_avg_pool2d(images.float(), side).expand(-1, 3, -1, -1)


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
    if source == "cifar10":
        return _cifar(root)
    if source == "sms":
        return _messages(root)
    if source == "bikes":
        return _bikes(root)
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


def _cifar(root: Path) -> Source:
    data = CIFAR10DataModule(root, val_size=0)
    data.prepare_data()
    train, _, test = data.load()
    return Source(train.inputs, train.targets, (test.inputs, test.targets), _letters(root))


def _messages(root: Path) -> Source:
    """Return the messages as tokens, of words, numbers (by their length) and signs; unwanted ones are class 1."""
    names = ("sms_spam/SMSSpamCollection", "SMSSpamCollection")
    text = find_file(root, *names, what="the SMS Spam Collection").read_text(encoding="utf-8", errors="replace")
    labels, messages = zip(*(line.split("\t", 1) for line in text.split("\n") if line.strip()), strict=True)
    if set(labels) != {"ham", "spam"}:
        raise ValueError("a line of SMSSpamCollection begins with neither ham nor spam: take the original file")
    words = [re.findall(r"[a-z]+|0+|[^\w\s]", re.sub(r"\d", "0", message.lower())) for message in messages]
    return Source(token_ids(words, WORDS, VOCABULARY), torch.tensor([label == "spam" for label in labels]).long())


def _bikes(root: Path) -> Source:
    """Return weather and calendar of each hour with the logarithm of its rentals, split in the order of time."""
    path = find_file(root, "bike_sharing/hour.csv", "hour.csv", what="the table of Bike Sharing by hours")
    table = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(*range(2, 14), 16))  # no dates, nor the sum's parts
    x, y = torch.as_tensor(table[:, :-1]), torch.as_tensor(table[:, -1]).log()
    angle = x[:, [3]] * (2 * math.pi / 24)
    x = torch.cat([x, angle.sin(), angle.cos()], 1)
    first, second = round(TRAINING_HOURS * len(y)), round((TRAINING_HOURS + VALIDATION_HOURS) * len(y))
    return Source(x[:first], y[:first], (x[second:], y[second:]), val=(x[first:second], y[first:second]))
