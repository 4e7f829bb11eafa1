"""The chains that learn a contour: how many they are, and how processes exchange their values."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sgmcmc.chains.layout import ChainLayout


def _as_is(tensor: Tensor, dim: int) -> Tensor:
    return tensor


@dataclass(frozen=True)
class ChainGroup:
    """The chains of this process among those of the run.

    Attributes:
        num_chains: C, chains of this process.
        total_chains: P, chains of the run.
        device: of this process's tensors.
        gather: from this process's values, with its C chains along an axis `dim`, makes those of all P chains.
        own: from the values of all P chains, takes this process's.
    """

    num_chains: int = 1
    total_chains: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    gather: Callable[[Tensor, int], Tensor] = _as_is
    own: Callable[[Tensor, int], Tensor] = _as_is

    @classmethod
    def of_layout(cls, layout: ChainLayout, device: torch.device) -> "ChainGroup":
        """Return the group of a layout's chains; a single process needs no functions of the strategy."""
        if layout.is_spread:
            return cls(layout.num_chains, layout.total_chains, device, layout.gather, layout.own)
        return cls(layout.num_chains, layout.total_chains, device)

    @property
    def is_spread(self) -> bool:
        """Whether other processes hold other chains."""
        return self.total_chains > self.num_chains
