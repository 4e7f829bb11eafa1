"""Whether the ranks that share a chain hold the same state: a comparison at samples and checkpoints."""

import torch
from torch import Tensor

from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.tensors import exact, exact_device

PRIME = 2**31 - 1
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensors: list[Tensor]) -> Tensor:
    """Return a number below 2³¹ that changes with any bit of the tensors, up to chance, shape (), on their device."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for place, tensor in enumerate(tensors, 1):
        bits = tensor.detach().contiguous().view(BITS[tensor.element_size()])
        total = (total + place * (bits.sum(dtype=torch.int64) % PRIME)) % PRIME
    return total


def check_replicas(chains: Chains, step: int) -> None:
    """Compare the chains of this process among the ranks that share them, by one reduction; all of these call it.

    Args:
        chains: the chains of this process.
        step: optimizer steps made.

    Raises:
        RuntimeError: if they differ, naming the ranks.
    """
    layout = chains.layout
    if layout.ranks_per_chain == 1:
        return
    sums = torch.zeros(layout.ranks_per_chain, dtype=torch.float64, device=exact_device(chains.model.device))
    sums[layout.rank_in_chain] = exact(checksum(list(chains.trainable.values())))
    found = layout.mean_over_data(sums).tolist()
    first = layout.first_chain // layout.num_chains * layout.ranks_per_chain
    others = [first + rank for rank, value in enumerate(found) if value != found[0]]
    if others:
        which = f"rank {others[0]} has" if len(others) == 1 else f"ranks {', '.join(map(str, others))} have"
        raise RuntimeError(
            f"{which} other parameters than rank {first} at step {step}, and they share chain {layout.first_chain}, so "
            "its samples would be of no posterior: use one model of GPU, the same versions, deterministic layers and a "
            "sampler that passes its seed on"
        )
