"""A program that serves: several threads predict with one posterior."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc import Categorical, Posterior
from lightning_sgmcmc.callbacks import SampleCollector
from tests.support.processes import in_a_process
from tests.support.small_run import fit_every_step, module, tensors


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


class Waiting(pl.Callback):
    """Stops a fit in mid-epoch until another thread has done something."""

    def __init__(self) -> None:
        self.reached, self.may_go = threading.Event(), threading.Event()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.reached.set()
        assert self.may_go.wait(60)


def test_a_thread_beside_the_fit_of_the_same_module() -> None:
    """It would put samples into the network of the chain's step."""
    model, waiting, (x, _) = module(), Waiting(), tensors()
    fit_every_step(model, SampleCollector(in_memory=True))
    posterior = model.posterior
    assert posterior is not None
    before = posterior.predict(x).probabilities
    with ThreadPoolExecutor(1) as pool:
        fit = pool.submit(fit_every_step, model, SampleCollector(in_memory=True), waiting)
        try:
            assert waiting.reached.wait(60)
            with pytest.raises(RuntimeError, match=r"is being fitted in another thread, .* Posterior.load"):
                posterior.predict(x)
        finally:
            waiting.may_go.set()
        fit.result()
    assert torch.equal(posterior.predict(x).probabilities, before)


class Turn(nn.Linear):
    """A network that takes its time in the program's own process."""

    process = 0
    reached, may_go = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() == self.process:
            self.reached.set()
            assert self.may_go.wait(60)
        return super().forward(x)


def test_a_process_that_is_forked_while_a_thread_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's workers, and those of a loader: the thread's lock is never released in them."""
    posterior, x = Posterior.from_states(Turn(2, 3), [Turn(2, 3) for _ in range(4)], Categorical()), torch.randn(5, 2)
    alone = posterior.predict(x).probabilities
    monkeypatch.setattr(Turn, "process", os.getpid())

    def worker() -> None:
        assert torch.equal(posterior.predict(x).probabilities, alone)

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(posterior.predict, x)
        try:
            assert Turn.reached.wait(60)
            assert in_a_process(worker, timeout=20) == 0
        finally:
            Turn.may_go.set()
        assert torch.equal(serving.result().probabilities, alone)
