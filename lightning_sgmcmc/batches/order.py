"""The order of the data: batch indices as a function of seed, chain, epoch and position."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.seeding import derive_seed


@dataclass(frozen=True)
class OrderSpec:
    """What an order of the data is made from, whatever its kind.

    Attributes:
        num_data: N.
        batch_size: data in a batch of one replica.
        seed: the run's seed.
        chain: global index of the chain.
        drop_last: leave out the last batch of an epoch where it is short.
        num_replicas: number of replicas that share the data.
        rank: index of this replica.
    """

    num_data: int
    batch_size: int
    seed: int
    chain: int = 0
    drop_last: bool = False
    num_replicas: int = 1
    rank: int = 0


class BatchOrder:
    """The indices of every mini-batch of an endless stream of epochs.

    Each epoch is a new permutation of the N data, drawn by a generator that is seeded by (seed, chain, epoch). With
    several replicas (data-parallel ranks of one chain) each takes every `num_replicas`-th datum of it; where they do
    not divide N, some data of the epoch's beginning are taken again, so that all replicas have as many.

    Args:
        spec: the data, the batches, the seed, the chain and its replicas.

    >>> order = BatchOrder(OrderSpec(num_data=5, batch_size=2, seed=0))
    >>> [order.indices(batch).tolist() for batch in range(order.batches_per_epoch)]
    [[1, 2], [0, 4], [3]]
    """

    repeats: ClassVar[bool] = False
    """Whether an epoch's batches come again in others, so that the batches of each step must do so too."""

    def __init__(self, spec: OrderSpec) -> None:
        self.spec = spec
        self.batches_per_epoch = batches_per_epoch(spec.num_data, spec.batch_size, spec.drop_last, spec.num_replicas)
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def indices(self, batch: int) -> Tensor:
        """Return the indices of a batch of the stream, counted from 0 over all epochs."""
        epoch, position = divmod(batch, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._permutation(epoch)
        size = self.spec.batch_size
        return self._order[position * size : (position + 1) * size]

    def _permutation(self, epoch: int) -> Tensor:
        spec = self.spec
        generator = torch.Generator().manual_seed(derive_seed(spec.seed, "data order", spec.chain, epoch))
        order = torch.randperm(spec.num_data, generator=generator)
        missing = -spec.num_data % spec.num_replicas
        if missing:
            order = torch.cat([order, order.repeat(math.ceil(missing / spec.num_data))[:missing]])
        return order[spec.rank :: spec.num_replicas]


MakeOrder = Callable[[OrderSpec], BatchOrder]
"""Makes a chain's order of the data: a class such as `BatchOrder`, or `functools.partial` of one."""


def check_order(order: Any) -> None:
    """Raise unless an order of the data can be made.

    Raises:
        TypeError: if it cannot be called.
    """
    if not callable(order):
        raise TypeError(f"order must be a function that makes an order of the data, got {order!r}: pass BatchOrder")


def batches_per_epoch(num_data: int, batch_size: int, drop_last: bool = False, num_replicas: int = 1) -> int:
    """Return the mini-batches that each replica makes of an epoch."""
    share = math.ceil(num_data / num_replicas)
    return share // batch_size if drop_last else math.ceil(share / batch_size)


def check_all_data_are_taken(spec: OrderSpec, batches: int) -> None:
    """Raise if an order that draws its batches once leaves out data.

    Args:
        spec: the order's.
        batches: its mini-batches of an epoch.

    Raises:
        ValueError: if drop_last leaves out data.
    """
    left_out = spec.num_data - batches * spec.batch_size * spec.num_replicas
    if spec.drop_last and left_out > 0:
        raise ValueError(
            f"drop_last=True would leave out the same {left_out} of {spec.num_data} data for the whole run, since the "
            "data are split only once: pass drop_last=False"
        )
