"""The samplers, and the largest step size at which each is stable on a problem of a known stiffness."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_sgmcmc.samplers import (
    MCLMC,
    SGHMC,
    SGLD,
    SGNHT,
    AdamSGLD,
    Sampler,
    ScaleAdaptedSGHMC,
    UnderdampedLangevin,
    pMCLMC,
    pSGHMC,
    pSGLD,
)

FRICTION = 0.1
"""Of the samplers with a momentum: the share that a step takes from it."""


@dataclass(frozen=True)
class Method:
    """A sampler.

    Attributes:
        make: its class, or a partial of it.
        largest: from the stiffness λ of U and the number N of data, the largest stable lr: 2·N/λ of a chain without
            momentum, about 4·N/λ of one with it, 2/√λ of a time step. A preconditioner's G is 1/√⟨g²⟩, about N/√λ.
        order: power of a time step that lr is, 2 for a chain with momentum whose lr is not the time step itself.
        adapts: whether it has a preconditioner, which is frozen behind the burn-in.
        timed: whether lr is a time step and the friction is per unit of time.
    """

    make: Callable[..., Sampler]
    largest: Callable[[float, int], float]
    order: int = 1
    adapts: bool = False
    timed: bool = False

    def step_size(self, factor: float, stiffness: float, num_data: int) -> float:
        """Return lr for a factor on the largest stable time step, or on the largest stable lr without momentum.

        Args:
            factor: the fraction.
            stiffness: λ.
            num_data: N.
        """
        return self.largest(stiffness, num_data) * factor**self.order

    def build(self, lr: float, burn_in: int) -> Callable[..., Sampler]:
        """Return the sampler's factory for a step size: with the friction of a time step, or the steps that it adapts.

        Args:
            lr: step size.
            burn_in: steps before the first draw.
        """
        options: dict[str, Any] = {}
        if self.adapts:
            options["adapt"] = max(1, burn_in)
        if self.timed:
            options["friction"] = FRICTION / lr
        return functools.partial(self.make, **options)


def _overdamped(stiffness: float, num_data: int) -> float:
    return 2 * num_data / stiffness


def _with_momentum(stiffness: float, num_data: int) -> float:
    return 4 * num_data / stiffness


def _time_step(stiffness: float, num_data: int) -> float:
    return 2 / math.sqrt(stiffness)


def _preconditioned(stiffness: float, num_data: int) -> float:
    return 2 / math.sqrt(stiffness)


def _preconditioned_with_momentum(stiffness: float, num_data: int) -> float:
    return 4 / math.sqrt(stiffness)


def _psghmc(stiffness: float, num_data: int) -> float:
    return 4 / (FRICTION * math.sqrt(stiffness))  # its step is friction·lr·G


METHODS: dict[str, Method] = {
    "SGLD": Method(SGLD, _overdamped),
    "SGHMC": Method(functools.partial(SGHMC, friction=FRICTION), _with_momentum, order=2),
    "SGNHT": Method(functools.partial(SGNHT, friction=FRICTION), _with_momentum, order=2),
    "BAOAB": Method(functools.partial(UnderdampedLangevin, integrator="baoab"), _time_step, timed=True),
    "OBABO": Method(functools.partial(UnderdampedLangevin, integrator="obabo"), _time_step, timed=True),
    "UBU": Method(functools.partial(UnderdampedLangevin, integrator="ubu"), _time_step, timed=True),
    "MCLMC": Method(MCLMC, _time_step, timed=True),
    "pMCLMC": Method(pMCLMC, _time_step, adapts=True, timed=True),
    "pSGLD": Method(pSGLD, _preconditioned, adapts=True),
    "AdamSGLD": Method(AdamSGLD, _preconditioned, adapts=True),
    "pSGHMC": Method(functools.partial(pSGHMC, friction=FRICTION), _psghmc, order=2, adapts=True),
    "ScaleAdaptedSGHMC": Method(
        functools.partial(ScaleAdaptedSGHMC, friction=FRICTION), _preconditioned_with_momentum, order=2, adapts=True
    ),
}
