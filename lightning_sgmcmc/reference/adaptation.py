"""What the warm-up adapts, for each chain by itself: step sizes by dual averaging, inverse masses in windows."""

import math
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.reference.leapfrog import Draws, Phase, Potential, kinetic, leapfrog, with_momenta
from lightning_sgmcmc.tensors import widest, widest_dtype

MOST_DOUBLINGS = 60
"""Of a first step size."""


class StepSizes:
    """Step sizes by dual averaging of the acceptance.

        log ε_t = μ - √t/γ·(1/(t+t₀))·Σ_{i≤t} (δ - α_i),   log ε̄_t = t^-κ·log ε_t + (1 - t^-κ)·log ε̄_{t-1}

    with γ = 0.05, t₀ = 10, κ = 0.75 and μ = log(10·ε_0). The warm-up uses ε, and the draws the average ε̄.

    Args:
        step: ε_0 of each chain, shape (C,), float64.
        target: δ.

    Source: Hoffman & Gelman 2014 (The No-U-Turn sampler), section 3.2.
    """

    SCALE, DELAY, DECAY = 0.05, 10.0, 0.75

    def __init__(self, step: Tensor, target: float) -> None:
        self.target = target
        self.restart(step)

    def restart(self, step: Tensor) -> None:
        """Begin again from other step sizes, shape (C,)."""
        self.log_step = step.log()
        self.log_average = self.log_step.clone()
        self.center = (10 * step).log()
        self.shortfall = torch.zeros_like(step)
        self.count = 0

    def update(self, acceptance: Tensor) -> None:
        """Adapt to an iteration's acceptance, shape (C,)."""
        self.count += 1
        share = 1 / (self.count + self.DELAY)
        self.shortfall = (1 - share) * self.shortfall + share * (self.target - acceptance)
        self.log_step = self.center - math.sqrt(self.count) / self.SCALE * self.shortfall
        weight = self.count**-self.DECAY
        self.log_average = weight * self.log_step + (1 - weight) * self.log_average

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next update depends on."""
        return {name: value for name, value in vars(self).items() if name != "target"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, value)


class Variances:
    """The variance of each coordinate over a window, by Welford's sums, drawn towards a small one.

        v = n/(n+5)·s² + 0.001·5/(n+5)

    Args:
        like: a tensor of shape (C, P).

    Source: Stan reference manual, section on HMC algorithm parameters.
    """

    def __init__(self, like: Tensor) -> None:
        self.count = 0
        self.mean = torch.zeros_like(like, dtype=widest_dtype(like.device))
        self.squares = torch.zeros_like(self.mean)

    def add(self, place: Tensor) -> None:
        """Add the chains' positions, shape (C, P)."""
        self.count += 1
        distance = widest(place) - self.mean
        self.mean = self.mean + distance / self.count
        self.squares = self.squares + distance * (widest(place) - self.mean)

    def take(self) -> Tensor:
        """Return v, shape (C, P), float64, and begin the next window."""
        count = self.count
        found = self.squares / max(count - 1, 1) * (count / (count + 5)) + 1e-3 * 5 / (count + 5)
        self.count, self.mean, self.squares = 0, torch.zeros_like(self.mean), torch.zeros_like(self.squares)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, value)


def windows(warmup: int) -> tuple[int, list[int]]:
    """Return the iteration at which the first window begins, and the iterations at which windows end.

    The step size alone is adapted before the first window (75 iterations) and after the last (50). Windows double from
    25; the last takes what would be too short for another. Below 150 iterations there is one window of three quarters,
    and below 20 none.

    Args:
        warmup: iterations of the warm-up.

    >>> windows(1000)
    (75, [100, 150, 250, 450, 950])
    >>> windows(100), windows(10)
    ((15, [90]), (10, []))

    Source: Stan reference manual, section on HMC algorithm parameters.
    """
    if warmup < 20:
        return warmup, []
    begin, rest, size = (75, 50, 25) if warmup >= 150 else (int(0.15 * warmup), int(0.1 * warmup), warmup)
    end, at, ends = warmup - rest, begin, []
    while at < end:
        at = end if at + 3 * size > end else at + size
        ends.append(at)
        size *= 2
    return begin, ends


def first_step_sizes(
    potential: Potential, state: Phase, step: Tensor, variance: Tensor, draws: Draws, target: float
) -> Tensor:
    """Return step sizes at which one leapfrog step is accepted about as often as wanted, shape (C,), float64.

    Each chain doubles or halves ε until its acceptance crosses the target.

    Args:
        potential: U and its gradient.
        state: of C chains.
        step: ε to begin from, shape (C,), float64.
        variance: v, shape (C, P).
        draws: the random numbers.
        target: the acceptance.

    Source: Hoffman & Gelman 2014, Algorithm 4, with Stan's 0.8 in place of 0.5.
    """
    start, hamiltonian = with_momenta(state, variance, draws)

    def suits(index: Tensor, step: Tensor) -> Tensor:
        phase = leapfrog(potential, start.rows(index), step, variance[index])
        error = phase.energy + kinetic(phase.momentum, variance[index]) - hamiltonian[index]
        return error.nan_to_num(nan=torch.inf) < -math.log(target)

    everyone = torch.arange(len(step), device=step.device)
    grows = suits(everyone, step)
    factor = torch.where(grows, 2.0, 0.5).to(step)
    going, step = everyone, step.clone()
    for _ in range(MOST_DOUBLINGS):
        step[going] = step[going] * factor[going]
        going = going[suits(going, step[going]) == grows[going]]
        if len(going) == 0:
            break
    return step
