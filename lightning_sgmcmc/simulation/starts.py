"""Initial positions of the chains in a light loop."""

import torch
from torch import Tensor

from lightning_sgmcmc.seeding import derive_seed


def draw_starting_places(num_chains: int, dimension: int, seed: int) -> Tensor:
    """Return standard normal positions, shape (C, d); chain c's depends only on (seed, c)."""
    rows = [
        torch.randn(dimension, generator=torch.Generator().manual_seed(derive_seed(seed, "start", chain)))
        for chain in range(num_chains)
    ]
    return torch.stack(rows)


def starting_places(
    initial: Tensor, num_chains: int, dimension: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a copy of the chains' initial positions, shape (C, d).

    Args:
        initial: positions of that shape, or one position for all chains, shape (d,).
        num_chains: C.
        dimension: d.
        dtype: dtype of the copy.
        device: device of the copy.

    Raises:
        ValueError: for another shape, or numbers that are not finite.
    """
    if initial.shape not in ((dimension,), (num_chains, dimension)) or not bool(initial.isfinite().all()):
        raise ValueError(
            f"initial should be finite numbers of shape ({dimension},) or ({num_chains}, {dimension}), got "
            f"{tuple(initial.shape)}"
        )
    return initial.to(device, dtype).expand(num_chains, dimension).clone()
