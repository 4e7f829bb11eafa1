"""Replica exchange (parallel tempering): chains at several temperatures that swap them with their neighbours.

A ladder of R slots has a temperature and a step size in each; R chains stand on it, one in each slot. Now and then
chains in neighbouring slots trade them, by a probability that leaves the product of the slots' densities
exp(-U/τ_r) as it is; what moves is temperatures and step sizes, not places. A mini-batch's energy is noisy, and a noisy
difference in the exponent would swap too often: the corrected rate takes that out (Deng et al. 2020, reSGLD). The
functions here take tensors and return tensors, without waiting for the device.
"""

from typing import TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = "float | Tensor"


def log_swap_rate(
    colder_energy: Tensor,
    hotter_energy: Tensor,
    colder_temperature: Number,
    hotter_temperature: Number,
    variance: Number = 0.0,
    correction: float = 1.0,
) -> Tensor:
    """Return the log of the rate of a swap, whose exponential, capped at 1, is the swap's probability.

        δ·(Ũ_cold - Ũ_hot - δ·variance/correction),   δ = 1/τ_cold - 1/τ_hot

    With a correction of 1 and Gaussian noise of that variance on each of the two energies, independently, the rate's
    mean is the rate without noise. The cap makes a probability of it, and leaves a bias that grows with the noise.

    Args:
        colder_energy: U or its estimate at the chain with the lower temperature, in nats, any shape.
        hotter_energy: that at the chain with the higher temperature.
        colder_temperature: τ_cold > 0.
        hotter_temperature: τ_hot > 0.
        variance: of the noise of ONE of the energies, in nats².
        correction: F ≥ 1 divides the variance: more swaps, for some bias.

    Source: Deng et al. 2020 (Non-convex learning via replica exchange stochastic gradient MCMC), section 3.
    """
    coldness = 1 / colder_temperature - 1 / hotter_temperature
    return coldness * (colder_energy - hotter_energy - coldness * variance / correction)


def attempted_pairs(attempt: int, num_slots: int) -> Tensor:
    """Return which of the pairs (0, 1), (1, 2), … of slots try to swap, shape (R-1,): even and odd ones in turn.

    Args:
        attempt: number of the attempt, from 0.
        num_slots: R ≥ 2; with two there is one pair, and it tries every time.
    """
    turns = min(2, num_slots - 1)
    return torch.arange(num_slots - 1) % turns == attempt % turns


def swapped(order: Tensor, accepted: Tensor) -> Tensor:
    """Return which chain stands in each slot after swaps.

    Args:
        order: which does before, shape (L, R) for L ladders.
        accepted: whether the slots r and r+1 swap, shape (L, R-1), no two neighbours in a row.
    """
    none = torch.zeros_like(accepted[:, :1])
    upward, downward = torch.cat([accepted, none], 1), torch.cat([none, accepted], 1)
    kept = torch.where(downward, order.roll(1, 1), order)
    return torch.where(upward, order.roll(-1, 1), kept)
