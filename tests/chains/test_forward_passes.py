"""Networks that compute from more than their tensors and inputs are refused; others are as torch has them."""

import functools
import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGLD, BayesianModule, Gaussian, GaussianPrior, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.chains import together
from tests.support.trainers import quiet_trainer
from tests.support.two_layers import INPUTS, LR, STEPS, TARGETS, Net


class InList(Net):
    def more(self) -> None:
        self.weights = [self.b.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.a(x).tanh(), self.weights[0], self.b.bias)


class InLambda(Net):
    def more(self) -> None:
        weight = self.a.weight
        self.first = lambda x: F.linear(x, weight, self.a.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.first(x).tanh())


class InPartial(Net):
    def more(self) -> None:
        self.first = functools.partial(F.linear, weight=self.a.weight, bias=self.a.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.first(x).tanh())


class SharedMemory(Net):
    def more(self) -> None:
        scale = torch.ones(8)
        self.p, self.q = nn.Parameter(scale), nn.Parameter(scale.view(8))

    def between(self, h: Tensor) -> Tensor:
        return h * self.p + self.q.sin()


class BufferOfParameter(Net):
    def more(self) -> None:
        self.register_buffer("row", self.a.weight.detach()[0])

    def between(self, h: Tensor) -> Tensor:
        return h * (1 + self.get_buffer("row").sum())


class Expanded(Net):
    def more(self) -> None:
        self.p = nn.Parameter(torch.ones(1).expand(8))

    def between(self, h: Tensor) -> Tensor:
        return h * self.p


class Clamps(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class ClampsData(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.a.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


class Renorms(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.a.weight.data = torch.renorm(self.a.weight.data, 2, 0, 0.3)
        return super().forward(x)


class Anneals(Net):
    scale = 1.0

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.scale = max(0.1, 0.9 * self.scale)
        return h * self.scale


class SkipsALayer(Net):
    """The first two passes are alike."""

    def more(self) -> None:
        self.count, self.c = 0, nn.Linear(8, 8)

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            if self.count % 3:
                return h
        return self.c(h)


class KeepsAMean(Net):
    def more(self) -> None:
        self.mean = torch.zeros(8)

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return h - self.mean


class ReversesAGradient(Net):
    def between(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda gradient: -0.3 * gradient)
        return h


class CountsFrequencies(Net):
    def more(self) -> None:
        self.words = nn.Embedding(7, 8)

    def between(self, h: Tensor) -> Tensor:
        return h + F.embedding((h.detach()[:, 0] > 0).long(), self.words.weight, scale_grad_by_freq=True)


class MakesABuffer(Net):
    def more(self) -> None:
        self.register_buffer("cache", None)

    def between(self, h: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.linspace(0, 1, 8)
        return h * self.cache


class GrowsABuffer(Net):
    def more(self) -> None:
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def between(self, h: Tensor) -> Tensor:
        if len(self.cache) < len(h):
            self.cache = torch.ones(len(h))
        return h * self.cache[: len(h), None]


REFUSED: dict[type[Net], str] = {
    MakesABuffer: r"buffer 'net.cache' another shape, \(8,\) for None.* net\(x\)",
    GrowsABuffer: r"buffer 'net.cache' another shape, \(4,\) for \(2,\).* net\(x\)",
    InList: "'net.b.weight' by another way than its name",
    InLambda: "'net.a.weight' by another way",
    InPartial: "'net.a.(weight|bias)' by another way",
    SharedMemory: "'net.p' and 'net.q' share memory",
    BufferOfParameter: "'net.(row|a.weight)' and 'net.(row|a.weight)' share memory",
    Expanded: "elements of 'net.p' share memory",
    Clamps: "writes to 'net.a.weight'",
    ClampsData: "writes to 'net.a.weight'",
    Renorms: "writes to 'net.a.weight'",
    Anneals: "'net.scale', which each forward pass changes.*register_buffer",
    SkipsALayer: "'net.count', which each forward pass changes",
    KeepsAMean: "'net.mean', which each forward pass changes",
    ReversesAGradient: "hook .*changes a gradient",
    CountsFrequencies: "scale_grad_by_freq",
}


def fitted(net: nn.Module, chains: int, steps: int = STEPS, **options: Any) -> BayesianModule:
    """Return a module after a fit at temperature 0, whose chains begin alike."""
    module = BayesianModule(
        net,
        Gaussian(0.7),
        GaussianPrior(1.5),
        sampler=SGLD,
        lr=LR,
        temperature=0.0,
        num_chains=chains,
        chain_start="same",
        seed=1,
        **options,
    )
    quiet_trainer(max_steps=steps, max_epochs=-1).fit(module, DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=4))
    return module


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("make", REFUSED)
def test_a_network_that_computes_from_more_is_refused_with_the_cause(make: type[Net], chains: int) -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=REFUSED[make]):
        fitted(make(), chains)


class Hidden(Net):
    def more(self) -> None:
        self.parts = [nn.Linear(8, 8)]

    def between(self, h: Tensor) -> Tensor:
        return self.parts[0](h)


def test_a_layer_in_a_plain_list_is_named_by_its_shape() -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=re.escape("parameter of shape (8, 8) that is not registered")):
        fitted(Hidden(), 1)
    frozen = Hidden()
    frozen.parts[0].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not registered")
        fitted(frozen, 1)


# -- what torch has ----------------------------------------------------------------------------------------------------


class ThreeTimes(Net):
    """One layer is registered three times."""

    def more(self) -> None:
        self.c = nn.Linear(8, 8)
        self.parts = nn.ModuleList([self.c, self.c, nn.Sequential(self.c)])

    def between(self, h: Tensor) -> Tensor:
        for part in self.parts:
            h = part(h).tanh()
        return h


class Tied(Net):
    def more(self) -> None:
        self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 8)
        self.d.weight = self.c.weight

    def between(self, h: Tensor) -> Tensor:
        return self.d(self.c(h).tanh())


class Slices(Net):
    """Two parameters of one storage, without a common element."""

    def more(self) -> None:
        base = torch.randn(4, 16)
        self.p, self.q = nn.Parameter(base[:, ::2]), nn.Parameter(base[:, 1::2])

    def between(self, h: Tensor) -> Tensor:
        return h * self.p.sum(0) + self.q.mean(0)


class Masked(Net):
    """Shapes depend on a batch's numbers."""

    def more(self) -> None:
        self.c = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, mask = self.a(x).tanh(), x[:, 0] > 0
        out = h.clone()
        out[mask] = self.c(h[mask])
        return self.b(out)


class Counts(Net):
    """A plain attribute that changes nothing, and features that are kept."""

    count = 0

    def between(self, h: Tensor) -> Tensor:
        self.count += 1
        self.features = h
        return h


class InBuffer(Net):
    """Numbers of the passes before, where each chain has its own."""

    def more(self) -> None:
        self.register_buffer("mean", torch.zeros(8))

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


class OwnModes(Net):
    """train(mode) sets a number."""

    scale = 1.0

    def train(self, mode: bool = True) -> "OwnModes":
        super().train(mode)
        self.scale = 2.0 if mode else 1.0
        return self

    def between(self, h: Tensor) -> Tensor:
        return h * self.scale


class Watches(Net):
    """A hook that changes nothing."""

    def between(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda gradient: None)
        return h


class HalvesInputs(Net):
    """It changes its inputs in place, each time again."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


class KeepsAWeight(Net):
    """A pass leaves a tensor that it computed."""

    def more(self) -> None:
        self.v = nn.Parameter(torch.randn(8, 8))
        self.computed = torch.zeros(8, 8)

    def between(self, h: Tensor) -> Tensor:
        self.computed = self.v / self.v.norm(dim=1, keepdim=True)
        return h @ self.computed


class Normed(Net):
    def more(self) -> None:
        self.a = parametrizations.weight_norm(self.a)


HELD = [ThreeTimes, Tied, Slices, Masked, Counts, InBuffer, OwnModes, Watches, HalvesInputs, KeepsAWeight, Normed]


def by_torch(net: nn.Module, steps: int) -> nn.Module:
    """Return a network after as many steps of torch's SGD on the same loss."""
    likelihood, prior = Gaussian(0.7), GaussianPrior(1.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    net.train()
    for step in range(steps):
        rows = slice(4 * step % 24, 4 * step % 24 + 4)
        named = dict(net.named_parameters())
        loss = -likelihood.log_prob(net(INPUTS[rows].clone()), TARGETS[rows]).mean() - prior.log_prob(named) / 24
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


@pytest.mark.by_default("-1-", "Masked-2", "KeepsAWeight-2", "Normed-2")
@pytest.mark.parametrize(
    ("chains", "steps"),
    [(1, STEPS), (2, 500), *(pytest.param(*own, marks=pytest.mark.slow) for own in ((2, STEPS), (1, 1_000)))],
)
@pytest.mark.parametrize("make", HELD)
def test_a_network_that_computes_from_its_tensors_is_as_torch_has_it(make: type[Net], chains: int, steps: int) -> None:
    """In Lightning's loop and, after 64 steps, in blocks."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(make())
    expected = by_torch(nets[0], steps)
    module = fitted(nets[1], chains, steps)
    for chain in range(chains):
        with module.at_chain(chain):
            torch.testing.assert_close(module.net.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-5)


def test_samples_predict_from_the_inputs_as_they_were_given() -> None:
    torch.manual_seed(0)
    module = BayesianModule(HalvesInputs(), Gaussian(0.7), lr=1e-2, num_chains=2, seed=1)
    callbacks = [SamplingSchedule(every_n_steps=4), SampleCollector(in_memory=True)]
    loader = DataLoader(TensorDataset(INPUTS.clone(), TARGETS), batch_size=5)
    trainer = quiet_trainer(max_steps=12, callbacks=callbacks)
    trainer.fit(module, loader)
    given = INPUTS.clone()
    found = module.posterior.predict(given)
    outputs = torch.stack([net.eval()(INPUTS.clone()) for net in module.posterior.networks()])
    torch.testing.assert_close(found.mean, outputs.mean(0).detach(), rtol=1e-4, atol=1e-5)
    assert torch.equal(given, INPUTS)
    likelihood = Gaussian(0.7)
    each = torch.stack([likelihood.log_prob(output, TARGETS) for output in outputs])
    nll = -(each.logsumexp(0) - math.log(len(each))).mean()
    assert math.isclose(module.posterior.evaluate(loader).running[-1]["nll"], nll, rel_tol=1e-4)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("make", [InList, InPartial])
def test_networks_from_elsewhere_that_reach_a_parameter_otherwise_are_refused_in_predictions(
    make: type[Net], at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would predict with the weights of the network that the states are put into."""
    monkeypatch.setattr(together, "runs_at_once", lambda device: at_once)
    posterior = Posterior.from_states(make(), [make() for _ in range(3)], Gaussian(0.7))
    with pytest.raises(ValueError, match="by another way than its name"):
        posterior.predict(INPUTS)
    nets = [Net() for _ in range(3)]
    found = Posterior.from_states(Net(), nets, Gaussian(0.7)).predict(INPUTS).mean
    torch.testing.assert_close(found, torch.stack([net(INPUTS) for net in nets]).mean(0).detach())


class Logs(BayesianModule):
    """It logs in its likelihood."""

    def log_likelihood(self, batch: Any) -> Tensor:
        each = super().log_likelihood(batch)
        if self.training:
            self.log("mean", batch[0].mean(), on_step=False, on_epoch=True)
            self.log_dict({"ones": 1.0}, on_step=False, on_epoch=True, reduce_fx="sum")
        return each


def test_what_a_likelihood_logs_is_logged_once_a_step() -> None:
    torch.manual_seed(0)
    module = Logs(Net(), Gaussian(0.7), lr=1e-2, seed=1)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=4))
    assert trainer.callback_metrics["ones"] == 6
    torch.testing.assert_close(trainer.callback_metrics["mean"], INPUTS.mean())


class Again(Net):
    def more(self) -> None:
        self.c = nn.Linear(8, 8)

    def between(self, h: Tensor) -> Tensor:
        return checkpoint(self.c, h, use_reentrant=True)


def test_reentrant_checkpoints_are_refused_where_they_lose_gradients() -> None:
    """In Lightning's loop one chain is as torch has it; in blocks and with two chains the sentence names a remedy."""
    for chains, message in ((1, "use_reentrant=False"), (2, "switch activation checkpointing off")):
        with pytest.raises(ValueError, match=message):
            fitted(Again(), chains, 1_000)
    torch.manual_seed(0)
    expected = by_torch(Again(), STEPS)
    torch.manual_seed(0)
    found = fitted(Again(), 1, chain_execution="loop").net
    torch.testing.assert_close(found.state_dict(), expected.state_dict())


class CountsAlways(Net):
    def more(self) -> None:
        self.register_buffer("count", torch.zeros(()))

    def between(self, h: Tensor) -> Tensor:
        self.get_buffer("count").add_(1)
        return h


@pytest.mark.parametrize("chains", [1, 2])
def test_the_checks_of_a_fit_leave_buffers_as_they_are(chains: int) -> None:
    with pytest.warns(UserWarning, match=r"'net.count' in evaluation mode.*self.training"):
        module = fitted(CountsAlways(), chains)
    assert module.net.get_buffer("count").flatten().tolist() == [STEPS] * chains


class WithoutGradient(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.a(x).tanh()
        return self.b(hidden)


class Unused(Net):
    def more(self) -> None:
        self.pooler = nn.Linear(3, 3)


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize(
    ("network", "told"),
    [
        (WithoutGradient, r"2 of 4 sampled tensors \('net.a.weight', 'net.a.bias'\)"),
        (Unused, r"2 of 6 sampled tensors \('net.pooler.weight', 'net.pooler.bias'\)"),
        (Net, None),
    ],
)
def test_weights_that_the_likelihood_does_not_reach_are_named(network: Any, told: str | None, chains: int) -> None:
    def fit(net: nn.Module) -> list[str]:
        module = BayesianModule(net, Gaussian(), sampler=SGLD, lr=LR, num_chains=chains)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            quiet_trainer(max_steps=2).fit(module, DataLoader(TensorDataset(INPUTS, TARGETS), 4))
        return [str(one.message) for one in caught if "has no gradient in" in str(one.message)]

    found = fit(network())
    assert len(found) == (told is not None)
    assert told is None or re.search(told, found[0])
    frozen = network()
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_(name.startswith("b."))
    assert not fit(frozen)
