"""Batches of tensors in memory, taken several at once out of a trainer's pass over its loader."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from lightning_sgmcmc.batches.loader import ChainBatches, ResumableLoader


class RowsOfTensors:
    """Gathers the rows of a batch of a `TensorDataset` at once, in place of item by item; the batch is the same."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._tensors = dataset.tensors

    def fetch(self, rows: list[int]) -> list[Tensor]:
        """Return the batch of some rows."""
        at = torch.from_numpy(np.array(rows, dtype=np.int64))
        return [tensor[at] for tensor in self._tensors]


class Taken:
    """Batches of some steps.

    Attributes:
        sizes: data of each batch and chain; empty if they differ between chains.
        parts: the tensors of all steps' batches, shape (K, ..., B, ...), with an axis of chains after that of steps if
            they have batches of their own. Shorter ones are filled up with copies of their first datum.
    """

    def __init__(
        self, tensors: Sequence[Tensor], indices: Sequence[Sequence[Tensor]], kind: type, size: int | None
    ) -> None:
        self._tensors, self._indices, self._kind = tensors, indices, kind
        self.axis = None if len(indices) == 1 else 0
        self.structure = pytree.tree_structure(kind(tensors))
        sizes = [len(rows) for rows in indices[0]]
        self.sizes = sizes if all([len(rows) for rows in own] == sizes for own in indices[1:]) else []
        self.parts: list[Tensor] = []
        self._size = max(size or 0, *sizes)
        if self.sizes:
            at = torch.stack([torch.stack([self._filled(rows) for rows in own]) for own in indices])
            at = at[0] if len(indices) == 1 else at.transpose(0, 1).contiguous()
            self.parts = [tensor[at] for tensor in tensors]

    def _filled(self, rows: Tensor) -> Tensor:
        missing = self._size - len(rows)
        return torch.cat([rows, rows[:1].expand(missing)]) if missing > 0 else rows

    @property
    def ends_short(self) -> bool:
        """Whether the last batch is filled up."""
        return bool(self.sizes) and self.sizes[-1] < self._size

    def weights(self, factors: Sequence[float | None], dtype: torch.dtype) -> Tensor:
        """Return the weights of the data's log-likelihoods in Ũ/N, shape (K, B), by each step's factor, see
        `DataWeights`."""
        own = [1 / size if factor is None else factor for size, factor in zip(self.sizes, factors, strict=True)]
        is_own = torch.arange(self._size) < torch.tensor(self.sizes)[:, None]
        return is_own * torch.tensor(own, dtype=dtype)[:, None]

    def batch(self, place: int) -> Any:
        """Return a step's batch as the loader would."""
        own = [self._kind(tensor[rows[place]] for tensor in self._tensors) for rows in self._indices]
        return own[0] if len(own) == 1 else ChainBatches(own)


class RowsOfPass:
    """Takes batches of tensors in memory out of a trainer's pass over its only loader, several at once.

    Args:
        taken: returns the indices of the next batches, for each chain a list of tensors.
        kind: the class of a batch, list or tuple.
        size: data in a batch that is not short, None if unknown.
    """

    def __init__(
        self,
        fetcher: Any,
        tensors: Sequence[Tensor],
        taken: Callable[[int], list[list[Tensor]]],
        kind: type,
        size: int | None,
    ) -> None:
        self._fetcher = fetcher
        self._tensors = tensors
        self._taken = taken
        self._kind = kind
        self._size = size

    @property
    def is_done(self) -> bool:
        """Whether the pass's last batch is taken."""
        return bool(self._fetcher.done)

    def take(self, count: int) -> Taken:
        """Return the batches of the next steps."""
        taken = Taken(self._tensors, self._taken(count), self._kind, self._size)
        self._fetcher.fetched += count
        self._fetcher.done = self._fetcher.fetched >= self._fetcher.length
        self._fetcher.iterator._iterator._idx += count
        return taken


def rows_of_pass(fetcher: Any) -> RowsOfPass | None:
    """Return a pass over tensors in memory, None for other data; a plain loader gathers each batch at once from now
    on."""
    combined = fetcher.combined_loader
    passes, loaders = getattr(combined._iterator, "iterators", []), combined.flattened
    if (
        len(passes) != 1
        or len(loaders) != 1
        or fetcher.length is None
        or not isinstance(combined.iterables, type(loaders[0]))
    ):
        return None
    (own,), (loader,) = passes, loaders
    if isinstance(loader, ResumableLoader):
        tensors = loader.plain_tensors
        return None if tensors is None else RowsOfPass(fetcher, tensors, loader.take, tuple, loader.batch_size)
    if type(loader) is not DataLoader or type(own) is not _SingleProcessDataLoaderIter or loader.pin_memory:
        return None
    if (
        loader.collate_fn is not default_collate
        or type(loader.dataset) is not TensorDataset
        or loader.batch_sampler is None
    ):
        return None
    if not isinstance(own._dataset_fetcher, RowsOfTensors):
        own._dataset_fetcher = RowsOfTensors(loader.dataset)

    def take(count: int) -> list[list[Tensor]]:
        own._num_yielded += count
        return [[torch.from_numpy(np.array(next(own._sampler_iter), dtype=np.int64)) for _ in range(count)]]

    return RowsOfPass(fetcher, loader.dataset.tensors, take, list, loader.batch_size)
