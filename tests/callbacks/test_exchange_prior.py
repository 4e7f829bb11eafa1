"""Which energy decides over swaps: with the prior or of the data alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGLD, BayesianModule, GaussianPrior
from lightning_sgmcmc.callbacks import ReplicaExchange, SamplingSchedule
from tests.support.trainers import quiet_trainer


class FarApart(BayesianModule):
    """Data that say nothing, and two chains of which the second is 5,000 nats up the prior."""

    def __init__(self) -> None:
        super().__init__(prior=GaussianPrior(1.0), sampler=SGLD, lr=1e-9, num_data=8, num_chains=2, seed=0)
        self.weight = nn.Parameter(torch.zeros(1))

    def initialise_chain(self, chain: int) -> None:
        with torch.no_grad():
            self.weight.fill_(100.0 * chain)

    def log_likelihood(self, batch: Any) -> Tensor:
        return 0 * self.weight * batch[0]


@pytest.mark.parametrize(("include_prior", "order"), [(True, [[0, 1]]), (False, [[1, 0]])])
def test_the_prior_counts_in_a_swap_unless_left_out(include_prior: bool, order: list[list[int]]) -> None:
    """Energies of the data alone are equal, so that every attempt succeeds, and three leave the chains swapped."""
    exchange = ReplicaExchange([1.0, 2.0], noise_variance=0.0, include_prior=include_prior)
    trainer = quiet_trainer(max_steps=3, callbacks=[SamplingSchedule(every_n_steps=1), exchange])
    trainer.fit(FarApart(), DataLoader(TensorDataset(torch.ones(8)), batch_size=4))
    state = exchange.state_dict()
    assert state["attempts"] == 3
    assert state["order"].tolist() == order
