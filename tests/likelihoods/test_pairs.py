"""Pairwise preferences: Bradley and Terry's model against its closed form, from batches to predictions."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_sgmcmc import SGLD, BayesianModule, Bernoulli, Posterior
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.likelihoods import PairwiseScore
from tests.support.trainers import quiet_trainer

N = 33
generator = torch.Generator().manual_seed(0)
A, B = torch.randn(N, 3, generator=generator), torch.randn(N, 3, generator=generator)
TRUE = torch.tensor([2.0, -1.0, 0.0])
Y = (torch.rand(N, generator=generator) < ((A - B) @ TRUE).sigmoid()).long()


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return (A[i], B[i]), Y[i]


def test_a_linear_score_is_the_logistic_regression_of_differences() -> None:
    pairs = BayesianModule(PairwiseScore(nn.Linear(3, 1)), Bernoulli(), lr=0.1)
    plain = BayesianModule(nn.Linear(3, 1, bias=False), Bernoulli(), lr=0.1)
    plain.net.weight.data.copy_(pairs.net.net.weight.data)
    expected = plain.log_likelihood((A - B, Y))
    torch.testing.assert_close(pairs.log_likelihood(((A, B), Y)), expected)
    swapped = pairs.log_likelihood(((B, A), 1 - Y))
    torch.testing.assert_close(swapped, expected)


@pytest.mark.by_default("2")
@pytest.mark.parametrize("chains", [1, 2])
def test_from_fit_to_prediction(chains: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = PairwiseScore(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    module = BayesianModule(net, Bernoulli(), sampler=SGLD, lr=0.05, num_chains=chains)
    loader = DataLoader(Pairs(), 10)
    callbacks = [SamplingSchedule(200, every_n_steps=50), SampleCollector(tmp_path / "s"), BayesianModelAverage()]
    quiet_trainer(max_steps=400, callbacks=callbacks).fit(module, DataLoader(Pairs(), 10, shuffle=True), loader)
    posterior = Posterior.load(tmp_path / "s")
    found = posterior.predict([(A, B)]).probabilities
    torch.testing.assert_close(found[:, 1], posterior.predict([(B, A)]).probabilities[:, 0])
    torch.testing.assert_close(found.sum(1), torch.ones(N))
    metrics = module.evaluations["val"].bma
    assert metrics["nll"] == pytest.approx(-float(found.gather(1, Y[:, None]).log().mean()), rel=1e-4)
    assert metrics["nll"] < math.log(2)  # better than a coin


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PairwiseScore(lambda x: x), TypeError, "torch module"),  # type: ignore[arg-type]
        (lambda: PairwiseScore(nn.Linear(3, 2))(A, B), ValueError, r"one score .*\(33, 2\)"),
    ],
)
def test_networks_without_a_score_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
