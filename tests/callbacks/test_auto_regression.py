"""AutoSampling in noisy regressions: its temperature rises while the validation data find the predictions too sure."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule
from lightning_sgmcmc.callbacks import AutoSampling, SampleCollector
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.likelihoods import Gaussian
from lightning_sgmcmc.namespace import pl
from tests.support.comparisons import assert_same
from tests.support.trainers import quiet_trainer

COLUMNS = 20


def rows(count: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return x and y = (w·x + noise·ε)/√(1 + noise²) of variance 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, COLUMNS, generator=generator)
    weights = torch.linspace(-1, 1, COLUMNS) / torch.linspace(-1, 1, COLUMNS).norm()
    y = x @ weights + noise * torch.randn(count, generator=generator)
    return x, y[:, None] / math.sqrt(1 + noise**2)


def data(noise: float, count: int = 450) -> DatasetDataModule:
    train, val = (torch.utils.data.TensorDataset(*rows(n, noise, seed)) for n, seed in ((count, 0), (100, 1)))
    return DatasetDataModule(train, val, batch_size=48)


def fit(
    auto: AutoSampling, noise: float, epochs: int = 60, resume: Path | None = None, **options: Any
) -> tuple[BayesianModule, pl.Trainer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(COLUMNS, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
    module = BayesianModule(net, Gaussian(std=0.5, learned=True), seed=3, num_chains=2)
    callbacks = [auto, SampleCollector(in_memory=True), *options.pop("callbacks", [])]
    trainer = quiet_trainer(max_epochs=epochs, callbacks=callbacks, **options)
    trainer.fit(module, datamodule=data(noise), ckpt_path=resume)
    return module, trainer


def nll(module: BayesianModule, noise: float) -> float:
    assert module.posterior is not None
    return float(module.posterior.evaluate([rows(2000, noise, 2)]).bma["nll"])


@pytest.fixture(scope="module")
def noisy() -> tuple[BayesianModule, AutoSampling]:
    auto = AutoSampling(num_draws=20)
    return fit(auto, noise=1.0)[0], auto


def test_noise_raises_the_temperature_and_the_predictions_gain(noisy: tuple[BayesianModule, AutoSampling]) -> None:
    """Noise is half of the variance here: at the fixed temperature the NLL is above a guess's 1.42."""
    module, auto = noisy
    assert module.posterior is not None
    taus = [record.temperature for record in module.posterior.records if record.chain == 0]
    assert taus == sorted(taus)
    assert taus[0] == pytest.approx(0.1)
    assert taus[-1] == pytest.approx(auto.new_temperatures[-1][1], rel=1e-3)
    assert taus[-1] > 0.5
    steps = [record.step for record in module.posterior.records if record.chain == 0]
    assert {step for step, _ in auto.new_temperatures} <= set(steps)
    truth, guess = 0.5 * math.log(2 * math.pi * math.e * 0.5), 0.5 * math.log(2 * math.pi * math.e)
    cold = nll(fit(AutoSampling(num_draws=20, temperature=0.1), noise=1.0)[0], 1.0)
    warm = nll(module, 1.0)
    assert truth - 0.05 < warm < cold - 0.05
    assert warm < guess - 0.1


def test_a_temperature_of_ones_own_stays() -> None:
    auto = AutoSampling(num_draws=20, temperature=0.2)
    module, _ = fit(auto, noise=1.0, epochs=6)
    assert module.posterior is not None
    assert [record.temperature for record in module.posterior.records] == pytest.approx([0.2] * 40)
    assert not auto.new_temperatures


def test_without_noise_it_stays_cold() -> None:
    auto = AutoSampling(num_draws=20)
    fit(auto, noise=0.05)
    assert not auto.new_temperatures
    assert "temperatures" not in auto.as_configuration()["init_args"]


def test_a_resumed_run_goes_on_at_its_temperature(noisy: tuple[BayesianModule, AutoSampling], tmp_path: Path) -> None:
    whole, auto = noisy
    first = auto.new_temperatures[0][0]
    saves = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=first + 5, save_top_k=-1)
    fit(AutoSampling(num_draws=20), noise=1.0, callbacks=[saves], enable_checkpointing=True)
    saved = min(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    resumed = AutoSampling(num_draws=20)
    module, _ = fit(resumed, noise=1.0, resume=saved)
    assert resumed.new_temperatures == auto.new_temperatures
    assert whole.posterior is not None
    assert module.posterior is not None
    assert_same(list(whole.posterior)[-8:], list(module.posterior)[-8:])
