"""Networks whose steps are made in blocks by their layers: convolutions, norms, attention, and what vmap cannot run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian
from lightning_sgmcmc.chains import execution
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.fit import blocks
from tests.fit.test_blocks import ALL, LISTED, Run, check_blocks, needs_compiler


class Attention(nn.Module):
    """Patches of an image that attend to each other, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 4, 3, stride=3)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.patches(inputs).flatten(2).transpose(1, 2)
        found: Tensor = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return found.mean(1)[:, :3]


def convolution(*then: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), *then, nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": convolution,
    "channels last": lambda: convolution(nn.Conv2d(2, 2, 1)).to(memory_format=torch.channels_last),
    "instance norm": lambda: convolution(nn.InstanceNorm2d(2, affine=True)),
    "attention": Attention,
}


def images() -> Any:
    labels = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(2))
    return TensorDataset(torch.randn(60, 1, 6, 6, generator=torch.Generator().manual_seed(1)), labels)


@pytest.mark.by_default("-traced", "convolutions-apart")
@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("layers", LAYERS)
def test_a_run_is_that_without_blocks(layers: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def options() -> dict[str, Any]:
        torch.manual_seed(0)
        module = BayesianModule(LAYERS[layers](), Categorical(), lr=1e-3, num_chains=2, seed=3)
        return {"module": module, "data": DatasetDataModule(images(), batch_size=20), "epochs": 30}

    check_blocks(form, options, monkeypatch)


class Squared(torch.autograd.Function):
    """A function without a rule for `torch.vmap`."""

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        return values.square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradients[0]


class WithSquares(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.rest = layers[0], nn.Sequential(*layers[1:])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.rest(Squared.apply(self.first(inputs)))  # type: ignore[no-any-return]


def convolving(kind: Any = nn.Sequential) -> nn.Module:
    torch.manual_seed(0)
    return kind(  # type: ignore[no-any-return]
        nn.Sequential(nn.Unflatten(1, (1, -1)), nn.Conv1d(1, 2, 1)), nn.Flatten(), nn.Linear(6, 1)
    )


@needs_compiler
@pytest.mark.parametrize(
    ("large", "most", "is_compiled"),
    [
        (10**9, 1, True),
        (0, 1, False),
        pytest.param(0, 2, True, marks=pytest.mark.slow),
    ],
    ids=["grouped", "written out and many", "written out"],
)
def test_convolutions_are_grouped_or_written_out(
    large: int, most: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their size; where they become many operations, they are not compiled."""
    monkeypatch.setattr(execution, "LARGE", large)
    monkeypatch.setattr(blocks, "MOST_CONVOLUTIONS", most)

    def run(form: str | None) -> Run:
        module = BayesianModule(convolving(), Gaussian(0.3), lr=1e-3, num_chains=2, seed=3)
        return Run(form, monkeypatch, module=module, epochs=14)

    made = run("compiled")
    assert (made.compiled > 0, made.hidden > 60) == (is_compiled, True)
    made.check_like(run(None))


@pytest.mark.parametrize("form", [*LISTED, pytest.param("compiled", marks=[needs_compiler, pytest.mark.slow])])
@pytest.mark.parametrize("convolves", [True, False])
def test_chains_that_vmap_cannot_run_are_written_out(
    convolves: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(form: str | None) -> Run:
        torch.manual_seed(0)
        net = convolving(WithSquares) if convolves else WithSquares(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        return Run(form, monkeypatch, module=BayesianModule(net, Gaussian(0.3), lr=1e-3, num_chains=2, seed=3))

    made = run(form)
    assert made.hidden > 60
    made.check_like(run(None))
