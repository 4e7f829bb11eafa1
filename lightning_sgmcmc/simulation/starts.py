"""Where the chains of a light loop start."""

import torch
from torch import Tensor

from lightning_sgmcmc.seeding import derive_seed


def draw_starting_places(num_chains: int, dimension: int, seed: int) -> Tensor:
    """Return standard normal places, shape (C, d); that of chain c depends on (seed, c) only."""
    rows = [
        torch.randn(dimension, generator=torch.Generator().manual_seed(derive_seed(seed, "start", chain)))
        for chain in range(num_chains)
    ]
    return torch.stack(rows)


def starting_places(
    initial: Tensor, num_chains: int, dimension: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a copy of the places where chains start, shape (C, d).

    Args:
        initial: places of that shape, or one place for all chains, shape (d,).
        num_chains: C.
        dimension: d.
        dtype: of the copy.
        device: of the copy.

    Raises:
        ValueError: for another shape, or numbers that are not finite.
    """
    if initial.shape not in ((dimension,), (num_chains, dimension)) or not bool(initial.isfinite().all()):
        raise ValueError(
            f"initial should be finite numbers of shape ({dimension},) or ({num_chains}, {dimension}), got "
            f"{tuple(initial.shape)}"
        )
    return initial.to(device, dtype).expand(num_chains, dimension).clone()
