"""A run that goes on from a checkpoint, wherever it was saved, is the run that was never stopped, bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, Posterior
from lightning_sgmcmc.callbacks import BayesianModelAverage, CyclicalSchedule, SampleCollector
from lightning_sgmcmc.datamodules import ArrayDataModule, DatasetDataModule, Split
from tests.conjugate import quiet_trainer

NUM_DATA, BATCH, CLASSES = 60, 8, 3


def data(count: int, seed: int) -> Split:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator)
    return Split(x, (x[:, :CLASSES] + 0.3 * torch.randn(count, CLASSES, generator=generator)).argmax(1))


class Noisy:
    """Augmentation of a whole batch."""

    def __call__(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class InMemory(ArrayDataModule):
    def __init__(self) -> None:
        super().__init__(BATCH)

    def load(self) -> tuple[Split, Split, Split]:
        return data(NUM_DATA, 0), data(20, 1), data(20, 2)

    def train_transform(self) -> Any:
        return Noisy()


class Decoded(Dataset[Any]):
    """Items that draw their augmentation from torch's and NumPy's default generators."""

    def __init__(self, split: Split, augment: bool) -> None:
        self.split = split
        self.augment = augment

    def __len__(self) -> int:
        return len(self.split.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.split.inputs[index]
        if self.augment:
            x = x + 0.1 * torch.randn(5) + 0.1 * float(np.random.normal())  # noqa: NPY002
        return x, self.split.targets[index]


def datamodule(kind: str) -> pl.LightningDataModule:
    if kind == "memory":
        return InMemory()
    train, val = Decoded(data(NUM_DATA, 0), True), Decoded(data(20, 1), False)
    module = DatasetDataModule(train, val, batch_size=BATCH, num_workers=int(kind.removeprefix("workers ")))
    module.val_dataloader = lambda: torch.utils.data.DataLoader(val, BATCH)  # type: ignore[method-assign]
    return module


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
        )


class SaveEverywhere(pl.callbacks.Checkpoint):
    """Saves a checkpoint behind every batch, micro-batches included, every validation and every epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batches = 0

    def _save(self, trainer: pl.Trainer, what: str) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"{self.batches:03d}-{what}.ckpt")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.batches += 1
        self._save(trainer, "batch")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._save(trainer, "validation")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._save(trainer, "epoch")


Outcome = dict[str, Any]


def run(
    folder: Path, options: dict[str, Any], kind: str, *extra: pl.Callback, ckpt_path: Path | None = None, **fit: Any
) -> Outcome:
    """Fit; return everything that must not depend on stops."""
    torch.manual_seed(int.from_bytes(folder.name.encode()[-3:], "little"))  # what a new process happens to have
    module = BayesianModule(net=network(), likelihood=Categorical(), sampler=SGHMC, lr=0.05, seed=3)
    trainer = quiet_trainer(
        **({"max_epochs": 3, "num_sanity_val_steps": 0, "enable_checkpointing": True} | options),
        callbacks=[
            CyclicalSchedule(2, 0.4, 3),
            SampleCollector(folder / "samples"),
            BayesianModelAverage(),
            *extra,
        ],
        default_root_dir=folder,
    )
    trainer.fit(module, datamodule=datamodule(kind), ckpt_path=ckpt_path, **fit)
    posterior = Posterior.load(folder / "samples")
    return {
        "state": module.state_dict(),
        "sampler": module.sampler.state_dict(),
        "samples": [sample.state for sample in posterior],
        "records": posterior.records,
        "running": module.evaluations["val"].running,
        "members": module.evaluations["val"].members,
        "step": trainer.global_step,
    }


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Return the places where two outcomes differ."""
    if isinstance(a, Tensor):
        return [] if torch.equal(a, b) else [path]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{path} keys"]
        return [d for key in a for d in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [f"{path} has {len(a)} and {len(b)}"]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}/{i}")]
    return [] if a == b or a != a else [f"{path}: {a} {b}"]


SETTINGS: dict[str, dict[str, Any]] = {
    "epochs": {},
    "steps": {"max_steps": 21, "max_epochs": -1},
    "steps in mid-epoch": {"max_steps": 19, "max_epochs": -1},
    "validation in mid-epoch": {"val_check_interval": 3},
    "validation across epochs": {"val_check_interval": 5, "check_val_every_n_epoch": None},
    "validation seldom": {"check_val_every_n_epoch": 2},
    "accumulation": {"accumulate_grad_batches": 2, "max_epochs": 4},
    "accumulation and validation in mid-window": {
        "accumulate_grad_batches": 3,
        "val_check_interval": 2,
        "max_epochs": 5,
    },
    "part of the batches": {"limit_train_batches": 5, "max_epochs": 4},
    "everything": {
        "limit_train_batches": 7,
        "accumulate_grad_batches": 2,
        "val_check_interval": 3,
        "max_epochs": 4,
        "gradient_clip_val": 1.0,
        "precision": "bf16-mixed",
    },
}


def check_every_save_point(tmp_path: Path, setting: str, kind: str, stride: int = 1) -> int:
    whole_folder = tmp_path / "whole"
    whole = run(whole_folder, SETTINGS[setting], kind, SaveEverywhere(tmp_path))
    checkpoints = sorted(tmp_path.glob("*.ckpt"))[::stride]
    bad = {}
    for checkpoint in checkpoints:
        torch.load(checkpoint, weights_only=True)  # nothing in it needs unpickling
        folder = tmp_path / checkpoint.stem
        shutil.copytree(whole_folder / "samples", folder / "samples")
        resumed = run(folder, SETTINGS[setting], kind, ckpt_path=checkpoint)
        if found := differences(whole, resumed):
            bad[checkpoint.stem] = found[:3]
        shutil.rmtree(folder)
    assert not bad, bad
    return len(checkpoints)


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_save_point(tmp_path: Path, setting: str) -> None:
    assert check_every_save_point(tmp_path, setting, "memory") >= 20
