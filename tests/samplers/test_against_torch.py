"""At temperature 0 the samplers are torch's optimizers, bit for bit, and draw nothing."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc.samplers import SGHMC, SGLD, pSGLD

STEPS = 100


class Wide(nn.Module):
    """Thirty small layers side by side: 60 tensors, so the multi-tensor paths see a real list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 3) for _ in range(30))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).tanh() for layer in self.layers]).sum(0)


def convolutional_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def twins(make: Callable[[], nn.Module], dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    net = make().to(dtype)
    return net, copy.deepcopy(net)


def batches(shape: tuple[int, ...], dtype: torch.dtype, count: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(8, *shape, generator=generator, dtype=dtype)
        yield x, torch.randint(3, (8,), generator=generator)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, data: Any, lr_of: Callable[[int], float] | None) -> None:
    initial = [group["lr"] for group in optimizer.param_groups]
    for step, (x, y) in enumerate(data):
        if lr_of is not None:
            for group, lr in zip(optimizer.param_groups, initial, strict=True):
                group["lr"] = lr * lr_of(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def assert_same(a: nn.Module, b: nn.Module, start: nn.Module) -> None:
    assert list(a.state_dict()) == list(b.state_dict())
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, b.state_dict()[name]), name
    for p, q in zip(a.parameters(), start.parameters(), strict=True):
        assert p.isfinite().all()
        assert not torch.equal(p, q), "a parameter that never moved compares nothing"


def sawtooth(step: int) -> float:
    """Falls, restarts and touches 0, as a cyclical schedule does."""
    return 1 - (step % 25) / 24


NETWORKS = [
    pytest.param(Wide, (6,), torch.float32, id="60-tensors"),
    pytest.param(Wide, (6,), torch.float64, id="60-tensors-float64"),
    pytest.param(convolutional_network, (1, 5, 5), torch.float32, id="cnn-batchnorm"),
]
PAIRS = [
    pytest.param(SGLD, {}, torch.optim.SGD, {}, id="SGLD"),
    pytest.param(SGHMC, {"friction": 0.1}, torch.optim.SGD, {"momentum": 1 - 0.1}, id="SGHMC-0.1"),
    pytest.param(SGHMC, {"friction": 0.05}, torch.optim.SGD, {"momentum": 1 - 0.05}, id="SGHMC-0.05"),
    pytest.param(SGHMC, {"friction": 1.0}, torch.optim.SGD, {"momentum": 0.0}, id="SGHMC-1.0"),
    pytest.param(pSGLD, {"alpha": 0.9, "eps": 1e-3}, torch.optim.RMSprop, {"alpha": 0.9, "eps": 1e-3}, id="pSGLD"),
]


@pytest.mark.by_default("SGLD-60-tensors-float64", "SGHMC-0.1-60-tensors-float64", "cnn-batchnorm")
@pytest.mark.parametrize(("make", "shape", "dtype"), NETWORKS)
@pytest.mark.parametrize(("sampler", "options", "torch_class", "torch_options"), PAIRS)
@pytest.mark.parametrize("lr_of", [None, sawtooth], ids=["constant-lr", "changing-lr"])
def test_temperature_zero_is_torch(
    make: Any,
    shape: Any,
    dtype: torch.dtype,
    sampler: Any,
    options: Any,
    torch_class: Any,
    torch_options: Any,
    lr_of: Any,
) -> None:
    ours, theirs = twins(make, dtype)
    start = copy.deepcopy(ours)
    lr = 0.01 if sampler is pSGLD else 0.3
    a = sampler(ours.parameters(), lr=lr, temperature=0.0, **options)
    b = torch_class(theirs.parameters(), lr=lr, **torch_options)
    train(ours, a, batches(shape, dtype), lr_of)
    train(theirs, b, batches(shape, dtype), lr_of)
    assert_same(ours, theirs, start)


@pytest.mark.parametrize(("sampler", "options", "torch_class", "torch_options"), PAIRS)
def test_groups_with_their_own_lr_are_torch(sampler: Any, options: Any, torch_class: Any, torch_options: Any) -> None:
    nets = twins(Wide, torch.float32)
    start = copy.deepcopy(nets[0])
    optimizers: list[torch.optim.Optimizer] = []
    for net, cls, own in ((nets[0], sampler, options | {"temperature": 0.0}), (nets[1], torch_class, torch_options)):
        parameters = list(net.parameters())
        groups = [{"params": parameters[:20], "lr": 0.02}, {"params": parameters[20:41]}, {"params": parameters[41:]}]
        groups[2]["lr"] = 0.005
        optimizers.append(cls(groups, lr=0.01, **own))
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, batches((6,), torch.float32), sawtooth)
    assert_same(*nets, start)


def test_sgd_of_another_momentum_differs() -> None:
    """The comparison above can tell two rules apart."""
    ours, theirs = twins(Wide, torch.float32)
    train(ours, SGHMC(ours.parameters(), lr=0.3, friction=0.1, temperature=0.0), batches((6,), torch.float32), None)
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.3, momentum=0.89), batches((6,), torch.float32), None)
    assert not torch.equal(next(ours.parameters()), next(theirs.parameters()))
