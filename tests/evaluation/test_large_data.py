"""Passes over many data and sums over many samples: workers, memory, and the numbers of the plain formulas."""

import functools
import math
import os
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_sgmcmc import BayesianModule, ContourRules, Gaussian, GaussianPrior, ResumableLoader
from lightning_sgmcmc.callbacks import ContourGradient, SampleCollector, SamplingSchedule
from lightning_sgmcmc.diagnostics.draws import weight_efficiency, within_groups
from lightning_sgmcmc.evaluation import passes
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.evaluation.passes import full_energies, pass_over_data
from tests.support.rows import ROWS, Constant, energy, module, targets
from tests.support.trainers import quiet_trainer

STARTED = "TEST_WORKER_STARTED"


class Noisy(Dataset[Any]):
    """Rows whose inputs are the worker that loaded them, -1 for none, whether it was started as it should be, and a
    random number."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        worker = get_worker_info()
        of_worker = [-1 if worker is None else worker.id, float(os.environ.get(STARTED, 0))]
        return torch.tensor([*of_worker, float(torch.rand(()))], dtype=torch.float64), targets()[index]


def start_worker(worker: int) -> None:
    os.environ[STARTED] = "1"


class Pass(pl.Callback):
    """Passes over the data at the end of an epoch."""

    def __init__(self) -> None:
        self.full = math.nan
        self.batches: list[Any] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        chains = pl_module.chains
        self.full = float(full_energies(trainer, chains, True, "a test")[0])
        self.batches = list(pass_over_data(trainer, chains, pl_module.sampler, "a test", "snapshot", shuffled=True))


def passed(make: Any, workers: int, chains: int = 1) -> tuple[Pass, Any]:
    seen, model = Pass(), module(num_chains=chains, seed=1)
    trainer = quiet_trainer(callbacks=[seen], num_sanity_val_steps=0, max_epochs=1, precision="64-true")
    trainer.fit(model, make(Noisy(), batch_size=20, num_workers=workers))
    return seen, model


@pytest.mark.parametrize("chains", [1, 3])
def test_passes_have_the_workers_of_training(chains: int) -> None:
    """... and the numbers of a pass without them: a batch's random numbers are seeded where it is loaded."""
    alone, model = passed(ResumableLoader, 0, chains)
    together, _ = passed(ResumableLoader, 2, chains)
    assert together.full == alone.full
    with model.at_chain(0):
        assert alone.full == pytest.approx(energy(model.net.mean.detach(), targets()), rel=1e-9)
    for own, other in zip(alone.batches, together.batches, strict=True):
        for (x, y), (x2, y2) in zip([own] if chains == 1 else own, [other] if chains == 1 else other, strict=True):
            assert torch.equal(y, y2)
            assert torch.equal(x[:, 2], x2[:, 2])
            assert bool((x[:, 0] == -1).all())
            assert bool((x2[:, 0] >= 0).all())


def test_the_loaders_own_way_of_starting_workers_is_passed_on() -> None:
    seen, _ = passed(functools.partial(DataLoader, worker_init_fn=start_worker), 1)
    assert all(bool((x[:, 1] == 1).all()) for x, _ in seen.batches)


def test_log_densities_are_added_up_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "LARGEST_KEPT", 100)
    seen, model = passed(ResumableLoader, 0)
    assert seen.full == pytest.approx(energy(model.net.mean.detach(), targets()), rel=1e-9)


class Endless(Dataset[Any]):
    """A billion rows that nobody stores."""

    def __len__(self) -> int:
        return 10**9

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        y = torch.tensor(indices, dtype=torch.float64)[:, None].sin()
        return [(torch.zeros(1, dtype=torch.float64), row) for row in y]


def test_a_billion_data_are_sampled_with_energies_of_their_own() -> None:
    """Steps, samples and their energies take seconds, and the energies are N times a random batch's mean."""
    prior, likelihood = GaussianPrior(std=4.0), Gaussian(std=1.0)
    model = BayesianModule(net=Constant(), likelihood=likelihood, prior=prior, lr=1e-3, seed=1).double()
    contour = ContourGradient(ContourRules(2.0), 40, first_edge=1e9, width=1e8)
    callbacks = [SamplingSchedule(every_n_steps=1), SampleCollector(in_memory=True), contour]
    quiet_trainer(max_steps=3, callbacks=callbacks, precision="64-true").fit(model, ResumableLoader(Endless(), 1000))
    assert model.posterior is not None
    for sample in model.posterior:
        mean = float(sample.parameters["net.mean"])
        wanted = 0.5 * (0.5 + mean**2) + 0.5 * math.log(2 * math.pi)
        assert sample.energy / 10**9 == pytest.approx(wanted, rel=0.1)
    assert len({sample.energy for sample in model.posterior}) == 3


# -- sums over samples ------------------------------------------------------------------------------------------------


LOG_WEIGHTS = {
    "equal": [0.5] * 6,
    "unequal": [0.0, 1.0, -2.0, 700.0, 699.0, -math.inf],
    "zero first": [-math.inf, -math.inf, 0.0, 1.0, 1.0, -math.inf],
    "equal in a chain": [0.0, 700.0, 0.0, 700.0, 0.0, 700.0],
    "none": [-math.inf] * 6,
}


@pytest.mark.parametrize("comparable", [True, False])
@pytest.mark.parametrize("name", LOG_WEIGHTS)
def test_an_evaluation_sums_as_it_grows(name: str, comparable: bool) -> None:
    evaluation = Evaluation(comparable=comparable)
    generator = torch.Generator().manual_seed(0)
    for place, log_weight in enumerate(LOG_WEIGHTS[name]):
        value = float(torch.rand((), generator=generator))
        evaluation.members.append({"chain": place % 2, "nll": value, "rmse": 2 * value})
        evaluation.running.append({"nll": value} if place < 3 else {"nll": value, "rmse": value})
        evaluation.log_weights.append(log_weight)
        values = [member["nll"] for member in evaluation.members]
        assert evaluation.single["nll"] == pytest.approx(sum(values) / len(values), rel=1e-14)
        assert evaluation.single.get("rmse", 2 * sum(values) / len(values)) == pytest.approx(
            2 * sum(values) / len(values), rel=1e-14
        )
        assert evaluation.weight_efficiency == direct(evaluation)
    evaluation.members.pop(), evaluation.log_weights.pop()
    assert evaluation.weight_efficiency == direct(evaluation)
    assert evaluation.single["nll"] == pytest.approx(sum(values[:-1]) / 5, rel=1e-14)


def direct(evaluation: Evaluation) -> Any:
    weights = torch.tensor(evaluation.log_weights, dtype=torch.float64)
    if not evaluation.comparable:
        weights = within_groups(weights, torch.tensor([member["chain"] for member in evaluation.members]))
    if len(weights) < 2 or torch.allclose(weights, weights[0]) or not bool((weights > -torch.inf).any()):
        return None
    return pytest.approx(weight_efficiency(weights), rel=1e-12)
