"""Injected Gaussian noise: one flat buffer that is reused, one generator per chain."""

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.process import usable_cores
from lightning_sgmcmc.seeding import derive_seed, device_text

WORTH_A_THREAD = 20_000
"""Number of elements below which passing the draw to another thread costs more than the draw."""


class ChainNoise:
    """Standard normal noise in the shapes of a set of parameters, one stream per chain.

    The noise of chain c is drawn in one call into row c of a buffer of shape `(num_chains, numel of one chain)`, by a
    generator seeded with `(seed, first_chain + c)`. So a chain's noise does not depend on the number of chains in its
    process or on the global generator, and ranks with the same chain draw the same noise.

    `ahead` draws the next step's noise in a background thread; None does so on a CPU with a spare core. `draws`, the
    normal tensors for each parameter, may change until the first draw.
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
        self._silent: list[Tensor] = []
        """The views of the buffer at held rows."""
        self._worker: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._states: list[Tensor] = []
        """The generators' states before the pending draw."""
        self._generators: list[torch.Generator] = []
        self._buffer = torch.empty(0)
        self._views: list[Tensor] = []
        self._loaded: dict[str, Any] | None = None

    def draw(self) -> list[Tensor]:
        """Refill the buffer; return `draws` times one view per parameter, in its shape. The next overwrites them."""
        if not self._views or self._buffer.device != self._parameters[0].device:
            self._allocate()
        if self._pending is not None:
            self._wait()
        else:
            self._fill()
        return self._views

    @property
    def rows(self) -> Tensor:
        """The last draw as one tensor, a row for each chain, shape (C, draws·P)."""
        return self._buffer

    def draw_ahead(self) -> None:
        """Start the next draw if there is a background thread; the views of the last draw are overwritten."""
        if self._worker is not None and self._pending is None:
            self._states = [generator.get_state() for generator in self._generators]
            self._pending = self._worker.submit(self._fill)

    def _fill(self) -> None:
        for row, generator in zip(self._buffer, self._generators, strict=True):
            row.normal_(generator=generator)
        for view in self._silent:
            view.zero_()

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _allocate(self) -> None:
        self._wait()
        first, shaped = self._parameters[0], [*self._parameters] * self.draws
        per_chain = sum(p.numel() for p in shaped) // self.num_chains
        self._buffer = torch.empty(self.num_chains, per_chain, device=first.device, dtype=first.dtype)
        self._views, start = [], 0
        for parameter in shaped:
            stop = start + parameter.numel() // self.num_chains
            self._views.append(self._buffer[:, start:stop].view(parameter.shape))
            start = stop
        axis = int(self.num_chains > 1)
        rows = ((view, self.held.get(place % len(self._parameters))) for place, view in enumerate(self._views))
        self._silent = [view.select(axis, row) for view, row in rows if row is not None]
        self._generators = []
        for chain in range(self.first_chain, self.first_chain + self.num_chains):
            generator = torch.Generator(device=first.device)
            generator.manual_seed(derive_seed(self.seed, "noise", chain))
            self._generators.append(generator)
        if self._loaded is not None:
            self._restore(self._loaded, first.device)
            self._loaded = None
        ahead = self.ahead if self.ahead is not None else _core_to_spare() and self._buffer.numel() >= WORTH_A_THREAD
        self._worker = ThreadPoolExecutor(1, "noise") if ahead and first.device.type == "cpu" else None

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
        device = self._buffer.device
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


def _core_to_spare() -> bool:
    """Return whether this process has at least two cores, with the machine's cores split evenly over the processes."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return usable_cores() // (torch.distributed.get_world_size() if distributed else 1) >= 2
