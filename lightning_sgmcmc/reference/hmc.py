"""Hamiltonian Monte Carlo with trajectories of a fixed length in time, and a Metropolis test at their end."""

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
    which the trajectories always complete. Chains with few steps wait for those with many, without a gradient.

    Args:
        potential: U and its gradient.
        state: of C chains; its momentum is drawn anew.
        step: ε of each chain, shape (C,).
        variance: v, shape (C, P).
        draws: the iteration's random numbers.
        length: mean length of a trajectory in units of time; π/2 is a quarter of a period where v is the variance.
        jitter: in [0, 1].
        max_steps: steps of a trajectory at most.

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
