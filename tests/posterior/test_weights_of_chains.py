"""Importance weights of several chains: with a π for each they compare only within a chain, with a shared π in all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc import SGLD, BayesianModule, Categorical, ContourRules, Posterior
from lightning_sgmcmc.callbacks import BayesianModelAverage, ContourGradient, SampleCollector, SamplingSchedule
from lightning_sgmcmc.chains.samples import SampleRecord
from lightning_sgmcmc.contour import DecayingStepSize
from lightning_sgmcmc.report.run_record import read_run
from lightning_sgmcmc.report.tables import samples
from lightning_sgmcmc.simulation import TargetDataModule, TargetModule
from lightning_sgmcmc.simulation.targets import GaussianMixture
from tests.support.problems import Data
from tests.support.trainers import quiet_trainer

CHAINS = 4


def run(folder: Path, **options: Any) -> BayesianModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    module = BayesianModule(net=net, likelihood=Categorical(), sampler=SGLD, lr=0.1, seed=2, num_chains=CHAINS)
    callbacks = [
        SamplingSchedule(burn_in_steps=50, every_n_steps=15),
        ContourGradient(
            ContourRules(5.0), 20, first_edge=50.0, width=3.0, step_size=DecayingStepSize(5, 0.7, 20), **options
        ),
        SampleCollector(folder / "samples"),
        BayesianModelAverage(),
    ]
    quiet_trainer(max_epochs=16, callbacks=callbacks, default_root_dir=folder).fit(module, datamodule=Data())
    return module


def shares(records: list[SampleRecord], weights: Tensor) -> list[float]:
    """Return each chain's share of all weight."""
    chains = torch.tensor([record.chain for record in records])
    return [float(weights[chains == chain].sum()) for chain in range(CHAINS)]


def test_chains_with_a_contour_each_count_alike(tmp_path: Path) -> None:
    """Everywhere that weights meet: the posterior, a store read later, a subset, the running average, the report."""
    module = run(tmp_path)
    posterior, found = module.posterior, module.evaluations["val"]
    assert posterior is not None
    records = posterior.records
    raw = torch.tensor([record.log_weight for record in records], dtype=torch.float64)
    assert max(shares(records, raw.softmax(0))) > 0.6, "the constants of the chains must matter"
    equal = pytest.approx([1 / CHAINS] * CHAINS)
    own = posterior.weights.view(-1, CHAINS) * CHAINS
    torch.testing.assert_close(own, raw.view(-1, CHAINS).softmax(0))
    later = Posterior.load(tmp_path / "samples")
    for chosen in (posterior, later, later.in_memory(), later.reweighted("final"), later.reweighted("sample", 0.5)):
        assert shares(chosen.records, chosen.weights) == equal
    half = later.in_memory()
    half.store.keep(half.records[len(half) // 2 :])
    assert shares(half.records, half.weights) == equal
    again = posterior.resample(400)
    assert shares(again.records, again.weights) == pytest.approx([1 / CHAINS] * CHAINS, abs=1 / 400 + 1e-9)
    assert again.weight_efficiency == pytest.approx(1)
    x = torch.cat([batch[0] for batch in validation_loader()])
    assert found.average is not None
    torch.testing.assert_close(found.average.terms["probabilities"], posterior.predict(x).probabilities)
    assert found.weight_efficiency == pytest.approx(posterior.weight_efficiency)
    shown = samples(read_run(tmp_path).records)
    assert shown is not None
    assert any(f"{float(posterior.weights.max()):.3g}"[:4] in row[-1].text for row in shown.cells())


def validation_loader() -> Any:
    data = Data()
    data.setup("fit")
    return data.val_dataloader()


def test_chains_that_share_a_contour_are_pooled(tmp_path: Path) -> None:
    module = run(tmp_path, interacting=True)
    posterior = module.posterior
    assert posterior is not None
    raw = torch.tensor([record.log_weight for record in posterior.records], dtype=torch.float64)
    for chosen in (posterior, Posterior.load(tmp_path / "samples")):
        assert torch.equal(chosen.log_weights, raw)
        assert max(shares(chosen.records, chosen.reweighted("final").weights)) != pytest.approx(1 / CHAINS)


def mixture_run(zeta: float, chains: int, steps: int) -> tuple[Tensor, Tensor]:
    """Return places and weights of chains with a π each on 0.4·N(-6, 1) + 0.6·N(4, 1), shape (draws, chains)."""
    weighting: Any = "bin" if zeta > 50 else "interpolated"
    learner = ContourGradient(
        ContourRules(zeta, weighting=weighting), 50, 2.0, 1.0, step_size=DecayingStepSize(1, 0.6, 100)
    )
    options: dict[str, Any] = {"num_chains": chains, "chain_execution": "vmap", "gradient_noise": 0.1, "seed": 3}
    module = TargetModule(GaussianMixture.two_modes(), sampler=SGLD, lr=0.1, **options)
    callbacks = [SamplingSchedule(steps // 4, every_n_steps=10), learner, SampleCollector(in_memory=True)]
    quiet_trainer(max_steps=steps, callbacks=callbacks).fit(module, datamodule=TargetDataModule(1000))
    posterior = module.posterior
    assert posterior is not None
    x = torch.cat([sample.parameters["x"] for sample in posterior]).double().view(-1, chains)
    return x, posterior.weights.view(-1, chains)


@pytest.mark.slow
@pytest.mark.parametrize("zeta", [0.75, 5.0, 100.0])
def test_shares_of_equal_chains(zeta: float) -> None:
    _, weights = mixture_run(zeta, 4, 1000)
    assert weights.sum(0).tolist() == pytest.approx([1 / 4] * 4)


@pytest.mark.slow
def test_averages_over_two_modes_are_right() -> None:
    """E[x] = 0 and P(x > 0) = 0.6 at ζ = 5, over 40 chains of 8,000 steps with a π each.

    The intervals are 99.9 % of Student's t with 39 degrees of freedom, from the spread of the chains' own averages:
    a right program fails for one choice of seeds in 500.
    """
    x, weights = mixture_run(5.0, 40, 8000)
    for name, values, truth in (("E[x]", x, 0.0), ("P(x > 0)", (x > 0).double(), 0.6)):
        each = 40 * (weights * values).sum(0)
        half = 3.56 * each.std().item() / 40**0.5
        print(f"{name} = {each.mean():.4f} ± {half:.4f} (99.9 %), truth {truth}")
        assert each.mean().item() == pytest.approx(truth, abs=half)
