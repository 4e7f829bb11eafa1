"""Injected Gaussian noise: one flat buffer that is reused, or blocks of a large one; one generator per chain."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc.process import usable_cores
from lightning_sgmcmc.seeding import derive_seed, device_text

WORTH_A_THREAD = 20_000
"""Number of elements below which passing the draw to another thread costs more than the draw."""

WHOLE = 2**24
"""Numbers of a step up to which its noise is one buffer; more are drawn in blocks, as the step adds them."""
ON_CPU, ON_DEVICE = 2**18, 2**22
"""Numbers of a block: few enough for a CPU's cache, and many enough for an accelerator."""
TOGETHER = 16
"""Numbers that torch makes together on a CPU, where a call for fewer of them makes others."""


def block_width(device: torch.device, chains: int) -> int:
    """Return the columns of a block: pieces of this length have the bits of one long call of `normal_`.

    They are a multiple of 16 on a CPU, and on CUDA of what all threads draw in one pass, four numbers each.
    """
    unit = TOGETHER
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        unit = 4 * found.multi_processor_count * getattr(found, "max_threads_per_multi_processor", 2048)
    return max(1, (ON_CPU if device.type == "cpu" else ON_DEVICE) // (chains * unit)) * unit


class ChainNoise:
    """Standard normal noise in the shapes of a set of parameters, one stream per chain.

    The noise of chain c is drawn in one call into row c of a buffer of shape `(num_chains, numel of one chain)`, by a
    generator seeded with `(seed, first_chain + c)`. So a chain's noise does not depend on the number of chains in its
    process or on the global generator, and ranks with the same chain draw the same noise.

    `ahead` draws the next step's noise in a background thread; None does so on a CPU with a spare core, for noise that
    is not large. `draws`, the normal tensors for each parameter, may change until the first draw. Large noise may be
    drawn in blocks, with the same numbers.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        num_chains: int,
        seed: int,
        first_chain: int = 0,
        ahead: bool | None = None,
        draws: int = 1,
    ) -> None:
        self._parameters = parameters
        self.num_chains = num_chains
        self.seed = seed
        self.first_chain = first_chain
        self.ahead = ahead
        self.draws = draws
        self.held: Mapping[int, int] = {}
        """The row of a parameter without noise, by the parameter's place; it may change until the first draw."""
        self._silent: list[tuple[int, int]] = []
        """The first and last columns of held rows."""
        self.in_blocks = False
        """Whether the present step draws blocks."""
        self._large: bool | None = None
        self._starts: list[int] = []
        """The first column of each parameter, and the number of columns."""
        self._scratch = torch.empty(0)
        self._span = (0, 0)
        """The first and last columns of the block in `_scratch`."""
        self._worker: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._states: list[Tensor] = []
        """The generators' states before the pending draw."""
        self._generators: list[torch.Generator] = []
        self._device = torch.device("cpu")
        self._buffer = torch.empty(0)
        self._views: list[Tensor] = []
        self._loaded: dict[str, Any] | None = None
        self._of_steps, self._rows = torch.empty(0), list[Tensor]()
        """Memory for the noise of several steps, and its rows."""

    def draw(self) -> list[Tensor]:
        """Refill the buffer; return `draws` times one view per parameter, in its shape. The next overwrites them."""
        device = self._prepared()
        if not self._views or self._buffer.device != device:
            self._allocate(device)
        if self._pending is not None:
            self._wait()
        else:
            self._fill()
        return self._views

    def draw_steps(self, steps: int, memory: Tensor | None = None) -> Tensor:
        """Return the numbers of the next steps, shape (K, C, columns); the next call overwrites them.

        Args:
            memory: what they are drawn into, of that shape or for more steps; it keeps memory of its own otherwise.
        """
        self.states()
        first, chains = self._parameters[0], self.num_chains
        shape = (max(steps, len(self._rows) // chains), chains, self.draws * self._starts[-1])
        if memory is None and (self._of_steps.shape != shape or self._of_steps.device != first.device):
            memory = torch.empty(shape, dtype=first.dtype, device=first.device)
        if memory is not None and memory is not self._of_steps:
            self._of_steps = memory
            self._rows = [row for step in memory.unbind() for row in step.unbind()]
        for chain, generator in enumerate(self._generators):
            for row in self._rows[chain : steps * chains : chains]:
                row.normal_(generator=generator)
        return self._of_steps[:steps]

    def in_place(self) -> tuple[Tensor, Callable[[], None], list[torch.Generator]]:
        """Return the buffer, shape (C, columns), what refills it, and the generators that it takes."""
        self.states()
        device = self._device
        if not self._views or self._buffer.device != device:
            self._allocate(device)
        return self._buffer, self._fill, self._generators

    def states(self) -> list[Tensor]:
        """Return the generators' states, with which the next draw begins."""
        self._prepared()
        if self._pending is not None:
            self._wait()
            self.go_back(self._states)
        return [generator.get_state() for generator in self._generators]

    def go_back(self, states: Sequence[Tensor]) -> None:
        """Draw again from states of the generators on."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    @property
    def is_large(self) -> bool:
        """Whether a step's noise is to be drawn in blocks, by a rule that takes them."""
        if self._large is None:
            numel, first = sum(p.numel() for p in self._parameters), self._parameters[0]
            each = (p[0] if self.num_chains > 1 else p for p in self._parameters)
            self._large = (
                numel > WHOLE
                and block_width(first.device, self.num_chains) * self.num_chains < numel
                and self.draws == 1
                and self.ahead is not True
                and all(p.is_contiguous() for p in each)
            )
        return self._large

    @property
    def width(self) -> int:
        """The columns of a block."""
        return block_width(self._parameters[0].device, self.num_chains)

    def nbytes(self, takes_blocks: bool) -> int:
        """Return the bytes of the memory in which noise is drawn."""
        size = self._parameters[0].element_size()
        if takes_blocks and self.is_large:
            return size * self.num_chains * (self.width + TOGETHER)
        return size * self.draws * sum(p.numel() for p in self._parameters)

    def begin(self, in_blocks: bool = False) -> None:
        """Begin a step's noise: draw it, or let its users draw it in blocks."""
        self.in_blocks = in_blocks
        if not in_blocks:
            self.draw()
            return
        device, shape = self._prepared(), (self.num_chains, self.width + TOGETHER)
        if self._scratch.device != device or self._scratch.shape != shape:
            self._scratch = torch.empty(shape, device=device, dtype=self._parameters[0].dtype)
        self._span = (0, 0)

    def of(self, places: Sequence[int], as_rows: bool = False) -> "list[Tensor] | NoiseBlocks":
        """Return the step's noise of some parameters, `draws` times one tensor for each; `as_rows` for parameters that
        follow one another as one tensor of shape (C, d)."""
        if self.in_blocks:
            return NoiseBlocks(self, [self._starts[place] for place in places])
        if as_rows:
            low, high, total = self._starts[places[0]], self._starts[places[-1] + 1], self._starts[-1]
            return [self._buffer[:, low + skip : high + skip] for skip in range(0, self.draws * total, total)]
        total = len(self._parameters)
        return [self._views[first + place] for first in range(0, len(self._views), total) for place in places]

    def blocks(self, start: int, stop: int, silent: bool) -> Iterator[tuple[int, int, Tensor | None]]:
        """Yield the first and last columns of blocks that cover those from `start` to `stop`, with their numbers, shape
        (C, b), or with None if `silent`; a step's columns come in order."""
        if silent:
            for first in range(start, stop, width := self.width):
                yield first, min(first + width, stop), None
            return
        while True:
            first, last = self._span
            if last > start:
                yield first, last, self._scratch[:, : last - first]
            if last >= stop:
                return
            self._fill_block()

    def _fill_block(self) -> None:
        """Draw the next block; the last one has what is left."""
        first, columns, width = self._span[1], self._starts[-1], self._scratch.shape[1] - TOGETHER
        last = first + width if columns - first - width >= TOGETHER else columns
        for row, generator in zip(self._scratch[:, : last - first], self._generators, strict=True):
            row.normal_(generator=generator)
        for low, high in self._silent:
            self._scratch[:, max(low - first, 0) : max(min(high, last) - first, 0)].zero_()
        self._span = first, last

    def finish(self) -> None:
        """Draw the blocks that a step has not used."""
        while self.in_blocks and self._span[1] < self._starts[-1]:
            self._fill_block()

    def draw_ahead(self) -> None:
        """Start the next draw if there is a background thread; the views of the last draw are overwritten."""
        if self._worker is not None and self._pending is None:
            self._states = [generator.get_state() for generator in self._generators]
            self._pending = self._worker.submit(self._fill)

    def _fill(self) -> None:
        for row, generator in zip(self._buffer, self._generators, strict=True):
            row.normal_(generator=generator)
        for low, high in self._silent:
            self._buffer[:, low:high].zero_()

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _prepared(self) -> torch.device:
        """Seed the generators for the parameters' device at its first draw, and return it."""
        device = self._parameters[0].device
        if self._generators and self._device == device:
            return device
        self._wait()
        self._device, self._large, self._views = device, None, []
        self._starts = [0, *accumulate(p.numel() // self.num_chains for p in self._parameters)]
        self._silent = []
        for place, row in self.held.items():
            parameter = self._parameters[place]
            size = parameter.shape[int(self.num_chains > 1) + 1 :].numel()
            starts = (self._starts[place] + row * size + draw * self._starts[-1] for draw in range(self.draws))
            self._silent += [(start, start + size) for start in starts]
        self._generators = []
        for chain in range(self.first_chain, self.first_chain + self.num_chains):
            generator = torch.Generator(device=device)
            generator.manual_seed(derive_seed(self.seed, "noise", chain))
            self._generators.append(generator)
        if self._loaded is not None:
            self._restore(self._loaded, device)
            self._loaded = None
        return device

    def _allocate(self, device: torch.device) -> None:
        shaped = [*self._parameters] * self.draws
        starts = [0, *accumulate(p.numel() // self.num_chains for p in shaped)]
        self._buffer = torch.empty(self.num_chains, starts[-1], device=device, dtype=shaped[0].dtype)
        ranges = zip(shaped, starts, starts[1:], strict=False)
        self._views = [self._buffer[:, start:stop].view(p.shape) for p, start, stop in ranges]
        ahead = self.ahead if self.ahead is not None else _core_to_spare() and self._buffer.numel() >= WORTH_A_THREAD
        self._worker = ThreadPoolExecutor(1, "noise") if ahead and device.type == "cpu" else None

    def _restore(self, state: dict[str, Any], device: torch.device) -> None:
        if state["device"] == device.type:
            for generator, saved in zip(self._generators, state["generators"], strict=True):
                generator.set_state(saved.cpu())
            model = device_text(device)
            if state.get("model", model) != model:
                warnings.warn(
                    f"The checkpoint's noise was drawn on {state['model']}, this run is on {model}, and a GPU's random "
                    "numbers depend on its multiprocessors: the run is valid but not bit-identical to an uninterrupted "
                    "one; resume on the same model for equal bits.",
                    stacklevel=2,
                )
            return
        warnings.warn(
            f"The checkpoint's noise generators are for {state['device']}, this run is on {device.type}: the noise "
            "continues with a new stream, so the run is valid but not bit-identical to an uninterrupted one.",
            stacklevel=2,
        )
        for index, generator in enumerate(self._generators):
            generator.manual_seed(derive_seed(self.seed, "noise", self.first_chain + index, "moved", state["step"]))

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the generators' states (one uint8 tensor each) and their device."""
        if self._loaded is not None:
            return self._loaded
        device = self._device
        model = {} if device.type == "cpu" else {"model": device_text(device)}
        return model | {
            "seed": self.seed,
            "step": step,
            "device": device.type,
            "generators": self._states if self._pending is not None else [g.get_state() for g in self._generators],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`, which must have the same number of chains."""
        self._wait()
        self.seed = state["seed"]
        self._views, self._generators = [], []
        self._loaded = dict(state) if state["generators"] else None


# -- blocks ------------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """Parts of lists of tensors of a step: whole ones, or their columns in one block of the noise."""

    lists: Sequence[list[Tensor]]
    noise: Any
    """The normal numbers of each part; None in a step without noise."""
    places: list[int] | None = None
    """The place of each part's tensor in its list; None for whole tensors."""
    offset: int = 0
    """The first part's first column in its tensor."""


class NoiseBlocks:
    """A step's noise of some parameters, which is drawn as it is used, once and in order; a silent one has none."""

    def __init__(self, noise: ChainNoise, starts: Sequence[int], silent: bool = False) -> None:
        self._noise = noise
        self._starts = starts
        self._silent = silent

    def along(self, *lists: list[Tensor]) -> Iterator[Block]:
        """Yield the parts of lists of tensors block by block, each part with shape (C, b).

        Args:
            lists: tensors in the parameters' shapes, or one of shape (C, d) that stands for all.
        """
        rows = [[tensor.view(self._noise.num_chains, -1) for tensor in tensors] for tensors in lists]
        sizes = [row.shape[1] for row in rows[0]]
        starts = [*accumulate(sizes, initial=0)][:-1] if self._silent else self._starts[: len(sizes)]
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        place = 0
        for first, last, drawn in self._noise.blocks(starts[0], ends[-1], self._silent):
            while ends[place] <= first:
                place += 1
            within = []
            for index in range(place, len(starts)):
                if starts[index] >= last:
                    break
                start, low, high = starts[index], max(first, starts[index]), min(last, ends[index])
                if low < high:
                    within.append((index, slice(low - start, high - start), slice(low - first, high - first)))
            if within:
                parts = [[tensors[index][:, own] for index, own, _ in within] for tensors in rows]
                noise = None if drawn is None else [drawn[:, columns] for *_, columns in within]
                yield Block(parts, noise, [index for index, *_ in within], within[0][1].start)


def along(noise: "list[Tensor] | NoiseBlocks | None", *lists: list[Tensor]) -> Iterable[Block]:
    """Yield lists of tensors with their noise: as they are, or in the blocks of a noise that is drawn so."""
    return noise.along(*lists) if isinstance(noise, NoiseBlocks) else [Block(lists, noise)]


def _core_to_spare() -> bool:
    """Return whether this process has at least two cores, with the machine's cores split evenly over the processes."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return usable_cores() // (torch.distributed.get_world_size() if distributed else 1) >= 2
