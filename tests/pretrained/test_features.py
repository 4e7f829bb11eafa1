"""The frozen layers' outputs, computed once: the draws are those of the whole network."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, FeatureDataModule, Posterior, bayesianize
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import ArrayDataModule, Split, TableDataModule
from tests.support.trainers import quiet_trainer


def table() -> TableDataModule:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 5, generator=generator)
    return TableDataModule(x, x[:, :3].argmax(1), batch_size=16, val_fraction=0.2, test_fraction=0.2)


def network(*before: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        trunk = nn.Sequential(nn.Linear(5, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Dropout(0.2))
        return nn.Sequential(trunk, *before, nn.Linear(20, 3))


def module(net: nn.Module | None = None, **options: Any) -> BayesianModule:
    chosen: dict[str, Any] = {"sampler": SGHMC, "lr": 0.05, "num_chains": 2, "seed": 3, "chain_start": "own"} | options
    return bayesianize(network() if net is None else net, "last_layer", Categorical(), **chosen)


def fit(model: BayesianModule, data: pl.LightningDataModule, folder: Path) -> pl.Trainer:
    callbacks: list[pl.Callback] = [SamplingSchedule(every_n_steps=2), SampleCollector(folder), BayesianModelAverage()]
    trainer = quiet_trainer(max_steps=8, callbacks=callbacks)
    trainer.fit(model, datamodule=data)
    return trainer


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_draws_and_predictions_are_those_of_the_whole_network(tmp_path: Path, execution: Any) -> None:
    whole, part, data = module(chain_execution=execution), module(chain_execution=execution), table()
    of_whole = fit(whole, table(), tmp_path / "whole")
    of_part = fit(part, FeatureDataModule(part, data), tmp_path / "part")
    stores = [Posterior.load(tmp_path / name) for name in ("whole", "part")]
    assert len(stores[0]) == len(stores[1]) == 8
    for one, other in zip(*stores, strict=True):
        torch.testing.assert_close(one.state, other.state, rtol=1e-4, atol=1e-5)
        assert one.energy == pytest.approx(other.energy, rel=1e-5)
    for name in ("val/bma_nll", "val/bma_accuracy"):
        assert float(of_part.callback_metrics[name]) == pytest.approx(float(of_whole.callback_metrics[name]), rel=1e-4)
    x = data.splits[2].inputs
    expected = stores[0].predict(x).probabilities
    for posterior in (stores[1], part.posterior):
        assert posterior is not None
        torch.testing.assert_close(posterior.predict(x).probabilities, expected, rtol=1e-4, atol=1e-5)


class Augmented(ArrayDataModule):
    def load(self) -> tuple[Split, Split, Split]:
        return table().load()

    def train_transform(self) -> Any:
        return lambda x: x + torch.randn_like(x)


class Scaled(nn.Module):
    """Does more with its last layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 20), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = 2 * self.head(self.body(x))
        return out


def test_what_cannot_be_computed_once() -> None:
    with pytest.raises(TypeError, match=r"data should be a datamodule with data in memory, got list"):
        FeatureDataModule(module(), [])  # type: ignore[arg-type]
    for model, data, message in (
        (module(), Augmented(8), "Augmented augments its training data, so features would be of other inputs"),
        (module(Scaled()), table(), r"output is not that of its sampled part 'net.head'"),
        (module(network(nn.Dropout(0.5))), table(), r"'net.1' drops out in training"),
        (module(frozen_dropout=True), table(), r"'net.0.3' drops out in training"),
        (BayesianModule(net=network(), likelihood=Categorical()), table(), r"are in several parts of the network"),
    ):
        with pytest.raises(ValueError, match=message):
            FeatureDataModule(model, data).setup("fit")
