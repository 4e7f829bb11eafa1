"""Two ranks evaluate and predict what one does: each datum once, in the loader's order."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import pytorch_lightning as pl
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGLD, BayesianModule, Categorical, Gaussian, Posterior
from lightning_sgmcmc.callbacks import BayesianModelAverage, PredictionWriter, RunSummary, SampleCollector
from lightning_sgmcmc.datamodules import TableDataModule
from tests.support import small_run
from tests.support.trainers import quiet_trainer

COUNT = 21
"""Validation data, of which two ranks cannot have equally many."""


def held_out() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(COUNT, 2, generator=generator)
    return TensorDataset(x, (x.sum(1) + torch.randn(COUNT, generator=generator) > 0).long())


class Losses(pl.Callback):
    """Writes what each rank logs of the validation, and the loss of the chains' weights over all of its data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        x, y = held_out().tensors
        with torch.no_grad():
            each = []
            for chain in range(pl_module.num_chains):
                with pl_module.at_chain(chain):
                    each.append(float(nn.functional.cross_entropy(pl_module(x), y)))
        validation = pl_module.chains.observed.validation
        found = {
            "logged": float(trainer.callback_metrics["val/nll"]),
            "true": sum(each) / len(each),
            "count": validation.count,
        }
        (self.folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("batch_size", [4, 10, 32])
def test_the_loss_of_a_validation_counts_each_datum_once(batch_size: int, tmp_path: Path) -> None:
    """Lightning makes the ranks' shares equally long by a datum that one rank has already."""
    trainer = quiet_trainer(
        max_epochs=1, devices=2, strategy="ddp_fork", num_sanity_val_steps=0, callbacks=[Losses(tmp_path)]
    )
    trainer.fit(small_run.module(num_chains=2), small_run.loader(), DataLoader(held_out(), batch_size))
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert all(math.isclose(rank["logged"], rank["true"], rel_tol=1e-6) for rank in ranks)
    assert [rank["count"] for rank in ranks] == [11, 10]


class Reuses(BayesianModule):
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_step(batch, batch_idx, dataloader_idx)


def test_a_test_step_may_call_validation_step() -> None:
    (found,) = quiet_trainer().test(Reuses(nn.Linear(2, 2), Categorical(), lr=0.1), small_run.loader(), verbose=False)
    assert found.keys() == {"val/nll"}


class Halves(DataLoader[Any]):
    """Each rank's own half of the data, as a user divides them."""

    def __init__(self) -> None:
        rank = torch.distributed.get_rank()
        super().__init__(TensorDataset(*(part[rank::2] for part in held_out().tensors)), 4)


class Divided(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return small_run.loader()

    def val_dataloader(self) -> Any:
        return Halves()


@pytest.mark.parametrize("divided", [False, True], ids=["all data on each rank", "divided"])
def test_without_a_distributed_sampler_each_datum_counts_once(divided: bool, tmp_path: Path) -> None:
    callbacks = [small_run.every_step(), SampleCollector(tmp_path / "samples"), BayesianModelAverage()]
    trainer = quiet_trainer(
        max_epochs=2,
        devices=2,
        strategy="ddp_fork",
        use_distributed_sampler=False,
        default_root_dir=tmp_path,
        callbacks=[*callbacks, RunSummary(show="none")],
    )
    if divided:
        trainer.fit(small_run.module(), datamodule=Divided())
    else:
        trainer.fit(small_run.module(), small_run.loader(), DataLoader(held_out(), 4))
    results = json.loads((tmp_path / "sgmcmc/results.json").read_text())
    assert f"on {COUNT} validation data" in results["sentences"]["quality"]
    x, y = held_out().tensors
    probabilities = Posterior.load(tmp_path / "samples").predict(x).probabilities
    (found,) = (row["value"] for row in results["rows"] if (row["method"], row["metric"]) == ("bma", "nll"))
    assert math.isclose(found, float(-probabilities[range(COUNT), y].log().mean()), rel_tol=1e-5)


def test_predictions_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    frame = pd.DataFrame(torch.randn(90, 3, generator=generator).numpy(), columns=["a", "b", "y"])
    frame.index = pd.Index([f"row {number}" for number in range(90)])
    data = TableDataModule(frame, target="y", task="regression", batch_size=4, test_fraction=COUNT / 90)
    module = BayesianModule(nn.Linear(2, 1), Gaussian(std=0.5), sampler=SGLD, lr=0.01)
    store = SampleCollector(tmp_path / "samples")
    quiet_trainer(max_epochs=2, callbacks=[small_run.every_step(), store]).fit(module, datamodule=data)
    written = []
    for devices in (1, 2):
        strategy = "ddp_fork" if devices == 2 else "auto"
        trainer = quiet_trainer(
            devices=devices,
            strategy=strategy,
            default_root_dir=tmp_path / f"{devices}",
            callbacks=[SampleCollector(tmp_path / "samples"), PredictionWriter()],
        )
        trainer.predict(module, datamodule=data, return_predictions=False)
        folder = tmp_path / f"{devices}/sgmcmc"
        assert sorted(path.name for path in folder.iterdir()) == ["predictions.csv", "predictions.safetensors"]
        written.append((load_file(folder / "predictions.safetensors"), pd.read_csv(folder / "predictions.csv")))
    (one, table), (two, of_ranks) = written
    assert len(table) == COUNT
    pd.testing.assert_frame_equal(table, of_ranks)
    assert one.keys() == two.keys()
    torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-7)  # batches of other sizes round otherwise
