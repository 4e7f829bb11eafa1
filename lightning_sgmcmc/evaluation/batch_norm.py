"""BatchNorm's running statistics at given weights, as plain averages over training batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def batch_norm_layers(model: nn.Module) -> dict[str, Any]:
    """Return the BatchNorm layers with running statistics, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats
    }


@contextmanager
def _averaging(layers: Iterable[Any]) -> Iterator[None]:
    """Within the context, the layers take the batch's statistics, and average them over the batches."""
    before = [(layer, layer.momentum, layer.training) for layer in layers]
    try:
        for layer, _, _ in before:
            layer.train()
            layer.momentum = None  # the plain average over batches
        yield
    finally:
        for layer, momentum, training in before:
            layer.momentum, layer.training = momentum, training


def new_statistics(
    model: nn.Module,
    state: Mapping[str, Tensor],
    batches: Iterable[Any],
    call: Callable[[Mapping[str, Tensor], Any], Any],
) -> dict[str, Tensor]:
    """Return a state whose BatchNorm statistics are averages over batches at its weights.

    Args:
        model: the network, in evaluation mode.
        state: parameters and buffers by name; unchanged. Layers without statistics in it keep the model's.
        batches: not read if the network has no BatchNorm.
        call: calls the network with a state and a batch.
    """
    layers = {n: layer for n, layer in batch_norm_layers(model).items() if f"{n}.running_mean" in state}
    fresh = dict(state)
    for name in layers:
        for statistic, value in (("running_mean", 0), ("running_var", 1), ("num_batches_tracked", 0)):
            key = f"{name}.{statistic}"
            fresh[key] = torch.full_like(state[key], value)
    if layers:
        with _averaging(layers.values()), torch.no_grad():
            for batch in batches:
                call(fresh, batch)
    return fresh
