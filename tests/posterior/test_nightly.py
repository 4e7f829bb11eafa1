"""A folder that is written again every night: who has opened it before keeps the samples that it opened."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, Posterior
from lightning_sgmcmc.callbacks import AutoSampling, BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import TableDataModule
from lightning_sgmcmc.posterior.calibration import FILE
from tests.support.trainers import quiet_trainer

X = torch.randn(120, 2, generator=torch.Generator().manual_seed(0))


def night(path: Path, seed: int, auto: bool = True, frozen: bool = False) -> None:
    """Fit once more into the folder; with AutoSampling the manifest's weights are rewritten at the end."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    sampled = {"sampled": ["net.2.*"]} if frozen else {}
    module = BayesianModule(net, Categorical(), lr=0.01, seed=seed, **sampled)
    schedule: Any = AutoSampling(num_draws=8) if auto else SamplingSchedule(every_n_steps=4)
    callbacks = [schedule, SampleCollector(path), BayesianModelAverage()]
    quiet_trainer(max_epochs=15 if auto else 4, callbacks=callbacks).fit(module, datamodule=labels())


def labels() -> TableDataModule:
    return TableDataModule(X, (X[:, 0] > 0).long(), batch_size=40, task="classes", val_fraction=0.2, test_fraction=0)


def probabilities(posterior: Posterior) -> Tensor:
    return posterior.predict(X).probabilities


@pytest.mark.by_default("another seed", "plain-the same")
@pytest.mark.parametrize("seed", [1, 0], ids=["another seed", "the same seed"])
@pytest.mark.parametrize("kind", ["auto", "plain", "plain, then auto", "auto, then plain", "frozen trunk"])
def test_an_opened_posterior_serves_the_old_samples(tmp_path: Path, kind: str, seed: int) -> None:
    path = tmp_path / "samples"
    night(path, 0, kind.startswith("auto"), frozen=kind == "frozen trunk")
    expected = probabilities(Posterior.load(path))
    never_read, half_read = Posterior.load(path), Posterior.load(path)
    half_read.store[0]
    for _ in range(2):
        night(path, seed, kind.endswith("auto"), frozen=kind == "frozen trunk")
        assert torch.equal(probabilities(half_read), expected)
        assert torch.equal(probabilities(Posterior(never_read.store, never_read.model)), expected)
    if seed:
        assert not torch.equal(probabilities(Posterior.load(path)), expected)


def test_two_nights_in_one_folder_are_merged_and_one_is_not_twice(tmp_path: Path) -> None:
    path = tmp_path / "samples"
    night(path, 0, auto=False)
    yesterday, again = Posterior.load(path), Posterior.load(path)
    alone = probabilities(Posterior.load(path))
    night(path, 1, auto=False)
    today = Posterior.load(path)
    assert yesterday.store.run_id != today.store.run_id  # type: ignore[attr-defined]
    both = Posterior.merge(yesterday, today)
    assert len(both) == len(yesterday) + len(today)
    torch.testing.assert_close(probabilities(both), (alone + probabilities(today)) / 2)
    for twice in (again, Posterior.load(tmp_path / "samples-1")):
        with pytest.raises(ValueError, match="posterior 1 is given twice"):
            Posterior.merge(yesterday, twice)


def test_a_calibration_is_saved_beside_its_own_samples(tmp_path: Path) -> None:
    path = tmp_path / "samples"
    night(path, 0, auto=False)
    yesterday = Posterior.load(path)
    night(path, 1, auto=False)
    yesterday.calibrate(labels(), save=True)
    assert (tmp_path / "samples-1" / FILE).exists()
    assert not (path / FILE).exists()


@pytest.mark.parametrize("width", [4, 9])
def test_predictions_take_the_runs_network(tmp_path: Path, width: int) -> None:
    """A module of another width evaluates a run's samples with `trainer.test`, and predicts with them too."""
    night(tmp_path / "samples", 0, auto=False)
    net = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))
    trainer = quiet_trainer(callbacks=[SampleCollector(tmp_path / "samples")])
    loader = DataLoader(TensorDataset(X), 50)
    found: Any = trainer.predict(BayesianModule(net, Categorical()), loader)
    expected = probabilities(Posterior.load(tmp_path / "samples"))
    torch.testing.assert_close(torch.cat([one.probabilities for one in found]), expected)
