"""Evaluation data shared among all processes, and gathered in their original order."""

import itertools
import math
from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any, cast

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_sgmcmc.model import EnergyModel


@dataclass(frozen=True)
class EvaluationShare:
    """This process's share of a loader's data.

    Attributes:
        loader: iterates over the share.
        limit: number of batches to use, may be infinite.
        replicas: W, where rank r of W has the data r, r + W, …; 0 if each process has its own data.
        num_data: number of data in all shares, without the repetitions that make them equally long.
        dataloader_idx: index of the loader among the trainer's, which batch hooks receive.
    """

    loader: Any
    limit: float
    replicas: int = 0
    num_data: int = 0
    dataloader_idx: int = 0

    def batches(self, trainer: pl.Trainer, module: EnergyModel) -> Iterator[Any]:
        """Yield the share's batches in the run's precision, on the module's device, through the user's batch hooks."""
        stop = int(self.limit) if math.isfinite(self.limit) else None
        index = self.dataloader_idx
        for batch in itertools.islice(self.loader, stop):
            converted = trainer.precision_plugin.convert_input(batch)
            converted = trainer.lightning_module._on_before_batch_transfer(converted, dataloader_idx=index)
            yield trainer.strategy.batch_to_device(converted, module.device, dataloader_idx=index)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the values of all data, in their order.

        Args:
            tensor: values of this share, along the first axis.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return tensor
        if self.replicas == 1:
            return tensor
        parts = gather_all_tensors(tensor.contiguous())
        if self.replicas == 0:
            return torch.cat(parts)
        return torch.stack(parts, 1).flatten(0, 1)[: self.num_data]


def share_of(trainer: pl.Trainer, loader: Any, limit: float, dataloader_idx: int = 0) -> EvaluationShare:
    """Return this process's share of the data of a loader that the trainer has prepared.

    Args:
        trainer: the run's.
        loader: a loader of evaluation data.
        limit: number of batches to use.
        dataloader_idx: index of the loader among the trainer's.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        share = EvaluationShare(loader, limit)
    elif sampler.num_replicas == trainer.world_size:
        share = EvaluationShare(loader, limit, sampler.num_replicas, len(loader.dataset))
    else:
        # Training data are shared only by the ranks of a chain; here all processes share.
        shorter = math.ceil(limit * sampler.num_replicas / trainer.world_size) if limit < len(loader) else math.inf
        share = _shared_by_all(trainer, loader, shorter)
    return replace(share, dataloader_idx=dataloader_idx)


def share_of_plain(trainer: pl.Trainer, loader: Any, limit: float) -> EvaluationShare:
    """Return this process's share of the data of a loader with the same data in every process."""
    in_order = isinstance(getattr(loader, "sampler", None), SequentialSampler)
    if trainer.world_size > 1 and type(loader) is DataLoader and in_order and not math.isfinite(limit):
        return _shared_by_all(trainer, loader, limit)
    return EvaluationShare(loader, limit, 1)


def _shared_by_all(trainer: pl.Trainer, loader: DataLoader[Any], limit: float) -> EvaluationShare:
    mine: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, trainer.world_size, trainer.global_rank, shuffle=False
    )
    again: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_size=loader.batch_size or 1,
        sampler=mine,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
    )
    return EvaluationShare(again, limit, trainer.world_size, len(cast(Sized, loader.dataset)))
