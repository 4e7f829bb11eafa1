"""Small models of every kind, and posteriors of states that are filled in by hand."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, Posterior
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.posterior.store import MemoryStore, SampleStore

FEATURES, CLASSES = 5, 3
LOG_WEIGHTS = (0.0, 1.5, -0.7, 0.4)


def normed(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, CLASSES)
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(12, CLASSES)
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh())


class Subclass(BayesianModule):
    def __init__(self, width: int = 6) -> None:
        super().__init__(likelihood=Categorical())
        self.body = nn.Linear(FEATURES, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def classifier(net: nn.Module | None = None) -> BayesianModule:
    return BayesianModule(net=net if net is not None else normed(), likelihood=Categorical())


MODULES = {
    "mlp": classifier,
    "dropout": lambda: classifier(normed(dropout=0.5)),
    "cnn": lambda: classifier(convolutional()),
    "torchvision": lambda: classifier(torchvision.ops.MLP(FEATURES, [6, CLASSES])),
    "subclass": Subclass,
    "regression": lambda: BayesianModule(net=nn.Linear(FEATURES, 2), likelihood=Gaussian(0.5, learned=True)),
}


def states(module: nn.Module, count: int = len(LOG_WEIGHTS)) -> Iterator[nn.Module]:
    """Yield networks like the given one, with random parameters and plausible running statistics."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(count):
        twin = copy.deepcopy(module)
        with torch.no_grad():
            for p in twin.parameters():
                p.add_(0.5 * torch.randn(p.shape, generator=generator))
            for name, b in twin.named_buffers():
                if name.endswith("running_var"):
                    b.copy_(0.5 + torch.rand(b.shape, generator=generator))
                elif name.endswith("running_mean"):
                    b.copy_(torch.randn(b.shape, generator=generator))
        yield twin.eval()


def filled(store: SampleStore, module: nn.Module, log_weights: Any = LOG_WEIGHTS) -> SampleStore:
    for step, (twin, log_weight) in enumerate(zip(states(module), log_weights, strict=True)):
        parameters, buffers = dict(twin.named_parameters()), dict(twin.named_buffers())
        store.append(PosteriorSample(step, 0, 0, 1.0, log_weight, parameters, buffers))
    return store


def in_memory(module: BayesianModule, log_weights: Any = LOG_WEIGHTS) -> Posterior:
    return Posterior(filled(MemoryStore(), module, log_weights), module)


def inputs(count: int = 23, seed: int = 9) -> Tensor:
    return torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Check that weights, buffers, modes, momenta and gradients are afterwards what they were."""

    def picture() -> list[Any]:
        layers = [(part.training, getattr(part, "momentum", None)) for part in module.modules()]
        return [*layers, *((p.requires_grad, p.grad, id(p), p._version) for p in module.parameters())]

    before, state = picture(), copy.deepcopy(module.state_dict())
    yield
    assert picture() == before
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
