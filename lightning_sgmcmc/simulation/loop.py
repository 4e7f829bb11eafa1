"""The light loop: chains of a sampler side by side, without a trainer.

A step is made by its parts, in their order. The first one takes the energy and the gradient at the chains' places; the
others set the step's controls, swap temperatures, read a contour, or test a trajectory. Then the update rule of the
sampler makes the step. `simulate` and `sample_sum` put the parts together.

Blocks of steps can be unrolled and compiled, since an eager step of a few chains is mostly overhead. So parts change
tensors in place, and draw their random numbers for many steps before they are made.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sgmcmc.compiling import compiled_if_possible, has_compiler
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.seeding import derive_seed

CHUNK = 1024
"""Steps whose noise is drawn at once; it affects a seed's results, since normal_ depends on the tensor's length."""
BLOCK = 16
"""Steps unrolled into one compiled function."""
WORTH_COMPILING = 200_000
"""Steps below which compiling (about 20 to 40 s, less when cached) costs more than it saves."""


class Step:
    """A step in the making.

    Attributes:
        place: the chains' positions, shape (C, d), which the update changes in place.
        group: the sampler's parameter group with the controls of the step.
        energy: U there with its noise, shape (C,); only known densities have it.
        gradient: the gradient for the update, shape (C, d).
    """

    energy: Tensor
    gradient: Tensor

    def __init__(self, place: Tensor, group: dict[str, Any]) -> None:
        self.place = place
        self.group = group
        self.traces: dict[str, list[Tensor]] = {}

    def trace(self, name: str, row: Tensor) -> None:
        """Add the step's row to a trace."""
        self.traces.setdefault(name, []).append(row)


class StepPart:
    """A part of every step: the source of gradients, or an observer."""

    def draw(self, first: int, count: int) -> tuple[Tensor, ...]:
        """Return the part's numbers for the steps first, first + 1, …, each a tensor of `count` rows."""
        return ()

    def before(self, step: Step, *numbers: Tensor) -> None:
        """Act before the update, with the step's rows of the numbers."""

    def after(self, step: Step) -> None:
        """Act after the update."""


class LightLoop:
    """Makes the steps of all chains of the only parameter `place`, shape (C, d).

    Args:
        normals: returns the injected noise of the next K steps, shape (K, J, C, d), which the loop may change.
        block_length: steps of a compiled block; None compiles none.
    """

    def __init__(
        self,
        rule: Sampler,
        place: nn.Parameter,
        group: dict[str, Any],
        normals: Callable[[int], Tensor],
        parts: Sequence[StepPart],
        block_length: int | None = None,
    ) -> None:
        self.rule = rule
        self.place = place
        self.group = group
        self.normals = normals
        self.parts = parts
        self._after = [part for part in parts if type(part).after is not StepPart.after]
        self.count = 0
        """Steps made."""
        self._length = block_length
        self._block = self.run if block_length is None else compiled_block(self.run, place.device)

    def advance(self, count: int) -> dict[str, Tensor]:
        """Make some steps, whose numbers are drawn at once; return their traces, each of `count` rows."""
        first = self.count + 1
        numbers = [(self.normals(count),), *(part.draw(first, count) for part in self.parts)]
        self.count += count
        if self._length is None or count < self._length:
            return self.run(*numbers)
        blocks = [[one.split(self._length) for one in own] for own in numbers]
        done = []
        for place, normals in enumerate(blocks[0][0]):
            # A shorter last block has another shape than the compiled ones.
            block = self._block if len(normals) == self._length else self.run
            done.append(block(*(tuple(one[place] for one in own) for own in blocks)))
        return {name: torch.cat([rows[name] for rows in done]) for name in done[0]}

    def run(self, normals: tuple[Tensor, ...], *numbers: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Make a block's steps, given the noise and the numbers of each part."""
        compiling = torch.compiler.is_compiling()
        # A compiled block leaves its inputs as they are, so it sets the controls in a copy.
        step = Step(self.place, dict(self.group) if compiling else self.group)
        rows: Sequence[Sequence[Sequence[Tensor] | Tensor]] = numbers
        if not compiling:  # one view at a time takes longer
            rows = [[one.unbind() for one in own] for own in numbers]
        for k, noise in enumerate(normals[0]):
            for part, own in zip(self.parts, rows, strict=True):
                part.before(step, *(one[k] for one in own))
            drawn = [one.clone() if compiling else one for one in noise]
            self.rule.update(step.group, [self.place], [step.gradient], drawn or None)
            for part in self._after:
                part.after(step)
        return {name: torch.stack(rows) for name, rows in step.traces.items()}


def compiled_block(method: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a bound method that makes a block of steps, compiled for good where that works: all blocks have the same
    shapes."""
    assert isinstance(method, MethodType)
    options: dict[str, Any] = {"cpp_wrapper": True} if device.type == "cpu" else {}
    # The guards on all that the parts hold would take longer than some steps; torch before 2.9 has no such option.
    if hasattr(torch.compiler, "skip_all_guards_unsafe"):
        options["guard_filter_fn"] = torch.compiler.skip_all_guards_unsafe
    # A separate code object, since torch limits the number of compilations of each.
    function = method.__func__
    assert isinstance(function, FunctionType)
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    bound = MethodType(own, method.__self__)
    # A compiler that is found may not work, as on a Mac without Xcode's command line tools.
    return compiled_if_possible("a block of steps", bound, dynamic=False, fullgraph=True, options=options)


def compiles_blocks(asked: bool | None, steps: int, rule: Sampler, device: torch.device) -> bool:
    """Return whether blocks are compiled: if it is asked for, or the run is long enough and there is a compiler."""
    if asked and rule.counts_steps:
        raise ValueError(
            f"compile=True repeats the same block of steps, and {type(rule).__name__} counts its steps: pass "
            "compile=None"
        )
    if asked is not None:
        return asked
    return steps >= WORTH_COMPILING and not rule.counts_steps and (device.type != "cpu" or has_compiler())


# -- random numbers and starts ----------------------------------------------------------------------------------------


class ChainStreams:
    """Random numbers from a generator of (seed, purpose, chain) for each chain, so that no chain depends on another."""

    def __init__(self, seed: int, purpose: str, place: Tensor, chunk: int = CHUNK) -> None:
        self._place = place.detach()
        self._chunk = chunk
        self._generators = [
            torch.Generator(place.device).manual_seed(derive_seed(seed, purpose, chain)) for chain in range(len(place))
        ]
        self._buffers: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def normal(self, count: int, *shape: int) -> Tensor:
        """Return standard normal numbers for the first `count` steps of the next chunk; a next call overwrites them.

        They have the shape (K, C) or (K, …, C, d), for a step's shape () or (…, d) of each chain.
        """
        return self._drawn(Tensor.normal_, shape)[:count]

    def uniform(self, count: int, *shape: int) -> Tensor:
        """Return numbers that are uniform on [0, 1), as `normal` does."""
        return self._drawn(Tensor.uniform_, shape)[:count]

    def _drawn(self, draw: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        axis = max(1, len(shape))
        if shape not in self._buffers:
            rows = self._place.new_empty(len(self._place), self._chunk, *shape)
            self._buffers[shape] = rows, torch.empty_like(rows.movedim(0, axis), memory_format=torch.contiguous_format)
        rows, turned = self._buffers[shape]
        for row, generator in zip(rows, self._generators, strict=True):
            draw(row, generator=generator)
        return turned.copy_(rows.movedim(0, axis))


def chain_normals(seed: int, place: Tensor, draws: int, chunk: int = CHUNK) -> Callable[[int], Tensor]:
    """Return a source of injected noise from a stream for each chain; a chunk of 1 draws what `Sampler.step` does."""
    streams = ChainStreams(seed, "noise", place, chunk)
    return lambda count: streams.normal(count, draws, place.shape[1])


def shared_normals(generator: torch.Generator, place: Tensor, draws: int) -> Callable[[int], Tensor]:
    """Return a source of injected noise from one generator for all chains."""

    def draw(count: int) -> Tensor:
        normals = place.new_empty(count, draws, *place.shape)
        for row in normals.flatten(0, 1):
            row.normal_(generator=generator)
        return normals

    return draw


def starting_places(
    initial: Tensor, num_chains: int, dimension: int, dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """Return the chains' initial positions, shape (C, d): a copy of `initial`, shape (C, d) or (d,)."""
    if initial.shape not in ((dimension,), (num_chains, dimension)) or not bool(initial.isfinite().all()):
        raise ValueError(
            f"initial should be finite numbers of shape ({dimension},) or ({num_chains}, {dimension}), got "
            f"{tuple(initial.shape)}"
        )
    return nn.Parameter(initial.to(device, dtype).expand(num_chains, dimension).clone())


def check_finite(last: Tensor, num_steps: int) -> None:
    """Raise unless the final positions are finite."""
    if not bool(last.isfinite().all()):
        raise ValueError(f"a chain diverged to infinity within {num_steps} steps: use a smaller lr")


# -- records ----------------------------------------------------------------------------------------------------------


class Recorder:
    """Keeps rows of chosen steps, and the weighted averages of a function, (K, C, d) to (K, C, F), up to marks."""

    def __init__(
        self,
        kept: Sequence[int],
        marks: Sequence[int] = (),
        observe: Callable[[Tensor], Tensor] | None = None,
        burn_in: int = 0,
    ) -> None:
        self._kept = kept
        self._marks = marks
        self._observe = observe
        self._burn_in = burn_in
        self._rows: list[dict[str, Tensor]] = []
        self._noted: list[Tensor] = []
        self._sum = self._weight = torch.zeros((), dtype=torch.float64)

    def record(self, first: int, rows: dict[str, Tensor]) -> None:
        """Record the rows of the steps first, first + 1, …: "positions" and others, with weights by "log_weights"."""
        places = rows["positions"]
        chosen = within(self._kept, first, len(places))
        if chosen:
            at = torch.tensor(chosen, device=places.device) - first
            self._rows.append({name: part[at] for name, part in rows.items()})
        if self._observe is not None:
            equal = torch.zeros(len(places), 1, dtype=torch.float64, device=places.device)
            self._average(first, rows.get("log_weights", equal).exp(), self._observe(places))

    def _average(self, first: int, weights: Tensor, observed: Tensor) -> None:
        start = min(max(self._burn_in + 1 - first, 0), len(observed))
        products = weights[..., None] * observed
        for mark in [*within(self._marks, first, len(observed)), None]:
            stop = len(observed) if mark is None else mark - first + 1
            self._sum = self._sum + products[start:stop].sum(0)
            self._weight = self._weight + weights[start:stop].sum(0)
            start = max(start, stop)
            if mark is not None:
                self._noted.append(self._sum / self._weight[..., None])

    @property
    def steps(self) -> Tensor:
        """The steps of the kept rows, shape (S,)."""
        return torch.tensor(list(self._kept), dtype=torch.int64)

    def rows(self) -> dict[str, Tensor]:
        """Return the kept rows, each of S rows; empty if there are none."""
        return {name: torch.cat([rows[name] for rows in self._rows]) for name in (self._rows or [{}])[0]}

    def averages(self, num_chains: int) -> Tensor:
        """Return the averages at the marks, shape (T, C, F); F = 0 without an observed function."""
        return torch.stack(self._noted) if self._noted else torch.zeros(0, num_chains, 0)


def within(steps: Sequence[int], first: int, count: int) -> Sequence[int]:
    """Return those of increasing steps that are among first, first + 1, …, of which there are `count`."""
    return steps[bisect_left(steps, first) : bisect_left(steps, first + count)]
