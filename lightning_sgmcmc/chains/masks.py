"""Dropout masks that belong to a sample: functions of its seed, the same for all data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sgmcmc.seeding import derive_seed

MASK_SEED = "dropout_seed"
"""Name of the buffer of a sample that holds the seed of its masks, an integer; the network has no such buffer."""
WHOLE_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
MASKED = (nn.Dropout, *WHOLE_CHANNELS)
"""The layers that get masks."""


def dropout_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers with p > 0 that get masks, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, MASKED) and layer.p > 0}


def mask(seed: int, name: str, shape: tuple[int, ...], p: float, whole_channels: bool = False) -> Tensor:
    """Return a mask that multiplies a layer's input: 1/(1-p) with probability 1-p, else 0, independently.

    Args:
        seed: the sample's.
        name: the layer's name in the network; each layer has its own mask.
        shape: of the input; its first axis is the batch's.
        p: probability of 0.
        whole_channels: whether all elements of a channel, the second axis, have one value.

    Returns:
        shape (1, …), in the host's memory: one mask for all data.
    """
    own = (1, *shape[1:2], *[1] * (len(shape) - 2)) if whole_channels else (1, *shape[1:])
    generator = torch.Generator().manual_seed(derive_seed(seed, "mask", name))
    kept = torch.rand(own, generator=generator) >= p
    return kept.float() / (1 - p) if p < 1 else torch.zeros(own)


@contextmanager
def masked(module: nn.Module, seed: int) -> Iterator[None]:
    """Within the context, every dropout layer multiplies its input by the mask of this seed.

    Args:
        module: the network, in evaluation mode.
        seed: the sample's.
    """
    hooks = [
        layer.register_forward_hook(_multiply(seed, name, layer)) for name, layer in dropout_layers(module).items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _multiply(seed: int, name: str, layer: Any) -> Callable[..., Tensor]:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        own = mask(seed, name, tuple(output.shape), layer.p, isinstance(layer, WHOLE_CHANNELS))
        return inputs[0] * own.to(output)

    return hook
