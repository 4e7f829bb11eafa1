"""The mini-batches of one step of several chains."""

from collections.abc import Iterable
from typing import Any

import torch
from lightning_fabric.utilities import move_data_to_device
from torch import Tensor
from torch.utils import _pytree as pytree


class ChainBatches(list[Any]):
    """A list with a mini-batch for each chain of this process.

    A plain batch instead of such a list is shared by all chains.
    """

    def __init__(self, batches: Iterable[Any], stack: Any = None) -> None:
        super().__init__(batches)
        self._stack = stack

    @classmethod
    def of_stack(cls, stack: Any, num_chains: int) -> "ChainBatches":
        """Return the batches of tensors with a leading chain axis; they are views."""
        leaves, structure = pytree.tree_flatten(stack)
        batches = [pytree.tree_unflatten([leaf[chain] for leaf in leaves], structure) for chain in range(num_chains)]
        return cls(batches, stack)

    def stacked(self) -> Any:
        """Return one batch whose tensors have a leading chain axis.

        Raises:
            ValueError: if the batches have parts that are not tensors, or their shapes differ between chains.
        """
        if self._stack is None:
            self._stack = pytree.tree_map(_stack, *self)
        return self._stack

    def to(self, device: torch.device | str, non_blocking: bool | None = None) -> "ChainBatches":
        """Return the batches on a device; a trainer moves them by this method.

        Tensors move as one stack over the chains, so that a step has one copy for each part of a batch, and the batches
        are views of it. On its way to a CUDA device the stack is in pinned memory, and the copy does not block.

        Args:
            device: the device.
            non_blocking: whether the host does not wait for the copy; None waits on a CPU or MPS device only.
        """
        device = torch.device(device)
        leaves = pytree.tree_leaves(list(self) if self._stack is None else self._stack)
        if all(isinstance(leaf, Tensor) and leaf.device == device for leaf in leaves):
            return self
        if non_blocking is None:
            non_blocking = device.type not in ("cpu", "mps")
        if self._stack is None and device.type == "cpu":
            return ChainBatches(move_data_to_device(list(self), device))
        if self._stack is None:
            columns = list(zip(*(pytree.tree_leaves(batch) for batch in self), strict=False))
            if not all(map(_are_alike, columns)):
                return ChainBatches(move_data_to_device(list(self), device))
            structure = pytree.tree_structure(self[0])
            pinned = device.type == "cuda"
            stack = pytree.tree_unflatten([_stack_in(column, pinned) for column in columns], structure)
        else:
            stack = self._stack
        moved = pytree.tree_map(lambda tensor: tensor.to(device, non_blocking=non_blocking), stack)
        return self.of_stack(moved, len(self))


def _stack(*parts: Any) -> Tensor:
    if not all(isinstance(part, Tensor) for part in parts):
        raise ValueError(
            f"a batch with a {type(parts[0]).__name__} in it cannot be stacked over chains: let batches hold tensors "
            "only, or run the chains one after the other by chain_execution='loop'"
        )
    shapes = list(dict.fromkeys(str(tuple(part.shape)) for part in parts))
    if len(shapes) > 1:
        raise ValueError(
            f"the chains' batches have the shapes {', '.join(shapes)}, and chains that are computed at once need one: "
            "pad all batches to one length in collate_fn (padding='max_length'), or pass chain_execution='loop'"
        )
    return torch.stack(parts)


def _are_alike(parts: tuple[Any, ...]) -> bool:
    """Return whether the parts of the chains' batches are plain tensors that one tensor can hold."""
    if not all(type(part) is Tensor and part.layout == torch.strided for part in parts):
        return False
    return len({(part.shape, part.dtype, part.device) for part in parts}) == 1


def _stack_in(parts: tuple[Tensor, ...], pinned: bool) -> Tensor:
    """Return a stack, of tensors in the host's memory in pinned memory if so wanted."""
    first = parts[0]
    if not pinned or first.device.type != "cpu":
        return torch.stack(parts)
    into = torch.empty(len(parts), *first.shape, dtype=first.dtype, pin_memory=True)
    return torch.stack([part.detach() for part in parts], out=into)
