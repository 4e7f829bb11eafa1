"""What is said of chains beside each other."""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_sgmcmc import BayesianModule, Gaussian, Posterior
from lightning_sgmcmc.callbacks import BayesianModelAverage, PosteriorDashboard, SampleCollector, SamplingSchedule
from lightning_sgmcmc.diagnostics.draws import ChainGrid
from lightning_sgmcmc.evaluation.comparison import ChainComparison, chain_rows, prediction_diagnostics
from tests.support.problems import Data, Net, data
from tests.support.trainers import quiet_trainer, seeded

arviz = pytest.importorskip("arviz")


def comparison(probabilities: dict[int, list[torch.Tensor]]) -> ChainComparison:
    """Return the comparison of chains by their samples' class probabilities, (n, 2) each."""
    result = ChainComparison()
    for chain, samples in probabilities.items():
        for sample in samples:
            result.add(chain, 0.0, {"probabilities": sample}, sample[:, 0].log())
    return result


def test_disagreement_of_classes() -> None:
    """0 where the chains' averages agree, however their samples differ; ln 2 where two are sure of others."""
    sure, other = torch.tensor([[1.0, 0.0]]).expand(5, 2), torch.tensor([[0.0, 1.0]]).expand(5, 2)
    assert comparison({0: [sure, other], 3: [other, sure]}).disagreement == pytest.approx(0, abs=1e-7)
    assert comparison({0: [sure], 3: [other]}).disagreement == pytest.approx(math.log(2))
    assert math.isnan(comparison({0: [sure, other]}).disagreement)


def test_disagreement_of_real_predictions() -> None:
    """Chains with means ±1, each with variance 3 of its own, noise included: a share of 1/4 lies between them."""
    result = ChainComparison()
    for chain, mean in ((0, 1.0), (1, -1.0)):
        for offset in (-1.0, 1.0):
            value = torch.full((4, 1), mean + offset, dtype=torch.float64)
            terms = {"mean": value, "square": value.square(), "variance": torch.full((4, 1), 2.0)}
            result.add(chain, 0.0, terms, torch.zeros(4))
    assert result.disagreement == pytest.approx(1 / 4)


def test_rows_of_chains_and_of_all() -> None:
    """Chains of one law mix (R-hat near 1), a chain elsewhere shows; the pooled NLL is that of the mean density."""
    rng = np.random.default_rng(0)
    energies = rng.normal(size=300)
    chains = list(np.tile([0, 1, 2], 100))
    rows = chain_rows(chains, list(energies))
    assert [row.chain for row in rows] == [0, 1, 2, None]
    assert rows[-1].samples == 300
    assert rows[-1].diagnostics.rhat < 1.03
    assert rows[-1].diagnostics.ess_bulk == pytest.approx(float(arviz.ess(energies.reshape(100, 3).T, method="bulk")))
    away = chain_rows(chains, list(energies + 3 * (np.array(chains) == 2)))
    assert away[-1].diagnostics.rhat > 1.5
    assert away[2].energy == pytest.approx(rows[2].energy + 3)
    half, quarter = torch.full((6, 2), 0.5), torch.tensor([[0.25, 0.75]]).expand(6, 2)
    found = chain_rows([0, 0, 1], [1.0, 2.0, 3.0], comparison({0: [half, half], 1: [quarter]}))
    assert [row.nll for row in found[:2]] == pytest.approx([math.log(2), math.log(4)])
    assert found[-1].nll == pytest.approx(-math.log((2 * 0.5 + 0.25) / 3))


def test_prediction_diagnostics_take_the_worst() -> None:
    """One datum of 40 on which a chain stands apart is found, if it is followed."""
    generator = torch.Generator().manual_seed(0)
    result = ChainComparison()
    for draw in range(120):
        chain = draw % 2
        density = torch.randn(40, generator=generator)
        density[0] += 4 * chain
        result.add(chain, 0.0, {}, density)
    assert prediction_diagnostics(result).rhat > 1.5
    assert prediction_diagnostics(result).ess_bulk < 20
    assert ChainGrid.of_chains([0, 1, 0]).arrange(np.arange(3.0)).tolist() == [[2.0], [1.0]]


def test_a_run_with_chains_shows_them(tmp_path: Path) -> None:
    """Scalars of the logger, the picture and the table in the run's folder; a resumed run says the same."""
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.loggers import CSVLogger

    def run(ckpt_path: Path | None, **options: Any) -> tuple[Any, PosteriorDashboard]:
        dashboard = PosteriorDashboard(figures=["chains", "tables"])
        trainer = quiet_trainer(
            max_steps=64,
            enable_checkpointing=True,
            log_every_n_steps=8,
            callbacks=[
                SamplingSchedule(every_n_steps=4),
                SampleCollector(in_memory=True),
                BayesianModelAverage(),
                dashboard,
                ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=24, save_top_k=-1),
            ],
            **options,
        )
        trainer.fit(seeded(lambda: Net(3)), datamodule=Data(), ckpt_path=ckpt_path)
        return trainer, dashboard

    logger = CSVLogger(tmp_path)
    trainer, _ = run(None, logger=logger)
    rows = [line.split(",") for line in next(tmp_path.rglob("chain_table.csv")).read_text().splitlines()]
    assert [row[0] for row in rows] == ["chain", "0", "1", "2", "all"]
    assert [row[1] for row in rows[1:]] == ["16", "16", "16", "48"]
    assert next(tmp_path.rglob("chains.png")).stat().st_size > 5000
    assert float(trainer.callback_metrics["val/chain_disagreement"]) > 0
    evaluation = trainer.lightning_module.evaluations["val"]
    expected = chain_rows(evaluation.chains.chains, [r.energy for r in trainer.lightning_module.posterior.records])
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        logged = {name: float(value) for row in csv.DictReader(file) for name, value in row.items() if value}
    assert logged["chains/rhat_energy"] == pytest.approx(expected[-1].diagnostics.rhat)
    assert {"chains/ess_bulk_prediction", "chains/ess_tail_energy", "sampler/energy_chain_2"} <= set(logged)
    resumed, _ = run(tmp_path / "step=24.ckpt")
    again = resumed.lightning_module.evaluations["val"].chains
    assert again.chains == evaluation.chains.chains
    assert np.array_equal(again.densities, evaluation.chains.densities)
    assert again.disagreement == evaluation.chains.disagreement


def test_chains_of_a_regression(tmp_path: Path) -> None:
    """A store of several chains is diagnosed by ArviZ's container too."""
    split = data(60, 0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    module = BayesianModule(net=net, likelihood=Gaussian(), lr=0.01, num_chains=2, seed=1)
    dataset = torch.utils.data.TensorDataset(split.inputs, split.inputs[:, :1])
    loader, held_out = (torch.utils.data.DataLoader(dataset, 12, shuffle=shuffle) for shuffle in (True, False))
    store = SampleCollector(tmp_path / "samples")
    trainer = quiet_trainer(max_steps=40, callbacks=[SamplingSchedule(every_n_steps=5), store, BayesianModelAverage()])
    trainer.fit(module, loader, held_out)
    assert 0 < float(module.evaluations["val"].chains.disagreement) < 1
    inference = Posterior.load(tmp_path / "samples").to_arviz()
    assert inference.sample_stats.energy.shape == (2, 8)
