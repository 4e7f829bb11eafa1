"""Injected Gaussian noise: one kept flat buffer, one generator per chain."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.seeding import derive_seed


class ChainNoise:
    """Standard normal noise in the shapes of a set of parameters, one stream per chain.

    The noise of chain c is drawn in one call into row c of a buffer of shape `(num_chains, numel of one chain)`, by a
    generator that is seeded by `(seed, first_chain + c)`. So a chain's noise depends neither on how many chains share
    its process nor on the global generator, and ranks that hold the same chain draw the same noise.

    Args:
        parameters: all parameters, in the order in which they share the buffer. They share a device and a dtype.
        num_chains: number of chains C; with C > 1 every parameter has a leading axis of size C.
        seed: the run's seed.
        first_chain: global index of this process's first chain.
    """

    def __init__(self, parameters: Sequence[Tensor], num_chains: int, seed: int, first_chain: int = 0) -> None:
        self._parameters = parameters
        self.num_chains = num_chains
        self.seed = seed
        self.first_chain = first_chain
        self._generators: list[torch.Generator] = []
        self._buffer = torch.empty(0)
        self._views: list[Tensor] = []
        self._loaded: dict[str, Any] | None = None

    def draw(self) -> list[Tensor]:
        """Fill the buffer anew; return one view per parameter, in its shape. The next call overwrites them."""
        if not self._views or self._buffer.device != self._parameters[0].device:
            self._allocate()
        for row, generator in zip(self._buffer, self._generators, strict=True):
            row.normal_(generator=generator)
        return self._views

    def _allocate(self) -> None:
        first = self._parameters[0]
        per_chain = sum(p.numel() for p in self._parameters) // self.num_chains
        self._buffer = torch.empty(self.num_chains, per_chain, device=first.device, dtype=first.dtype)
        self._views, start = [], 0
        for parameter in self._parameters:
            stop = start + parameter.numel() // self.num_chains
            self._views.append(self._buffer[:, start:stop].view(parameter.shape))
            start = stop
        self._make_generators(first.device)

    def _make_generators(self, device: torch.device) -> None:
        self._generators = []
        for chain in range(self.first_chain, self.first_chain + self.num_chains):
            generator = torch.Generator(device=device)
            generator.manual_seed(derive_seed(self.seed, "noise", chain))
            self._generators.append(generator)
        if self._loaded is not None:
            self._restore(self._loaded, device)
            self._loaded = None

    def _restore(self, state: dict[str, Any], device: torch.device) -> None:
        if state["device"] == device.type:
            for generator, saved in zip(self._generators, state["generators"], strict=True):
                generator.set_state(saved.cpu())
            return
        warnings.warn(
            f"The checkpoint's noise generators are for {state['device']}, this run is on {device.type}: the noise "
            "goes on with a new stream, so the run is right but not bit-identical to an uninterrupted one.",
            stacklevel=2,
        )
        for index, generator in enumerate(self._generators):
            generator.manual_seed(derive_seed(self.seed, "noise", self.first_chain + index, "moved", state["step"]))

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the generators' states (one uint8 tensor each) and where they live."""
        if self._loaded is not None:
            return self._loaded
        return {
            "seed": self.seed,
            "step": step,
            "device": self._buffer.device.type,
            "generators": [generator.get_state() for generator in self._generators],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the states that `state_dict` returned.

        Raises:
            ValueError: if the state holds another number of chains.
        """
        self.seed = state["seed"]
        saved = state["generators"]
        if saved and len(saved) != self.num_chains:
            raise ValueError(f"the saved sampler has {len(saved)} chains, this one has {self.num_chains}")
        self._views, self._generators = [], []
        self._loaded = dict(state) if saved else None
