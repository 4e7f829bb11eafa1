"""Hamiltonian dynamics of several chains at once: phases, kinetic energies, and the leapfrog.

    H(θ, p) = U(θ) + ½·Σ_j v_j·p_j²,   p ~ N(0, 1/v)

The inverse mass v is diagonal and each chain has its own: the variance of the coordinates under the target.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_sgmcmc.tensors import widest_dtype

Potential: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""U, shape (n,), float64, and its gradient, shape (n, P), at n positions, shape (n, P); each row by itself."""

DIVERGENT = 1000.0
"""An error of the Hamiltonian above which a trajectory has diverged, as in Stan."""


class Phase(NamedTuple):
    """Positions and momenta of C chains.

    Attributes:
        place: θ, shape (C, P).
        energy: U(θ), shape (C,), float64.
        gradient: ∇U(θ), shape (C, P).
        momentum: p, shape (C, P).
    """

    place: Tensor
    energy: Tensor
    gradient: Tensor
    momentum: Tensor

    def rows(self, index: Tensor) -> "Phase":
        """Return the chains with these indices."""
        return Phase(*(tensor[index] for tensor in self))

    def with_rows(self, index: Tensor, other: "Phase") -> "Phase":
        """Return a copy whose chains with these indices are those of another one."""
        return Phase(*(mine.index_copy(0, index, theirs) for mine, theirs in zip(self, other, strict=True)))


def chosen(mask: Tensor, yes: Phase, no: Phase) -> Phase:
    """Return `yes` for the chains of a mask, shape (C,), and `no` for the others."""
    pairs = zip(yes, no, strict=True)
    return Phase(*(torch.where(mask[:, None] if a.dim() > 1 else mask, a, b) for a, b in pairs))


def kinetic(momentum: Tensor, variance: Tensor) -> Tensor:
    """Return ½·Σ_j v_j·p_j², shape (C,), float64.

    Args:
        momentum: p, shape (C, P).
        variance: v, shape (C, P).
    """
    return (momentum.square() * variance).sum(1, dtype=widest_dtype(momentum.device)) / 2


def leapfrog(potential: Potential, phase: Phase, step: Tensor, variance: Tensor) -> Phase:
    """Return the phases after one step.

        p ← p - ε/2·∇U(θ),   θ ← θ + ε·v·p,   p ← p - ε/2·∇U(θ)

    It is reversible (a step of -ε leads back) and preserves volume; H changes by O(ε³) in a step, and by O(ε²) over a
    trajectory of any length.

    Args:
        potential: U and its gradient.
        phase: of C chains.
        step: ε of each chain, shape (C,), negative for backwards in time.
        variance: v, shape (C, P).

    Source: Neal 2011 (MCMC using Hamiltonian dynamics), section 2.3.
    """
    step = step.to(phase.place.dtype)[:, None]
    momentum = phase.momentum - step / 2 * phase.gradient
    place = phase.place + step * variance * momentum
    energy, gradient = potential(place)
    return Phase(place, energy, gradient, momentum - step / 2 * gradient)


def with_momenta(state: Phase, variance: Tensor, draws: "Draws") -> tuple[Phase, Tensor]:
    """Return the phases with momenta drawn from N(0, 1/v), and H there, shape (C,), float64.

    Args:
        state: of C chains.
        variance: v, shape (C, P).
        draws: the random numbers.
    """
    start = state._replace(momentum=draws.normal() / variance.sqrt())
    return start, start.energy + kinetic(start.momentum, variance)


class Move(NamedTuple):
    """What an iteration of a kernel did.

    Attributes:
        phase: the new state; its momentum has no meaning.
        acceptance: the acceptance that the step size is adapted by, shape (C,), float64.
        leapfrogs: gradients of the iteration, shape (C,).
        divergent: whether the trajectory diverged, shape (C,).
        at_limit: whether the trajectory was cut at its largest length, shape (C,).
        hamiltonian: H at the trajectory's start, shape (C,), float64.
    """

    phase: Phase
    acceptance: Tensor
    leapfrogs: Tensor
    divergent: Tensor
    at_limit: Tensor
    hamiltonian: Tensor


COUNTED = ("acceptance", "divergent", "at_limit", "leapfrogs")
"""What of a `Move` is added up over iterations."""


class Draws:
    """Random numbers of an iteration: chain c draws only from the stream of (seed, c, iteration).

    They are drawn on the host in double precision, so they are the same on every device and in every dtype.

    Args:
        generators: one for each chain, seeded for the iteration.
        like: a tensor of shape (C, P) whose dtype and device the normal numbers get.
    """

    def __init__(self, generators: list[torch.Generator], like: Tensor) -> None:
        self._generators = generators
        self._like = like

    def normal(self) -> Tensor:
        """Return standard normal numbers, shape (C, P)."""
        count = self._like.shape[1]
        rows = [torch.randn(count, generator=g, dtype=torch.float64) for g in self._generators]
        return torch.stack(rows).to(self._like)

    def uniform(self, count: int, chains: list[int] | None = None) -> Tensor:
        """Return numbers in [0, 1), shape (n, count), float64.

        Args:
            count: numbers of each chain.
            chains: places of the chains that draw; None is all.
        """
        own = self._generators if chains is None else [self._generators[c] for c in chains]
        rows = [torch.rand(count, generator=g, dtype=torch.float64) for g in own]
        return torch.stack(rows).to(self._like.device)
