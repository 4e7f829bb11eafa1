"""The No-U-Turn sampler of several chains, whose trees grow side by side.

A trajectory doubles, forwards or backwards in time at random, until it turns: until one of its ends moves towards the
other. All chains whose trajectories still grow have the same depth, so a doubling is one loop over its leaves for all
of them, and a chain that has ended waits without a gradient. Subtrees are merged like the digits of a binary counter,
so that a doubling of 2^j leaves keeps j segments.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc.reference.leapfrog import (
    DIVERGENT,
    Draws,
    Move,
    Phase,
    Potential,
    chosen,
    kinetic,
    leapfrog,
    with_momenta,
)


class Segment(NamedTuple):
    """A part of a trajectory, in the order in which it was made.

    Attributes:
        first: momentum at its first state, shape (C, P).
        last: momentum at its last state.
        total: the sum of its momenta, ρ.
    """

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
    Gaussian can miss its turn between the two.

    Args:
        one: the segment made first.
        other: the segment that continues it.
        variance: v, shape (C, P).
        single: whether both are of one state, for which all questions are the same.

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

    Args:
        potential: U and its gradient.
        end: the end of the trajectory that is continued.
        step: ε with the sign of the direction, shape (C,).
        variance: v, shape (C, P).
        hamiltonian: H_0, of the trajectory's start, shape (C,), float64.
        uniforms: one number for each leaf, shape (C, 2^j).
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

    Args:
        potential: U and its gradient.
        state: of C chains; its momentum is drawn anew.
        step: ε of each chain, shape (C,).
        variance: v, shape (C, P).
        draws: the iteration's random numbers.
        max_depth: doublings at most, so at most 2^max_depth - 1 gradients.

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
