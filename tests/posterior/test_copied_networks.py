"""Copies of networks, as each sample's own one is, compute with their own layers, or are refused with the cause."""

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGLD, BayesianModule, Gaussian, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from tests.support.trainers import quiet_trainer
from tests.support.two_layers import INPUTS, LR, STEPS, TARGETS, Net


class OfSelf(Net):
    def more(self) -> None:
        self.c = nn.Linear(8, 8)
        self.work = lambda h: self.c(h).tanh()

    def between(self, h: Tensor) -> Tensor:
        return self.work(h)


class OfAnother(Net):
    """A function in a list calls one that names a list of layers, and has a default."""

    def more(self) -> None:
        self.c = nn.Linear(8, 8)
        layers = [self.c, torch.tanh]

        def work(h: Tensor, last: nn.Module = self.c) -> Tensor:
            for layer in layers:
                h = layer(h)
            return last(h)

        self.works = [lambda h: work(h) + 1]

    def between(self, h: Tensor) -> Tensor:
        return self.works[0](h)


class Hooked(Net):
    """A hook keeps what forward uses, and another one has a weight."""

    def more(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self.scale = nn.Parameter(torch.ones(8))
        self.a.register_forward_hook(lambda module, inputs, output: output * self.scale)
        self.a.register_forward_hook(lambda module, inputs, output: self.kept.update(h=output))

    def forward(self, x: Tensor) -> Tensor:
        self.a(x)
        return self.b(self.kept["h"].tanh())


class Patched(Net):
    def more(self) -> None:
        plain = self.a.forward
        self.a.forward = lambda x: 2 * plain(x)


class Child(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * self.parent().scale


class Weak(Net):
    def more(self) -> None:
        self.scale, self.c = nn.Parameter(torch.ones(8)), Child()
        self.c.parent = weakref.ref(self)

    def between(self, h: Tensor) -> Tensor:
        return self.c(h)


def drawn(net: nn.Module, chains: int, **options: Any) -> BayesianModule:
    """Return a module with four samples of each chain."""
    module = BayesianModule(net, Gaussian(0.7), sampler=SGLD, lr=LR, num_chains=chains, seed=1)
    schedule = SamplingSchedule(burn_in_steps=0, every_n_steps=6)
    callbacks = [schedule, SampleCollector(**options)]
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=4)
    quiet_trainer(max_steps=STEPS, max_epochs=-1, callbacks=callbacks).fit(module, loader)
    return module


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("make", [OfSelf, OfAnother, Hooked, Patched])
def test_networks_compute_with_their_own_layers_in_functions_too(make: type[Net], chains: int) -> None:
    torch.manual_seed(0)
    posterior = drawn(make(), chains, in_memory=True).posterior
    assert posterior is not None
    networks = list(posterior.networks())
    with torch.no_grad():
        outputs = torch.stack([network(INPUTS) for network in networks])
        mean, _ = posterior.ensemble()(INPUTS)
    assert len(outputs.unique(dim=0)) == 4 * chains
    expected = posterior.predict(INPUTS).mean
    torch.testing.assert_close(outputs.mean(0), expected)
    torch.testing.assert_close(mean, expected)
    again = Posterior.from_states(make(), networks, Gaussian(0.7))
    torch.testing.assert_close(again.predict(INPUTS).mean, expected)


class OwnForward(BayesianModule):
    """The module is the network, and a lambda and a method of it name its layers."""

    def __init__(self) -> None:
        super().__init__(None, Gaussian(0.7), sampler=SGLD, lr=LR, seed=1)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)
        self.first, self.last = lambda x: self.a(x).tanh(), self.second

    def second(self, h: Tensor) -> Tensor:
        return self.b(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def test_networks_of_a_module_with_its_own_forward_compute_with_their_own_layers() -> None:
    torch.manual_seed(0)
    module = OwnForward()
    callbacks = [SamplingSchedule(burn_in_steps=0, every_n_steps=6), SampleCollector(in_memory=True)]
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=4)
    quiet_trainer(max_steps=STEPS, max_epochs=-1, callbacks=callbacks).fit(module, loader)
    assert module.posterior is not None
    expected = module.posterior.predict(INPUTS).mean
    with torch.no_grad():
        outputs = [network(INPUTS) for network in module.posterior.networks()]
    torch.testing.assert_close(torch.stack(outputs).mean(0), expected)


def test_a_weak_reference_cannot_be_copied() -> None:
    torch.manual_seed(0)
    posterior = drawn(Weak(), 1, in_memory=True).posterior
    assert posterior is not None
    with pytest.raises(ValueError, match=r"weak reference to a Weak.*in forward"):
        next(iter(posterior.networks()))


class Normed(Net):
    def more(self) -> None:
        self.a = parametrizations.weight_norm(self.a)


def test_parametrized_networks_are_rebuilt(tmp_path: Path) -> None:
    module = drawn(Normed(), 1, dirpath=tmp_path)
    assert module.posterior is not None
    found = Posterior.load(tmp_path, trust=True).predict(INPUTS).mean
    torch.testing.assert_close(found, module.posterior.predict(INPUTS).mean)


class Locked(Net):
    def more(self) -> None:
        self.lock = threading.Lock()


def test_a_network_that_cannot_be_copied_predicts_and_says_why_it_has_no_copies() -> None:
    posterior = drawn(Locked(), 1, in_memory=True).posterior
    assert posterior is not None
    assert posterior.predict(INPUTS).mean.shape == (24, 2)
    for made in (lambda: list(posterior.networks()), lambda: posterior.ensemble()):
        with pytest.raises(TypeError, match=r"lock.*outside of it"):
            made()
