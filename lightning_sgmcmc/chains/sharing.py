"""What of a network is sampled, and what all chains share: frozen parameters, and the buffers of frozen parts.

Shared tensors have no chain axis, samples do not contain them, and a store has them once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_sgmcmc.chains.layout import ChainLayout
from lightning_sgmcmc.chains.stateless import homes_of, state_of
from lightning_sgmcmc.checks import check_flag
from lightning_sgmcmc.priors.state import is_prior_state

NETWORK = "net."
"""The beginning of the parameters' names of a network that was passed; patterns may leave it out."""
LIKELIHOOD = "likelihood."
"""The beginning of the names of a likelihood's parameters, which are always sampled."""


def freeze(module: nn.Module, sampled: Sequence[str], argument: str = "sampled") -> None:
    """Set `requires_grad` of a network's parameters: those that a pattern matches are sampled, the others frozen.

    Parameters of the likelihood, such as a learned noise scale, are left as they are.

    Args:
        module: the module, changed in place.
        sampled: name patterns as in `fnmatch`, for names with or without the "net." in front.
        argument: the patterns' name in a message.

    Raises:
        ValueError: if a pattern matches no parameter.
    """
    names = [name for name, _ in module.named_parameters() if not name.startswith(LIKELIHOOD)]
    for pattern in sampled:
        if not any(_matches(name, pattern) for name in names):
            raise ValueError(
                f"{argument}: {pattern!r} matches no parameter of {type(module).__name__} (it has "
                f"{', '.join(names[:4])}, …): correct the pattern, such as '*.fc.*'"
            )
    for name, parameter in module.named_parameters():
        if not name.startswith(LIKELIHOOD):
            parameter.requires_grad_(any(_matches(name, pattern) for pattern in sampled))


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.removeprefix(NETWORK), pattern)


def frozen_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest parts of a module that have parameters, none of which requires gradients, with their names."""
    pending = list(module.named_children())
    while pending:
        name, part = pending.pop(0)
        parameters = list(part.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            yield name, part
        else:
            pending = [(f"{name}.{own}", child) for own, child in part.named_children()] + pending


def shared_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the tensors that all chains share; none if no parameter is frozen.

    They are the frozen parameters, the buffers of `frozen_parts`, and, beside frozen parameters, buffers that a state
    dict leaves out, which are constants.
    """
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    if not frozen:
        return frozenset()
    parts = tuple(f"{name}." for name, _ in frozen_parts(module))
    persistent = module.state_dict().keys()
    buffers = (name for name, _ in module.named_buffers() if not is_prior_state(name))
    return frozenset(frozen | {name for name in buffers if name.startswith(parts) or name not in persistent})


def keys_of(module: nn.Module, names: frozenset[str]) -> set[str]:
    """Return the keys of a state dict under which it has the tensors with these names, several for tied ones."""
    state = state_of(module)
    tensors = {id(state[name]) for name in names}
    everything = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {key for key, tensor in everything if id(tensor) in tensors}


class Sharing:
    """What the chains of a module share, since it is not sampled.

    Args:
        module: the module.

    Attributes:
        sampled: patterns of the sampled parameters' names; None samples those that require gradients.
        dropout: whether frozen parts drop out in training.
        names: of the shared tensors, once chains begin; those of stacked chains stay as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.sampled: tuple[str, ...] | None = None
        self.dropout = False
        self.names: frozenset[str] = frozenset()
        self._agreed = False
        """Whether all processes have the same shared tensors."""

    def choose(self, sampled: Sequence[str] | None, dropout: bool) -> None:
        """Set what is sampled, by the module's arguments.

        Raises:
            TypeError: if `sampled` is no list of patterns.
        """
        if isinstance(sampled, str) or not all(isinstance(pattern, str) for pattern in sampled or ()):
            raise TypeError(f"sampled must be a list of name patterns, such as ['*.fc.*'], got {sampled!r}")
        check_flag("frozen_dropout", dropout)
        self.sampled, self.dropout = None if sampled is None else tuple(sampled), dropout

    def begin(self) -> None:
        """Freeze what is not sampled, and note what is shared."""
        if self.sampled is not None:
            freeze(self._module, self.sampled)
        self.names = shared_names(self._module)

    def tensors(self) -> dict[str, Tensor]:
        """Return the shared tensors by name."""
        state = state_of(self._module) if self.names else {}
        return {name: tensor.detach() for name, tensor in state.items() if name in self.names}

    def agree(self, layout: ChainLayout) -> None:
        """Take the first process's shared tensors, once: networks that the processes drew without a seed differ.

        All processes call it together.

        Args:
            layout: of the chains.
        """
        if self.names and layout.is_spread and layout.strategy is not None and not self._agreed:
            layout.strategy.share_first(self.tensors().values())
            self._agreed = True

    def check(self, sampled: Iterable[str]) -> None:
        """Raise if one of the parameters to be sampled is shared by stacked chains.

        Raises:
            ValueError: with its name.
        """
        thawed = next((name for name in sampled if name in self.names), None)
        if thawed is not None:
            raise ValueError(
                f"'{thawed}' requires gradients now, but it was frozen when the chains began, and they share it: "
                "create a new module in which it is sampled"
            )

    def check_state(self, state_dict: Mapping[str, Tensor]) -> None:
        """Raise if a state of stacked chains is of chains that share other tensors than these.

        Raises:
            ValueError: with the first tensor that is sampled there and not here, or the other way round.
        """
        own = self._module.state_dict()
        for key in own.keys() & state_dict.keys():
            there, here = state_dict[key].shape, own[key].shape
            if there[1:] == here and there != here:
                where = "sampled there, and not here"
            elif here[1:] == there and there != here:
                where = "sampled here, and not there"
            else:
                continue
            raise ValueError(
                f"the checkpoint is of a run that samples other parameters: '{key}' is {where}; pass the same sampled=…"
            )

    def set_evaluating(self) -> None:
        """Set frozen parts to evaluation mode, so that they change no statistics; if they are to drop out, only their
        normalisation layers."""
        for _, part in frozen_parts(self._module):
            for layer in part.modules():
                if not self.dropout or isinstance(layer, _NormBase):
                    layer.training = False


class Holder:
    """Puts tensors in the place of a module's own for a while; what has the same values stays, and is compared once.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        self._compared: dict[str, _Compared] = {}

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Return a context in which the module has these tensors.

        Args:
            tensors: by name, on any device.
        """
        if tensors and not self._places:
            self._places = homes_of(self._module)
        before = []
        for name, tensor in tensors.items():
            home, key = self._places[name][0]
            own = home[key]
            other = self._other(name, own, tensor)
            if other is not None:
                before.append((name, own))
                self._put(name, other)
        try:
            yield
        finally:
            for name, own in before:
                self._put(name, own)

    def _put(self, name: str, tensor: Tensor) -> None:
        for home, key in self._places[name]:
            home[key] = tensor

    def _other(self, name: str, own: Tensor, tensor: Tensor) -> Tensor | None:
        """Return what is to take the place of a module's own tensor, or None if that has the same values."""
        countable = not (own.is_inference() or tensor.is_inference())  # changes of inference tensors are not counted
        known = self._compared.get(name)
        if known is not None and countable and known.is_of(own, tensor):
            return known.other
        moved = tensor.to(own.device)
        same = own is tensor or (own.shape == moved.shape and torch.equal(own, moved.to(own.dtype)))
        other = None if same else moved
        if countable:
            self._compared[name] = _Compared(own, own._version, tensor, tensor._version, other)
        return other


class _Compared(NamedTuple):
    """Two tensors, how often they had been changed in place, and what takes the first one's place."""

    own: Tensor
    own_version: int
    tensor: Tensor
    version: int
    other: Tensor | None

    def is_of(self, own: Tensor, tensor: Tensor) -> bool:
        """Return whether these are the same tensors, unchanged."""
        same = own is self.own and tensor is self.tensor
        return same and (own._version, tensor._version) == (self.own_version, self.version)
