"""A state of the chains that is kept, with its full-data likelihood: what control variates are made of."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_sgmcmc.chain_batches import ChainBatches
from lightning_sgmcmc.evaluation import StatelessCall, evaluation_mode

if TYPE_CHECKING:
    from lightning_sgmcmc.module import BayesianModule


class Snapshot:
    """Parameters and buffers of all chains of this process at one time, θ_q.

    Args:
        module: the module; with several chains its tensors have a leading chain axis, and so have the snapshot's.
    """

    def __init__(self, module: "BayesianModule") -> None:
        self._module = module
        self._call = StatelessCall(module, lambda m, batch: m.log_likelihood(batch))
        self.tensors = {name: tensor.detach().clone() for name, tensor in self._present().items()}
        self.log_likelihood = torch.zeros(module.num_chains, dtype=torch.float64, device=module.device)
        """log p(D|θ_q) of each chain over all data, shape (C,)."""

    def _present(self) -> dict[str, Tensor]:
        return dict(self._module.named_parameters()) | dict(self._module.named_buffers())

    def take(self) -> None:
        """Take over the chains' present states; `log_likelihood` is then to be filled in."""
        with torch.no_grad():
            for name, tensor in self._present().items():
                self.tensors[name].copy_(tensor)

    def state(self, chain: int) -> dict[str, Tensor]:
        """Return the network of a chain, by its index in this process."""
        several = self._module.num_chains > 1
        return {name: tensor[chain] if several else tensor for name, tensor in self.tensors.items()}

    def of_batch(self, batch: Any) -> Tensor:
        """Return log p(y|x,θ_q) of each datum of a mini-batch, shape (C, n), in evaluation mode.

        Args:
            batch: one for all chains, or a `ChainBatches`.
        """
        module, chains = self._module, range(self._module.num_chains)
        own = isinstance(batch, ChainBatches)
        with torch.no_grad(), evaluation_mode(module):
            if len(chains) > 1 and module.device.type != "cpu":
                over_chains = torch.vmap(self._call.call, in_dims=(0, 0 if own else None), randomness="different")
                found: Tensor = over_chains(self.tensors, batch.stacked() if own else batch)
                return found
            return torch.stack([self._call.call(self.state(c), batch[c] if own else batch) for c in chains])

    def state_dict(self) -> dict[str, Any]:
        """Return the state, of all chains of the run."""
        layout = self._module.layout
        return {
            "tensors": {name: layout.gather_stored(tensor).cpu() for name, tensor in self.tensors.items()},
            "log_likelihood": layout.gather(self.log_likelihood).cpu(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        layout = self._module.layout
        for name, tensor in state["tensors"].items():
            self.tensors[name].copy_(layout.own_stored(tensor))
        self.log_likelihood.copy_(layout.own(state["log_likelihood"]))
