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
        parts: the tensors of all steps' batches, shape (K, ...), with an axis of chains after that of steps if they have
            batches of their own.
        size: data of each batch and chain; None if they differ, and then there are no `parts`.
    """

    def __init__(self, tensors: Sequence[Tensor], indices: Sequence[Sequence[Tensor]], kind: type) -> None:
        self._tensors, self._indices, self._kind = tensors, indices, kind
        chains, steps, sizes = len(indices), len(indices[0]), {len(rows) for own in indices for rows in own}
        self.axis = None if chains == 1 else 0
        self.size = sizes.pop() if len(sizes) == 1 else None
        self.parts: list[Tensor] = []
        self.structure = pytree.tree_structure(kind(tensors))
        if self.size is not None:
            at = torch.cat([rows for own in indices for rows in own]).view(chains, steps, -1)
            at = at[0] if chains == 1 else at.transpose(0, 1).contiguous()
            self.parts = [tensor[at] for tensor in tensors]

    def batch(self, place: int) -> Any:
        """Return a step's batch as the loader would."""
        own = [self._kind(tensor[rows[place]] for tensor in self._tensors) for rows in self._indices]
        return own[0] if len(own) == 1 else ChainBatches(own)


class RowsOfPass:
    """Takes batches of tensors in memory out of a trainer's pass over its only loader, several at once.

    Args:
        taken: returns the indices of the next batches, for each chain a list of tensors.
        kind: the class of a batch, list or tuple.
        ends_odd: whether the last batch of an epoch is shorter than others.
    """

    def __init__(
        self,
        fetcher: Any,
        tensors: Sequence[Tensor],
        taken: Callable[[int], list[list[Tensor]]],
        kind: type,
        ends_odd: bool,
    ) -> None:
        self._fetcher = fetcher
        self._tensors = tensors
        self._taken = taken
        self._kind = kind
        self.ends_odd = ends_odd

    @property
    def is_done(self) -> bool:
        """Whether the pass's last batch is taken."""
        return bool(self._fetcher.done)

    def take(self, count: int) -> Taken:
        """Return the batches of the next steps."""
        taken = Taken(self._tensors, self._taken(count), self._kind)
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
        return None if tensors is None else RowsOfPass(fetcher, tensors, loader.take, tuple, loader.ends_odd)
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

    batches: Any = loader.batch_sampler
    ends_odd = not getattr(batches, "drop_last", False) and len(loader.dataset) % (loader.batch_size or 1) != 0

    def take(count: int) -> list[list[Tensor]]:
        own._num_yielded += count
        return [[torch.from_numpy(np.array(next(own._sampler_iter), dtype=np.int64)) for _ in range(count)]]

    return RowsOfPass(fetcher, loader.dataset.tensors, take, list, ends_odd)
