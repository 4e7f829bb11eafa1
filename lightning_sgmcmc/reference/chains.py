"""Chains of Hamiltonian Monte Carlo on any density: warm-up, iterations, state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.reference.adaptation import StepSizes, Variances, first_step_sizes, windows
from lightning_sgmcmc.reference.hmc import hamiltonian_monte_carlo
from lightning_sgmcmc.reference.leapfrog import COUNTED, Draws, Move, Phase, Potential
from lightning_sgmcmc.reference.nuts import no_u_turn
from lightning_sgmcmc.reference.settings import Kernel, Settings
from lightning_sgmcmc.seeding import derive_seed

EARLY_DEPTH = 7
"""Doublings of a trajectory at most before the end of the first window of the warm-up."""


class HamiltonianChains:
    """C chains side by side, each with its own step size, inverse mass and random numbers.

    An iteration is a function of the chain's state and of (seed, chain, iteration), so chains do not depend on one
    another, and a run that continues from `state_dict` is the run that was not interrupted.

    Args:
        potential: U and its gradient.
        initial: positions at the start, shape (C, P), with finite energies.
        settings: of the run.
        chains: the number in the run of each chain, by which it draws; None is 0, 1, ….

    Attributes:
        iteration: iterations made.
        phase: the present states.
        variance: v, the diagonal of the inverse mass, shape (C, P).

    Raises:
        ValueError: if the energy of a start is not finite.
    """

    def __init__(
        self, potential: Potential, initial: Tensor, settings: Settings, chains: Sequence[int] | None = None
    ) -> None:
        self.settings = settings
        self.chains = list(range(len(initial))) if chains is None else list(chains)
        self.iteration = 0
        self._potential = potential
        self._generators = [torch.Generator() for _ in self.chains]
        energy, gradient = potential(initial)
        sound = energy.isfinite() & gradient.isfinite().all(1)
        if not bool(sound.all()):
            chain = int((~sound).nonzero()[0])
            raise ValueError(
                f"the energy of chain {self.chains[chain]} at its start is {float(energy[chain])}, or its gradient is "
                "not finite: check the data, or start it elsewhere"
            )
        self.phase = Phase(initial, energy, gradient, torch.zeros_like(initial))
        self.variance = torch.ones_like(initial)
        self._first, self._ends = windows(settings.warmup)
        self._variances = Variances(initial)
        self._steps = StepSizes(torch.full_like(energy, 0.1), settings.target_acceptance)

    @property
    def in_warmup(self) -> bool:
        """Whether the next iteration belongs to the warm-up."""
        return self.iteration < self.settings.warmup

    @property
    def step_size(self) -> Tensor:
        """ε of each chain, shape (C,), float64: what the warm-up tries, and its average afterwards."""
        return (self._steps.log_step if self.in_warmup else self._steps.log_average).exp()

    def advance(self) -> Move:
        """Make one iteration of all chains, adapt in the warm-up, and return what it did."""
        settings, draws = self.settings, self._draws("iteration")
        if self.iteration == 0:
            self._restart_steps()
        given = self._potential, self.phase, self.step_size, self.variance, draws
        if settings.kernel == "nuts":
            move = no_u_turn(*given, self._depth)
        else:
            move = hamiltonian_monte_carlo(*given, settings.length, settings.jitter, 2**self._depth - 1)
        self.phase = move.phase
        if self.in_warmup:
            self._adapt(move.acceptance)
        self.iteration += 1
        return move

    @property
    def _depth(self) -> int:
        """Doublings at most: fewer while nothing is known of the scales, when long trajectories are wasted."""
        early = bool(self._ends) and self.iteration < self._ends[0]
        return min(self.settings.max_depth, EARLY_DEPTH) if early else self.settings.max_depth

    def _adapt(self, acceptance: Tensor) -> None:
        self._steps.update(acceptance)
        if not self._ends or not self._first <= self.iteration < self._ends[-1]:
            return
        self._variances.add(self.phase.place)
        if self.iteration + 1 in self._ends:
            self.variance = self._variances.take().to(self.variance)
            self._restart_steps()

    def _restart_steps(self) -> None:
        given = self._potential, self.phase, self._steps.log_step.exp(), self.variance
        self._steps.restart(first_step_sizes(*given, self._draws("step size"), self.settings.target_acceptance))

    def _draws(self, purpose: str) -> Draws:
        for chain, generator in zip(self.chains, self._generators, strict=True):
            generator.manual_seed(derive_seed(self.settings.seed, "Hamiltonian", purpose, chain, self.iteration))
        return Draws(self._generators, self.phase.place)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and numbers from which another object continues bit for bit."""
        return {
            "iteration": self.iteration,
            "phase": list(self.phase),
            "variance": self.variance,
            "steps": self._steps.state_dict(),
            "variances": self._variances.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned, in a run of the same settings."""
        own = self.phase.place
        self.iteration = int(state["iteration"])
        self.phase = Phase(*(tensor.to(own.device) for tensor in state["phase"]))
        self.variance = state["variance"].to(own.device)
        for part, name in ((self._steps, "steps"), (self._variances, "variances")):
            moved = {key: v.to(own.device) if isinstance(v, Tensor) else v for key, v in state[name].items()}
            part.load_state_dict(moved)


@dataclass(frozen=True)
class DensityDraws:
    """Draws from a density.

    Attributes:
        draws: positions, shape (C, S, P).
        energies: U at the draws, shape (C, S), float64.
        step_size: ε after the warm-up, shape (C,).
        variance: v, the diagonal of the inverse mass, shape (C, P).
        acceptance: mean acceptance after the warm-up, shape (C,).
        divergences: trajectories that diverged after the warm-up, shape (C,).
        at_limit: trajectories that were cut at their largest length after the warm-up, shape (C,).
        gradients: gradients of each chain after the warm-up, shape (C,).
    """

    draws: Tensor
    energies: Tensor
    step_size: Tensor
    variance: Tensor
    acceptance: Tensor
    divergences: Tensor
    at_limit: Tensor
    gradients: Tensor


def sample_density(
    potential: Potential,
    initial: Tensor,
    *,
    kernel: Kernel = "nuts",
    warmup: int = 1000,
    draws: int = 1000,
    every_n_draws: int = 1,
    target_acceptance: float = 0.8,
    max_depth: int = 10,
    length: float = Settings.length,
    jitter: float = Settings.jitter,
    seed: int = 0,
    chains: Sequence[int] | None = None,
) -> DensityDraws:
    """Draw from exp(-U) by the No-U-Turn sampler or Hamiltonian Monte Carlo, several chains at once.

    Args:
        potential: a function of n positions, shape (n, P), that returns U, shape (n,), float64, and its gradient,
            shape (n, P), each row by itself; n is the number of chains that have not ended their trajectory.
        initial: positions at the start, shape (C, P), in the dtype of the draws.
        kernel: see `sample`, as for the arguments that follow.
        warmup: iterations that adapt step sizes and inverse masses.
        draws: iterations after these.
        every_n_draws: keep every n-th.
        target_acceptance: what the step size is adapted to.
        max_depth: doublings of a trajectory at most.
        length: of "hmc".
        jitter: of "hmc".
        seed: chain c draws only from the streams of (seed, c), whatever the number of chains.
        chains: the numbers c of the chains; None is 0, 1, ….

    Raises:
        ValueError: for an argument out of range, or a start whose energy is not finite.

    Example::

        from lightning_sgmcmc.reference import sample_density

        def normal(x):
            return x.double().square().sum(1) / 2, x

        found = sample_density(normal, torch.zeros(2, 3), warmup=50, draws=20)
        mean, step = found.draws.mean((0, 1)), found.step_size
    """
    settings = Settings(
        kernel, warmup, draws, every_n_draws, target_acceptance, max_depth, float(length), float(jitter), seed
    )
    made = HamiltonianChains(potential, initial, settings, chains)
    places, energies, moves = [], [], []
    for _ in range(settings.iterations):
        is_draw = not made.in_warmup
        move = made.advance()
        if is_draw:
            moves.append(move)
            if len(moves) % every_n_draws == 0:
                places.append(move.phase.place)
                energies.append(move.phase.energy)
    counts = [torch.stack([getattr(move, name) for move in moves]).sum(0) for name in COUNTED]
    acceptance, divergences, at_limit, gradients = counts
    return DensityDraws(
        torch.stack(places, 1),
        torch.stack(energies, 1),
        made.step_size,
        made.variance,
        acceptance / draws,
        divergences,
        at_limit,
        gradients,
    )
