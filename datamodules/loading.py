"""Data in memory, read in whole batches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_sgmcmc.batches.loader import as_is
from lightning_sgmcmc.datamodules.augmentation import Augmentation
from lightning_sgmcmc.tensors import sent


class TensorBatches(Dataset[tuple[Tensor, ...]]):
    """Tensors of equal length that are indexed by whole batches, without a Python loop over the items.

    Args:
        tensors: one or more tensors with the same first axis, on one device; the first holds the inputs.
        transform: applied to the inputs of each batch, for instance to turn uint8 images into normalised floats.

    Raises:
        TypeError: if one is not a tensor.
        ValueError: if there are no tensors, or their lengths or devices differ.
    """

    def __init__(self, *tensors: Tensor, transform: Callable[[Tensor], Tensor] | None = None) -> None:
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"tensors must be torch tensors, got a {type(tensor).__name__}: use torch.as_tensor")
        if not tensors or len({len(tensor) for tensor in tensors}) != 1:
            raise ValueError(f"tensors must have the same length, got lengths {[len(tensor) for tensor in tensors]}")
        if len({tensor.device for tensor in tensors}) != 1:
            raise ValueError(f"tensors must be on the same device, got {[str(tensor.device) for tensor in tensors]}")
        self.tensors = tensors
        self.transform = transform

    @property
    def device(self) -> torch.device:
        """The device of the data."""
        return self.tensors[0].device

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[0] for tensor in self.whole_batch([index]))

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        return self.whole_batch(indices)

    def whole_batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, ...]:
        """Return the batch of the data with these indices."""
        index = sent(torch.as_tensor(indices), self.device)
        rest = (tensor[index] for tensor in self.tensors[1:])
        if isinstance(self.transform, Augmentation):
            return (self.transform.of_rows(self.tensors[0], index), *rest)
        inputs = self.tensors[0][index]
        return (self.transform(inputs) if self.transform is not None else inputs, *rest)


def evaluation_loader(dataset: TensorBatches, batch_size: int) -> DataLoader[Any]:
    """Return a loader of whole batches in the data's order, whose sampler the trainer can replace."""
    return DataLoader(dataset, batch_size=batch_size, collate_fn=as_is)
