"""One chain over two data-parallel ranks, in real processes (gloo)."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from lightning_sgmcmc import SGHMC, SGLD, BayesianModule, Categorical, ContourRules, Posterior
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    ContourGradient,
    CyclicalSchedule,
    SampleCollector,
    SamplingSchedule,
)
from lightning_sgmcmc.chains.callback import SamplerCallback
from lightning_sgmcmc.chains.samples import PosteriorSample
from tests.support.comparisons import assert_equal_trees, check_law
from tests.support.problems import Blobs, ConjugateRegression, RankData
from tests.support.recorders import Draws
from tests.support.trainers import quiet_trainer

PROBLEM = ConjugateRegression()


class Dump(SamplerCallback):
    """Writes what each rank holds at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.energies: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        if not self.energies:  # the default generators of the ranks differ, as without a seed
            torch.manual_seed(os.getpid())

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: BayesianModule, sample: PosteriorSample) -> None:
        self.energies.append(sample.energy)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, BayesianModule)
        state = {
            "parameters": pl_module.state_dict(),
            "sampler": pl_module.sampler.state_dict()["sampler"],
            "energies": self.energies,
        }
        torch.save(state, self.folder / f"rank{trainer.global_rank}.pt")


def fit_on_two_ranks(
    folder: Path, steps: int, callbacks: list[pl.Callback], chains: int = 1, **options: Any
) -> list[dict[str, Any]]:
    trainer = quiet_trainer(
        max_steps=steps,
        strategy="ddp_fork",
        devices=2,
        use_distributed_sampler=False,
        callbacks=[*callbacks, Dump(folder)],
    )
    trainer.fit(PROBLEM.module(**options), datamodule=RankData(25, chains))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.by_default("SGHMC")
@pytest.mark.parametrize("sampler", [SGLD, SGHMC])
def test_replicas_stay_bit_identical(tmp_path: Path, sampler: Any) -> None:
    schedule = SamplingSchedule(every_n_steps=10)
    first, second = fit_on_two_ranks(tmp_path, 100, [schedule], sampler=sampler, lr=0.02)
    assert first["sampler"]["step_count"] == 100
    assert first["parameters"].keys() == second["parameters"].keys()
    for name, tensor in first["parameters"].items():
        assert torch.equal(tensor, second["parameters"][name])
    start = PROBLEM.module().state_dict()["net.weight"]
    assert not torch.equal(first["parameters"]["net.weight"], start)
    assert first["energies"] == second["energies"], "a sample's energy is the mean over the ranks"
    assert len(first["energies"]) == 10


def test_a_contour_on_two_ranks_has_no_barrier_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both learn by the mean of their energies, in one exchange of it a step, and one of the gradients."""
    calls: list[str] = []

    class Count(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 1:
                for name in ("barrier", "all_reduce"):
                    own = getattr(torch.distributed, name)
                    counted = lambda *a, own=own, name=name, **k: (calls.append(name), own(*a, **k))[1]  # noqa: E731
                    monkeypatch.setattr(torch.distributed, name, counted)

        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
            if trainer.global_step == 6:
                learned = module.contour.state._asdict() | {"calls": list(calls)}
                torch.save(learned, tmp_path / f"learned{trainer.global_rank}")

    contour = ContourGradient(ContourRules(zeta=0.75), num_bins=30, first_edge=20.0, width=5.0)
    fit_on_two_ranks(tmp_path, 8, [SamplingSchedule(every_n_steps=8), contour, Count()], sampler=SGLD, lr=0.02)
    first, second = (torch.load(tmp_path / f"learned{rank}", weights_only=True) for rank in range(2))
    assert first["calls"].count("barrier") == 0
    reductions = "energies, gradients, and whether to stop before the later batches"
    assert first["calls"].count("all_reduce") == 5 + 5 + 4, reductions
    assert_equal_trees(first, second)
    assert int(first["visits"].sum()) > 0


CHAINS = 40


class DumpDraws(Draws):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            np.save(self.path, self.array(CHAINS))


def test_two_ranks_have_the_law_of_the_joint_batch(tmp_path: Path) -> None:
    """Two ranks with 25 data each are one chain with batches of 50; false alarms as in the test without ranks."""
    callbacks = [SamplingSchedule(burn_in_steps=100, every_n_steps=2), DumpDraws(tmp_path / "draws.npy")]
    options = {"num_chains": CHAINS, "chain_start": "same", "chain_execution": "vmap"}
    fit_on_two_ranks(tmp_path, 220, callbacks, CHAINS, sampler=SGLD, lr=0.1, **options)
    check_law(np.load(tmp_path / "draws.npy"), PROBLEM.sgld_covariance(0.1, 50))


@pytest.mark.slow
def test_collected_samples_and_their_average_on_two_ranks(tmp_path: Path) -> None:
    """The store holds each sample once, N is the whole training set, and both ranks' data count in the average."""
    store = tmp_path / "samples"
    trainer = quiet_trainer(
        max_epochs=20,
        strategy="ddp_fork",
        devices=2,
        callbacks=[CyclicalSchedule(2, 0.5, 3), SampleCollector(store), BayesianModelAverage()],
    )
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    module = BayesianModule(net=net, likelihood=Categorical(), sampler=SGHMC, lr=0.05)
    trainer.fit(module, datamodule=Blobs())
    posterior = Posterior.load(store)
    assert len(posterior) == 6
    assert len({record.step for record in posterior.records}) == 6
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    data = Blobs()
    probabilities = posterior.predict(data.x[96:]).probabilities
    assert probabilities is not None
    accuracy = (probabilities.argmax(1) == data.y[96:]).double().mean().item()
    assert metrics["val/bma_accuracy"] == pytest.approx(accuracy, abs=1e-6)
    nll = -probabilities[torch.arange(64), data.y[96:]].double().log().mean().item()
    assert metrics["val/bma_nll"] == pytest.approx(nll, rel=1e-5)
