"""Replica exchange in the light loop."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_count, check_number
from lightning_sgmcmc.replica_exchange import attempted_pairs, log_swap_rate, swapped
from lightning_sgmcmc.seeding import derive_seed


@dataclass(frozen=True)
class ExchangeRun:
    """How chains of a simulation exchange their temperatures.

    Chains form ladders by their order: the first R chains are one, the next R another, and ladders do not interact. At
    the start chain r of a ladder is in slot r.

    Args:
        temperatures: R ≥ 2 increasing temperatures of the slots, in units of the run's temperature.
        lrs: step sizes of the slots in units of the run's lr; None uses the run's own for all.
        every: steps between attempts.
        variance: variance of the noise in one energy, in nats², a number or a function of the step.
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
            raise ValueError(f"temperatures must be two or more increasing positive numbers, got {self.temperatures}")
        if self.lrs is not None and (len(self.lrs) != len(slots) or not all(0 <= lr < math.inf for lr in self.lrs)):
            raise ValueError(f"lrs must be {len(slots)} numbers, one for each temperature, and ≥ 0, got {self.lrs}")
        check_count("every", self.every)
        if not callable(self.variance):
            check_number("variance", self.variance)
        if not 1 <= self.correction < math.inf:
            raise ValueError(f"correction must be finite and at least 1, got {self.correction}")

    @property
    def num_slots(self) -> int:
        """R."""
        return len(self.temperatures)

    def variance_at(self, step: int) -> float:
        """Return the variance for the swap rate at step k = 1, 2, …."""
        return float(self.variance(step)) if callable(self.variance) else float(self.variance)

    def log_limits(self, first: int, count: int, generators: list[torch.Generator]) -> Tensor:
        """Return log u, u uniform in (0, 1), for each step, ladder and pair, shape (count, L, R-1).

        Chains swap if log u is below the log rate. log u is +inf if no swap is attempted, so loops need no branch.

        Args:
            first: the first step.
            count: number of steps.
            generators: one per ladder, used only for its attempts.
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


class Ladders:
    """The chain in each slot, changed in place, and the random numbers for swaps.

    Raises:
        ValueError: if the chains cannot be split evenly into ladders.
    """

    def __init__(self, exchange: ExchangeRun, num_chains: int, seed: int, place: Tensor) -> None:
        size = exchange.num_slots
        if num_chains % size:
            raise ValueError(f"{num_chains} chains cannot be split evenly into ladders of {size} temperatures")
        count = num_chains // size
        self.exchange = exchange
        options: dict[str, Any] = {"dtype": place.dtype, "device": place.device}
        self.temperatures = torch.tensor(exchange.temperatures, **options)
        self.lrs = torch.ones(size, **options) if exchange.lrs is None else torch.tensor(exchange.lrs, **options)
        self.order = torch.arange(size, device=place.device).repeat(count, 1)
        self._slots = self.order.clone()
        self._generators = [
            torch.Generator(place.device).manual_seed(derive_seed(seed, "exchange", ladder)) for ladder in range(count)
        ]

    def draw(self, first: int, count: int) -> list[Tensor]:
        """Return the swaps' limits (K, L, R-1) and the energies' variance (K,) of the steps first, first + 1, …"""
        limits = self.exchange.log_limits(first, count, self._generators)
        variances = [self.exchange.variance_at(k) for k in range(first, first + count)]
        return [limits, torch.tensor(variances, dtype=self.lrs.dtype, device=self.lrs.device)]

    def swap_(self, energies: Tensor, temperature: Tensor, limits: Tensor, variance: Tensor) -> Tensor:
        """Swap chains in one step, and return each chain's slot, shape (C,).

        Args:
            energies: energies with their noise, shape (C,).
            temperature: the run's temperature, shape ().
            limits: log of uniform numbers, shape (L, R-1).
            variance: variance of one energy's noise, shape ().
        """
        by_slot = energies.view(self.order.shape).gather(1, self.order)
        levels = temperature * self.temperatures
        rate = log_swap_rate(
            by_slot[:, :-1], by_slot[:, 1:], levels[:-1], levels[1:], variance, self.exchange.correction
        )
        self.order.copy_(swapped(self.order, limits < rate))
        return torch.zeros_like(self.order).scatter_(1, self.order, self._slots).view(-1)
