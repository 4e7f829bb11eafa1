"""Which chains a process holds, and which ranks share their data."""

from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ChainLayout:
    """How the chains of a run are laid out over processes.

    Attributes:
        first_chain: global index of this process's first chain.
        num_chains: C, chains in this process.
        total_chains: chains of the run.
        ranks_per_chain: data-parallel ranks that share each chain.
        rank_in_chain: index of this process among them.
        strategy: the trainer's, None without one.
    """

    first_chain: int = 0
    num_chains: int = 1
    total_chains: int = 1
    ranks_per_chain: int = 1
    rank_in_chain: int = 0
    strategy: Any = None

    @property
    def chains(self) -> range:
        """Global indices of this process's chains."""
        return range(self.first_chain, self.first_chain + self.num_chains)

    @property
    def is_spread(self) -> bool:
        """Whether other processes hold other chains."""
        return self.total_chains > self.num_chains

    def stream(self, chain: int) -> str:
        """Return the name of the random stream of a chain's rank (dropout, augmentation), the same wherever the chain
        runs."""
        return f"{chain}/{self.rank_in_chain}" if self.rank_in_chain else f"{chain}"

    def mean_over_data(self, tensor: Tensor) -> Tensor:
        """Return the mean over the ranks that share a chain's data."""
        if self.ranks_per_chain == 1:
            return tensor
        if self.is_spread:
            reduced: Tensor = self.strategy.mean_in_group(tensor)
        elif dist.is_initialized():
            reduced = mean_over_ranks(tensor, self.strategy.root_device, self.ranks_per_chain)
        else:
            reduced = self.strategy.reduce(tensor, reduce_op="mean")
        return reduced

    def gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return the values of all chains of the run, in their order.

        Args:
            tensor: this process's values, its chains along `dim`.
            dim: the chain axis.
        """
        if not self.is_spread:
            return tensor
        return torch.cat(self.strategy.gather_groups(tensor), dim)

    def own(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return this process's part of the result of `gather`."""
        return tensor.narrow(dim, self.first_chain, self.num_chains) if self.is_spread else tensor

    def gather_stored(self, tensor: Tensor) -> Tensor:
        """Return a tensor of all chains along a leading axis, from each process's stored one, which has a chain axis
        only if the process holds several chains."""
        return self.gather(tensor if self.num_chains > 1 else tensor[None])

    def own_stored(self, tensor: Tensor) -> Tensor:
        """Return this process's part of the result of `gather_stored`, in its stored form."""
        own = self.own(tensor)
        return own if self.num_chains > 1 else own[0]

    def collect(self, own: list[Any]) -> list[Any]:
        """Return an object of plain values and tensors for each chain of the run, for a checkpoint.

        All processes call it; other processes than the first, which writes the checkpoint, may return their own.

        Args:
            own: one object for each chain of this process, of one structure for all chains.
        """
        groups = self.strategy.collect(own) if self.is_spread else None
        return own if groups is None else [one for group in groups for one in group]

    def gather_unreduced(self, tensor: Tensor) -> Tensor:
        """Return each rank's unreduced value of a stored tensor (see `gather_stored`), for `own_unreduced`.

        Values are exact, except that groups of ranks with chains of their own keep only each group's mean.
        """
        if self.is_spread:
            return self.gather_stored(self.mean_over_data(tensor))[None]
        if self.ranks_per_chain == 1:
            return tensor[None]
        everyone: Tensor = self.strategy.all_gather(tensor)
        return everyone

    def own_unreduced(self, tensor: Tensor) -> Tensor:
        """Return this process's part of the result of `gather_unreduced`."""
        if self.is_spread or len(tensor) != self.ranks_per_chain:
            tensor = tensor.mean(0)
            return self.own_stored(tensor) if self.is_spread else tensor
        return tensor[self.rank_in_chain]


def mean_over_ranks(tensor: Tensor, device: torch.device, ranks: int, group: Any = None) -> Tensor:
    """Return the mean over ranks; a strategy's own `reduce` also waits for all of them at a barrier.

    Args:
        tensor: this rank's value.
        device: on which ranks communicate.
        ranks: their number.
        group: theirs; None means all ranks.
    """
    total = tensor.to(device, copy=True)
    dist.all_reduce(total, group=group)
    return (total / ranks).to(tensor.device)


def layout_of(trainer: pl.Trainer | None, num_chains: int) -> ChainLayout:
    """Return how a trainer's strategy lays the chains out.

    Args:
        trainer: the run's; None means one process.
        num_chains: C, chains in each process.
    """
    if trainer is None:
        return ChainLayout(num_chains=num_chains, total_chains=num_chains)
    strategy = trainer.strategy
    laid_out = getattr(strategy, "chain_layout", None)
    if laid_out is not None:
        layout: ChainLayout = laid_out(num_chains)
        return layout
    return ChainLayout(0, num_chains, num_chains, trainer.world_size, trainer.global_rank, strategy)
