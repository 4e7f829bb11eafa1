"""Rows of parameters that are held at their value: the padding rows of embeddings, which torch does not train.

A held row is not sampled: it has no noise, gradient or momentum, and the prior is a density of the other entries.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Entries(dict[str, Tensor]):
    """Tensors by name without their held rows; `held` has the place of the row that each of some tensors lacks."""

    def __init__(self, tensors: Mapping[str, Tensor], held: Mapping[str, int]) -> None:
        super().__init__(tensors)
        self.held = dict(held)


def held_rows(module: nn.Module) -> dict[str, int]:
    """Return the held row of each sampled parameter that has one, by name: `padding_idx` of its embedding."""
    found = {
        id(part.weight): part.padding_idx
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.padding_idx is not None
    }
    if not found:
        return {}
    return {name: found[id(p)] for name, p in module.named_parameters() if p.requires_grad and id(p) in found}


def without_row(tensor: Tensor, row: int, axis: int = 0) -> Tensor:
    """Return a tensor without one row; a view where it is the first or the last."""
    size = tensor.shape[axis]
    before, after = tensor.narrow(axis, 0, row), tensor.narrow(axis, row + 1, size - row - 1)
    return after if row == 0 else before if row == size - 1 else torch.cat([before, after], axis)


def with_row(tensor: Tensor, row: int, value: Tensor, axis: int = 0) -> Tensor:
    """Return a tensor with a row put back; undoes `without_row`."""
    rest = tensor.shape[axis] - row
    return torch.cat([tensor.narrow(axis, 0, row), value.unsqueeze(axis), tensor.narrow(axis, row, rest)], axis)


def without_held(tensors: Mapping[str, Tensor], held: Mapping[str, int], axis: int = 0) -> Mapping[str, Tensor]:
    """Return tensors by name without their held rows, on axis 1 if they have a leading axis of chains; the mapping
    itself where nothing is held."""
    if not held:
        return tensors
    kept = {name: without_row(t, held[name], axis) if name in held else t for name, t in tensors.items()}
    return Entries(kept, held)


def sampled_columns(tensors: Mapping[str, Tensor], held: Mapping[str, int], axis: int = 0) -> list[slice]:
    """Return the stretches of columns that are sampled in a row of all tensors, which are in the columns' order."""
    found, start, place = [], 0, 0
    for name, tensor in tensors.items():
        shape = tensor.shape[axis:]
        if name in held:
            width = shape[1:].numel()
            stop = place + held[name] * width
            if stop > start:
                found.append(slice(start, stop))
            start = stop + width
        place += shape.numel()
    return found + ([slice(start, place)] if place > start else [])
