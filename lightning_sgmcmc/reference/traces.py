"""What a run's record is made of: numbers of each iteration and draw."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.reference.chains import HamiltonianChains
from lightning_sgmcmc.reference.leapfrog import COUNTED, Move
from lightning_sgmcmc.reference.report import ReferenceReport, agreement, doubts, missing_information
from lightning_sgmcmc.reference.settings import Settings


class Traces:
    """Sums over iterations, the Hamiltonians after the warm-up, and energies and log-likelihoods of the draws.

    Args:
        chains: C.
    """

    def __init__(self, chains: int) -> None:
        self._sums = {name: torch.zeros(chains, dtype=torch.float64) for name in COUNTED}
        self._gradients = torch.zeros(chains, dtype=torch.float64)
        """With the warm-up's."""
        self._hamiltonians: list[Tensor] = []
        self._draws: list[Tensor] = []
        """Each of shape (C, 1 + M)."""

    def add(self, move: Move, in_warmup: bool) -> None:
        """Add an iteration."""
        self._gradients = self._gradients + move.leapfrogs.cpu()
        if in_warmup:
            return
        self._sums = {name: total + getattr(move, name).cpu() for name, total in self._sums.items()}
        self._hamiltonians.append(move.hamiltonian.cpu())

    def add_draw(self, energy: Tensor, log_likelihoods: Tensor) -> None:
        """Add a draw of each chain: energies, shape (C,), and log-likelihoods of some data, shape (C, M)."""
        self._draws.append(torch.cat([energy[:, None], log_likelihoods], 1).cpu())

    def progress(self, chains: HamiltonianChains, settings: Settings, seconds: float) -> str:
        """Return a line on how far the run is."""
        each = float(self._gradients.mean()) / max(chains.iteration, 1)
        stage = "warm-up" if chains.in_warmup else "draws"
        return (
            f"Iteration {chains.iteration} of {settings.iterations} ({stage}) after {seconds:.0f} s, "
            f"{each:.0f} gradients an iteration."
        )

    def report(
        self, chains: HamiltonianChains, settings: Settings, parameters: int, num_data: int, seconds: float
    ) -> ReferenceReport:
        """Return the record of a run that has ended.

        Args:
            chains: the chains.
            settings: of the run.
            parameters: P.
            num_data: N.
            seconds: that it took.
        """
        count = len(self._hamiltonians)
        means = {name: (total / count).tolist() for name, total in self._sums.items()}
        values = torch.stack(self._draws, 1).numpy()
        rhat, bulk, tail = agreement(values)
        found = ReferenceReport(
            settings=settings.law(),
            chains=len(values),
            draws=count,
            parameters=parameters,
            num_data=num_data,
            step_size=chains.step_size.tolist(),
            acceptance=means["acceptance"],
            divergences=[int(number) for number in self._sums["divergent"].tolist()],
            at_limit=means["at_limit"],
            leapfrogs=means["leapfrogs"],
            bfmi=missing_information(np.stack([h.numpy() for h in self._hamiltonians], 1)),
            gradients=[int(number) for number in self._gradients.tolist()],
            seconds=seconds,
            rhat=rhat,
            ess_bulk=bulk,
            ess_tail=tail,
        )
        found.warnings.extend(doubts(found, values.shape[2]))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the present numbers; lists are not copied, and their lengths say what belongs to this moment."""
        return {
            "sums": self._sums,
            "gradients": self._gradients,
            "hamiltonians": (self._hamiltonians, len(self._hamiltonians)),
            "draws": (self._draws, len(self._draws)),
        }

    @staticmethod
    def stacked(state: dict[str, Any]) -> dict[str, Any]:
        """Return a run's state with its lists up to their lengths as tensors, to be written."""
        traces = dict(state["traces"])
        for name in ("hamiltonians", "draws"):
            rows, length = traces[name]
            traces[name] = torch.stack(rows[:length]) if length else torch.zeros(0)
        return state | {"traces": traces}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `stacked` returned of these."""
        self._sums, self._gradients = dict(state["sums"]), state["gradients"]
        self._hamiltonians, self._draws = list(state["hamiltonians"].unbind()), list(state["draws"].unbind())
