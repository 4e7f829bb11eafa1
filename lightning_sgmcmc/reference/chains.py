"""Chains of Hamiltonian Monte Carlo on any density: settings, adaptation in the warm-up, iterations, state."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_choice, check_count, check_positive, check_within
from lightning_sgmcmc.reference.kernels import (
    COUNTED,
    Draws,
    Move,
    Phase,
    Potential,
    hamiltonian_monte_carlo,
    kinetic,
    leapfrog,
    no_u_turn,
    with_momenta,
)
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.tensors import widest, widest_dtype

Kernel = Literal["nuts", "hmc"]


@dataclass(frozen=True)
class Settings:
    """How chains are made; see `sample`."""

    kernel: Kernel = "nuts"
    warmup: int = 1000
    draws: int = 1000
    every_n_draws: int = 1
    target_acceptance: float = 0.8
    max_depth: int = 10
    length: float = math.pi / 2
    jitter: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("kernel", self.kernel, ("nuts", "hmc"))
        check_count("warmup", self.warmup, least=0, optional=False)
        for name in ("draws", "every_n_draws", "max_depth"):
            check_count(name, getattr(self, name), optional=False)
        check_within("target_acceptance", self.target_acceptance, "(0, 1)")
        check_positive("length", self.length)
        check_within("jitter", self.jitter, "[0, 1]")
        check_count("seed", self.seed, least=0, optional=False)
        if self.max_depth > 20:
            raise ValueError(f"max_depth must be at most 20, a million gradients, got {self.max_depth}")
        if self.draws < self.every_n_draws:
            raise ValueError(f"draws={self.draws} leaves no draw with every_n_draws={self.every_n_draws}: raise draws")

    @property
    def iterations(self) -> int:
        """Iterations of the warm-up and the draws."""
        return self.warmup + self.draws

    def law(self) -> dict[str, Any]:
        """Return the settings on which each draw depends, as plain data; a run may be continued to more draws."""
        return {name: value for name, value in asdict(self).items() if name != "draws"}


# -- adaptation --------------------------------------------------------------------------------------------------------


MOST_DOUBLINGS = 60
"""Of a first step size."""


class StepSizes:
    """Step sizes by dual averaging of the acceptance, shape (C,), float64.

        log ε_t = μ - √t/γ·(1/(t+t₀))·Σ_{i≤t} (δ - α_i),   log ε̄_t = t^-κ·log ε_t + (1 - t^-κ)·log ε̄_{t-1}

    with the target δ, γ = 0.05, t₀ = 10, κ = 0.75 and μ = log(10·ε_0). The warm-up uses ε, and the draws the average
    ε̄.

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


class Variances:
    """The variance of each coordinate, shape (C, P), over a window, by Welford's sums, drawn towards a small one.

        v = n/(n+5)·s² + 0.001·5/(n+5)

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


def windows(warmup: int) -> tuple[int, list[int]]:
    """Return the iteration at which the first window of the warm-up begins, and those at which windows end.

    Windows double from 25; the step size alone is adapted in 75 iterations before and 50 after them.

    >>> windows(1000)
    (75, [100, 150, 250, 450, 950])
    >>> windows(100), windows(10)
    ((15, [90]), (10, []))
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
    """Return step sizes, shape (C,), float64, doubled or halved until a leapfrog step's acceptance crosses the target.

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


# -- chains ------------------------------------------------------------------------------------------------------------


EARLY_DEPTH = 7
"""Doublings of a trajectory at most before the end of the first window of the warm-up."""


class HamiltonianChains:
    """C chains side by side, each with its own step size, inverse mass and random numbers.

    An iteration is a function of the chain's state and of (seed, chain, iteration), so chains do not depend on one
    another, and a run continues from `state_dict`. `initial` has the shape (C, P); `chains` are numbers of the run.
    """

    def __init__(
        self, potential: Potential, initial: Tensor, settings: Settings, chains: Sequence[int] | None = None
    ) -> None:
        self.settings = settings
        self.chains = list(range(len(initial))) if chains is None else list(chains)
        self.iteration = 0
        self._potential = potential
        self._generators = [torch.Generator() for _ in self.chains]
        energy, gradient = potential(initial)
        sound = energy.isfinite() & gradient.isfinite().all(1)
        if not bool(sound.all()):
            chain = int((~sound).nonzero()[0])
            raise ValueError(
                f"the energy of chain {self.chains[chain]} at its start is {float(energy[chain])}, or its gradient is "
                "not finite: check the data, or start it elsewhere"
            )
        self.phase = Phase(initial, energy, gradient, torch.zeros_like(initial))
        self.variance = torch.ones_like(initial)
        self._first, self._ends = windows(settings.warmup)
        self._variances = Variances(initial)
        self._steps = StepSizes(torch.full_like(energy, 0.1), settings.target_acceptance)

    @property
    def in_warmup(self) -> bool:
        """Whether the next iteration belongs to the warm-up."""
        return self.iteration < self.settings.warmup

    @property
    def step_size(self) -> Tensor:
        """ε of each chain, shape (C,), float64: what the warm-up tries, and its average afterwards."""
        return (self._steps.log_step if self.in_warmup else self._steps.log_average).exp()

    def advance(self) -> Move:
        """Make one iteration of all chains, adapt in the warm-up, and return what it did."""
        settings, draws = self.settings, self._draws("iteration")
        if self.iteration == 0:
            self._restart_steps()
        given = self._potential, self.phase, self.step_size, self.variance, draws
        if settings.kernel == "nuts":
            move = no_u_turn(*given, self._depth)
        else:
            move = hamiltonian_monte_carlo(*given, settings.length, settings.jitter, 2**self._depth - 1)
        self.phase = move.phase
        if self.in_warmup:
            self._adapt(move.acceptance)
        self.iteration += 1
        return move

    @property
    def _depth(self) -> int:
        """Doublings at most: fewer while nothing is known of the scales, when long trajectories are wasted."""
        early = bool(self._ends) and self.iteration < self._ends[0]
        return min(self.settings.max_depth, EARLY_DEPTH) if early else self.settings.max_depth

    def _adapt(self, acceptance: Tensor) -> None:
        self._steps.update(acceptance)
        if not self._ends or not self._first <= self.iteration < self._ends[-1]:
            return
        self._variances.add(self.phase.place)
        if self.iteration + 1 in self._ends:
            self.variance = self._variances.take().to(self.variance)
            self._restart_steps()

    def _restart_steps(self) -> None:
        given = self._potential, self.phase, self._steps.log_step.exp(), self.variance
        self._steps.restart(first_step_sizes(*given, self._draws("step size"), self.settings.target_acceptance))

    def _draws(self, purpose: str) -> Draws:
        for chain, generator in zip(self.chains, self._generators, strict=True):
            generator.manual_seed(derive_seed(self.settings.seed, "Hamiltonian", purpose, chain, self.iteration))
        return Draws(self._generators, self.phase.place)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and numbers from which another object continues bit for bit."""
        return {
            "iteration": self.iteration,
            "phase": list(self.phase),
            "variance": self.variance,
            "steps": {name: value for name, value in vars(self._steps).items() if name != "target"},
            "variances": dict(vars(self._variances)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned, in a run of the same settings."""
        own = self.phase.place
        self.iteration = int(state["iteration"])
        self.phase = Phase(*(tensor.to(own.device) for tensor in state["phase"]))
        self.variance = state["variance"].to(own.device)
        for part, name in ((self._steps, "steps"), (self._variances, "variances")):
            vars(part).update({k: v.to(own.device) if isinstance(v, Tensor) else v for k, v in state[name].items()})


@dataclass(frozen=True)
class DensityDraws:
    """Draws from a density.

    Attributes:
        draws: positions, shape (C, S, P).
        energies: U at the draws, shape (C, S), float64.
        step_size: ε after the warm-up, shape (C,).
        variance: v, the diagonal of the inverse mass, shape (C, P).
        acceptance: mean acceptance after the warm-up, shape (C,).
        divergences: trajectories that diverged after the warm-up, shape (C,).
        at_limit: trajectories that were cut at their largest length after the warm-up, shape (C,).
        gradients: gradients of each chain after the warm-up, shape (C,).
    """

    draws: Tensor
    energies: Tensor
    step_size: Tensor
    variance: Tensor
    acceptance: Tensor
    divergences: Tensor
    at_limit: Tensor
    gradients: Tensor


def sample_density(
    potential: Potential,
    initial: Tensor,
    *,
    kernel: Kernel = "nuts",
    warmup: int = 1000,
    draws: int = 1000,
    every_n_draws: int = 1,
    target_acceptance: float = 0.8,
    max_depth: int = 10,
    length: float = Settings.length,
    jitter: float = Settings.jitter,
    seed: int = 0,
    chains: Sequence[int] | None = None,
) -> DensityDraws:
    """Draw from exp(-U) by the No-U-Turn sampler or Hamiltonian Monte Carlo, several chains at once.

    Args:
        potential: a function of n positions, shape (n, P), that returns U, shape (n,), float64, and its gradient,
            shape (n, P), each row by itself; n is the number of chains that have not ended their trajectory.
        initial: positions at the start, shape (C, P), in the dtype of the draws.
        kernel: see `sample`, as for the arguments that follow.
        warmup: iterations that adapt step sizes and inverse masses.
        draws: iterations after these.
        every_n_draws: keep every n-th.
        target_acceptance: what the step size is adapted to.
        max_depth: doublings of a trajectory at most.
        length: of "hmc".
        jitter: of "hmc".
        seed: chain c draws only from the streams of (seed, c), whatever the number of chains.
        chains: the numbers c of the chains; None is 0, 1, ….

    Raises:
        ValueError: for an argument out of range, or a start whose energy is not finite.

    Example::

        from lightning_sgmcmc.reference import sample_density

        def normal(x):
            return x.double().square().sum(1) / 2, x

        found = sample_density(normal, torch.zeros(2, 3), warmup=50, draws=20)
        mean, step = found.draws.mean((0, 1)), found.step_size
    """
    settings = Settings(
        kernel, warmup, draws, every_n_draws, target_acceptance, max_depth, float(length), float(jitter), seed
    )
    made = HamiltonianChains(potential, initial, settings, chains)
    places, energies, moves = [], [], []
    for _ in range(settings.iterations):
        is_draw = not made.in_warmup
        move = made.advance()
        if is_draw:
            moves.append(move)
            if len(moves) % every_n_draws == 0:
                places.append(move.phase.place)
                energies.append(move.phase.energy)
    counts = [torch.stack([getattr(move, name) for move in moves]).sum(0) for name in COUNTED]
    acceptance, divergences, at_limit, gradients = counts
    return DensityDraws(
        torch.stack(places, 1),
        torch.stack(energies, 1),
        made.step_size,
        made.variance,
        acceptance / draws,
        divergences,
        at_limit,
        gradients,
    )
