"""The states of a process's chains, copied together when they become samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_sgmcmc.chains.sample import PosteriorSample
from lightning_sgmcmc.chains.transfers import HostCopies
from lightning_sgmcmc.finite import STATISTICS
from lightning_sgmcmc.tensors import as_rows

Parts = dict[str, dict[str, Tensor]]
"""A sample's parameters, buffers and scales, each by name."""
PARTS = ("parameters", "buffers", "scales")
"""The fields of a sample that hold tensors by name."""


class FlatStates:
    """Copies of the states of C chains: for each dtype one tensor (C, P), with a row for each chain.

    Each tensor begins at an even column, so that pairs of numbers in its last axis can be viewed as complex ones.

    Args:
        parts: parameters, buffers and scales of all chains by name, with a leading chain axis where C > 1.
        num_chains: C.
    """

    def __init__(self, parts: Mapping[str, Mapping[str, Tensor]], num_chains: int) -> None:
        self._num_chains = num_chains
        self._names: dict[torch.dtype, list[tuple[str, str, torch.Size]]] = {}
        """Part, name and shape of each tensor in the flat tensor of a dtype, in the order of its columns."""
        self._order = {part: list(parts[part]) for part in PARTS}
        self._ends: dict[torch.dtype, dict[int, int]] = {}
        """The ends of the columns of parameters, running statistics, other buffers and scales, by dtype."""
        rows: dict[torch.dtype, list[Tensor]] = {}
        statistics = {name: tensor for name, tensor in parts["buffers"].items() if name.endswith(STATISTICS)}
        others = {name: tensor for name, tensor in parts["buffers"].items() if name not in statistics}
        kinds = (("parameters", parts["parameters"]), ("buffers", statistics), ("buffers", others))
        for kind, (part, tensors) in enumerate((*kinds, ("scales", parts["scales"]))):
            for name, tensor in tensors.items():
                row = as_rows(tensor.detach(), num_chains)
                rows.setdefault(tensor.dtype, []).extend([row, row[:, :1]] if row.shape[1] % 2 else [row])
                shape = tensor.shape[1:] if num_chains > 1 else tensor.shape
                self._names.setdefault(tensor.dtype, []).append((part, name, shape))
            for dtype, pieces in rows.items():
                self._ends.setdefault(dtype, {})[kind] = sum(piece.shape[1] for piece in pieces)
        self.flat = {dtype: torch.cat(pieces, 1) for dtype, pieces in rows.items()}

    def of_chain(self, row: int, flat: Mapping[torch.dtype, Tensor] | None = None) -> Parts:
        """Return a chain's tensors, which are views.

        Args:
            row: the chain's row.
            flat: copies of the flat states, instead of these.
        """
        flat = self.flat if flat is None else flat
        found: Parts = {part: {} for part in PARTS}
        for dtype, names in self._names.items():
            sizes = [shape.numel() for _, _, shape in names]
            pieces = flat[dtype][row].split([size + size % 2 for size in sizes])
            for (part, name, shape), size, piece in zip(names, sizes, pieces, strict=True):
                found[part][name] = piece[:size].view(shape)
        return {part: {name: found[part][name] for name in names} for part, names in self._order.items()}

    def suspects(self) -> Tensor:
        """Return for each chain whether a parameter or running statistic may be NaN or infinite, or another buffer NaN;
        masks often have infinities.

        A sum of finite numbers may overflow, so a suspect is to be examined; other chains are sound.

        Returns:
            shape (C,), bool, on the device.
        """
        found: list[Tensor] = []
        for dtype, flat in self.flat.items():
            if not dtype.is_floating_point:
                continue
            ends, wide = self._ends[dtype], torch.promote_types(dtype, torch.float32)
            finite, numbers = ends.get(1, ends.get(0, 0)), ends.get(2, ends.get(1, ends.get(0, 0)))
            found.append(~flat[:, :finite].sum(1, dtype=wide).isfinite())
            found.append(flat[:, finite:numbers].sum(1, dtype=wide).isnan())
        return torch.stack(found).any(0) if found else torch.zeros(self._num_chains, dtype=torch.bool)


class Drawing:
    """Samples that are drawn together.

    Args:
        samples: the samples, in their order.
        states: the flat states of which their tensors are views; None if they are tensors of their own.
        rows: the row of each sample in these.
    """

    def __init__(
        self, samples: Sequence[PosteriorSample], states: FlatStates | None = None, rows: Sequence[int] = ()
    ) -> None:
        self.samples = list(samples)
        self._states = states
        self._rows = list(rows)
        self._copies: HostCopies | None = None

    def host_copy(self, sample: PosteriorSample) -> Callable[[], PosteriorSample]:
        """Return a function that returns the sample in host memory, once the device has copied it.

        The first call begins one copy of all samples of the drawing.

        Args:
            sample: one of the drawing's samples.
        """
        place = next((i for i, own in enumerate(self.samples) if own is sample), None)
        if place is None:
            return Drawing([sample]).host_copy(sample)
        if self._copies is None:
            self._copies = HostCopies(self._originals())
        return lambda: self._on_host(place)

    @property
    def on_cuda(self) -> bool:
        """Whether the samples are in a CUDA device's memory."""
        return any(tensor.device.type == "cuda" for tensor in self._originals())

    def _originals(self) -> list[Tensor]:
        if self._states is not None:
            return list(self._states.flat.values())
        return [t for sample in self.samples for part in PARTS for t in getattr(sample, part).values()]

    def _on_host(self, place: int) -> PosteriorSample:
        assert self._copies is not None
        copies, sample = self._copies.wait(), self.samples[place]
        if self._states is not None:
            flat = dict(zip(self._states.flat, copies, strict=True))
            return _with_parts(sample, self._states.of_chain(self._rows[place], flat))
        remaining = iter(copies)
        for own in self.samples[: place + 1]:
            parts = {part: {name: next(remaining) for name in getattr(own, part)} for part in PARTS}
        return _with_parts(sample, parts)


def _with_parts(sample: PosteriorSample, parts: Parts) -> PosteriorSample:
    return replace(sample, parameters=parts["parameters"], buffers=parts["buffers"], scales=parts["scales"])
