"""Mini-batches of several chains on their way to a device, by Lightning's own transfer."""

from dataclasses import dataclass
from typing import Any

import torch
from lightning_fabric.utilities import move_data_to_device
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sgmcmc.batches.loader import ChainBatches

CHAINS = 3


class Calls(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def moved(batches: ChainBatches) -> tuple[ChainBatches, dict[str, int]]:
    with Calls() as calls:
        result = move_data_to_device(batches, torch.device("meta"))
    assert type(result) is ChainBatches
    return result, calls.counts


def pairs() -> ChainBatches:
    return ChainBatches((torch.full((4, 2), float(chain)), torch.full((4,), chain)) for chain in range(CHAINS))


def test_a_step_has_one_copy_for_each_part_of_a_batch() -> None:
    """Inputs and targets of all chains move as one stack each, and are not stacked again for vmap."""
    for batches in (pairs(), ChainBatches.of_stack((torch.ones(CHAINS, 4, 2), torch.ones(CHAINS, 4)), CHAINS)):
        result, counts = moved(batches)
        assert counts["_to_copy"] == 2
        inputs, targets = result.stacked()
        assert (inputs.shape, targets.shape, inputs.device.type) == ((CHAINS, 4, 2), (CHAINS, 4), "meta")
        assert all(own[0]._base is inputs and own[1]._base is targets for own in result), "views of the stacks"


def test_the_stack_that_moves_holds_each_chains_numbers() -> None:
    batches = ChainBatches({"x": torch.randn(4, 2), "pair": [torch.arange(4) + chain]} for chain in range(CHAINS))
    result = batches.to("cpu", non_blocking=True)
    assert result is batches, "it is there already, and nothing is stacked"
    assert batches._stack is None
    stacked = ChainBatches(move_data_to_device(list(batches), torch.device("cpu"))).stacked()
    for own, (x, y) in zip(batches, zip(stacked["x"], stacked["pair"][0], strict=True), strict=True):
        assert torch.equal(own["x"], x)
        assert torch.equal(own["pair"][0], y)


@dataclass
class Record:
    x: Tensor


def test_batches_that_cannot_be_stacked_move_part_by_part() -> None:
    """Texts, shapes that differ between chains, and objects that only Lightning can look into."""
    result, counts = moved(ChainBatches([(torch.ones(4), "a"), (torch.ones(4), "b")]))
    assert counts["_to_copy"] == 2
    assert [own[1] for own in result] == ["a", "b"]
    result, _ = moved(ChainBatches([(torch.ones(4),), (torch.ones(3),)]))
    assert [(own[0].shape, own[0].device.type) for own in result] == [((4,), "meta"), ((3,), "meta")]
    result, _ = moved(ChainBatches([Record(torch.ones(4)), Record(torch.ones(4))]))
    assert {own.x.device.type for own in result} == {"meta"}
