"""What a run writes: whole files in place of others, no infinity in a sample, and words on what it costs."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import Categorical, NonFiniteEnergyError
from lightning_sgmcmc.callbacks import BayesianModelAverage, PredictionWriter, SampleCollector
from lightning_sgmcmc.chains.trainer import run_folder
from lightning_sgmcmc.cli.fit import ConfigFile
from tests.support import small_run
from tests.support.faults import limited_files
from tests.support.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore")


class Infinite(pl.Callback):
    """Makes a buffer of the network infinite, as inputs of 1e30 do to a running variance."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 3:
            for name, buffer in pl_module.named_buffers():
                if name.endswith(self.name):
                    buffer.fill_(torch.inf)


class WithMask(nn.Module):
    """A network with an infinite mask, as attention has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layers(x))


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("name", ["running_var", "running_mean"])
def test_an_infinite_running_statistic_is_no_sample(name: str, chains: int) -> None:
    module = small_run.module(net=WithMask(), num_chains=chains)
    with pytest.raises(NonFiniteEnergyError, match=rf"{name}.* holds NaN or infinite numbers after step"):
        small_run.fit_every_step(module, Infinite(name), SampleCollector(in_memory=True))


def test_an_infinite_mask_is_no_fault() -> None:
    module = small_run.module(net=WithMask(), num_chains=2)
    small_run.fit_every_step(module, SampleCollector(in_memory=True))
    assert module.posterior is not None
    assert len(module.posterior) == 12


def test_predictions_are_written_whole_and_through_no_link(tmp_path: Path) -> None:
    module = small_run.module()
    callbacks = [small_run.every_step(), SampleCollector(in_memory=True), PredictionWriter()]
    trainer = quiet_trainer(max_steps=2, callbacks=callbacks, default_root_dir=tmp_path)
    trainer.fit(module, small_run.loader())
    victim = tmp_path / "outside" / "victim"
    victim.parent.mkdir()
    inputs = DataLoader(TensorDataset(small_run.tensors()[0]), 8)
    trainer.predict(module, inputs)
    (file,) = tmp_path.rglob("predictions.safetensors")
    file.unlink()
    file.symlink_to(victim)  # it dangles
    trainer.predict(module, inputs)
    assert not victim.exists()
    assert not file.is_symlink()
    assert load_file(file)["probabilities"].shape == (24, 2)
    trainer.predict(module, inputs)
    assert {path.name for path in file.parent.glob("*predictions*")} == {file.name, "predictions-1.safetensors"}
    with (
        limited_files(100),
        pytest.raises(OSError, match=rf"{file} could not be written: .*File too large.* predict again"),
    ):
        trainer.predict(module, inputs)
    assert {path.name for path in file.parent.glob("*predictions*")} == {
        "predictions-1.safetensors",
        "predictions-2.safetensors",
    }


class Deleting(pl.Callback):
    """Deletes the run's samples, as a user does with a folder that seems old."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            shutil.rmtree(self.folder)


def test_a_deleted_folder_is_said_to_be_gone(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    with pytest.raises(OSError, match=r"the folder was deleted, with the 2 earlier samples") as raised:
        small_run.fit_every_step(small_run.module(), Deleting(folder), SampleCollector(folder))
    assert "complete" not in str(raised.value)


class Parser:
    text = "a: 1\n"

    def dump(self, config: Any, **options: Any) -> str:
        return self.text


def trainer_in(folder: Path) -> pl.Trainer:
    return pl.Trainer(default_root_dir=folder, logger=False, accelerator="cpu", enable_progress_bar=False)


def written(folder: Path, parser: Parser) -> None:
    one = ConfigFile(parser, None)  # type: ignore[arg-type]
    one.on_train_start(trainer_in(folder), small_run.module())


def test_a_configuration_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser, folder = Parser(), run_folder(trainer_in(tmp_path))
    written(tmp_path, parser)
    written(tmp_path, parser)
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]
    parser.text = "a: 2\n"
    written(tmp_path, parser)
    found = {path.name: path.read_text() for path in folder.iterdir()}
    assert found == {"config.yaml": "a: 2\n", "config-1.yaml": "a: 1\n"}
    parser.text, whole = "a: 3\n", Path.write_text

    def half(path: Path, text: str, **options: Any) -> int:
        whole(path, text[:2], **options)
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="disk full"):
        written(tmp_path, parser)
    assert (folder / "config.yaml").read_text() == "a: 2\n"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_configuration_follows_no_link(kind: str, tmp_path: Path) -> None:
    path = run_folder(trainer_in(tmp_path)) / "config.yaml"
    path.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "victim")
    written(tmp_path, Parser())
    assert path.is_file()
    assert path.read_text() == "a: 1\n"
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("value", ["abc", "1.5", "0x", "seed 1"])
def test_a_seed_in_the_environment_is_a_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", value)
    with pytest.raises(ValueError, match=rf"PL_GLOBAL_SEED must be a whole number, got '{value}': .*seed_everything"):
        small_run.fit_every_step(small_run.module())


def test_large_sums_in_checkpoints_are_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_sgmcmc.callbacks.bayesian_model_average.LARGE_STATE", 100)
    monkeypatch.setattr("lightning_sgmcmc.callbacks.bayesian_model_average.rank_zero_info", said.append)
    module = small_run.module(likelihood=Categorical())
    trainer = quiet_trainer(max_epochs=1, callbacks=[small_run.every_step(), BayesianModelAverage()])
    trainer.fit(module, small_run.loader(), small_run.loader())
    for name in ("a", "b"):
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
    assert len([text for text in said if "to each checkpoint" in text and "fewer data" in text]) == 1
