"""The mini-batches of one step of several chains."""

from collections.abc import Iterable
from typing import Any

import torch
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


def _stack(*parts: Any) -> Tensor:
    if not all(isinstance(part, Tensor) for part in parts):
        raise ValueError(
            f"a batch with a {type(parts[0]).__name__} in it cannot be stacked over chains: let batches hold tensors "
            "only, or run the chains one after the other by chain_execution='loop'"
        )
    return torch.stack(parts)
