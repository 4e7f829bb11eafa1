"""Predictions of standardised targets are in the data's units, from a fit and from its store, unless one asks."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_sgmcmc import BayesianModule, Gaussian, Posterior
from lightning_sgmcmc.callbacks import BayesianModelAverage, PredictionWriter, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import ArrayDataModule, Split, TableDataModule
from lightning_sgmcmc.datamodules.base import standardise
from lightning_sgmcmc.posterior.manifest import MANIFEST
from lightning_sgmcmc.tables import TargetScaling
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


def in_units(x: Any, y: Any, new: Any, targets: Any) -> dict[str, Any]:
    """What a fit of a table says of new rows and their targets."""
    data = TableDataModule(x, y, task="regression", batch_size=60, val_fraction=0.0, test_fraction=0.0)
    torch.manual_seed(0)
    module = BayesianModule(nn.Linear(1, 1), Gaussian(NOISE), lr=0.05, seed=0)
    callbacks = [SamplingSchedule(50, every_n_steps=10), SampleCollector(in_memory=True)]
    quiet_trainer(max_steps=100, callbacks=callbacks).fit(module, datamodule=data)
    assert module.posterior is not None
    posterior, inputs = module.posterior, module.posterior.inputs(new)
    later = TableDataModule(new, targets, splits=([], range(len(new)), []), like=posterior)
    prediction, found = posterior.predict(inputs), posterior.evaluate(later, metrics={"bias": bias}).bma
    conformal = posterior.conformal(later, 0.5).predict(inputs)
    places = {"mean": prediction.mean, "low": prediction.interval(0.9)[0], "set": conformal.low}
    places |= {"sample": prediction.sample(2), "ensemble": posterior.ensemble()(inputs)[0]}
    widths = {"std": prediction.std, "rmse": torch.tensor(found["rmse"]), "bias": torch.tensor(found["bias"])}
    place = float(targets[0])
    units = {"nll": found["nll"], "cdf": prediction.cdf(place), "coverage": found["coverage_90"]}
    return {"places": places, "widths": widths, "units": units}


def bias(mean: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (mean - target).double().mean()


@pytest.mark.parametrize(("shift", "unit"), [(0.0, 1e-13), (0.0, 1e-30), (0.0, 1e30), (1e9, 1.0), (-3e7, 10.0)])
def test_no_unit_of_a_table_changes_what_is_found(shift: float, unit: float) -> None:
    """Standardised data are the same in any unit, and so are all results but for it: seconds since 1970, farads."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(80, 1))
    y = 3 + x[:, 0] + NOISE * generator.normal(size=80)
    plain = in_units(x[:60], y[:60], x[60:], y[60:])
    x, y = shift + unit * x, shift + unit * y
    other = in_units(x[:60], y[:60], x[60:], y[60:])
    for name, expected in plain["places"].items():
        torch.testing.assert_close(
            (other["places"][name].double() - shift) / unit, expected.double(), atol=1e-4, rtol=0
        )
    for name, expected in plain["widths"].items():
        torch.testing.assert_close(other["widths"][name].double() / unit, expected.double(), atol=1e-4, rtol=1e-4)
    assert other["units"]["nll"] - math.log(unit) == pytest.approx(plain["units"]["nll"], abs=1e-4)
    torch.testing.assert_close(other["units"]["cdf"].double(), plain["units"]["cdf"].double(), atol=1e-3, rtol=0)
    assert other["units"]["coverage"] == plain["units"]["coverage"]


def test_each_of_several_units_is_looked_at() -> None:
    """A datamodule of one's own may only have divided its targets, so that their means are one 0."""
    data = SimpleNamespace(target_std=torch.tensor([1.0, 1e-50], dtype=torch.float64))
    with pytest.raises(ValueError, match=r"standard deviation 1e-50.*another unit"):
        TargetScaling.of_datamodule(data)


def test_a_unit_beyond_float32_is_an_error() -> None:
    x = torch.randn(20, 1, generator=torch.Generator().manual_seed(0)).double()
    with pytest.raises(ValueError, match=r"standard deviation .*e-50.*another unit"):
        in_units(x, 1e-50 * x[:, 0], x, 1e-50 * x[:, 0])


def test_a_constant_column_is_centred_in_any_unit() -> None:
    for value in (0.1, 1e25 / 3, -1e-20 / 3):
        x = torch.stack([torch.arange(50.0).double(), torch.full((50,), value, dtype=torch.float64)], 1)
        data = TableDataModule(x, x[:, 0], task="regression", val_fraction=0.0, test_fraction=0.0)
        data.setup("fit")
        assert data.splits[0].inputs[:, 1].unique().tolist() == [0.0]


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
