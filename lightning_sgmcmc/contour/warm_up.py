"""The energies of a warm-up, from which an energy partition is made."""

from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.chains.layout import ChainLayout


class EnergyRecord:
    """The energies of the second half of a warm-up; its first half, the way from the start, does not count.

    Args:
        steps: optimizer steps of the warm-up.
        num_chains: energies in a step.
        device: where they are kept, so that nothing waits for it.
    """

    def __init__(self, steps: int, num_chains: int, device: torch.device) -> None:
        self._first = steps // 2
        self._energies = torch.full((steps - self._first, num_chains), torch.nan, dtype=torch.float64, device=device)

    def take(self, step: int, energy: Tensor) -> None:
        """Keep the energies (C,) of the step 1, 2, …"""
        if step > self._first:
            self._energies[step - self._first - 1].copy_(energy)

    @property
    def energies(self) -> Tensor:
        """What was kept, NaN for steps left out, shape (steps, C)."""
        return self._energies

    def state_dict(self, layout: ChainLayout) -> dict[str, Any]:
        """Return the state: a tensor, of all chains of the run."""
        return {"energies": layout.gather(self._energies, dim=1).cpu()}

    def load_state_dict(self, state: dict[str, Any], layout: ChainLayout) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ValueError: if it is of a warm-up of another length.
        """
        expected = (len(self._energies), layout.total_chains)
        if state["energies"].shape != expected:
            raise ValueError(
                f"the checkpoint is of another warm-up: it has {len(state['energies'])} energies of "
                f"{state['energies'].shape[1]} chains, this run {expected[0]} of {expected[1]}"
            )
        self._energies.copy_(layout.own(state["energies"], dim=1))
