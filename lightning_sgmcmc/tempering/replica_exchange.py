"""Replica exchange (parallel tempering): chains at several temperatures swap them with their neighbours.

A ladder has R slots, each with a temperature, a step size and one of R chains. From time to time chains in neighbouring
slots swap with a probability that leaves the product of the slots' densities exp(-U/τ_r) invariant. Temperatures and
step sizes move, parameters do not. The energy of a mini-batch is noisy, and a noisy difference in the exponent swaps
too often; the corrected rate removes that bias (Deng et al. 2020, reSGLD). The functions here map tensors to tensors
and do not wait for the device.
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
    """Return the log of a swap's rate; the rate capped at 1 is the swap's probability.

        δ·(Ũ_cold - Ũ_hot - δ·variance/correction),   δ = 1/τ_cold - 1/τ_hot

    `variance`, in nats², is half that of the Gaussian noise on the difference of the two energies; with a correction of
    1 the mean rate is then the rate without noise. The cap at 1 leaves a bias that grows with the noise, and a larger
    correction swaps more often, with some bias.

    Source: Deng et al. 2020 (Non-convex learning via replica exchange stochastic gradient MCMC), section 3.
    """
    coldness = 1 / colder_temperature - 1 / hotter_temperature
    return coldness * (colder_energy - hotter_energy - coldness * variance / correction)


def pair_noise_variance(log_likelihood: Tensor, num_data: int, num_seen: int, replacement: bool) -> Tensor:
    """Return half the noise variance of each difference of neighbouring slots' mini-batch energies, shape (L, R-1).

        σ̂² = ½·N²/m·(1 - m/N)·S²,   S² the sample variance of ℓ_{r,i} - ℓ_{r+1,i} over a batch's places i

    It is unbiased for batches that the chains share and for independent ones, where S² is the sum of both chains'
    variances. ℓ are the log likelihoods of each datum of each slot's batch, shape (L, R, n), n ≥ 2; m counts the data
    of a chain in the whole step; with replacement the factor (1 - m/N) goes (Cochran 1977, theorem 2.2).
    """
    spread = (log_likelihood[:, :-1] - log_likelihood[:, 1:]).var(-1)
    unseen = 1.0 if replacement else max(0.0, 1 - num_seen / num_data)
    return spread * (num_data**2 * unseen / (2 * num_seen))


def attempted_pairs(attempt: int, num_slots: int) -> Tensor:
    """Return which of R-1 slot pairs (0, 1), (1, 2), … try to swap in an attempt, from 0: even and odd ones alternate.

    >>> attempted_pairs(0, 5), attempted_pairs(1, 5)
    (tensor([ True, False,  True, False]), tensor([False,  True, False,  True]))
    """
    turns = min(2, num_slots - 1)
    return torch.arange(num_slots - 1) % turns == attempt % turns


def swapped(order: Tensor, accepted: Tensor) -> Tensor:
    """Return the chain in each slot (L, R) after swaps of slots r and r+1 where accepted, (L, R-1), no two adjacent."""
    none = torch.zeros_like(accepted[:, :1])
    upward, downward = torch.cat([accepted, none], 1), torch.cat([none, accepted], 1)
    kept = torch.where(downward, order.roll(1, 1), order)
    return torch.where(upward, order.roll(-1, 1), kept)
