"""Kernels of several chains at once: the leapfrog, HMC and NUTS.

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
    """Positions θ of C chains, shape (C, P), U there, shape (C,), float64, its gradient, and momenta p, as θ."""

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
    """Return ½·Σ_j v_j·p_j², shape (C,), float64, of momenta and variances of shape (C, P)."""
    return (momentum.square() * variance).sum(1, dtype=widest_dtype(momentum.device)) / 2


def leapfrog(potential: Potential, phase: Phase, step: Tensor, variance: Tensor) -> Phase:
    """Return the phases of C chains after one step, of a time ε of shape (C,), negative for backwards.

        p ← p - ε/2·∇U(θ),   θ ← θ + ε·v·p,   p ← p - ε/2·∇U(θ)

    It is reversible (a step of -ε leads back) and preserves volume; H changes by O(ε³) in a step, and by O(ε²) over a
    trajectory of any length.

    Source: Neal 2011 (MCMC using Hamiltonian dynamics), section 2.3.
    """
    step = step.to(phase.place.dtype)[:, None]
    momentum = phase.momentum - step / 2 * phase.gradient
    place = phase.place + step * variance * momentum
    energy, gradient = potential(place)
    return Phase(place, energy, gradient, momentum - step / 2 * gradient)


def with_momenta(state: Phase, variance: Tensor, draws: "Draws") -> tuple[Phase, Tensor]:
    """Return the phases with momenta drawn from N(0, 1/v), and H there, shape (C,), float64."""
    start = state._replace(momentum=draws.normal() / variance.sqrt())
    return start, start.energy + kinetic(start.momentum, variance)


class Move(NamedTuple):
    """What an iteration of a kernel did, of C chains: each but the phase has the shape (C,)."""

    phase: Phase
    """The new state, whose momentum has no meaning."""
    acceptance: Tensor
    """What the step size is adapted by, float64."""
    leapfrogs: Tensor
    divergent: Tensor
    at_limit: Tensor
    """Whether the trajectory was cut at its largest length."""
    hamiltonian: Tensor
    """H at the trajectory's start, float64."""


COUNTED = ("acceptance", "divergent", "at_limit", "leapfrogs")
"""What of a `Move` is added up over iterations."""


class Draws:
    """Random numbers of an iteration, drawn on the host in double precision, so the same on every device."""

    def __init__(self, generators: list[torch.Generator], like: Tensor) -> None:
        self._generators = generators
        self._like = like

    def normal(self) -> Tensor:
        """Return standard normal numbers, shape (C, P)."""
        count = self._like.shape[1]
        rows = [torch.randn(count, generator=g, dtype=torch.float64) for g in self._generators]
        return torch.stack(rows).to(self._like)

    def uniform(self, count: int, chains: list[int] | None = None) -> Tensor:
        """Return numbers in [0, 1), shape (n, count), float64, of the chains at some places; None is all."""
        own = self._generators if chains is None else [self._generators[c] for c in chains]
        rows = [torch.rand(count, generator=g, dtype=torch.float64) for g in own]
        return torch.stack(rows).to(self._like.device)


# -- hmc ---------------------------------------------------------------------------------------------------------------


def hamiltonian_monte_carlo(
    potential: Potential,
    state: Phase,
    step: Tensor,
    variance: Tensor,
    draws: Draws,
    length: float,
    jitter: float,
    max_steps: int,
) -> Move:
    """Return an iteration: a trajectory of each chain, accepted with probability min(1, exp(H_0 - H)).

    The length in time is uniform in length·[1 - jitter, 1 + jitter], so that no direction of the target has a period
    which the trajectories always complete.

    Source: Neal 2011 (MCMC using Hamiltonian dynamics), sections 3.2 and 5.4.
    """
    start, hamiltonian = with_momenta(state, variance, draws)
    uniforms = draws.uniform(2)
    wanted = (length * (1 + jitter * (2 * uniforms[:, 0] - 1)) / step).round()
    steps = wanted.clamp(1, max_steps).long()
    phase, made = start, 0
    for stop in steps.unique().tolist():
        rows = (steps >= stop).nonzero()[:, 0]
        going, own_step, own_variance = phase.rows(rows), step[rows], variance[rows]
        for _ in range(stop - made):
            going = leapfrog(potential, going, own_step, own_variance)
        phase, made = phase.with_rows(rows, going), stop
    error = (phase.energy + kinetic(phase.momentum, variance) - hamiltonian).nan_to_num(nan=torch.inf)
    takes = uniforms[:, 1].log() < -error
    acceptance = (-error).clamp(max=0).exp()
    return Move(chosen(takes, phase, start), acceptance, steps, error > DIVERGENT, wanted > max_steps, hamiltonian)


# -- nuts --------------------------------------------------------------------------------------------------------------

# A trajectory doubles, forwards or backwards in time at random, until one of its ends moves towards the other. All
# chains whose trajectories still grow have the same depth, so a doubling is one loop over its leaves for all of them.
# Subtrees are merged like the digits of a binary counter, so that a doubling of 2^j leaves keeps j segments.


class Segment(NamedTuple):
    """A part of a trajectory: momenta at its first and last state, and their sum ρ over all, each of shape (C, P)."""

    first: Tensor
    last: Tensor
    total: Tensor


class Subtree(NamedTuple):
    """The 2^j leaves of a doubling.

    Attributes:
        sound: places of the A chains that neither turned nor diverged, shape (A,).
        end: the last state of these.
        sample: a state of theirs, drawn by the weights exp(-H).
        log_weight: log Σ exp(H_0 - H) over their leaves, shape (A,), float64.
        segment: all their leaves.
        divergent: whether the error of H has grown too large, of all chains, shape (C,).
        acceptance: Σ min(1, exp(H_0 - H)) over the leaves made, of all chains, shape (C,), float64.
        leaves: number of leaves made, of all chains, shape (C,).
    """

    sound: Tensor
    end: Phase
    sample: Phase
    log_weight: Tensor
    segment: Segment
    divergent: Tensor
    acceptance: Tensor
    leaves: Tensor


def turns(one: Segment, other: Segment, variance: Tensor, single: bool = False) -> Tensor:
    """Return for each chain whether two adjacent segments together have turned, shape (C,), bool.

        p_first·(v∘ρ) ≤ 0  or  p_last·(v∘ρ) ≤ 0

    It is asked of the whole, and of each segment with the other's adjacent state, without which a trajectory of a
    Gaussian can miss its turn between the two; of two single states all questions are the same.

    Source: Betancourt 2017 (A conceptual introduction to Hamiltonian Monte Carlo), appendix A.4; the second question is
    that of Stan since 2.21.
    """
    found = _ends(one.first, other.last, one.total + other.total, variance)
    if single:
        return found
    found |= _ends(one.first, other.first, one.total + other.first, variance)
    found |= _ends(one.last, other.last, one.last + other.total, variance)
    return found


def _ends(first: Tensor, last: Tensor, total: Tensor, variance: Tensor) -> Tensor:
    velocity = total * variance
    return torch.minimum((first * velocity).sum(1), (last * velocity).sum(1)) <= 0


def subtree(
    potential: Potential,
    end: Phase,
    step: Tensor,
    variance: Tensor,
    hamiltonian: Tensor,
    uniforms: Tensor,
) -> Subtree:
    """Return 2^j further states of each chain's trajectory; a chain stops where a subtree turns or H diverges.

    The step has the sign of the direction, shape (C,), and `uniforms` are one number for each leaf, shape (C, 2^j).
    """
    sound = torch.arange(len(step), device=step.device)
    leaves, divergent = torch.full_like(sound, uniforms.shape[1]), torch.zeros_like(sound, dtype=torch.bool)
    acceptances, acceptance = torch.zeros_like(hamiltonian), torch.zeros_like(hamiltonian)
    phase = sample = end
    log_weight, limits = torch.full_like(hamiltonian, -torch.inf), uniforms.log()
    stack: list[Segment] = []
    for leaf in range(uniforms.shape[1]):
        phase = leapfrog(potential, phase, step, variance)
        gain = hamiltonian - phase.energy - kinetic(phase.momentum, variance)
        diverged = ~(gain >= -DIVERGENT)  # also where it is not a number
        gain = gain.masked_fill(diverged, -torch.inf)
        acceptance = acceptance + gain.clamp(max=0).exp()
        log_weight = torch.logaddexp(log_weight, gain)
        # Each leaf replaces the earlier choice by its share of the weight so far, so every leaf has its share at last.
        sample = chosen(limits[:, leaf] < gain - log_weight, phase, sample)
        segment, place, turned = Segment(phase.momentum, phase.momentum, phase.momentum), leaf, diverged
        while place & 1:
            before = stack.pop()
            turned = turned | turns(before, segment, variance, single=place == leaf)
            segment, place = Segment(before.first, segment.last, before.total + segment.total), place >> 1
        stack.append(segment)
        if bool(turned.any()):
            divergent[sound], acceptances[sound], leaves[sound[turned]] = diverged, acceptance, leaf + 1
            index = (~turned).nonzero()[:, 0]
            sound, phase, sample = sound[index], phase.rows(index), sample.rows(index)
            step, variance, hamiltonian, limits = step[index], variance[index], hamiltonian[index], limits[index]
            log_weight, acceptance = log_weight[index], acceptance[index]
            stack = [Segment(*(part[index] for part in own)) for own in stack]
            if len(index) == 0:
                break
    acceptances[sound] = acceptance
    return Subtree(sound, phase, sample, log_weight, stack[-1], divergent, acceptances, leaves)


def no_u_turn(
    potential: Potential, state: Phase, step: Tensor, variance: Tensor, draws: Draws, max_depth: int = 10
) -> Move:
    """Return an iteration of the No-U-Turn sampler with multinomial sampling over the trajectory.

    The new state is drawn by the weights exp(-H) of the trajectory's states; a doubling's own choice replaces the
    present one with probability min(1, w_new/w_old), which favours states far from the start. A doubling that turns
    within itself, or diverges, is left out, and ends the trajectory.

    Source: Hoffman & Gelman 2014 (The No-U-Turn sampler), section 3.1; Betancourt 2017, appendix A.
    """
    start, hamiltonian = with_momenta(state, variance, draws)
    backward = forward = sample = start
    total, log_weight = start.momentum, torch.zeros_like(hamiltonian)
    acceptance, leapfrogs = torch.zeros_like(hamiltonian), torch.zeros_like(hamiltonian, dtype=torch.long)
    going = torch.ones_like(leapfrogs, dtype=torch.bool)
    divergent = ~going
    for depth in range(max_depth):
        rows = going.nonzero()[:, 0]
        if len(rows) == 0:
            break
        uniforms = draws.uniform(2**depth + 2, rows.tolist())
        ahead = uniforms[:, 0] < 0.5
        ends = backward.rows(rows), forward.rows(rows)
        near, far = chosen(ahead, ends[1], ends[0]), chosen(ahead, ends[0], ends[1])
        signed = torch.where(ahead, step[rows], -step[rows])
        grown = subtree(potential, near, signed, variance[rows], hamiltonian[rows], uniforms[:, 2:])
        acceptance = acceptance.index_add(0, rows, grown.acceptance)
        leapfrogs = leapfrogs.index_add(0, rows, grown.leaves)
        divergent = divergent.index_copy(0, rows, grown.divergent)
        going[rows] = False
        own, ahead, limit = grown.sound, ahead[grown.sound], uniforms[grown.sound, 1].log()
        rows, near, far = rows[own], near.rows(own), far.rows(own)
        takes = limit < grown.log_weight - log_weight[rows]
        sample = sample.with_rows(rows, chosen(takes, grown.sample, sample.rows(rows)))
        before = Segment(far.momentum, near.momentum, total[rows])
        going[rows] = ~turns(before, grown.segment, variance[rows], single=depth == 0)
        forward = forward.with_rows(rows, chosen(ahead, grown.end, far))
        backward = backward.with_rows(rows, chosen(ahead, far, grown.end))
        total = total.index_copy(0, rows, before.total + grown.segment.total)
        log_weight = log_weight.index_copy(0, rows, torch.logaddexp(log_weight[rows], grown.log_weight))
    return Move(sample, acceptance / leapfrogs, leapfrogs, divergent, going, hamiltonian)
