"""The settings, the samplers, and the largest step size of each that is stable on a problem of a known stiffness."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_sgmcmc.samplers import (
    AMAGOLD,
    GGMC,
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
NUTS = "NUTS"
"""The reference's name: it has full gradients, and finds its step sizes itself."""


@dataclass(frozen=True)
class Settings:
    """The settings of `samplers_bench.yaml`.

    Attributes:
        repeats: runs of each sampler on each problem, at the step size that another seed has chosen.
        chains: chains of a run on densities and regressions, computed at once.
        gradients: gradient evaluations of each of these chains.
        burn_in: share of the steps before the first draw.
        noise: standard deviation of the noise of gradients, over the root mean square of the target's gradient.
        batch: batch size of the regressions.
        noises: kinds of the gradients' noise on densities.
        networks: those that are sampled.
        steps: of each of four chains on a network, behind the warm start.
        warm_start: steps of Adam on a network.
        draws: of each chain on a network.
        network_factors: step sizes on networks, over the largest stable one.
        factors: step sizes elsewhere, over the largest stable one of the full gradient.
    """

    repeats: int
    chains: int
    gradients: int
    burn_in: float
    noise: float
    batch: int
    noises: tuple[str, ...]
    networks: tuple[str, ...]
    steps: int
    warm_start: int
    draws: int
    network_factors: tuple[float, ...]
    factors: tuple[float, ...]

    @property
    def work(self) -> float:
        """The steps of all runs; a step of a network takes as long as about twenty others."""
        runs = self.repeats + 4  # about four choose the step size
        problems = 4 * len(self.noises) + 2
        return float(runs * (problems * self.gradients + 20 * len(self.networks) * (self.steps + self.warm_start)))


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
        tested: whether a Metropolis test decides on its trajectories.
    """

    make: Callable[..., Sampler]
    largest: Callable[[float, int], float]
    order: int = 1
    adapts: bool = False
    timed: bool = False
    tested: bool = False

    def step_size(self, factor: float, stiffness: float, num_data: int) -> float:
        """Return lr for a fraction of the largest stable time step, or of the largest stable lr without momentum."""
        return self.largest(stiffness, num_data) * factor**self.order

    def build(self, lr: float, burn_in: int) -> Callable[..., Sampler]:
        """Return the sampler's factory: with the friction of a time step, or the number of steps in which it adapts."""
        options: dict[str, Any] = {}
        if self.adapts:
            options["adapt"] = max(1, burn_in)
        if self.timed:
            options["friction"] = FRICTION / lr
        return functools.partial(self.make, **options)


def _over_curvature(factor: float) -> Callable[[float, int], float]:
    return lambda stiffness, num_data: factor * num_data / stiffness


def _over_root(factor: float) -> Callable[[float, int], float]:
    return lambda stiffness, num_data: factor / math.sqrt(stiffness)


METHODS: dict[str, Method] = {
    "SGLD": Method(SGLD, _over_curvature(2)),
    "SGHMC": Method(functools.partial(SGHMC, friction=FRICTION), _over_curvature(4), order=2),
    "SGNHT": Method(functools.partial(SGNHT, friction=FRICTION), _over_curvature(4), order=2),
    "BAOAB": Method(functools.partial(UnderdampedLangevin, integrator="baoab"), _over_root(2), timed=True),
    "OBABO": Method(functools.partial(UnderdampedLangevin, integrator="obabo"), _over_root(2), timed=True),
    "UBU": Method(functools.partial(UnderdampedLangevin, integrator="ubu"), _over_root(2), timed=True),
    # Without the test both are OBABO.
    "GGMC": Method(GGMC, _over_root(2), timed=True, tested=True),
    "AMAGOLD": Method(AMAGOLD, _over_root(2), timed=True, tested=True),
    "MCLMC": Method(MCLMC, _over_root(2), timed=True),
    "pMCLMC": Method(pMCLMC, _over_root(2), adapts=True, timed=True),
    "pSGLD": Method(pSGLD, _over_root(2), adapts=True),
    "AdamSGLD": Method(AdamSGLD, _over_root(2), adapts=True),
    # The step of pSGHMC is friction·lr·G.
    "pSGHMC": Method(functools.partial(pSGHMC, friction=FRICTION), _over_root(4 / FRICTION), order=2, adapts=True),
    "ScaleAdaptedSGHMC": Method(
        functools.partial(ScaleAdaptedSGHMC, friction=FRICTION), _over_root(4), order=2, adapts=True
    ),
}
