"""A program that serves: several threads predict with one posterior."""

import copy
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc import Categorical, Gaussian, Likelihood, NegativeBinomial, Poisson, Posterior, StudentT
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


@pytest.mark.parametrize("likelihood", [Gaussian(0.5), StudentT(), Poisson(), NegativeBinomial()], ids=repr)
def test_threads_draw_what_one_thread_draws(likelihood: Likelihood) -> None:
    """torch's distributions draw from default generators, which all threads share."""
    posterior = Posterior.from_states(nn.Linear(4, 3), [nn.Linear(4, 3) for _ in range(10)], likelihood)
    prediction, generator = posterior.predict(torch.randn(50, 4)), torch.get_rng_state()

    def draws(i: int) -> list[torch.Tensor]:
        path = posterior.rollout(torch.ones(2, 4), 5, lambda x, y: x + 0.01 * torch.randn(2, 4), noise=True, seed=i % 4)
        return [path, *(prediction.sample(40, seed=i % 4) for _ in range(10))]

    alone = [draws(i) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for i, found in enumerate(pool.map(draws, range(100))):
            assert all(torch.equal(a, b) for a, b in zip(found, alone[i % 4], strict=True))
    assert torch.equal(torch.get_rng_state(), generator)
    with torch.inference_mode():
        assert all(torch.equal(a, b) for a, b in zip(draws(0), alone[0], strict=True))


class Slow(nn.Linear):
    """A network whose construction takes its time."""

    begun, may_go = threading.Event(), threading.Event()
    begun.set()
    may_go.set()

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        if not self.weight.is_meta:
            self.begun.set()
            assert self.may_go.wait(60)


def test_draws_beside_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loaded network's first weights are drawn too, and the generator was set back after them."""
    Posterior.from_states(Slow(2, 3), [Slow(2, 3)], Categorical()).save(tmp_path / "s")
    monkeypatch.setattr(Slow, "begun", threading.Event())
    monkeypatch.setattr(Slow, "may_go", threading.Event())
    torch.manual_seed(0)
    alone = torch.rand(6)
    torch.manual_seed(0)
    found = torch.rand(2)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(Posterior.load, tmp_path / "s")
        try:
            assert Slow.begun.wait(60)
            found = torch.cat([found, torch.rand(2)])
        finally:
            Slow.may_go.set()
        assert loading.result().model is not None
    assert torch.equal(torch.cat([found, torch.rand(2)]), alone)


def test_networks_that_share_layers() -> None:
    """Two heads on one backbone: one prediction's end would set the other's BatchNorm to training."""
    backbone = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x, posteriors = torch.randn(16, 3, 16, 16), list[Posterior]()
    for classes in (3, 5):
        net = nn.Sequential(backbone, nn.Linear(16, classes))
        members = [copy.deepcopy(net) for _ in range(6)]
        posterior = Posterior.from_states(net, members, Categorical())
        assert posterior.model is not None
        posterior.model.net = net.train()  # as Posterior.load(path, net=net) has it
        posteriors.append(posterior)
    alone = [posterior.predict(x).probabilities for posterior in posteriors]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: posteriors[i % 2].predict(x).probabilities, range(200)))
    assert all(torch.equal(one, alone[i % 2]) for i, one in enumerate(found))


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
            with pytest.warns(UserWarning, match="Two fits run in threads of one program"):
                fit_every_step(module(), SampleCollector(in_memory=True))
        finally:
            waiting.may_go.set()
        fit.result()
    assert torch.equal(posterior.predict(x).probabilities, before)


PRELOADED = """
import multiprocessing, sys, torch
from lightning_sgmcmc import Categorical, Posterior
torch.set_num_threads(2)
make = lambda: torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
posterior, x = Posterior.from_states(make(), [make() for _ in range(4)], Categorical()), torch.randn(3000, 6)
alone = posterior.predict(x).probabilities

def worker():
    torch.testing.assert_close(posterior.predict(x).probabilities, alone)

process = multiprocessing.get_context("fork").Process(target=worker)
process.start()
process.join(30)
code = process.exitcode
process.kill()
sys.exit("the worker waits for threads of its parent" if code is None else code)
"""


def test_a_process_that_is_forked_after_a_prediction_by_several_threads() -> None:
    """OpenMP waits in the worker for the threads of its parent, which do not exist there."""
    done = subprocess.run([sys.executable, "-c", PRELOADED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


def test_a_copy_while_a_thread_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have the weights that are in the network at the moment."""
    net = Turn(2, 3)
    posterior, x = Posterior.from_states(net, [Turn(2, 3) for _ in range(4)], Categorical()), torch.randn(5, 2)
    alone = posterior.predict(x).probabilities
    monkeypatch.setattr(Turn, "process", os.getpid())
    monkeypatch.setattr(Turn, "reached", threading.Event())
    monkeypatch.setattr(Turn, "may_go", threading.Event())
    with ThreadPoolExecutor(3) as pool:
        serving = pool.submit(posterior.predict, x)
        try:
            assert Turn.reached.wait(60)
            twin, longer = pool.submit(copy.deepcopy, posterior), pool.submit(posterior.extend, [net])
            assert not wait([twin, longer], timeout=0.5).done
        finally:
            Turn.may_go.set()
        assert torch.equal(serving.result().probabilities, alone)
        model: Any = twin.result().model
        assert torch.equal(model.net.weight, net.weight)
        assert torch.equal(twin.result().predict(x).probabilities, alone)
        assert len(longer.result()) == len(posterior) + 1
