"""What a user saves by `save_hyperparameters` stays whole in checkpoints and in loggers, and loads back."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
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


@pytest.mark.by_default("OfConfig", "OfArguments-dict", "OfArguments-nested", "OfArguments-OmegaConf]")
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


NAMES = {
    "lr": 0.3,
    "batch_size": 3,
    "precision": "mine",
    "seed": 5,
    "max_steps": -2,
    "callbacks": "none",
    "sampler": "a",
}


class Named(BayesianModule):
    """Hyperparameters with the names of a run's settings, and with other values than the run's."""

    def __init__(self, lr: float = 0.1, **others: Any) -> None:
        super().__init__(nn.Linear(6, 2), Gaussian(), lr=lr / 100)
        self.save_hyperparameters()


class Data(pl.LightningDataModule):
    def __init__(self, temperature: float = 7.0, prior: str = "of the data") -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(X, X[:, :2]), 8)


def logged(logger: Any, **options: Any) -> dict[str, Any]:
    """Fit an epoch, and return the content of `hparams.yaml`."""
    quiet_trainer(max_epochs=1, logger=logger, **options).fit(Named(**NAMES), datamodule=Data())
    path = Path(logger.log_dir) / "hparams.yaml"
    return yaml.safe_load(path.read_text()) if path.is_file() else {}


LOGGERS = [pl.loggers.CSVLogger, pl.loggers.TensorBoardLogger]


@pytest.mark.parametrize("kind", LOGGERS)
def test_a_logger_keeps_the_users_values_beside_the_runs(kind: Any, tmp_path: Path) -> None:
    found = logged(kind(tmp_path))
    assert {name: found.get(name) for name in NAMES} == NAMES
    assert (found["temperature"], found["prior"]) == (7.0, "of the data")
    assert (found["run.lr"], found["run.temperature"], found["run.batch_size"]) == (0.003, 1.0, 8)
    assert found["run.sampler"] == "SGLD"


@pytest.mark.parametrize("kind", LOGGERS)
def test_hyperparameters_are_not_logged_where_the_trainer_says_so(kind: Any, tmp_path: Path) -> None:
    assert not logged(kind(tmp_path), enable_autolog_hparams=False)


def test_a_module_loads_with_the_loggers_file(tmp_path: Path) -> None:
    """As of a checkpoint that holds no hyperparameters."""
    logger = pl.loggers.CSVLogger(tmp_path)
    saver = pl.callbacks.ModelCheckpoint(tmp_path, "a")
    logged(logger, enable_checkpointing=True, callbacks=[saver])
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    del content["hyper_parameters"]
    torch.save(content, tmp_path / "b.ckpt")
    loaded = Named.load_from_checkpoint(tmp_path / "b.ckpt", hparams_file=Path(logger.log_dir) / "hparams.yaml")
    assert loaded.lr == 0.003


def test_tensorboards_own_metric_is_logged_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = pl.loggers.TensorBoardLogger(tmp_path)
    logged(logger)
    logger.finalize("success")
    events = accumulator.EventAccumulator(logger.log_dir)
    events.Reload()
    assert len(events.Scalars("hp_metric")) == 1
