"""The functions that a learner calls at every step, for one contour: plain, or compiled to a few kernels on a GPU."""

from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.contour.contour import Contour, ContourState, Location
from lightning_sgmcmc.tensors import Control


class ContourKernels:
    """A contour's functions with its edges on a device.

    Compiled, a function is a few kernels instead of dozens of operations on tensors of a handful of numbers. The step
    size and the temperature, which change, are then tensors on the device: a compiled function would be compiled again
    for each new number.

    Args:
        contour: partition and rules.
        device: of the chains.
        compiled: whether to compile the functions.
    """

    def __init__(self, contour: Contour, device: torch.device, compiled: bool = False) -> None:
        self._contour = contour
        self._edges = contour.partition.edges(device)
        self._device = device
        self._on_device: dict[str, tuple[float, Tensor]] = {}
        self._compiled = compiled
        if compiled:
            self._locate, self._learn = torch.compile(self._locate), torch.compile(self._learn)  # type: ignore[method-assign]
            self._learn_coded, self._encode = torch.compile(self._learn_coded), torch.compile(self._encode)  # type: ignore[method-assign]

    def locate(self, state: ContourState, energy: Tensor, temperature: Control = 1.0) -> Location:
        """Return `Contour.locate`."""
        return Location(*self._locate(state, energy, self._input("temperature", temperature)))

    def learn(self, state: ContourState, location: Location, step_size: float) -> None:
        """Update π from the chains' locations."""
        self._learn(state, location.index, location.log_density, self._input("step size", step_size))

    def learn_coded(self, state: ContourState, codes: Tensor, step_size: float) -> None:
        """Update π from encoded energies."""
        self._learn_coded(state, codes, self._input("step size", step_size))

    def encode(self, location: Location) -> Tensor:
        """Return the encoded energies of the chains."""
        return self._encode(location.energy, location.index)

    def _input(self, name: str, value: Control) -> Control:
        """Return a number as the functions take it."""
        if not self._compiled or isinstance(value, Tensor):
            return value
        kept, tensor = self._on_device.get(name, (None, None))
        if tensor is None:
            tensor = torch.full((), value, dtype=torch.float64, device=self._device)
        elif kept != value:
            tensor.fill_(value)
        self._on_device[name] = value, tensor
        return tensor

    def _locate(self, state: ContourState, energy: Tensor, temperature: Control) -> tuple[Tensor, ...]:
        return self._contour.locate(state, energy, temperature, self._edges)

    def _learn(self, state: ContourState, index: Tensor, log_density: Tensor, step_size: Control) -> None:
        self._contour.learn_(state, index, log_density, step_size)

    def _learn_coded(self, state: ContourState, codes: Tensor, step_size: Control) -> None:
        location = self._contour.locate(state, self._contour.partition.decode(codes), 1.0, self._edges)
        self._contour.learn_(state, location.index, location.log_density, step_size)

    def _encode(self, energy: Tensor, index: Tensor) -> Tensor:
        return self._contour.partition.encode(energy, index)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a contour's functions belong to a run: copy what they learned")
