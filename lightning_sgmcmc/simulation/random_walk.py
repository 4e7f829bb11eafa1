"""Random-walk Metropolis: many chains at once on an exact density, as a reference for approximate samplers.

A step proposes x' = x + s·Lξ with LLᵀ the covariance of proposals, and accepts it with probability min{1, p(x')/p(x)}.
The scale s is tuned to an acceptance rate during the burn-in only, so later draws come from a chain that leaves p
invariant.

Source: Metropolis et al. 1953; Roberts, Gelman & Gilks 1997 (the acceptance of 0.234); Andrieu & Thoms 2008, Algorithm
4 (the tuning).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.simulation.loop import CHUNK, ChainStreams

DECAY = 0.6
"""The scale is tuned in steps of k^-0.6."""


@dataclass(frozen=True)
class RandomWalk:
    """Results of a random walk.

    Attributes:
        draws: positions after the burn-in, shape (S, C, d).
        log_densities: log p at the draws, shape (S, C).
        acceptance: share of accepted proposals after the burn-in, shape (C,).
        scale: s after the burn-in, shape (C,).
    """

    draws: Tensor
    log_densities: Tensor
    acceptance: Tensor
    scale: Tensor


def random_walk_metropolis(
    log_density: Callable[[Tensor], Tensor],
    initial: Tensor,
    num_steps: int,
    *,
    scale: float | None = None,
    covariance: Tensor | None = None,
    burn_in: int = 0,
    target_acceptance: float = 0.234,
    keep_every: int = 1,
    seed: int = 0,
) -> RandomWalk:
    """Run chains of random-walk Metropolis.

    Args:
        log_density: log p up to a constant, from (C, d) to (C,); -inf (or NaN) outside the support.
        initial: initial positions, shape (C, d), with positive density.
        num_steps: steps of each chain, including the burn-in.
        scale: s at the start; None uses 2.38/√d.
        covariance: covariance of the proposals at s = 1, shape (d, d); None uses the identity.
        burn_in: steps without draws, in which each chain's s is tuned.
        target_acceptance: acceptance rate for the tuning of s.
        keep_every: steps between draws that are kept.
        seed: chain c draws only from the stream of (seed, c), whatever the number of chains.

    Raises:
        ValueError: for an argument out of range or of the wrong shape, or a start without density.
    """
    check_walk(num_steps, burn_in, keep_every, "scale", scale, target_acceptance)
    if initial.dim() != 2 or not bool(initial.isfinite().all()):
        raise ValueError(f"initial should be finite numbers of shape (C, d), got {tuple(initial.shape)}")
    dimension = initial.shape[1]
    factor = torch.eye(dimension).to(initial) if covariance is None else torch.linalg.cholesky(covariance.to(initial))
    place, density = initial.clone(), log_density(initial)
    if not bool(density.isfinite().all()):
        raise ValueError("log_density must be finite at every chain's start")
    log_scale = torch.full_like(density, math.log(scale or 2.38 / math.sqrt(dimension)))
    accepted = torch.zeros_like(density)
    streams = ChainStreams(seed, "random walk", place)
    draws, densities = [], []
    for first in range(1, num_steps + 1, CHUNK):
        moves, limits = streams.normal(CHUNK, dimension) @ factor.T, streams.uniform(CHUNK).log()
        for k in range(first, min(first + CHUNK, num_steps + 1)):
            proposal = place + log_scale.exp()[:, None] * moves[k - first]
            proposed = log_density(proposal)
            log_chance = (proposed - density).nan_to_num(nan=-math.inf).clamp(max=0)
            accepts = limits[k - first] < log_chance
            place = torch.where(accepts[:, None], proposal, place)
            density = torch.where(accepts, proposed, density)
            if k <= burn_in:
                log_scale = log_scale + k**-DECAY * (log_chance.exp() - target_acceptance)
                continue
            accepted += accepts
            if (k - burn_in) % keep_every == 0:
                draws.append(place)
                densities.append(density)
    return RandomWalk(torch.stack(draws), torch.stack(densities), accepted / (num_steps - burn_in), log_scale.exp())


def check_walk(
    num_steps: int, burn_in: int, keep_every: int, name: str, size: float | None, target_acceptance: float | None
) -> None:
    """Raise unless the lengths of a walk leave a draw, and its step size `name` and the tuning of it are in range."""
    check_count("num_steps", num_steps)
    check_count("burn_in", burn_in, 0)
    check_count("keep_every", keep_every)
    if num_steps < burn_in + keep_every:
        raise ValueError(f"num_steps={num_steps} leaves no draw after burn_in={burn_in} with keep_every={keep_every}")
    if size is not None and not 0 < size < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {size}")
    if target_acceptance is not None and not 0 < target_acceptance < 1:
        raise ValueError(f"target_acceptance must lie in (0, 1), got {target_acceptance}")
