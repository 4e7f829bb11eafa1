"""The tensors that a prior has for each chain, as buffers of the module: drawn scales, and centres at the start.

Like the chains' own tensors they are saved in checkpoints, but samples and descriptions of networks leave them out.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_sgmcmc.priors.base import STATE, Prior
from lightning_sgmcmc.priors.held import held_rows, without_held


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
    """Register the tensors of a prior that has some, once, while the module holds a single chain."""
    if STATE in module._modules:
        return
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    tensors = prior.initial_state(without_held(trainable, held_rows(module)))
    if not tensors:
        return
    module.add_module(STATE, PriorState(tensors))
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
