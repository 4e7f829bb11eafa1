"""Replica exchange (parallel tempering): chains at several temperatures that swap them with their neighbours.

A ladder of R slots has a temperature and a step size in each; R chains stand on it, one in each slot. Now and then
chains in neighbouring slots trade them, by a probability that leaves the product of the slots' densities
exp(-U/τ_r) as it is; what moves is temperatures and step sizes, not places. A mini-batch's energy is noisy, and a noisy
difference in the exponent would swap too often: the corrected rate takes that out (Deng et al. 2020, reSGLD). The
functions here take tensors and return tensors, without waiting for the device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_count, check_number

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


@dataclass(frozen=True)
class ExchangeRun:
    """How chains of a simulation exchange their temperatures.

    Chains form ladders by their order: the first R chains are one, the next R another, and ladders do not meet. At the
    start chain r of a ladder stands in slot r.

    Args:
        temperatures: of the slots, rising, in units of the run's temperature, R ≥ 2 of them.
        lrs: step sizes of the slots in units of the run's lr; None is the run's own for all.
        every: steps from one attempt to the next.
        variance: of the noise of one energy, in nats², a number or a function of the step.
        correction: F ≥ 1, see `log_swap_rate`.

    Raises:
        ValueError: for an argument out of range.
    """

    temperatures: tuple[float, ...]
    lrs: tuple[float, ...] | None = None
    every: int = 1
    variance: float | Callable[[int], float] = 0.0
    correction: float = 1.0

    def __post_init__(self) -> None:
        slots = list(self.temperatures)
        if len(slots) < 2 or not all(0 < t < math.inf for t in slots) or slots != sorted(set(slots)):
            raise ValueError(f"temperatures must be two or more positive numbers that rise, got {self.temperatures}")
        if self.lrs is not None and (len(self.lrs) != len(slots) or not all(0 <= lr < math.inf for lr in self.lrs)):
            raise ValueError(f"lrs must be {len(slots)} numbers, one for each temperature, and ≥ 0, got {self.lrs}")
        check_count("every", self.every)
        if not callable(self.variance):
            check_number("variance", self.variance)
        if not 1 <= self.correction < math.inf:
            raise ValueError(f"correction must be at least 1, and finite, got {self.correction}")

    @property
    def num_slots(self) -> int:
        """R."""
        return len(self.temperatures)

    def variance_at(self, step: int) -> float:
        """Return the variance that is reckoned with at step k = 1, 2, …"""
        return float(self.variance(step)) if callable(self.variance) else float(self.variance)

    def log_limits(self, first: int, count: int, generators: list[torch.Generator]) -> Tensor:
        """Return log u, u uniform in (0, 1), for each step, ladder and pair, shape (count, L, R-1).

        A swap is made where it lies below the log rate. It is +inf where none is tried, so that a loop needs no branch.

        Args:
            first: the first step.
            count: how many steps.
            generators: of the ladders; each draws for its attempts alone.
        """
        pairs = self.num_slots - 1
        limits = torch.full((count, len(generators), pairs), math.inf, device=generators[0].device)
        attempts = [k for k in range(first, first + count) if k % self.every == 0]
        if not attempts:
            return limits
        rows = [torch.rand(len(attempts), pairs, generator=g, device=g.device) for g in generators]
        tried = torch.stack([attempted_pairs(k // self.every - 1, self.num_slots) for k in attempts])
        drawn = torch.stack(rows, 1).log()
        drawn = drawn.masked_fill(~tried[:, None].to(drawn.device), math.inf)
        limits[torch.tensor(attempts, device=limits.device) - first] = drawn
        return limits
