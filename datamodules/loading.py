"""Data in memory, handed out in whole batches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class TensorBatches(Dataset[tuple[Tensor, ...]]):
    """Tensors of equal length that are indexed by whole batches, without a Python loop over the items.

    Args:
        tensors: one or more tensors with the same first axis; the first holds the inputs.
        transform: applied to the inputs of each batch (from uint8 images to normalised floats, say).

    Raises:
        ValueError: if there are no tensors, or their lengths differ.
    """

    def __init__(self, *tensors: Tensor, transform: Callable[[Tensor], Tensor] | None = None) -> None:
        if not tensors or len({len(tensor) for tensor in tensors}) != 1:
            raise ValueError(f"tensors of one length are needed, got lengths {[len(tensor) for tensor in tensors]}")
        self.tensors = tensors
        self.transform = transform

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[0] for tensor in self.__getitems__([index]))

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        index = torch.as_tensor(indices)
        inputs, *rest = (tensor[index] for tensor in self.tensors)
        return (self.transform(inputs) if self.transform is not None else inputs, *rest)


def whole_batch(batch: Any) -> Any:
    """The collate function of `TensorBatches`: a batch is one already."""
    return batch


def make_loader(dataset: TensorBatches, batch_size: int, shuffle: bool, drop_last: bool = False) -> DataLoader[Any]:
    """Return a loader of whole batches, into which the trainer can put its distributed sampler."""
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, collate_fn=whole_batch)
