"""The energies of a warm-up, from which an energy partition is made."""

from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.contour.chain_group import ChainGroup
from lightning_sgmcmc.tensors import exact


class EnergyRecord:
    """Records the energies of the second half of a warm-up; its first half, the way from the start, is left out.

    Args:
        steps: optimizer steps of the warm-up.
        chains: the chains; energies stay on their device, so that recording never waits for it.
        keeps_prior: whether to record log p(θ) too.
    """

    def __init__(self, steps: int, chains: ChainGroup, keeps_prior: bool = False) -> None:
        self._chains = chains
        self._first = steps // 2
        shape = (steps - self._first, chains.num_chains)
        self._energies = torch.full(shape, torch.nan, dtype=torch.float64, device=chains.device)
        self._log_priors = self._energies.clone() if keeps_prior else None

    def add(self, step: int, energy: Tensor, log_prior: Tensor | None = None) -> None:
        """Record the energies (C,) of step 1, 2, …, and log p(θ), of shape (C,) or ()."""
        if step > self._first:
            self._energies[step - self._first - 1].copy_(energy)
            if self._log_priors is not None and log_prior is not None:
                self._log_priors[step - self._first - 1].copy_(exact(log_prior))

    def everything(self) -> tuple[Tensor, Tensor | None]:
        """Return energies and log p(θ) of all chains of the run, shape (S, P), NaN where none was recorded."""
        priors = self._log_priors
        return self._chains.gather(self._energies, 1), None if priors is None else self._chains.gather(priors, 1)

    def energies(self) -> Tensor:
        """Return the recorded energies of all chains of the run, shape (S,).

        Raises:
            ValueError: if there are none: the contour rested in all these steps.
        """
        energies = self._chains.gather(self._energies, 1)
        found = energies[energies.isfinite()]
        if found.numel() == 0:
            raise ValueError(
                f"the second half of the warm-up, {len(self._energies)} steps, was at temperature 0, where the contour "
                "rests, so the energy range is not known: lengthen warm_up_steps into the first sampling stage, or "
                "pass first_edge and width"
            )
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all chains of the run: a tensor."""
        energies, priors = self.everything()
        return {"energies": energies.cpu()} | ({} if priors is None else {"log_priors": priors.cpu()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`.

        Raises:
            ValueError: if the warm-up had another length or another number of chains.
        """
        expected = (len(self._energies), self._chains.total_chains)
        if state["energies"].shape != expected:
            raise ValueError(
                f"the checkpoint is of another warm-up: it has {len(state['energies'])} energies of "
                f"{state['energies'].shape[1]} chains, this run {expected[0]} of {expected[1]}. Continue with the same "
                "warm_up_steps and num_chains, or start a new run"
            )
        self._energies.copy_(self._chains.own(state["energies"], 1))
        if self._log_priors is not None:
            self._log_priors.copy_(self._chains.own(state["log_priors"], 1))
