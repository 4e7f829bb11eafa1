"""What a prior is a density of: a module's tensors without held rows, and with the prior's own tensors of each chain.

Held rows are the padding rows of embeddings, which torch does not train. They are not sampled: they have no noise,
gradient or momentum, and the prior is a density of the other entries.

A prior's own tensors are buffers of the module: drawn scales, and centres at the start. Like the chains' own tensors
they are saved in checkpoints, but samples and descriptions of networks leave them out.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sgmcmc.priors.base import STATE, Prior


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


# -- tensors of the prior ----------------------------------------------------------------------------------------------


class PriorState(nn.Module):
    """Holds a prior's tensors as buffers; a name with dots is a path of submodules, as in a parameter's name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            place: nn.Module = self
            for part in path:
                if part not in place._modules:
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            place.register_buffer(last, tensor)


def is_prior_state(name: str) -> bool:
    """Return whether a buffer or submodule of this name belongs to a prior rather than to the network."""
    return name == STATE or name.startswith(f"{STATE}.")


def prior_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module's prior, by their names in the module; none for a fixed prior."""
    part = module._modules.get(STATE)
    return {} if part is None else {f"{STATE}.{name}": tensor for name, tensor in part.named_buffers()}


def begin_prior_state(module: nn.Module, prior: Prior) -> None:
    """Register the tensors of a prior that has some, while the module holds a single chain: once, and again in a fit
    that samples other parameters or has another prior, where those that stay keep their values.

    Raises:
        ValueError: if the prior needs others than that with which the module's chains were stacked.
    """
    stacked = getattr(getattr(module, "chains", None), "stacked", None)
    trainable = {
        name: p if stacked is None or p.dim() == 0 else p[0] for name, p in module.named_parameters() if p.requires_grad
    }
    tensors = prior.initial_state(without_held(trainable, held_rows(module)))
    present = {name.removeprefix(f"{STATE}."): tensor for name, tensor in prior_state(module).items()}
    if tensors.keys() <= present.keys():
        return
    if stacked is not None:
        raise ValueError(
            f"{prior!r} has tensors that this module's chains did not begin with, as another prior or other sampled "
            "parameters need them: create a new module for this fit"
        )
    kept = {name: present[name] for name, t in tensors.items() if name in present and present[name].shape == t.shape}
    module._modules.pop(STATE, None)
    module.add_module(STATE, PriorState(tensors | kept))
    # DDP would broadcast them at every step, and centres are as large as the network and never change.
    module._ddp_params_and_buffers_to_ignore = [f"{STATE}.{name}" for name in tensors]  # type: ignore[assignment]


def with_own_state(module: nn.Module, prior: Prior, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict that a module with this prior can load: tensors of another prior are left out, and those that
    the saved run did not have keep the module's values."""
    saved = [name for name in state_dict if is_prior_state(name)]
    if saved:
        begin_prior_state(module, prior)
    own = prior_state(module)
    if own.keys() == set(saved):
        return state_dict
    network = {name: value for name, value in state_dict.items() if not is_prior_state(name)}
    return OrderedDict(network | {name: state_dict.get(name, value) for name, value in own.items()})
