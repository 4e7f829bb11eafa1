"""Several chains of one network: its parameters and buffers stacked along a leading chain axis.

The stacked tensors replace the module's own, so that optimizers, checkpoints, devices and data-parallel wrappers see
them. To compute with a chain, its slices replace them temporarily: one chain after another (on a CPU, bit for bit as
that chain alone), or all at once under `torch.vmap`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sgmcmc.chains.layers import mask_padding
from lightning_sgmcmc.chains.stateless import homes_of
from lightning_sgmcmc.priors.state import is_prior_state
from lightning_sgmcmc.samplers.flat import FlatParameters


class StackedChains:
    """The stacked tensors of a module and their slices, one for each chain.

    Args:
        module: the module with one chain's tensors; they are replaced by stacked ones.
        num_chains: C.
        initialise: writes the start of chain c, an index in this process, to the module's own tensors.
        shared: names of the tensors that all chains share, which are left as they are.
    """

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
        given = [tensor.detach().clone() for tensor in self._present()]
        starts = []
        for chain in range(num_chains):
            with torch.no_grad():
                initialise(chain)
                starts.append([tensor.detach().clone() for tensor in self._present()])
                for tensor, value in zip(self._present(), given, strict=True):
                    tensor.copy_(value)
        for index, one in enumerate(self._present()):
            stacked = torch.stack([start[index] for start in starts])
            self._put(index, nn.Parameter(stacked, one.requires_grad) if isinstance(one, nn.Parameter) else stacked)
        self._dim = self._present()[0].dim()
        self._stacked: list[Tensor] = []
        self._slices: list[list[Tensor]] = []
        self._gradients: list[Tensor | None] = []
        self._of_prior: list[dict[str, Tensor]] = []
        self._rows: tuple[FlatParameters, list[int], list[Tensor]] | None = None
        """Flat parameters, their places in `_stacked`, and each slice's gradient in the rows."""

    @property
    def is_at_rest(self) -> bool:
        """Whether the module holds the stacked tensors rather than those of one network."""
        home, key = self.homes[0][0]
        return bool(home[key].dim() == self._dim)

    # -- the tensors --------------------------------------------------------------------------------------------------

    def _present(self) -> list[Tensor]:
        """Return the module's current tensors."""
        return [places[0][0][places[0][1]] for places in self.homes]

    def _put(self, index: int, tensor: Tensor) -> None:
        for home, key in self.homes[index]:
            home[key] = tensor

    def refresh(self) -> None:
        """Renew the slices if the module has been moved, converted or copied."""
        present = self._present()
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
        self._of_prior = [
            {name: t for name, t in zip(self.names, slices, strict=True) if t.requires_grad or is_prior_state(name)}
            for slices in self._slices
        ]

    @property
    def stacked(self) -> list[Tensor]:
        """The stacked tensors, parameters first, while the module is at rest."""
        return self._present()

    @property
    def slices(self) -> list[list[Tensor]]:
        """Each chain's tensors: leaves whose data are slices of the stacked ones."""
        self.refresh()
        return self._slices

    def of_prior(self, chain: int) -> dict[str, Tensor]:
        """Return the trainable parameters of a chain by name, and its prior's tensors: leaves, whose data are slices of
        the stacked ones."""
        return self._of_prior[chain]

    @contextmanager
    def swapped(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Temporarily replace the module's tensors by these.

        A buffer that the module reassigns meanwhile is copied into the given one.
        """
        before = self._present()
        try:
            for index, tensor in enumerate(tensors):
                self._put(index, tensor)
            yield
            for index in range(self.num_parameters, len(tensors)):
                home, key = self.homes[index][0]
                if home[key] is not tensors[index]:
                    tensors[index].copy_(home[key])
        finally:
            for index, tensor in enumerate(before):
                self._put(index, tensor)

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
        for slices in self._slices:
            for piece in slices[: self.num_parameters]:
                piece.grad = None

    def collect_gradients(self, flat: FlatParameters | None = None) -> None:
        """Copy the slices' gradients to the stacked parameters, in persistent buffers.

        Args:
            flat: the stacked parameters as rows of one tensor, whose `gradients` are these buffers; None for buffers of
                their own, also where a parameter has no gradient.
        """
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
        return self.__dict__ | {"_stacked": [], "_slices": [], "_gradients": [], "_of_prior": [], "_rows": None}


def clip_each_chain(gradients: Sequence[Tensor], limit: float) -> None:
    """Scale each chain's gradient down to a norm of at most `limit`, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        gradients: tensors with a leading chain axis.
        limit: the largest norm of one chain's gradient over all tensors.
    """
    for pieces in zip(*(gradient.unbind(0) for gradient in gradients), strict=True):
        norm = nn.utils.get_total_norm(pieces)
        torch._foreach_mul_(list(pieces), (limit / (norm + 1e-6)).clamp(max=1.0))
