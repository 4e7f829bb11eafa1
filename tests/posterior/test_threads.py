"""A program that serves: several threads predict with one posterior."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from lightning_sgmcmc import Categorical, Posterior


def test_threads_predict_what_one_thread_predicts() -> None:
    """The samples take turns in one network, so threads without order would mix each other's weights."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3))

    torch.manual_seed(0)
    posterior = Posterior.from_states(make(), [make() for _ in range(8)], Categorical())
    x = torch.randn(80, 1, 8, 8)
    alone = [posterior.predict(x[i : i + 10]).probabilities for i in range(0, 80, 10)]
    single = [network(x[:10]).softmax(1) for network in posterior.networks()]

    def serve(i: int) -> float:
        networks = [network(x[:10]).softmax(1) for network in posterior.networks()]
        errors = [float((a - b).detach().abs().max()) for a, b in zip(networks, single, strict=True)]
        found = posterior.predict(x[10 * i : 10 * i + 10]).probabilities
        return max(*errors, float((found - alone[i]).abs().max()))

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(serve, 20 * list(range(8)))) < 1e-6
    assert torch.equal(posterior.predict(x[:10]).probabilities, alone[0])
