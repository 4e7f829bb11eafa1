"""Several samples' states in one call: at once as one after another, on networks that vmap can run or not."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc.chains import together
from lightning_sgmcmc.chains.execution import MASK_SEED, StatelessCall
from lightning_sgmcmc.chains.together import States, TogetherCall, grouped

SAMPLES, DATA = 5, 7


class Everything(nn.Module):
    """Batch normalisation with integer buffers, shared weights, a scalar, a parametrization, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(16, 16)
        self.second = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.first.weight
        self.dropout = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: dict[str, Tensor]) -> dict[str, Any]:
        hidden = self.norm(self.convolution(x["image"])).relu().flatten(1)
        hidden = self.dropout(self.tied(self.second(self.first(hidden)).tanh()))
        return {"mean": hidden[:, :2] * self.scale, "others": (hidden.sum(1), self.norm.num_batches_tracked + 1)}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(9, 6, 2, batch_first=True)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.cells(x["image"][..., 0].tile(1, 1, 3)[:, :, :9])[0][:, -1]


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        output = x["image"].mean((2, 3)) * self.weight
        return output if bool(output.sum() > 0) else -2 * output


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return x["image"].mean((2, 3)) * self.weight + torch.randn(3)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "everything": Everything,
    "recurrent": Recurrent,
    "data-dependent": DataDependent,
    "random": Random,
}
VMAPPED = ("everything",)


def states_of(make: Callable[[], nn.Module], dropout: bool = False) -> list[dict[str, Tensor]]:
    states = []
    for seed in range(SAMPLES):
        torch.manual_seed(seed)
        network = make()
        for buffer in network.buffers():
            buffer.copy_(torch.rand_like(buffer) + 0.5) if buffer.is_floating_point() else buffer.add_(seed)
        state = {name: t.detach() for name, t in (*network.named_parameters(), *network.named_buffers())}
        states.append(state | ({MASK_SEED: torch.tensor(seed)} if dropout else {}))
    return states


def inputs() -> dict[str, Tensor]:
    return {"image": torch.randn(DATA, 3, 4, 4, generator=torch.Generator().manual_seed(1))}


def leaves_of(results: Any) -> list[list[Tensor]]:
    return [torch.utils._pytree.tree_leaves(result) for result in results]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("kind", NETWORKS)
def test_each_state_is_the_network_with_its_tensors(kind: str, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "runs_at_once", lambda device: at_once)
    network, states = NETWORKS[kind]().eval(), states_of(NETWORKS[kind])
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    kept = [id(parameter) for parameter in network.parameters()]
    call = TogetherCall(network, lambda net, x: net(x))
    with torch.no_grad():
        torch.manual_seed(3)
        alone = [StatelessCall(network, lambda net, x: net(x)).call(state, inputs()) for state in states]
        for _ in range(2):  # what failed once is not tried again
            torch.manual_seed(3)
            found = leaves_of(call(States(states), inputs()))
            for own, expected in zip(found, leaves_of(alone), strict=True):
                for a, b in zip(own, expected, strict=True):
                    assert a.dtype == b.dtype
                    if at_once:
                        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
                    else:
                        assert torch.equal(a, b)
    assert (call._together is None) == (at_once and kind not in VMAPPED)
    assert [id(parameter) for parameter in network.parameters()] == kept
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_dropout_masks_belong_to_their_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "runs_at_once", lambda device: True)
    network, states = Everything().eval(), states_of(Everything, dropout=True)
    with torch.no_grad():
        found = leaves_of(TogetherCall(network, lambda net, x: net(x))(States(states), inputs()))
        for state, own in zip(states, found, strict=True):
            expected = leaves_of([StatelessCall(network, lambda net, x: net(x)).call(state, inputs())])[0]
            assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


@pytest.mark.parametrize("fits", [1, 2, 3])
def test_as_many_run_at_once_as_memory_holds(fits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "runs_at_once", lambda device: True)
    network, states = Everything().eval(), states_of(Everything)
    call = TogetherCall(network, lambda net, x: net(x))
    run, sizes = call._vmapped, []

    def limited(stacked: dict[str, Tensor], args: Any) -> Any:
        sizes.append(len(stacked["scale"]))
        if sizes[-1] > fits:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return run(stacked, args)

    call._together = limited
    with torch.no_grad():
        found = leaves_of(call(States(states), inputs()))
        expected = leaves_of(TogetherCall(network, lambda net, x: net(x))(States(states), inputs()))
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
        sizes.clear()
        assert len(list(call(States(states), inputs()))) == SAMPLES
        assert max(sizes) <= fits, "what did not fit is not tried again"
    fits = 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        list(call(States(states), inputs()))


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_what_failed_is_let_go_before_another_try(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of a call that lacked memory is alive in the next one, and the stack of all states is not copied."""
    monkeypatch.setattr(together, "runs_at_once", lambda device: True)
    call = TogetherCall(Everything().eval(), lambda net, x: net(x))
    run, places = call._vmapped, set()
    held: list[weakref.ref[Tensor]] = []

    def limited(stacked: dict[str, Tensor], args: Any) -> Any:
        assert [one() for one in held] == [None] * len(held)
        activations = torch.zeros(100)
        held.append(weakref.ref(activations))
        places.add(stacked["first.weight"].untyped_storage().data_ptr())
        if len(stacked["scale"]) > 1:
            raise kind("MPS backend out of memory")
        return run(stacked, args)

    call._together = limited
    with torch.no_grad():
        for _ in call(States(states_of(Everything)), inputs()):
            pass
    assert len(held) > SAMPLES
    assert len(places) == 1


@pytest.mark.parametrize("at_once", [False, True])
def test_an_error_is_the_networks_own(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "runs_at_once", lambda device: at_once)
    network = Everything().eval()
    call = TogetherCall(network, lambda net, x: net(x))
    kept = [id(parameter) for parameter in network.parameters()]
    with pytest.raises(KeyError, match="image"), torch.no_grad():
        list(call(States(states_of(Everything)), {}))
    assert [id(parameter) for parameter in network.parameters()] == kept
    assert call._together is not None, "a wrong batch says nothing about the network"


@pytest.mark.slow
def test_compiled_evaluation_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "runs_at_once", lambda device: True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    network, states = Everything().eval(), states_of(Everything)
    with torch.no_grad():
        found = leaves_of(TogetherCall(network, lambda net, x: net(x), compiled=True)(States(states), inputs()))
        expected = leaves_of(TogetherCall(network, lambda net, x: net(x))(States(states), inputs()))
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_groups_are_bounded_by_number_and_bytes_and_have_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "LARGEST_GROUP", 100)
    kinds = [(4, torch.float32)] * 5 + [(4, torch.float64)] * 2 + [(100, torch.float32), (1, torch.float32)]
    states = [{"w": torch.zeros(count, dtype=dtype)} for count, dtype in kinds]
    groups = list(grouped(states, lambda state: state, most=4))
    assert [len(group) for group in groups] == [4, 1, 2, 1, 1]
    assert [state for group in groups for state in group] == states
