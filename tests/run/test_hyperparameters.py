"""What a user saves by `save_hyperparameters` stays whole in checkpoints, and loads back."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Gaussian, GaussianPrior
from tests.support.trainers import quiet_trainer

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
PLAIN = {"width": 8, "lr": 0.1, "temperature": 0.5, "prior": {"std": 2.0}, "sampler": "SGLD", "likelihood": [1, 2]}


@dataclass
class Config:
    width: int = 8
    lr: float = 0.1
    prior: dict[str, float] = field(default_factory=lambda: {"std": 2.0})


class OfConfig(BayesianModule):
    def __init__(self, config: Any) -> None:
        read = config.get if hasattr(config, "get") else lambda name: getattr(config, name)
        super().__init__(nn.Linear(6, 2), Gaussian(), lr=read("lr"))
        self.config = config
        self.save_hyperparameters(config)


class OfArguments(BayesianModule):
    def __init__(self, config: Any, lr: float = 0.3) -> None:
        super().__init__(nn.Linear(6, 2), Gaussian(), lr=lr)
        self.config = config
        self.save_hyperparameters()


class Ignoring(BayesianModule):
    def __init__(self, lr: float = 0.3, temperature: float = 1.0, net: Any = None) -> None:
        super().__init__(net or nn.Linear(6, 2), Gaussian(), lr=lr, temperature=temperature)
        self.save_hyperparameters(ignore=["net", "temperature"])


class Unsaved(BayesianModule):
    def __init__(self, lr: float = 0.3, temperature: float = 1.0, prior: Any = None) -> None:
        super().__init__(nn.Linear(6, 2), Gaussian(), prior, lr=lr, temperature=temperature)


def configured(kind: str) -> Any:
    omegaconf = pytest.importorskip("omegaconf")
    made = omegaconf.OmegaConf.create(PLAIN)
    if kind == "struct":
        omegaconf.OmegaConf.set_struct(made, True)
    if kind == "read-only":
        omegaconf.OmegaConf.set_readonly(made, True)
    return made


CONFIGS: dict[str, Any] = {
    "dict": lambda: dict(PLAIN),
    "nested dict": lambda: {"lr": 0.1, "config": {"lr": 0.2, "num_chains": 3}},
    "empty of ours": lambda: {"lr": 0.1},
    "OmegaConf": lambda: configured("plain"),
    "OmegaConf, struct": lambda: configured("struct"),
    "OmegaConf, read-only": lambda: configured("read-only"),
}


def saved(module: BayesianModule, path: Path) -> Path:
    """Fit an epoch, and return the checkpoint's path."""
    saver = pl.callbacks.ModelCheckpoint(path, "a")
    trainer = quiet_trainer(max_epochs=1, enable_checkpointing=True, callbacks=[saver])
    trainer.fit(module, DataLoader(TensorDataset(X, X[:, :2]), 8))
    return path / "a.ckpt"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("cls", [OfConfig, OfArguments])
def test_a_configuration_stays_whole_and_loads_back(cls: Any, name: str, tmp_path: Path) -> None:
    config, whole = CONFIGS[name](), CONFIGS[name]()
    module: Any = cls(config)
    for round_ in ("once", "twice"):
        path = saved(module, tmp_path / round_)
        module = cls.load_from_checkpoint(path, weights_only=False)
        assert config == whole
        assert module.config == whole
        assert module.lr == (0.1 if cls is OfConfig else 0.3)
    assert type(module.config) is type(config) or isinstance(module.config, dict)


@pytest.mark.parametrize("config", [Config(), argparse.Namespace(width=8, lr=0.1)])
def test_objects_of_configurations(config: Any, tmp_path: Path) -> None:
    loaded = OfArguments.load_from_checkpoint(saved(OfArguments(config, lr=0.2), tmp_path), weights_only=False)
    assert loaded.config == config
    assert loaded.lr == 0.2


def test_what_is_ignored_stays_ignored(tmp_path: Path) -> None:
    path = saved(Ignoring(0.2, 0.5), tmp_path)
    assert torch.load(path, weights_only=True)["hyper_parameters"] == {"lr": 0.2}
    assert Ignoring.load_from_checkpoint(path).temperature == 1.0


def test_plain_arguments_load_without_save_hyperparameters(tmp_path: Path) -> None:
    path = saved(Unsaved(0.2, 0.5, GaussianPrior(2.0)), tmp_path)
    loaded = Unsaved.load_from_checkpoint(path)
    assert (loaded.lr, loaded.temperature) == (0.2, 0.5)
