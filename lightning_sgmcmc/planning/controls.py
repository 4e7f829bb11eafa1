"""The controls of a run's steps, as blocks of equal steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MOST_BLOCKS = 3000
"""Steps of a longer run are grouped: a block has the controls of its middle step."""


class ChainControls(NamedTuple):
    """The controls of one step.

    Attributes:
        lrs: step sizes of each parameter group and chain, shape (G, C).
        temperatures: temperature of each chain, shape (C,).
        is_sampling: whether the step belongs to a sampling stage.
    """

    lrs: Tensor
    temperatures: Tensor
    is_sampling: bool


@dataclass(frozen=True)
class Blocks:
    """B blocks of steps with constant controls.

    Attributes:
        counts: steps of each block.
        lrs: shape (B, G, C).
        temperatures: shape (B, C).
        is_sampling: whether each block belongs to a sampling stage.
    """

    counts: list[int]
    lrs: Tensor
    temperatures: Tensor
    is_sampling: list[bool]

    @property
    def steps(self) -> int:
        """K, the number of steps."""
        return sum(self.counts)


def blocks_of(steps: int, controls: Callable[[int], ChainControls], most: int = MOST_BLOCKS) -> Blocks:
    """Return the blocks of steps 1 to K; neighbours with equal controls are one block.

    Args:
        steps: K.
        controls: the controls of step k.
        most: largest number of steps at which the controls are read.
    """
    size = max(1, -(-steps // most))
    counts: list[int] = []
    found: list[ChainControls] = []
    for first in range(1, steps + 1, size):
        count = min(size, steps - first + 1)
        now = controls(first + count // 2)
        if found and _equal(found[-1], now):
            counts[-1] += count
        else:
            counts.append(count)
            found.append(now)
    return Blocks(
        counts,
        torch.stack([block.lrs for block in found]).double(),
        torch.stack([block.temperatures for block in found]).double(),
        [block.is_sampling for block in found],
    )


def _equal(one: ChainControls, other: ChainControls) -> bool:
    return (
        one.is_sampling == other.is_sampling
        and torch.equal(one.lrs, other.lrs)
        and torch.equal(one.temperatures, other.temperatures)
    )
