"""Training data that grow during a run, and streams that have another order in each epoch."""

import zlib
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_sgmcmc.batches.rows import resolve_num_data, stream_of
from lightning_sgmcmc.chains.chains import ChainModel, sampler_of


def follow_data(trainer: pl.Trainer, module: ChainModel) -> None:
    """Read N again: energies, the prior's share and the noise follow it from the next step on."""
    chains = module.chains
    num_data, _ = resolve_num_data(module.given_num_data, trainer, type(module).__name__)
    module.num_data = chains.observed.num_data = sampler_of(module).num_data = num_data
    if chains.energies is not None:
        chains.energies.follow(num_data)
    if chains.weights is not None:
        chains.weights.follow(num_data)


def begin_stream(trainer: pl.Trainer) -> None:
    """Tell a stream the number of the epoch, as Lightning tells samplers; otherwise it may repeat the first order."""
    stream = stream_of(trainer)
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(trainer.current_epoch)


class StreamShares:
    """Compares a stream's first batches over the ranks that share a chain, and over its workers."""

    def __init__(self) -> None:
        self._ranks = self._workers = 1
        self._first: int | None = None
        self._left = 0
        """Batches to come that are looked at."""
        self._alike = True

    def begin(self, trainer: pl.Trainer, ranks_per_chain: int) -> None:
        """Look at this fit's first batches, if it reads a stream that several processes should divide."""
        workers = max(getattr(trainer.train_dataloader, "num_workers", 0), 1)
        self._ranks, self._workers = ranks_per_chain, workers
        divided = ranks_per_chain * workers > 1 and stream_of(trainer) is not None
        self._first, self._left, self._alike = None, workers if divided else 0, True

    def look(self, batch: Any) -> None:
        """Look at a batch; all ranks do at the same."""
        if self._left == 0:
            return
        self._left -= 1
        own = _digest(batch)
        if self._first is None:
            self._first = own
            self._compare_ranks(own)
        else:
            self._alike = self._alike and own == self._first
        if self._left == 0 and self._alike and self._workers > 1:
            self._refuse(f"the {self._workers} workers deliver the same batch", "torch.utils.data.get_worker_info()")

    def _compare_ranks(self, own: int) -> None:
        if self._ranks == 1 or not (dist.is_available() and dist.is_initialized()):
            return
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        for first in range(0, len(everyone), self._ranks):
            group = everyone[first : first + self._ranks]
            if len(set(group)) < len(group):
                part = "datasets.distributed.split_dataset_by_node, or by torch.distributed.get_rank()"
                self._refuse(f"some of the {self._ranks} ranks that share a chain read the same first batch", part)

    @staticmethod
    def _refuse(what: str, by: str) -> None:
        raise ValueError(
            f"{what} of the stream, so it is not divided and data would count several times: let its __iter__ yield a "
            f"part of the data ({by})"
        )


def _digest(batch: Any) -> int:
    """Return a number that tells batches apart."""
    found = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            content = leaf.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        else:
            content = repr(leaf).encode()
        found = zlib.crc32(content, found)
    return found
