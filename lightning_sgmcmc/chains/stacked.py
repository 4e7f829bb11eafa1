"""Several chains of one network: its parameters and buffers stacked along a leading chain axis.

The stacked tensors replace the module's own, so that optimizers, checkpoints, devices and data-parallel wrappers see
them. To compute with a chain, its slices replace them temporarily: one chain after another (on a CPU, bit for bit as
that chain alone), or all at once under `torch.vmap`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from lightning_sgmcmc.chains.execution import homes_of, put, restored
from lightning_sgmcmc.priors.state import is_prior_state
from lightning_sgmcmc.samplers.rows import FlatParameters

_STACKED: "WeakKeyDictionary[nn.Module, tuple[int, dict[str, torch.Size]]]" = WeakKeyDictionary()
"""For each layer whose tensors are stacked, the number of chains, and the tensors' shapes by name."""


def check_free(module: nn.Module) -> None:
    """Raise ValueError if a network holds the chains of another module."""
    for name, part in module.named_modules():
        if part not in _STACKED:
            continue
        num_chains, shapes = _STACKED[part]
        for key, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None and tensor.shape == shapes.get(key):
                raise ValueError(
                    f"'{name}.{key}' holds the states of {num_chains} chains of another module's fit: make the network "
                    "anew for this module, or go on with the other one; posterior.networks() has samples as networks"
                )


def check_num_chains(model: nn.Module, state_dict: Mapping[str, Any], num_chains: int, are_stacked: bool) -> None:
    """Raise ValueError if a state dict has another number of chains; that of one network is every chain's start."""
    counts = set()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not isinstance(state_dict.get(name), Tensor):
            continue
        own, found = parameter.shape[1:] if are_stacked else parameter.shape, state_dict[name].shape
        count = found[0] if len(found) > 0 and found[1:] == own else 1
        if count > 1 or (found == own and are_stacked):
            counts.add(count)
    if counts and num_chains not in counts:  # parameters that were not sampled there have one state for all
        count = max(counts)
        raise ValueError(
            f"the checkpoint has num_chains={count} in each process, and this module num_chains={num_chains}: pass "
            f"num_chains={count}, or start a new run"
        )


class StackedChains:
    """The stacked tensors of a module and their slices, one for each chain; they replace the module's own."""

    def __init__(
        self,
        module: nn.Module,
        num_chains: int,
        initialise: Callable[[int], None],
        shared: frozenset[str] = frozenset(),
    ) -> None:
        self.num_chains = num_chains
        homes = {name: places for name, places in homes_of(module).items() if name not in shared}
        self.homes = list(homes.values())
        """For each tensor, parameters first, where the module keeps it."""
        self.names = list(homes)
        self.num_parameters = sum(1 for name, _ in module.named_parameters() if name not in shared)
        mask_padding(module)
        given = [tensor.detach().clone() for tensor in self.stacked]
        starts = []
        for chain in range(num_chains):
            with torch.no_grad():
                initialise(chain)
                starts.append([tensor.detach().clone() for tensor in self.stacked])
                for tensor, value in zip(self.stacked, given, strict=True):
                    tensor.copy_(value)
        self._replaced: MutableMapping[str, Tensor] = WeakValueDictionary()
        """The parameters that the stacked ones replace, as far as something else holds them."""
        for index, one in enumerate(self.stacked):
            stacked = torch.stack([start[index] for start in starts])
            is_parameter = isinstance(one, nn.Parameter)
            if is_parameter:
                self._replaced[self.names[index]] = one
            put(self.homes[index], nn.Parameter(stacked, one.requires_grad) if is_parameter else stacked)
        _note_shapes(module, {id(tensor) for tensor in self.stacked})
        self._dim = self.stacked[0].dim()
        self._stacked: list[Tensor] = []
        self._slices: list[list[Tensor]] = []
        self._gradients: list[Tensor | None] = []
        self.of_prior: list[dict[str, Tensor]] = []
        """For each chain, its slices by name that its prior is a function of."""
        self._rows: tuple[FlatParameters, list[int], list[Tensor]] | None = None
        """Flat parameters, their places in `_stacked`, and each slice's gradient in the rows."""
        self._arrived: dict[Tensor, Tensor] | None = None
        """The slices whose gradient is in the rows, with it; None where gradients stay in the slices."""

    @property
    def is_at_rest(self) -> bool:
        """Whether the module holds the stacked tensors rather than those of one network."""
        home, key = self.homes[0][0]
        return bool(home[key].dim() == self._dim)

    # -- the tensors --------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Renew the slices if the module has been moved, converted or copied."""
        present = self.stacked
        if self._slices and all(
            a is b and a.data_ptr() == s.data_ptr()
            for a, b, s in zip(present, self._stacked, self._slices[0], strict=True)
        ):
            return
        self._stacked = present
        self._gradients = [None] * len(present)
        self._slices = []
        for chain in range(self.num_chains):
            slices: list[Tensor] = []
            for tensor in present:
                piece = tensor.detach()[chain]
                slices.append(nn.Parameter(piece, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else piece)
            self._slices.append(slices)
        self.of_prior = [
            {name: t for name, t in zip(self.names, slices, strict=True) if t.requires_grad or is_prior_state(name)}
            for slices in self._slices
        ]

    def replaced(self) -> dict[int, str]:
        """Return by their ids the names of the parameters that the stacked ones have replaced, where they are held."""
        return {id(tensor): name for name, tensor in self._replaced.items()}

    @property
    def stacked(self) -> list[Tensor]:
        """The module's present tensors, parameters first: the stacked ones while it is at rest."""
        return [places[0][0][places[0][1]] for places in self.homes]

    @property
    def slices(self) -> list[list[Tensor]]:
        """Each chain's tensors: leaves whose data are slices of the stacked ones."""
        self.refresh()
        return self._slices

    @contextmanager
    def swapped(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Temporarily replace the module's tensors; a buffer that the module reassigns is copied into the given one."""
        with restored(self.homes):
            for homes, tensor in zip(self.homes, tensors, strict=True):
                put(homes, tensor)
            yield
            for index in range(self.num_parameters, len(tensors)):
                home, key = self.homes[index][0]
                if home[key] is not tensors[index]:
                    tensors[index].copy_(home[key])

    @contextmanager
    def at(self, chain: int) -> Iterator[None]:
        """Temporarily replace the module's tensors by a chain's slices."""
        with self.swapped(self.slices[chain]):
            yield

    def unbound(self) -> list[list[Tensor]]:
        """Return each chain's tensors, with parameters unbound from the stacked ones in their graph."""
        self.refresh()
        columns = [tensor.unbind(0) for tensor in self._stacked[: self.num_parameters]]
        buffers = [slices[self.num_parameters :] for slices in self._slices]
        return [[column[c] for column in columns] + buffers[c] for c in range(self.num_chains)]

    # -- gradients ----------------------------------------------------------------------------------------------------

    def clear_gradients(self) -> None:
        """Clear the slices' gradients."""
        if self._arrived is not None:
            self._arrived.clear()
        for slices in self._slices:
            for piece in slices[: self.num_parameters]:
                piece.grad = None

    @property
    def receives(self) -> bool:
        """Whether the slices' gradients go to the rows as they arrive."""
        return self._arrived is not None

    def receive(self, flat: FlatParameters | None) -> None:
        """Let each gradient of a slice go to the rows `flat` as it arrives, so that not all exist twice; None ends
        it."""
        self.clear_gradients()  # or the slices, their hooks and these gradients would hold one another
        self._rows, self._arrived, self._slices, self.of_prior = None, None, [], []
        if flat is None:
            return
        self.refresh()
        arrived = self._arrived = {}
        place = {id(tensor): index for index, tensor in enumerate(self._stacked)}
        for parameter, view in zip(flat.parameters, flat.views, strict=True):
            for chain, slices in enumerate(self._slices):
                hook = functools.partial(_move_gradient, arrived, view[chain])
                slices[place[id(parameter)]].register_post_accumulate_grad_hook(hook)

    def collect_gradients(self, flat: FlatParameters | None = None) -> None:
        """Copy the slices' gradients to the stacked parameters, in persistent buffers: the rows `flat` or their own."""
        if flat is not None and self._collect_rows(flat):
            return
        for index, stacked in enumerate(self._stacked[: self.num_parameters]):
            gradients = [slices[index].grad for slices in self._slices]
            if all(gradient is None for gradient in gradients):
                continue
            kept = self._gradients[index]
            if kept is None:
                kept = self._gradients[index] = torch.empty_like(stacked)
            torch.stack([torch.zeros_like(kept[0]) if g is None else g for g in gradients], out=kept)
            stacked.grad = kept

    def _collect_rows(self, flat: FlatParameters) -> bool:
        """Copy the slices' gradients to the rows, unless a slice has none."""
        if self._arrived:
            if len(self._arrived) == self.num_chains * len(flat.parameters):
                flat.attach_gradients()
                return True
            for piece, view in self._arrived.items():
                piece.grad = view
            return False
        if self._rows is None or self._rows[0] is not flat:
            place = {id(tensor): index for index, tensor in enumerate(self._stacked)}
            order = [place[id(p)] for p in flat.parameters]
            self._rows = flat, order, [view[chain] for chain in range(self.num_chains) for view in flat.views]
        _, order, targets = self._rows
        each = (slices[index].grad for slices in self._slices for index in order)
        gradients = [gradient for gradient in each if gradient is not None]
        if len(gradients) < len(targets):
            return False
        torch._foreach_copy_(targets, gradients)
        flat.attach_gradients()
        return True

    def spread_gradients(self) -> None:
        """Copy the stacked parameters' gradients to their slices, to continue accumulating."""
        self.refresh()
        for index, stacked in enumerate(self._stacked[: self.num_parameters]):
            if stacked.grad is not None:
                for chain, slices in enumerate(self._slices):
                    slices[index].grad = stacked.grad[chain].clone()

    def __getstate__(self) -> dict[str, Any]:
        # Copies make their own slices.
        return self.__dict__ | {
            "_stacked": [],
            "_slices": [],
            "_gradients": [],
            "of_prior": [],
            "_rows": None,
            "_arrived": None,
            "_replaced": {},
        }


def _move_gradient(arrived: dict[Tensor, Tensor], view: Tensor, piece: Tensor) -> None:
    """Move a slice's fresh gradient to its view of the rows."""
    fresh, piece.grad = piece.grad, None
    assert fresh is not None
    if piece in arrived:
        view.add_(fresh)
    else:
        view.copy_(fresh)
        arrived[piece] = view


def clip_each_chain(gradients: Sequence[Tensor], limit: float) -> None:
    """Scale each chain's gradient, along the leading axis, down to a norm of at most `limit`, as torch does."""
    for pieces in zip(*(gradient.unbind(0) for gradient in gradients), strict=True):
        norm = nn.utils.get_total_norm(pieces)
        torch._foreach_mul_(list(pieces), (limit / (norm + 1e-6)).clamp(max=1.0))


# -- embeddings with a padding row ------------------------------------------------------------------------------------


def _note_shapes(module: nn.Module, stacked: set[int]) -> None:
    """Note which tensors of a module's layers are stacked, by their ids."""
    for part in module.modules():
        held = [*part._parameters.items(), *part._buffers.items()]
        shapes = {key: tensor.shape for key, tensor in held if tensor is not None and id(tensor) in stacked}
        if shapes:
            _STACKED[part] = next(iter(shapes.values()))[0], shapes


def mask_padding(model: nn.Module) -> None:
    """Let no gradient pass through embeddings' outputs at `padding_idx`, of which vmap masks only the first chain's."""
    padded = (part for part in model.modules() if isinstance(part, nn.Embedding) and part.padding_idx is not None)
    for part in padded:
        if _without_padding not in part._forward_hooks.values():
            part.register_forward_hook(_without_padding, with_kwargs=True)


def _without_padding(
    layer: nn.Embedding, arguments: tuple[Tensor, ...], named: Mapping[str, Tensor], output: Tensor
) -> Tensor:
    indices = arguments[0] if arguments else named["input"]
    assert layer.padding_idx is not None
    return torch.where(indices.eq(layer.padding_idx)[..., None], output.detach(), output)
