"""The steps of all chains of a light loop, in blocks that can be compiled, and the noise they use."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sgmcmc.contour.contour import ContourState
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.simulation.contour_run import ContourRun
from lightning_sgmcmc.simulation.exchange_run import Ladders
from lightning_sgmcmc.simulation.targets import Density, Target

CHUNK = 1024
"""Steps whose noise is drawn at once; it affects a seed's results, since normal_ depends on the tensor's length."""
BLOCK = 16
WORTH_COMPILING = 200_000
"""Steps below which compiling (about 20 to 40 s, less when cached) costs more than it saves."""
CONTOUR_BLOCK = 8
"""Steps unrolled into one compiled function; twice as many are no faster, and take twice as long to compile."""


@dataclass(frozen=True)
class NoiseLevels:
    """Standard deviations of the Gaussian noise that a run adds.

    Attributes:
        energy: standard deviation on the energy, in nats.
        gradient: standard deviation on each coordinate of the gradient.
    """

    energy: float = 0.0
    gradient: float = 0.0


class TargetSteps:
    """Steps all chains; its tensors are changed in place.

    Args:
        target: the density.
        rule: the sampler, with `place` as its only parameter.
        place: the chains' positions, shape (C, d).
        levels: levels of the added noise.
        contour: contour sampling.
        ladders: replica exchange.

    Raises:
        ValueError: if the chains cannot be split into the contour's groups, or a sampler with momentum exchanges
            temperatures.
    """

    def __init__(
        self,
        target: Density,
        rule: Sampler,
        place: nn.Parameter,
        levels: NoiseLevels,
        contour: ContourRun | None = None,
        ladders: Ladders | None = None,
    ) -> None:
        self.target = target.to(place.device, place.dtype) if isinstance(target, Target) else target
        self.rule = rule
        self.place = place
        self.levels = levels
        self.contour_run = contour
        self.ladders = ladders
        self.state: ContourState | None = None
        if contour is not None:
            self.state = contour.initial_state(len(place), place.device)
            self.edges = contour.contour.partition.edges(place.device)
        self.group = dict(rule.param_groups[0])
        self.group["lr"] = torch.zeros((), dtype=place.dtype, device=place.device)
        self.group["temperature"] = torch.ones_like(self.group["lr"])  # at 0 MCLMC's momenta have no length
        # One update with zero force and step size creates the rule's buffers; it moves nothing.
        zero = torch.zeros_like(place)
        with torch.no_grad():
            rule.update(self.group, [place], [zero], [zero.clone() for _ in range(rule.draws)])
        if ladders is not None and rule.momenta(self.group) is not None:
            raise ValueError(
                f"{type(rule).__name__} has momentum, which also has a temperature: use SGLD for an exchange"
            )

    @property
    def block_length(self) -> int:
        """Number of steps in a compiled block."""
        return BLOCK if self.contour_run is None and self.ladders is None else CONTOUR_BLOCK

    def run(
        self,
        lr: Tensor,
        temperature: Tensor,
        step_size: Tensor,
        noise: Tensor,
        energy: Tensor,
        gradient: Tensor,
        *swaps: Tensor,
    ) -> tuple[Tensor, ...]:
        """Make one step per step size.

        Args:
            lr, temperature, step_size: ε, τ and ω of each step, shape (K,).
            noise: the injected noise, standard normal, shape (K, C, d·J) for a rule that takes J tensors a step.
            energy: noise on the energy, shape (K, C) or (K, 0).
            gradient: noise on the gradient, shape (K, C, d) or (K, 0).
            swaps: with an exchange, the result of `Ladders.draw`.

        Returns:
            positions (K, C, d), energies (K, C), and with a contour log Ψ and multipliers (K, C), before each step;
            with an exchange, slots (K, C) of the step.
        """
        places, energies, densities, multipliers, slots = [], [], [], [], []
        group = dict(self.group)
        for k in range(len(lr)):
            potential = self.target.energy(self.place)
            force = self.target.gradient(self.place)
            places.append(self.place.clone())
            energies.append(potential)
            if self.levels.gradient > 0:
                force = force + self.levels.gradient * gradient[k]
            group["lr"], group["temperature"] = lr[k], temperature[k]
            if self.ladders is not None:
                seen = potential + self.levels.energy * energy[k] if self.levels.energy > 0 else potential
                limits, variance = swaps
                slot = self.ladders.swap_(seen, temperature[k], limits[k], variance[k])
                group["lr"] = lr[k] * self.ladders.lrs[slot]
                group["temperature"] = temperature[k] * self.ladders.temperatures[slot]
                slots.append(slot)
            if self.contour_run is None:
                self.rule.update(group, [self.place], [force], self._normals(noise[k]))
                continue
            assert self.state is not None
            seen = potential + self.levels.energy * energy[k] if self.levels.energy > 0 else potential
            location = self.contour_run.contour.locate(self.state, seen, temperature[k], self.edges)
            group["gradient_multiplier"] = location.multiplier
            densities.append(location.log_density)
            multipliers.append(location.multiplier)
            self.rule.update(group, [self.place], [force], self._normals(noise[k]))
            if self.contour_run.learn:
                self.contour_run.contour.learn_(self.state, location.index, location.log_density, step_size[k])
        return tuple(torch.stack(part) for part in (places, energies, densities, multipliers, slots) if part)

    def _normals(self, noise: Tensor) -> list[Tensor]:
        """Return copies of the standard normal tensors of a step, each of shape (C, d)."""
        return [part.clone() for part in noise.chunk(self.rule.draws, -1)]

    def compiled(self) -> Callable[..., tuple[Tensor, ...]]:
        """Return `run`, compiled."""
        return compiled_block(self.run, self.place.device)


class ChainNoise:
    """Standard normal numbers for chunks of steps, from generators of (seed, purpose, chain).

    A chain's numbers therefore do not depend on other draws.

    Args:
        seed: the run's seed.
        place: the chains' positions, shape (C, d).
        levels: levels of the added noise.
        draws: standard normal tensors of the injected noise in a step.
    """

    def __init__(self, seed: int, place: Tensor, levels: NoiseLevels, draws: int = 1) -> None:
        chains, dimension = place.shape
        widths = {
            "noise": dimension * draws,
            "energy noise": int(levels.energy > 0),
            "gradient noise": dimension * (levels.gradient > 0),
        }
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
        """Return the numbers of the next chunk, one tensor per purpose; the next call overwrites them."""
        for generators, rows, turned in self._parts:
            for row, generator in zip(rows, generators, strict=True):
                row.normal_(generator=generator)
            if generators:
                turned.copy_(rows.view(len(rows), CHUNK, *turned.shape[2:]).transpose(0, 1))
        return [turned for _, _, turned in self._parts]


def compiled_block(method: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a bound method that makes a block of steps, compiled.

    Args:
        method: the method.
        device: of its tensors.
    """
    assert isinstance(method, MethodType)
    options: dict[str, Any] = {"cpp_wrapper": True} if device.type == "cpu" else {}
    # A separate code object, since torch limits the number of compilations of each.
    function = method.__func__
    assert isinstance(function, FunctionType)
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(MethodType(own, method.__self__), dynamic=False, fullgraph=True, options=options)


def is_worth_compiling(steps: int, device: torch.device) -> bool:
    """Return whether a run of so many steps is long enough to compile them, and there is a compiler."""
    return steps >= WORTH_COMPILING and (device.type != "cpu" or has_compiler())


def has_compiler() -> bool:
    """Return whether there is a C++ compiler for compiled loops."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))
