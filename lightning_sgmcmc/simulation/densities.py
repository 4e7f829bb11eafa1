"""Known densities: `simulate` in the light loop, with contour sampling or replica exchange; `descend` by particles."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lightning_sgmcmc.checks import check_count, check_number
from lightning_sgmcmc.contour import Contour, ContourState, DecayingStepSize
from lightning_sgmcmc.samplers import SGLD, Sampler
from lightning_sgmcmc.samplers.sgld import PreconditionedSampler
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.simulation.loop import (
    BLOCK,
    CHUNK,
    ChainStreams,
    LightLoop,
    Recorder,
    Step,
    StepPart,
    chain_normals,
    check_finite,
    compiles_blocks,
    starting_places,
)
from lightning_sgmcmc.simulation.targets import Density, Target
from lightning_sgmcmc.tempering.replica_exchange import attempted_pairs, log_swap_rate, swapped
from lightning_sgmcmc.tensors import has_float64

SHORT_BLOCK = 8
"""Steps of a compiled block with an observer; twice as many are no faster, and take twice as long to compile."""
Schedule: TypeAlias = "float | Callable[[int], float]"
"""A number, or a function of the step k = 1, 2, …"""


@dataclass(frozen=True)
class ContourRun:
    """Configuration of a contour in a simulation.

    Attributes:
        contour: partition, ζ, scheme and other rules.
        step_size: ω of the stochastic approximation.
        shared: one π for all chains, learned from the mean of their steps; otherwise one for each chain.
        state: initial π, uniform if None; it is not changed.
        learn: False keeps π fixed (KSGLD).
        groups: number of shared π, with `shared`. Chains are split evenly, in their order, into this many groups, each
            sharing one π: independent repeats of a run of interacting chains, at the cost of one.

    Raises:
        ValueError: if `groups` is below 1, or above 1 without `shared`.
    """

    contour: Contour
    step_size: DecayingStepSize = field(default_factory=DecayingStepSize)
    shared: bool = False
    state: ContourState | None = None
    learn: bool = True
    groups: int = 1

    def __post_init__(self) -> None:
        check_count("groups", self.groups)
        if self.groups > 1 and not self.shared:
            raise ValueError(f"groups={self.groups} counts shared π, but shared is False: pass shared=True")


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


@dataclass(frozen=True)
class Simulation:
    """Results of a simulation; a draw is a chain's position, with its energy and the π of that step.

    Attributes:
        steps: the draws' steps k = 1, 2, …, shape (S,).
        positions: positions of the draws, shape (S, C, d).
        energies: energies without the added noise, shape (S, C).
        log_weights: log importance weights from the π of the draw's step, shape (S, C), zeros without a contour.
        multipliers: κ of the step from there, shape (S, C).
        averages: weighted averages of the observed function from the burn-in up to each checkpoint, shape (T, C, F).
        checkpoints: steps of the averages, shape (T,).
        last: the chains' final positions, shape (C, d).
        contour: the learned state, None without a contour; with groups, one row of π per group.
        slots: the exchange's slot of the step from there, 0 the coldest, shape (S, C); None without an exchange.
    """

    steps: Tensor
    positions: Tensor
    energies: Tensor
    log_weights: Tensor
    multipliers: Tensor
    averages: Tensor
    checkpoints: Tensor
    last: Tensor
    contour: ContourState | None
    slots: Tensor | None = None


def _check_combination(exchange: "ExchangeRun | None", contour: "ContourRun | None", device: torch.device) -> None:
    if exchange is not None and contour is not None:
        raise ValueError("an exchange cannot be combined with a contour, whose π would be learned at all temperatures")
    if not has_float64(device):
        raise ValueError(f"device must have float64, which a contour and energies need, got {device}: use device='cpu'")


def simulate(
    target: Density,
    sampler: Callable[..., Sampler] = SGLD,
    *,
    lr: Schedule,
    num_steps: int,
    num_chains: int = 1,
    temperature: Schedule = 1.0,
    contour: ContourRun | None = None,
    energy_noise: float = 0.0,
    gradient_noise: float = 0.0,
    initial: Tensor | None = None,
    keep_every: int | None = None,
    burn_in: int = 0,
    observe: Callable[[Tensor], Tensor] | None = None,
    checkpoints: Sequence[int] = (),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    compile: bool | None = None,
    exchange: ExchangeRun | None = None,
) -> Simulation:
    """Run chains on a target.

    Step k of a chain computes the energy U(x) and the gradient, with their noise; with a contour the energy's bin,
    multiplier and log Ψ, or with an exchange its swaps; then the sampler's update, and the contour's learning step.

    Args:
        target: the density, with `dimension`, `energy` and `gradient`.
        sampler: a sampler class, or a partial of one; N is 1, so that `lr` is the papers' ε.
        lr: step size.
        num_steps: steps of each chain.
        num_chains: C.
        temperature: τ; while it is 0, a contour learns nothing.
        contour: contour sampling.
        energy_noise: standard deviation, in nats, of the Gaussian noise on the energy that contour or exchange use.
        gradient_noise: standard deviation of the noise on each coordinate of the gradient.
        initial: initial positions, shape (C, d) or (d,); None draws them from a standard normal.
        keep_every: steps between draws that are kept after the burn-in; None keeps none.
        burn_in: steps before the first draw's interval and before averages count.
        observe: function from (…, d) to (…, F) whose weighted averages are recorded, each chain's over all its slots.
        checkpoints: increasing steps at which the averages are recorded.
        seed: chain c draws only from streams of (seed, c), whatever the number of chains.
        dtype: dtype of the positions; the contour uses float64.
        device: device of all tensors.
        compile: whether to compile blocks of steps; None compiles long runs if there is a C++ compiler.
        exchange: swaps of temperatures and step sizes between chains; ladder l draws from the stream of (seed, l).

    Raises:
        ValueError: for an argument out of range or of the wrong shape, an exchange with a contour, with momentum or at
            temperature 0, compile=True for a sampler that counts steps, or a final position that is not finite.

    Example::

        from lightning_sgmcmc.simulation import GaussianMixture, simulate

        run = simulate(GaussianMixture.two_modes(), lr=0.1, num_steps=500, num_chains=100, keep_every=100)
        run.positions.mean((0, 1))
    """
    check_count("num_chains", num_chains, 1)
    check_number("energy_noise", energy_noise)
    check_number("gradient_noise", gradient_noise)
    _check_records(num_steps, keep_every, burn_in, observe, list(checkpoints))
    device = torch.device(device)
    _check_combination(exchange, contour, device)
    if initial is None:
        initial = _draw_starts(num_chains, target.dimension, seed)
    place = starting_places(initial, num_chains, target.dimension, dtype, device)
    rule = sampler([place], lr=_at(lr, 1), num_data=1, temperature=1.0, num_chains=num_chains, seed=seed)
    controls = _Controls(lr, temperature, place)
    learner = None if contour is None else _Learner(contour, controls, place)
    ladders = None if exchange is None else _Ladders(exchange, controls, place, seed)
    parts: list[StepPart] = [_Energies(target, place, seed, energy_noise, gradient_noise), controls]
    parts += [part for part in (learner, ladders) if part is not None]
    loop = _light_loop(rule, place, parts, seed, compiles_blocks(compile, num_steps, rule, device))
    if exchange is not None and rule.momenta(loop.group) is not None:
        raise ValueError(f"{type(rule).__name__} has momentum, which also has a temperature: use SGLD for an exchange")
    kept = range(0) if keep_every is None else range(burn_in + keep_every, num_steps + 1, keep_every)
    recorder = Recorder(kept, checkpoints, observe, burn_in)
    with torch.no_grad():
        for first in range(1, num_steps + 1, CHUNK):
            rows = loop.advance(min(CHUNK, num_steps + 1 - first))
            if contour is not None:
                rows["log_weights"] = contour.contour.log_weight(rows.pop("log_densities"))
            else:
                energies = rows["energies"]
                rows |= {"log_weights": torch.zeros_like(energies).double(), "multipliers": torch.ones_like(energies)}
            recorder.record(first, rows)
    check_finite(place, num_steps)
    return _results(recorder, place, checkpoints, None if learner is None else learner.state)


def _results(recorder: Recorder, place: Tensor, checkpoints: Sequence[int], state: ContourState | None) -> Simulation:
    none = torch.zeros(0, len(place), device=place.device)
    rows = recorder.rows() or {"positions": place.new_zeros(0, *place.shape)} | dict.fromkeys(
        ("energies", "log_weights", "multipliers"), none
    )
    return Simulation(
        steps=recorder.steps,
        averages=recorder.averages(len(place)),
        checkpoints=torch.tensor(list(checkpoints), dtype=torch.int64),
        last=place.detach().clone(),
        contour=state,
        **rows,
    )


def _check_records(
    num_steps: int,
    keep_every: int | None,
    burn_in: int,
    observe: Callable[[Tensor], Tensor] | None,
    checkpoints: list[int],
) -> None:
    check_count("num_steps", num_steps)
    check_count("keep_every", keep_every)
    check_count("burn_in", burn_in, 0)
    if checkpoints and observe is None:
        raise ValueError("checkpoints record averages of an observed function, but observe is None: pass observe")
    if checkpoints != sorted(set(checkpoints)) or any(not burn_in < c <= num_steps for c in checkpoints):
        raise ValueError(
            f"checkpoints must increase and lie between burn_in={burn_in} and num_steps={num_steps}, got {checkpoints}"
        )


def _draw_starts(num_chains: int, dimension: int, seed: int) -> Tensor:
    """Return standard normal positions, shape (C, d); chain c's depends only on (seed, c)."""
    generators = (torch.Generator().manual_seed(derive_seed(seed, "start", chain)) for chain in range(num_chains))
    return torch.stack([torch.randn(dimension, generator=generator) for generator in generators])


def _light_loop(rule: Sampler, place: nn.Parameter, parts: Sequence[StepPart], seed: int, compiles: bool) -> LightLoop:
    """Return the loop of a run, with tensors as controls."""
    group = rule.param_groups[0]
    group["lr"] = place.new_zeros(())
    group["temperature"] = place.new_ones(())  # at 0 MCLMC's momenta have no length
    # One update with zero force and step size creates the rule's buffers; it moves nothing.
    zero = torch.zeros_like(place)
    with torch.no_grad():
        rule.update(group, [place], [zero], [zero.clone() for _ in range(rule.draws)])
        if isinstance(rule, PreconditionedSampler):
            rule.forget()
    length = (SHORT_BLOCK if len(parts) > 2 else BLOCK) if compiles else None
    return LightLoop(rule, place, group, chain_normals(seed, place, rule.draws), parts, length)


# -- the parts of a step ----------------------------------------------------------------------------------------------


def _at(schedule: Schedule, step: int) -> float:
    return float(schedule(step)) if callable(schedule) else float(schedule)


def _values(schedule: Schedule, first: int, count: int) -> list[float]:
    steps = range(first, first + count)
    return [_at(schedule, step) for step in steps] if callable(schedule) else [float(schedule)] * count


class _Energies(StepPart):
    """The target's energies and gradients, with noise from streams of each chain; it traces the places before steps."""

    def __init__(self, target: Density, place: Tensor, seed: int, energy_noise: float, gradient_noise: float) -> None:
        self._target = target.to(place.device, place.dtype) if isinstance(target, Target) else target
        self._levels = energy_noise, gradient_noise
        known: list[tuple[str, float, tuple[int, ...]]] = [
            ("energy noise", energy_noise, ()),
            ("gradient noise", gradient_noise, (place.shape[1],)),
        ]
        self._noise = [(ChainStreams(seed, purpose, place), shape) for purpose, level, shape in known if level > 0]

    def draw(self, first: int, count: int) -> tuple[Tensor, ...]:
        return tuple(streams.normal(count, *shape) for streams, shape in self._noise)

    def before(self, step: Step, *numbers: Tensor) -> None:
        step.energy = self._target.energy(step.place)
        step.gradient = self._target.gradient(step.place)
        step.trace("positions", step.place.clone())
        step.trace("energies", step.energy)
        of_energy, of_gradient = self._levels
        if of_gradient > 0:
            step.gradient = step.gradient + of_gradient * numbers[-1]
        if of_energy > 0:
            step.energy = step.energy + of_energy * numbers[0]


class _Controls(StepPart):
    """The step's lr and temperature."""

    def __init__(self, lr: Schedule, temperature: Schedule, place: Tensor) -> None:
        self._lr = lr
        self._temperature = temperature
        self._place = place.detach()
        self.temperatures: list[float] = []
        """Those of the steps that were drawn last."""

    def draw(self, first: int, count: int) -> tuple[Tensor, ...]:
        self.temperatures = _values(self._temperature, first, count)
        both = _values(self._lr, first, count), self.temperatures
        return tuple(self._place.new_tensor(values) for values in both)

    def before(self, step: Step, *numbers: Tensor) -> None:
        step.group["lr"], step.group["temperature"] = numbers


class _Learner(StepPart):
    """A contour, which sets the multipliers and learns π; it rests where the temperature is 0."""

    def __init__(self, run: ContourRun, controls: _Controls, place: Tensor) -> None:
        if len(place) % run.groups:
            raise ValueError(f"{len(place)} chains cannot be split evenly into groups={run.groups}")
        rows = run.groups if run.shared else len(place)
        own = None if run.shared and rows == 1 else rows
        bins = run.contour.partition.num_bins
        shape = (bins,) if own is None else (own, bins)
        begin = run.state or run.contour.initial_state(own, place.device)
        self.state = ContourState(*(tensor.to(place.device).expand(shape).clone() for tensor in begin))
        self._run = run
        self._controls = controls
        self._edges = run.contour.partition.edges(place.device)

    def draw(self, first: int, count: int) -> tuple[Tensor, ...]:
        tempered = zip(range(first, first + count), self._controls.temperatures, strict=True)
        rates = [self._run.step_size.at(k) if tau > 0 else 0.0 for k, tau in tempered]
        return (torch.tensor(rates, dtype=torch.float64, device=self._edges.device),)

    def before(self, step: Step, *numbers: Tensor) -> None:
        contour = self._run.contour
        place = contour.locate(self.state, step.energy, step.group["temperature"], self._edges)
        step.group["gradient_multiplier"] = place.multiplier
        step.trace("log_densities", place.log_density)
        step.trace("multipliers", place.multiplier)
        if self._run.learn:
            contour.learn_(self.state, place.index, place.log_density, numbers[0])


class _Ladders(StepPart):
    """Replica exchange: the chain in each slot, changed in place, and the random numbers for swaps."""

    def __init__(self, run: ExchangeRun, controls: _Controls, place: Tensor, seed: int) -> None:
        size, count = len(run.temperatures), len(place) // len(run.temperatures)
        if len(place) % size:
            raise ValueError(f"{len(place)} chains cannot be split evenly into ladders of {size} temperatures")
        self._run = run
        self._controls = controls
        self._place = place.detach()
        self._temperatures = self._place.new_tensor(run.temperatures)
        self._lrs = self._place.new_ones(size) if run.lrs is None else self._place.new_tensor(run.lrs)
        self._order = torch.arange(size, device=place.device).repeat(count, 1)
        self._slots = self._order.clone()
        self._generators = [
            torch.Generator(place.device).manual_seed(derive_seed(seed, "exchange", ladder)) for ladder in range(count)
        ]

    def draw(self, first: int, count: int) -> tuple[Tensor, ...]:
        """Return log u of each step, ladder and pair, shape (K, L, R-1), and the energies' variance, shape (K,).

        Chains swap if log u is below the log rate, so it is +inf where no swap is attempted, and loops need no branch.
        """
        if not all(tau > 0 for tau in self._controls.temperatures):
            raise ValueError("the swap rate is undefined at temperature=0: keep the temperature positive")
        run, pairs = self._run, len(self._run.temperatures) - 1
        limits = torch.full((count, len(self._generators), pairs), math.inf, device=self._place.device)
        attempts = [k for k in range(first, first + count) if k % run.every == 0]
        if attempts:
            rows = [torch.rand(len(attempts), pairs, generator=g, device=g.device) for g in self._generators]
            tried = torch.stack([attempted_pairs(k // run.every - 1, pairs + 1) for k in attempts])
            drawn = torch.stack(rows, 1).log().masked_fill(~tried[:, None].to(limits.device), math.inf)
            limits[torch.tensor(attempts, device=limits.device) - first] = drawn
        return limits, self._place.new_tensor(_values(run.variance, first, count))

    def before(self, step: Step, *numbers: Tensor) -> None:
        limits, variance = numbers
        by_slot = step.energy.view(self._order.shape).gather(1, self._order)
        levels = step.group["temperature"] * self._temperatures
        rate = log_swap_rate(by_slot[:, :-1], by_slot[:, 1:], levels[:-1], levels[1:], variance, self._run.correction)
        self._order.copy_(swapped(self._order, limits < rate))
        slot = torch.zeros_like(self._order).scatter_(1, self._order, self._slots).view(-1)
        step.group["lr"] = step.group["lr"] * self._lrs[slot]
        step.group["temperature"] = step.group["temperature"] * self._temperatures[slot]
        step.trace("slots", slot)


# -- Stein variational gradient descent --------------------------------------------------------------------------------


def median_bandwidth(particles: Tensor) -> Tensor:
    """Return h of the median heuristic, (…), for n ≥ 2 particles (…, n, d): the median squared distance over log n."""
    count = particles.shape[-2]
    first, second = torch.triu_indices(count, count, 1, device=particles.device)
    return _squares(particles)[..., first, second].median(-1).values / math.log(count)


def stein_direction(particles: Tensor, gradients: Tensor) -> Tensor:
    """Return φ at each particle; particles, gradients of the energy U = -log p and φ have shape (…, n, d)."""
    count = particles.shape[-2]
    if count < 2:
        raise ValueError(f"particles must be at least two, since they repel each other, got {count}")
    scale = median_bandwidth(particles)[..., None, None]
    kernel = torch.exp(-_squares(particles) / scale)
    # ∇_{x_j} k(x_j, x_i) = (2/h)·(x_i - x_j)·k, summed over j without another tensor of all pairs.
    repulsion = 2 / scale * (particles * kernel.sum(-1, keepdim=True) - kernel @ particles)
    return (repulsion - kernel @ gradients) / count


def descend(
    gradient: Callable[[Tensor], Tensor],
    particles: Tensor,
    lr: float,
    num_steps: int,
    note: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Return particles after `num_steps` steps of Stein variational gradient descent, without noise.

    A particle follows the others' gradients, averaged by a kernel, and is pushed away from them:

        x_i += lr·φ(x_i),   φ(x) = n⁻¹·Σ_j [k(x_j, x)·∇log p(x_j) + ∇_{x_j} k(x_j, x)],   k(x, y) = exp(-‖x-y‖²/h)

    with h = median of the squared distances over log n, so that Σ_j k(x_j, x) is about 1 for each x. A step costs n²
    kernel evaluations. Leading axes hold independent sets of particles.

    Args:
        gradient: ∇U at positions (…, n, d).
        particles: initial positions, shape (…, n, d); not changed.
        lr: step size.
        num_steps: number of steps.
        note: called with the step k = 1, 2, … and the particles after it.

    Raises:
        ValueError: for a negative lr, or a final particle that is not finite.

    Source: Liu & Wang 2016 (Stein variational gradient descent), eq. (8), Algorithm 1 and section 5.
    """
    if not 0 <= lr < math.inf:
        raise ValueError(f"lr must be finite and not negative, got {lr}")
    for step in range(1, num_steps + 1):
        particles = particles + lr * stein_direction(particles, gradient(particles))
        if note is not None:
            note(step, particles)
    if not bool(particles.isfinite().all()):
        raise ValueError(f"a particle diverged to infinity within {num_steps} steps: use a smaller lr")
    return particles


def _squares(particles: Tensor) -> Tensor:
    """Return all squared distances, shape (…, n, n)."""
    columns = (particles[..., i] for i in range(particles.shape[-1]))
    return functools.reduce(torch.add, ((column[..., :, None] - column[..., None, :]).square() for column in columns))
