"""What a dashboard traces of a chain: single weights, and step sizes by name pattern."""

import torch
from torch import Tensor, nn

from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.tensors import mean_of

TRACED_WEIGHTS = 4


def traced_weights(module: nn.Module) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """Return, by name, up to four tensors and an index in each, spread over the network, the same in every run."""
    tensors = [(name, p) for name, p in module.named_parameters() if p.requires_grad and p.numel()]
    count = min(TRACED_WEIGHTS, len(tensors))
    traced: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
    for turn in range(count):
        name, tensor = tensors[round(turn * (len(tensors) - 1) / max(count - 1, 1))]
        place = derive_seed(0, "trace", name) % tensor.numel()
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), tensor.shape))
        traced[f"{name}[{', '.join(map(str, index))}]"] = (tensor, index)
    return traced


def named_step_sizes(sampler: Sampler) -> dict[str, float]:
    """Return the step sizes by name pattern as scalars, none if all parameters have one."""
    return {f"sampler/lr/{group['name']}": mean_of(group["lr"]) for group in sampler.param_groups if "name" in group}
