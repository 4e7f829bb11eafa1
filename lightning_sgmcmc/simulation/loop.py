"""A light loop without a trainer: the samplers and the contour of this library on thousands of chains at once.

The steps are those of `lightning_sgmcmc.samplers` and `lightning_sgmcmc.contour`, by their own code, on an analytic
target; chains may share a contour, or exchange temperatures (`lightning_sgmcmc.replica_exchange`). Blocks of steps are
unrolled and compiled, where a C++ compiler is at hand and the run is long enough to pay for it, since an eager step of
a few chains is all overhead.
"""

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from lightning_sgmcmc.checks import check_count, check_number
from lightning_sgmcmc.contour import Contour, ContourState, DecayingStepSize
from lightning_sgmcmc.replica_exchange import log_swap_rate, swapped
from lightning_sgmcmc.samplers import SGLD, Sampler
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.simulation.exchange_run import ExchangeRun

CHUNK = 1024
"""Steps whose noise is drawn at once; part of what a seed means, since normal_ of another length draws otherwise."""
BLOCK = 32
CONTOUR_BLOCK = 16
"""Steps that are unrolled into one compiled function: more save calls, and take longer to compile."""
WORTH_COMPILING = 200_000
"""Steps below which compiling (some 20 to 40 s, less when cached) costs more than it saves."""

Schedule: TypeAlias = "float | Callable[[int], float]"
"""A number, or a function of the step k = 1, 2, …"""


class Density(Protocol):
    """What is sampled: see `lightning_sgmcmc.simulation.targets.Target`."""

    @property
    def dimension(self) -> int: ...

    def energy(self, x: Tensor) -> Tensor: ...

    def gradient(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class ContourRun:
    """How a contour takes part in a simulation.

    Attributes:
        rules: partition, ζ, scheme and so on.
        step_size: ω of the stochastic approximation.
        shared: one π for all chains, learned from the mean of their steps; else one for each.
        state: where π begins, uniform if None; it is not changed.
        learn: False keeps π as it is (KSGLD).
        groups: with `shared`, so many π: chains are split evenly, in their order, into groups of which each shares one
            (independent repeats of a run of interacting chains, at the price of one).
    """

    rules: Contour
    step_size: DecayingStepSize = field(default_factory=DecayingStepSize)
    shared: bool = False
    state: ContourState | None = None
    learn: bool = True
    groups: int = 1

    def __post_init__(self) -> None:
        check_count("groups", self.groups)
        if self.groups > 1 and not self.shared:
            raise ValueError(f"groups={self.groups} says how many π are shared, and without shared=True none is")


@dataclass(frozen=True)
class Simulation:
    """What a simulation leaves; a draw is a chain's place with the energy and the π of that place and time.

    Attributes:
        steps: the draws' steps k = 1, 2, …, shape (S,).
        positions: shape (S, C, d).
        energies: without the energy noise, shape (S, C).
        log_weights: log importance weights by the π of their time, shape (S, C), zeros without a contour.
        multipliers: κ of the step from there, shape (S, C).
        averages: weighted averages of the observed function from the burn-in up to each checkpoint, shape (T, C, F).
        checkpoints: their steps, shape (T,).
        last: the chains' places in the end, shape (C, d).
        contour: what was learned, None without a contour; with groups, a row of π for each.
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

    The step k of a chain: the energy U(x) and the gradient, with their noise; with a contour, bin, multiplier and
    log Ψ of that energy, or with an exchange its swaps; the sampler's update; and the contour's learning.

    Args:
        target: with `dimension`, `energy` and `gradient`.
        sampler: a sampler class, or a partial of one; N is 1, so that `lr` is the papers' ε.
        lr: step size.
        num_steps: steps of each chain.
        num_chains: C.
        temperature: τ; while it is 0 a contour rests.
        contour: contour sampling.
        energy_noise: standard deviation of the Gaussian noise on the energy that the contour, or the exchange, sees, in
            nats.
        gradient_noise: that of the noise on each coordinate of the gradient.
        initial: where the chains start, shape (C, d) or (d,); None draws standard normal places.
        keep_every: a draw after the burn-in every so many steps; None keeps none.
        burn_in: steps before the first draw's interval and before averages count.
        observe: function from (…, d) to (…, F) whose weighted averages are wanted, each chain's over all its slots.
        checkpoints: steps at which the averages are noted, rising.
        seed: chain c draws from streams of (seed, c) alone, however many chains there are.
        dtype: of the places; the contour is in float64.
        device: of everything.
        compile: whether to compile blocks of steps; None does so for long runs, where there is a C++ compiler.
        exchange: swaps of temperatures and step sizes between chains; ladder l draws from the stream of (seed, l).

    Raises:
        ValueError: for an argument out of range or of the wrong shape, an exchange with a contour, with a sampler that
            has momentum or at a temperature of 0, or a place that is not finite in the end.
    """
    _check(num_steps, num_chains, keep_every, burn_in, energy_noise, gradient_noise, checkpoints, observe)
    if exchange is not None and contour is not None:
        raise ValueError("an exchange and a contour in one run are not offered: π would be learned at all temperatures")
    device = torch.device(device)
    place = nn.Parameter(_start(initial, num_chains, target.dimension, seed, dtype, device))
    rule = sampler([place], lr=_at(lr, 1), num_data=1, temperature=1.0, num_chains=num_chains, seed=seed)
    ladders = None if exchange is None else _Ladders(exchange, num_chains, seed, place)
    walk = _Walk(target, rule, place, contour, energy_noise, gradient_noise, num_chains, ladders)
    noise = _Noise(seed, place, energy_noise > 0, gradient_noise > 0)
    if compile is None:
        compile = num_steps >= WORTH_COMPILING and (device.type != "cpu" or _has_compiler())
    block = walk.compiled() if compile else walk.steps
    record = _Record(keep_every, burn_in, observe, checkpoints, contour)
    length = BLOCK if contour is None and exchange is None else CONTOUR_BLOCK
    with torch.no_grad():
        for first in range(1, num_steps + 1, CHUNK):
            count = min(CHUNK, num_steps + 1 - first)
            inputs = [*_controls(lr, temperature, contour, first, count, place), *noise.draw()]
            if ladders is not None:
                if not bool((inputs[1] > 0).all()):
                    raise ValueError("at a temperature of 0 the rate of a swap has no limit: keep it positive")
                inputs += ladders.draw(first, count)
            pieces = zip(*(part[:count].split(length) for part in inputs), strict=True)
            # The remainder of a run is no block that was compiled.
            done = [(block if len(piece[0]) == length else walk.steps)(*piece) for piece in pieces]
            record.take(first, *(torch.cat(part) for part in zip(*done, strict=True)))
    if not bool(place.isfinite().all()):
        raise ValueError(f"a chain left for infinity within {num_steps} steps: take a smaller lr")
    return record.result(place.detach().clone(), walk.state)


class _Walk:
    """The steps of all chains; its tensors are changed in place."""

    def __init__(
        self,
        target: Density,
        rule: Sampler,
        place: nn.Parameter,
        contour: ContourRun | None,
        energy_noise: float,
        gradient_noise: float,
        num_chains: int,
        ladders: "_Ladders | None" = None,
    ) -> None:
        self.target = target
        self.rule = rule
        self.place = place
        self.contour = contour
        self.energy_noise = energy_noise
        self.gradient_noise = gradient_noise
        self.ladders = ladders
        self.state: ContourState | None = None
        if contour is not None:
            if num_chains % contour.groups:
                raise ValueError(f"{num_chains} chains cannot be split evenly into groups={contour.groups}")
            rows = contour.groups if contour.shared else num_chains
            own = None if contour.shared and rows == 1 else rows
            begin = contour.state or contour.rules.initial_state(own, place.device)
            shape = (contour.rules.partition.num_bins,) if own is None else (own, contour.rules.partition.num_bins)
            self.state = ContourState(*(t.to(place.device).expand(shape).clone() for t in begin))
            self.edges = contour.rules.partition.edges(place.device)
        self.group = dict(rule.param_groups[0])
        self.group["lr"] = self.group["temperature"] = torch.zeros((), dtype=place.dtype, device=place.device)
        # One update without force and of no length makes the rule's buffers; it moves nothing.
        zero = torch.zeros_like(place)
        with torch.no_grad():
            rule.update(self.group, [place], [zero], [zero.clone()])
        if ladders is not None and rule.momenta(self.group) is not None:
            raise ValueError(f"{type(rule).__name__} has momentum, which has a temperature too: exchange takes SGLD")

    def steps(
        self,
        lr: Tensor,
        temperature: Tensor,
        step_size: Tensor,
        noise: Tensor,
        energy: Tensor,
        gradient: Tensor,
        *swaps: Tensor,
    ) -> tuple[Tensor, ...]:
        """Make as many steps as there are step sizes.

        Args:
            lr, temperature, step_size: ε, τ and ω of each step, shape (K,).
            noise: the injected noise, standard normal, shape (K, C, d).
            energy: that on the energy, shape (K, C) or (K, 0).
            gradient: that on the gradient, shape (K, C, d) or (K, 0).
            swaps: with an exchange, what `_Ladders.draw` gave.

        Returns:
            places (K, C, d), energies (K, C), and with a contour log Ψ and multipliers (K, C), before each step; with
            an exchange, slots (K, C) of the step.
        """
        places, energies, densities, multipliers, slots = [], [], [], [], []
        group = dict(self.group)
        for k in range(len(lr)):
            potential = self.target.energy(self.place)
            force = self.target.gradient(self.place)
            places.append(self.place.clone())
            energies.append(potential)
            if self.gradient_noise > 0:
                force = force + self.gradient_noise * gradient[k]
            group["lr"], group["temperature"] = lr[k], temperature[k]
            if self.ladders is not None:
                seen = potential + self.energy_noise * energy[k] if self.energy_noise > 0 else potential
                limits, variance = swaps
                slot = self.ladders.swap_(seen, temperature[k], limits[k], variance[k])
                group["lr"] = lr[k] * self.ladders.lrs[slot]
                group["temperature"] = temperature[k] * self.ladders.temperatures[slot]
                slots.append(slot)
            if self.contour is None:
                self.rule.update(group, [self.place], [force], [noise[k].clone()])
                continue
            assert self.state is not None
            seen = potential + self.energy_noise * energy[k] if self.energy_noise > 0 else potential
            location = self.contour.rules.locate(self.state, seen, temperature[k], self.edges)
            group["gradient_multiplier"] = location.multiplier
            densities.append(location.log_density)
            multipliers.append(location.multiplier)
            self.rule.update(group, [self.place], [force], [noise[k].clone()])
            if self.contour.learn:
                self.contour.rules.learn_(self.state, location.index, location.log_density, step_size[k])
        return tuple(torch.stack(part) for part in (places, energies, densities, multipliers, slots) if part)

    def compiled(self) -> Callable[..., tuple[Tensor, ...]]:
        """Return `steps`, compiled."""
        options: dict[str, Any] = {"cpp_wrapper": True} if self.place.device.type == "cpu" else {}
        # A code object of its own, since torch limits how often one may be compiled.
        own = FunctionType(_Walk.steps.__code__.replace(), _Walk.steps.__globals__, "steps")
        return torch.compile(MethodType(own, self), dynamic=False, fullgraph=True, options=options)


class _Ladders:
    """Which chain stands in which slot, changed in place, and the numbers that decide on swaps."""

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
        """Make the swaps of one step, and return each chain's slot, shape (C,).

        Args:
            energies: as they are seen, shape (C,).
            temperature: the run's, shape ().
            limits: log of uniform numbers, shape (L, R-1).
            variance: of one energy's noise, shape ().
        """
        by_slot = energies.view(self.order.shape).gather(1, self.order)
        levels = temperature * self.temperatures
        rate = log_swap_rate(
            by_slot[:, :-1], by_slot[:, 1:], levels[:-1], levels[1:], variance, self.exchange.correction
        )
        self.order.copy_(swapped(self.order, limits < rate))
        return torch.zeros_like(self.order).scatter_(1, self.order, self._slots).view(-1)


class _Noise:
    """Standard normal numbers for chunks of steps: from generators of (seed, purpose, chain), so that a chain's do not
    depend on what else is drawn."""

    def __init__(self, seed: int, place: Tensor, of_energy: bool, of_gradient: bool) -> None:
        chains, dimension = place.shape
        widths = {"noise": dimension, "energy noise": int(of_energy), "gradient noise": dimension * of_gradient}
        self._parts: list[tuple[list[torch.Generator], Tensor, Tensor]] = []
        for purpose, width in widths.items():
            shape = (CHUNK, chains) if purpose == "energy noise" and width else (CHUNK, chains, width)
            if not width:
                shape, chains_drawn = (CHUNK, 0), 0
            else:
                chains_drawn = chains
            generators = [
                torch.Generator(place.device).manual_seed(derive_seed(seed, purpose, chain))
                for chain in range(chains_drawn)
            ]
            rows = torch.empty(chains_drawn, CHUNK * width, dtype=place.dtype, device=place.device)
            turned = torch.empty(shape, dtype=place.dtype, device=place.device)
            self._parts.append((generators, rows, turned))

    def draw(self) -> list[Tensor]:
        """Return the numbers of the next chunk, one tensor for each purpose; the next call overwrites them."""
        for generators, rows, turned in self._parts:
            for row, generator in zip(rows, generators, strict=True):
                row.normal_(generator=generator)
            if generators:
                turned.copy_(rows.view(len(rows), CHUNK, *turned.shape[2:]).transpose(0, 1))
        return [turned for _, _, turned in self._parts]


class _Record:
    """Draws and running averages, taken from whole chunks of steps."""

    def __init__(
        self,
        keep_every: int | None,
        burn_in: int,
        observe: Callable[[Tensor], Tensor] | None,
        checkpoints: Sequence[int],
        contour: ContourRun | None,
    ) -> None:
        self._keep_every = keep_every
        self._burn_in = burn_in
        self._observe = observe
        self._checkpoints = list(checkpoints)
        self._rules = contour.rules if contour is not None else None
        self._kept: list[tuple[Tensor, ...]] = []
        self._noted: list[Tensor] = []
        self._sum = self._weight = torch.zeros((), dtype=torch.float64)

    def take(self, first: int, places: Tensor, energies: Tensor, *others: Tensor) -> None:
        """Take in the steps first, first + 1, …"""
        if self._rules is not None:
            densities, multipliers, *slots = others
            log_weights = self._rules.log_weight(densities)
        else:
            slots = list(others)
            log_weights, multipliers = torch.zeros_like(energies).double(), torch.ones_like(energies)
        steps = torch.arange(first, first + len(places))
        if self._keep_every is not None:
            chosen = ((steps > self._burn_in) & ((steps - self._burn_in) % self._keep_every == 0)).nonzero()[:, 0]
            if len(chosen):
                at = chosen.to(places.device)
                parts = (places, energies, log_weights, multipliers, *slots)
                self._kept.append((steps[chosen], *(part[at] for part in parts)))
        if self._observe is not None:
            self._average(first, places, log_weights)

    def _average(self, first: int, places: Tensor, log_weights: Tensor) -> None:
        assert self._observe is not None
        start = min(max(self._burn_in + 1 - first, 0), len(places))
        weights = log_weights.exp()
        products = weights[..., None] * self._observe(places)
        due = [c for c in self._checkpoints if first <= c < first + len(places)]
        for stop in [*(c - first + 1 for c in due), len(places)]:
            if stop > start:
                self._sum = self._sum + products[start:stop].sum(0)
                self._weight = self._weight + weights[start:stop].sum(0)
                start = stop
            if due and stop == due[0] - first + 1:
                due.pop(0)
                self._noted.append(self._sum / self._weight[..., None])

    def result(self, last: Tensor, state: ContourState | None) -> Simulation:
        """Return everything."""
        chains, dimension = last.shape
        if self._kept:
            whole = (torch.cat(part) for part in zip(*self._kept, strict=True))
            steps, places, energies, log_weights, multipliers, *slots = whole
        else:
            steps, places = torch.zeros(0, dtype=torch.int64), torch.zeros(0, chains, dimension).to(last)
            energies = log_weights = multipliers = torch.zeros(0, chains, device=last.device)
            slots = []
        noted = torch.stack(self._noted) if self._noted else torch.zeros(0, chains, 0)
        checkpoints = torch.tensor(self._checkpoints[: len(self._noted)], dtype=torch.int64)
        of_slots = slots[0] if slots else None
        return Simulation(steps, places, energies, log_weights, multipliers, noted, checkpoints, last, state, of_slots)


def _at(schedule: Schedule, step: int) -> float:
    return float(schedule(step)) if callable(schedule) else float(schedule)


def _controls(
    lr: Schedule, temperature: Schedule, contour: ContourRun | None, first: int, count: int, place: Tensor
) -> Iterable[Tensor]:
    """Return ε, τ and ω of the steps first, first + 1, …; ω is 0 where τ is."""

    def values(schedule: Schedule) -> list[float]:
        return [_at(schedule, k) for k in range(first, first + count)] if callable(schedule) else [schedule] * count

    temperatures = values(temperature)
    step_sizes = [0.0] * count
    if contour is not None:
        rates = (contour.step_size.at(k) for k in range(first, first + count))
        step_sizes = [rate if tau > 0 else 0.0 for rate, tau in zip(rates, temperatures, strict=True)]
    for numbers, dtype in ((values(lr), place.dtype), (temperatures, place.dtype), (step_sizes, torch.float64)):
        yield torch.tensor(numbers, dtype=dtype, device=place.device)


def _start(
    initial: Tensor | None, chains: int, dimension: int, seed: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    if initial is None:
        rows = [
            torch.randn(dimension, generator=torch.Generator().manual_seed(derive_seed(seed, "start", chain)))
            for chain in range(chains)
        ]
        initial = torch.stack(rows)
    return starting_places(initial, chains, dimension, dtype, device)


def starting_places(initial: Tensor, chains: int, dimension: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a copy of the places where chains start, shape (C, d), from places of that shape or one for all, (d,).

    Raises:
        ValueError: for another shape, or numbers that are not finite.
    """
    if initial.shape not in ((dimension,), (chains, dimension)) or not bool(initial.isfinite().all()):
        raise ValueError(
            f"initial should be finite numbers of shape ({dimension},) or ({chains}, {dimension}), got "
            f"{tuple(initial.shape)}"
        )
    return initial.to(device, dtype).expand(chains, dimension).clone()


def _check(
    num_steps: int,
    num_chains: int,
    keep_every: int | None,
    burn_in: int,
    energy_noise: float,
    gradient_noise: float,
    checkpoints: Sequence[int],
    observe: Callable[[Tensor], Tensor] | None,
) -> None:
    for name, count, least in (
        ("num_steps", num_steps, 1),
        ("num_chains", num_chains, 1),
        ("keep_every", keep_every, 1),
        ("burn_in", burn_in, 0),
    ):
        check_count(name, count, least)
    for name, value in (("energy_noise", energy_noise), ("gradient_noise", gradient_noise)):
        check_number(name, value)
    if checkpoints and observe is None:
        raise ValueError("checkpoints note averages of an observed function, and there is none: give observe")
    if list(checkpoints) != sorted(set(checkpoints)) or any(not burn_in < c <= num_steps for c in checkpoints):
        raise ValueError(
            f"checkpoints must rise and lie between the burn-in of {burn_in} and num_steps={num_steps}, got "
            f"{list(checkpoints)}"
        )


def _has_compiler() -> bool:
    """Return whether there is a C++ compiler for compiled loops."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))
