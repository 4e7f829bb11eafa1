"""The functions that a learner calls at every step, for one contour: plain, or compiled to a few kernels on a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.contour.contour import Contour, ContourState, Location
from lightning_sgmcmc.tensors import Control


class ContourKernels:
    """A contour's functions with its edges on a device.

    Compiled, a function is a few kernels instead of dozens of operations on tensors of a handful of numbers. The step
    size and the temperature, which change, are then tensors of shape (): a compiled function would be compiled again
    for each new number. They are in the host's memory, from which a kernel takes them as arguments.

    Args:
        contour: partition and rules.
        device: of the chains.
        compiled: whether to compile the functions.
    """

    def __init__(self, contour: Contour, device: torch.device, compiled: bool = False) -> None:
        self._contour = contour
        self._device = device
        self._compiled = compiled
        self._edges = contour.partition.edges(device)
        functions: list[Callable[..., Any]] = [self._locate, self._encode, self._learn, self._learn_coded]
        if compiled:
            functions = [torch.compile(function, dynamic=False) for function in functions]
        self._locates, self._encodes, self._learns, self._learns_coded = functions

    def locate(self, state: ContourState, energy: Tensor, temperature: Control = 1.0) -> Location:
        """Return `Contour.locate`."""
        return Location(*self._locates(state, energy, self._input(temperature)))

    def encode(self, location: Location) -> Tensor:
        """Return the encoded energies of the chains."""
        code: Tensor = self._encodes(location.energy, location.index)
        return code

    def learn(self, state: ContourState, location: Location, step_size: float) -> None:
        """Update π from the chains' locations."""
        self._learns(state, location.index, location.log_density, self._input(step_size))

    def learn_coded(self, state: ContourState, codes: Tensor, step_size: float) -> None:
        """Update π from the encoded energies of all chains, shape (P,)."""
        self._learns_coded(state, codes, None, self._input(step_size))

    def learn_together(self, state: ContourState, location: Location, step_size: float) -> None:
        """Update π from the locations of all chains by way of their encoded energies, as chains of several processes
        do."""
        self._learns_coded(state, location.energy, location.index, self._input(step_size))

    def _input(self, value: Control) -> Control:
        """Return a number as the functions take it."""
        return torch.tensor(value, dtype=torch.float64) if self._compiled and not isinstance(value, Tensor) else value

    def _locate(self, state: ContourState, energy: Tensor, temperature: Control) -> tuple[Tensor, ...]:
        return self._contour.locate(state, energy, temperature, self._edges)

    def _encode(self, energy: Tensor, index: Tensor) -> Tensor:
        return self._contour.partition.encode(energy, index)

    def _learn(self, state: ContourState, index: Tensor, log_density: Tensor, step_size: Control) -> None:
        if self._compiled:
            self._contour.learn_densely_(state, index, log_density, torch.as_tensor(step_size))
        else:
            self._contour.learn_(state, index, log_density, step_size)

    def _learn_coded(self, state: ContourState, codes: Tensor, index: Tensor | None, step_size: Control) -> None:
        """Update π from codes, or from energies with their bins."""
        partition = self._contour.partition
        codes = codes if index is None else partition.encode(codes, index)
        location = self._contour.locate(state, partition.decode(codes), 1.0, self._edges, index)
        self._learn(state, location.index, location.log_density, step_size)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._contour, self._device, self._compiled)  # compiled functions cannot be copied
