"""A state of the chains that is kept, and the data's likelihood and gradients there: what control variates are made
of."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.batches.loader import ChainBatches
from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.chains.density import Densities
from lightning_sgmcmc.chains.execution import evaluation_mode, state_of
from lightning_sgmcmc.tensors import as_rows, exact_device


class Snapshot:
    """Parameters and buffers of all chains of this process at one time, θ_q, and if so wanted gradients there."""

    def __init__(self, chains: Chains, with_gradients: bool = False) -> None:
        module = chains.model
        self._chains = chains
        self._module = module
        self._densities = Densities(module)
        self._vmapped = chains.num_chains > 1 and chains.execution in ("auto", "vmap")
        self.tensors = {name: tensor.detach().clone() for name, tensor in self._present().items()}
        self.log_likelihood = torch.zeros(chains.num_chains, dtype=torch.float64, device=exact_device(module.device))
        """log p(D|θ_q) of each chain over all data, shape (C,)."""
        self.parameters = {n: p for n, p in module.named_parameters() if p.requires_grad and with_gradients}
        """The module's own tensors that have a gradient here."""
        self._sum_memory, self.sums = self._like_parameters()
        """The sum of the gradients added since `clear`, in the parameters' shapes."""
        self.count = 0
        """How many were added."""
        self._full_memory: Tensor | None = None
        self.full: list[Tensor] | None = None
        """The gradient of the mean negative log likelihood of all data, in the parameters' shapes, once it is kept."""
        self._states = self._make_states()

    def _present(self) -> dict[str, Tensor]:
        return {name: t for name, t in state_of(self._module).items() if name not in self._chains.sharing.names}

    def _like_parameters(self) -> tuple[Tensor, list[Tensor]]:
        """Return zeros in one piece of memory, and its parts in the parameters' shapes."""
        sizes = [p.numel() for p in self.parameters.values()]
        dtype = next((p.dtype for p in self.parameters.values()), None)
        memory = torch.zeros(sum(sizes), dtype=dtype, device=self._module.device)
        shapes = [p.shape for p in self.parameters.values()]
        return memory, [part.view(shape) for part, shape in zip(memory.split(sizes), shapes, strict=True)]

    def _make_states(self) -> list[dict[str, Tensor]]:
        """Return the tensors to compute with: of all chains at once, or of each; their gradients go into the sums."""
        chains, states = self._chains.num_chains, []
        whole = chains == 1 or self._vmapped
        places = {name: place for place, name in enumerate(self.parameters)}
        for chain in range(1 if whole else chains):
            state = {}
            for name, tensor in self.tensors.items():
                state[name] = (tensor if whole else tensor[chain]).detach()
                if name in places:
                    total = self.sums[places[name]]
                    state[name].requires_grad_().grad = total if whole else total[chain]
            states.append(state)
        return states

    def take(self) -> None:
        """Copy the chains' current states; results of a pass over the data become invalid."""
        layout = self._chains.layout
        with torch.no_grad():
            for name, tensor in self._present().items():
                # Ranks that share a chain have running statistics of their own, and the snapshot is one.
                is_buffer = not isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point()
                averaged = layout.ranks_per_chain > 1 and is_buffer
                self.tensors[name].copy_(layout.mean_over_data(tensor.clone()) if averaged else tensor)
        self.clear()

    # -- the data at θ_q ----------------------------------------------------------------------------------------------

    def of_batch(self, batch: Any) -> Tensor:
        """Return log p(y|x,θ_q) of each datum of a mini-batch, shape (C, n), in evaluation mode."""
        module, own = self._module, isinstance(batch, ChainBatches)
        with torch.set_grad_enabled(bool(self.parameters)), evaluation_mode(module):
            if self._vmapped:
                stacked, axis = batch.stacked() if own else batch, 0 if own else None
                return self._densities.log_likelihoods(self._states[0], stacked, axis)
            each = enumerate(self._states)
            return torch.stack([self._densities.log_likelihood(s, batch[c] if own else batch) for c, s in each])

    def log_prior(self) -> Tensor:
        """Return log p(θ_q) of each chain, shape (C,)."""
        states = self._states
        with torch.set_grad_enabled(bool(self.parameters)):
            if self._vmapped:
                states = [{name: t[c] for name, t in states[0].items()} for c in range(self._chains.num_chains)]
            return torch.stack([self._densities.log_prior(state) for state in states])

    def add_gradients(self, log_density: Tensor, divisor: float) -> None:
        """Add the gradients of each chain's -Σ_i log_density_i/divisor to the sums; the densities' graph is used up."""
        (-log_density.sum() / divisor).backward()  # type: ignore[no-untyped-call]
        self.count += 1

    def reduce(self) -> None:
        """Replace the sums by their mean over the ranks that share the chains' data."""
        if self._chains.layout.ranks_per_chain > 1:
            self._sum_memory.copy_(self._chains.layout.mean_over_data(self._sum_memory))

    def keep_full(self) -> None:
        """Take the sums, of this rank's share of all data over N each, for the gradient of all data."""
        self.reduce()
        if self._full_memory is None:
            self._full_memory, self.full = self._like_parameters()
        torch.mul(self._sum_memory, self._chains.layout.ranks_per_chain, out=self._full_memory)
        self.clear()

    def clear(self) -> None:
        """Reset the sums."""
        self._sum_memory.zero_()
        self.count = 0

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, of all chains of the run."""
        layout = self._chains.layout

        def stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: layout.gather_stored(tensor).cpu().clone() for name, tensor in tensors.items()}

        state = {"tensors": stored(self.tensors), "log_likelihood": layout.gather(self.log_likelihood).cpu().clone()}
        if self.full is not None:
            state["full"] = stored(dict(zip(self.parameters, self.full, strict=True)))
        if self.count:
            state["count"] = self.count
            sums = zip(self.parameters, self.sums, strict=True)
            state["sums"] = {name: layout.gather_unreduced(tensor).cpu().clone() for name, tensor in sums}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        layout = self._chains.layout
        for name, tensor in state["tensors"].items():
            self.tensors[name].copy_(layout.own_stored(tensor))
        self.log_likelihood.copy_(layout.own(state["log_likelihood"]))
        self.clear()
        if "full" in state and self.parameters:
            self._full_memory, self.full = self._like_parameters()
            for name, tensor in zip(self.parameters, self.full, strict=True):
                tensor.copy_(layout.own_stored(state["full"][name]))
        if "sums" in state and self.parameters:
            self.count = state["count"]
            for name, tensor in zip(self.parameters, self.sums, strict=True):
                tensor.copy_(layout.own_unreduced(state["sums"][name]))


def rows_of(tensors: Sequence[Tensor], num_chains: int, out: Tensor | None = None) -> Tensor:
    """Return tensors of C chains as one row for each chain, shape (C, d)."""
    parts = [as_rows(tensor, num_chains) for tensor in tensors]
    return torch.cat(parts, 1) if out is None else torch.cat(parts, 1, out=out)
