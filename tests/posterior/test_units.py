"""Predictions of standardised targets are in the data's units, from a fit and from its store, unless one asks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_sgmcmc import BayesianModule, Gaussian, Posterior
from lightning_sgmcmc.callbacks import BayesianModelAverage, PredictionWriter, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import ArrayDataModule, Split
from lightning_sgmcmc.datamodules.base import standardise
from lightning_sgmcmc.posterior.manifest import MANIFEST
from tests.support.trainers import quiet_trainer

NOISE = 0.3


class Prices(ArrayDataModule):
    """A line with mean 300 and standard deviation about 50, standardised."""

    def __init__(self) -> None:
        super().__init__(batch_size=20)

    def load(self) -> tuple[Split, Split, Split]:
        x = torch.randn(60, 1, generator=torch.Generator().manual_seed(0)).double()
        targets, mean, std = standardise(300 + 50 * x)
        self.target_mean, self.target_std = float(mean), float(std)
        part = Split(x.float(), targets[0])
        return part, part, part


def test_predictions_are_in_the_datas_units(tmp_path: Path) -> None:
    """The mean is the data's, the noise is the data's share of their spread, and the errors agree with the metrics."""
    data = Prices()
    module = BayesianModule(net=nn.Linear(1, 1), likelihood=Gaussian(NOISE), lr=0.05, seed=0)
    average = BayesianModelAverage()
    callbacks = [SamplingSchedule(100, every_n_steps=10), SampleCollector(tmp_path / "samples"), average]
    trainer = quiet_trainer(max_steps=200, callbacks=[*callbacks, PredictionWriter()], default_root_dir=tmp_path)
    trainer.fit(module, datamodule=data)
    part = data.splits[0]
    assert data.target_std is not None
    assert data.target_mean is not None
    prices = part.targets * data.target_std + data.target_mean
    posterior, later = module.posterior, Posterior.load(tmp_path / "samples")
    assert posterior is not None
    for chosen in (posterior, later, later.in_memory(), later.resample(50), later.reweighted("sample")):
        found = chosen.predict(part.inputs, return_samples=True)
        assert (found.mean - prices).abs().max() < 0.2 * data.target_std
        noise = (found.std.square() - found.epistemic_std.square()).sqrt()
        torch.testing.assert_close(noise, torch.full_like(noise, NOISE * data.target_std), rtol=1e-3, atol=0)
        assert found.sample_means.mean().item() == pytest.approx(prices.mean().item(), rel=0.05)
    rmse = (later.predict(part.inputs).mean - prices).square().mean().sqrt().item()
    assert module.evaluations["val"].bma["rmse"] == pytest.approx(rmse, rel=1e-4)
    plain = later.standardised().predict(part.inputs)
    back = plain.mean * data.target_std + data.target_mean
    torch.testing.assert_close(back, later.predict(part.inputs).mean)
    for original in (True, False):
        folder = tmp_path / str(original)
        writers = [SampleCollector(tmp_path / "samples"), PredictionWriter(original_units=original)]
        reader = quiet_trainer(callbacks=writers, default_root_dir=folder)
        twin = BayesianModule(net=nn.Linear(1, 1), likelihood=Gaussian(NOISE))
        reader.predict(twin, datamodule=Prices(), return_predictions=False)
        (written,) = folder.rglob("predictions.safetensors")
        expected = later.predict(part.inputs).mean if original else plain.mean
        torch.testing.assert_close(load_file(written)["mean"], expected)


def test_a_store_without_scaling_predicts_as_before(tmp_path: Path) -> None:
    module = BayesianModule(net=nn.Linear(1, 1), likelihood=Gaussian(NOISE), lr=0.05, seed=0)
    callbacks: Any = [SamplingSchedule(every_n_steps=5), SampleCollector(tmp_path / "samples")]
    quiet_trainer(max_steps=20, callbacks=callbacks).fit(module, datamodule=Prices())
    manifest = tmp_path / "samples" / MANIFEST
    first, rest = manifest.read_text().split("\n", 1)
    x = torch.randn(5, 1)
    expected = Posterior.load(tmp_path / "samples").standardised().predict(x).mean
    manifest.write_text(json.dumps({k: v for k, v in json.loads(first).items() if k != "targets"}) + "\n" + rest)
    torch.testing.assert_close(Posterior.load(tmp_path / "samples").predict(x).mean, expected)
