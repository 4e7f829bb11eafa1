"""Trajectories of several steps that a Metropolis test accepts or rejects as a whole, for each chain."""

import torch
from torch import Tensor

from lightning_sgmcmc.samplers.reversible import ReversibleLangevin
from lightning_sgmcmc.tensors import Control, along_first_axis


def log_acceptance(start: Tensor, end: Tensor, work: Tensor, temperature: Control) -> Tensor:
    """Return (U(θ_0) - U(θ_K) + W)/τ, the log of the acceptance probability where it is below 0, shape (C,).

    Args:
        start: U at the trajectory's start with all data, shape (C,), in nats.
        end: U at its end.
        work: W, the work of the trajectory's forces (`ReversibleLangevin.work`), shape (C,), in nats.
        temperature: τ > 0.
    """
    return (start - end + work) / temperature


class Trajectory:
    """The present trajectory of a sampler's chains: where it began, and the test at its end.

        trajectory.begin(energy)
        for position in range(steps):
            trajectory.set_place(position, steps)  # before the gradient
            sampler.step()
        trajectory.end(energy, log_uniforms)

    Args:
        sampler: the chains' sampler.
    """

    def __init__(self, sampler: ReversibleLangevin) -> None:
        self._sampler = sampler
        self._start: list[Tensor] = []
        """Copies of the parameters, and then of the momenta, at the trajectory's start."""
        self.energy = torch.empty(0)
        """U of the start, shape (C,), float64, in nats."""

    @property
    def is_on(self) -> bool:
        """Whether the chains are on a trajectory."""
        return self._sampler.work is not None

    @torch.no_grad()
    def begin(self, energy: Tensor) -> None:
        """Begin a trajectory at the chains' states.

        Args:
            energy: U of these states with all data, shape (C,), float64.
        """
        present = self._present()
        if not self._start:
            self._start = [torch.empty_like(tensor) for tensor in present]
        torch._foreach_copy_(self._start, present)
        self.energy = energy
        self._sampler.work = torch.zeros_like(energy)
        self._sampler.enter_trajectory()

    def set_place(self, position: int, steps: int) -> None:
        """Set the place of the next step in its trajectory.

        Args:
            position: number of the trajectory's steps before it.
            steps: K, the number of the trajectory's steps.
        """
        self._sampler.begins, self._sampler.ends = position == 0, position == steps - 1

    @torch.no_grad()
    def end(self, energy: Tensor, log_uniforms: Tensor) -> Tensor:
        """Test the trajectory of each chain; return its log-acceptance, shape (C,).

        A rejected chain has the position of the start again, bit for bit, and the start's momentum reversed. A NaN is
        a rejection. Afterwards `energy` is that of the chains' states.

        Args:
            energy: U of the chains' states with all data, shape (C,), float64.
            log_uniforms: the logarithm of a uniform number for each chain, shape (C,), on the energies' device.
        """
        sampler = self._sampler
        assert sampler.work is not None
        temperature = sampler.param_groups[0]["temperature"]
        if isinstance(temperature, Tensor):
            temperature = temperature.to(energy.device)
        found = log_acceptance(self.energy, energy, sampler.work, temperature)
        accepted = log_uniforms < found
        moves = accepted.to(sampler.param_groups[0]["params"][0].device)
        present = self._present()
        momenta = len(present) // 2
        for place, (now, start) in enumerate(zip(present, self._start, strict=True)):
            stays = along_first_axis(moves, now.dim()) if sampler.num_chains > 1 else moves[0]
            now.copy_(torch.where(stays, now, start if place < momenta else -start))
        self.energy = torch.where(accepted, energy, self.energy)
        self.leave()
        return found

    def leave(self) -> None:
        """Leave the trajectory without a test."""
        self._sampler.work, self._sampler.begins, self._sampler.ends = None, False, False

    def tensors(self) -> list[Tensor]:
        """Return what a checkpoint needs in the middle of a trajectory, in the parameters' stored form."""
        return self._start

    def restore(self, tensors: list[Tensor], energy: Tensor, work: Tensor) -> None:
        """Continue a trajectory.

        Args:
            tensors: from `tensors`.
            energy: U of its start, shape (C,), float64.
            work: W so far, shape (C,), float64.
        """
        self._start, self.energy, self._sampler.work = tensors, energy, work

    def _present(self) -> list[Tensor]:
        """Return the parameters, and then their momenta."""
        groups = self._sampler.param_groups
        momenta = [momentum for group in groups for momentum in self._sampler.momenta(group) or []]
        return [*(p for group in groups for p in group["params"]), *momenta]
