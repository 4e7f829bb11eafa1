"""Sampled networks and ensembles at equal cost: budgets, units and rows; the figures are the recipes' own affair."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sgmcmc import BayesianModule, Gaussian, Posterior, PosteriorSample
from lightning_sgmcmc.datamodules import ArrayDataModule, Split
from lightning_sgmcmc.datamodules.base import standardise
from lightning_sgmcmc.posterior.store import MemoryStore, TargetScaling
from lightning_sgmcmc.recipes import airfoil, uci_nll
from lightning_sgmcmc.recipes.shared import regression
from lightning_sgmcmc.recipes.shared.options import Options


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Options:
    """Make both recipes tiny, on data of their own, in this process."""
    draws = np.random.default_rng(0)
    np.savetxt(tmp_path / "airfoil.csv", draws.normal(120, 7, (1503, 6)), delimiter=",")
    x = draws.normal(size=(40, 3))
    test = np.arange(80).reshape(20, 4) % 40
    np.savez(tmp_path / "yacht.npz", x=x, y=5 + x.sum(1), test_indices=test)
    tiny = regression.Setting((4,), batch_size=18, warm_steps=8, members=3, chains=2, sampling_steps=6, samples=4)
    for recipe in (airfoil, uci_nll):

        def in_turn(function: Any, jobs: Any, options: Options, *shared: Any) -> dict[Any, Any]:
            return {job: function(*job, tiny, options) for job in jobs}

        monkeypatch.setattr(recipe, "run_jobs", in_turn)
    monkeypatch.setattr(uci_nll, "PUBLISHED", {"yacht": uci_nll.PUBLISHED["yacht"]})
    return Options(tmp_path, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_both_methods_and_their_costs(small: Options) -> None:
    rows = {(row.method, row.metric): row for row in airfoil.run(small)}
    costs = [rows[method, "gradient evaluations"].value for method in regression.METHODS]
    assert costs == [8 * 18 * 2 + 6 * 1202 * 2, 8 * 18 * 3]  # optimized networks, and chains that start at two of them
    assert rows["posterior", "RMSE"].paper == 0.1215
    gain = rows["posterior", "NLL"].value - rows["ensemble", "NLL"].value
    assert rows["posterior - ensemble", "NLL"].value == pytest.approx(gain)
    rows = {(row.method, row.metric): row for row in uci_nll.run(small)}
    assert rows["ensemble", "yacht: NLL"].paper == 1.18
    assert all(math.isfinite(row.value) for row in rows.values())


def test_metrics_are_in_the_targets_units() -> None:
    """One sample of a line with known noise: RMSE and NLL by hand, in units of the data and of their spread."""

    class Line(ArrayDataModule):
        def load(self) -> tuple[Split, Split, Split]:
            x = torch.linspace(-1, 1, 30)[:, None].double()
            targets, mean, std = standardise(100 + 20 * x)
            self.target_mean, self.target_std = float(mean), float(std)
            part = Split(x.float(), targets[0])
            return part, part, part

    data = Line(10)
    data.setup("fit")
    assert data.target_mean is not None
    assert data.target_std is not None
    store = MemoryStore()
    module = BayesianModule(net=torch.nn.Linear(1, 1, bias=False), likelihood=Gaussian(0.3))
    store.append(PosteriorSample(1, 0, 0, 0.0, 0.0, {"net.weight": torch.zeros(1, 1)}, dict(module.named_buffers())))
    store.scaling = TargetScaling((data.target_mean,), (data.target_std,))
    found = regression.metrics_of(Posterior(store, module), data)
    assert found["standardised_rmse"] == pytest.approx(1, rel=1e-4)
    assert found["rmse"] == pytest.approx(data.target_std, rel=1e-4)
    expected = 0.5 / 0.3**2 + math.log(0.3) + math.log(2 * math.pi) / 2
    assert found["standardised_nll"] == pytest.approx(expected, rel=1e-4)
    assert found["nll"] == pytest.approx(expected + math.log(data.target_std), rel=1e-4)
    assert found["width_90"] == pytest.approx(2 * 1.6449 * 0.3 * data.target_std, rel=1e-3)


def test_networks_and_likelihoods_of_a_setting() -> None:
    setting = regression.Setting(hidden=(4, 5), activation="ReLU")
    for likelihood, outputs in (("gaussian", 1), ("student", 1), ("heteroscedastic", 2)):
        chosen = replace(setting, likelihood=likelihood)
        assert regression.network(3, chosen)(torch.zeros(2, 3)).shape == (2, outputs)
        density = regression.likelihood_of(chosen).log_prob(torch.zeros(2, outputs), torch.zeros(2, 1))
        assert density.shape == (2,)
