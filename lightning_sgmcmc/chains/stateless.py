"""Evaluate a module without side effects: with given tensors, in evaluation mode, without advancing generators."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from torch import Tensor, nn
from torch.func import functional_call

from lightning_sgmcmc.chains.masks import MASK_SEED, masked
from lightning_sgmcmc.expansion import PLAIN, collapsed, expansions_of
from lightning_sgmcmc.priors.state import is_prior_state
from lightning_sgmcmc.seeding import unchanged_torch_generators

Home = tuple[dict[str, Any], str]
"""Where a module keeps a tensor: the dictionary and the key."""


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name, the parameters first."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def homes_of(module: nn.Module) -> dict[str, list[Home]]:
    """Return where a module keeps each tensor of `state_of`, by name; a tensor that layers share has several places."""
    names: dict[int, str] = {}
    homes: dict[str, list[Home]] = {}
    for kind in ("_parameters", "_buffers"):
        for prefix, part in module.named_modules():
            home: dict[str, Any] = getattr(part, kind)
            for key, tensor in home.items():
                if tensor is not None:
                    name = names.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
                    homes.setdefault(name, []).append((home, key))
    return homes


def network_state(module: nn.Module) -> dict[str, Tensor]:
    """Return what samples and stores have: what `state_of` returns, without the tensors of the prior, and with the
    products of expanded weights."""
    named = collapsed(dict(module.named_parameters()), module) | dict(module.named_buffers())
    return {name: tensor for name, tensor in named.items() if not is_prior_state(name)}


def slots_of(module: nn.Module) -> dict[str, Home]:
    """Return where a module takes the plain weights of its expanded layers, by name."""
    return {expansion.name: (expansion.rule._buffers, PLAIN) for expansion in expansions_of(module)}


class StatelessCall(nn.Module):
    """Calls `function(module, *args)` with a sample's tensors instead of the module's own.

    Args:
        module: the module whose parameters and buffers are replaced; its own are unchanged.
        function: the function to call.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._function = function
        self._renamed = {expansion.name: expansion.slot for expansion in expansions_of(module)}

    def forward(self, *args: Any) -> Any:
        return self._function(self.module, *args)

    def call(self, state: Mapping[str, Tensor], *args: Any) -> Any:
        """Call the function with the tensors of `state`, by the module's own names.

        If the state has the seed of dropout masks, dropout is active with these masks (see `chains/masks.py`).
        """
        renamed = self._renamed
        own = {f"module.{renamed.get(name, name)}": tensor for name, tensor in state.items() if name != MASK_SEED}
        if len(own) == len(state):
            return functional_call(self, own, args)
        with masked(self.module, int(state[MASK_SEED])):
            return functional_call(self, own, args)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set a module to evaluation mode; restore each submodule's mode at the end."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def undisturbed_generators(module: pl.LightningModule) -> Iterator[None]:
    """Restore torch's default generators, of the CPU and the module's device, at the end."""
    with unchanged_torch_generators([module.device]):
        yield
