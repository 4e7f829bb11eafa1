"""Samples as rows of a few tensors, in which they travel between processes."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.chains.drawing import PARTS
from lightning_sgmcmc.chains.sample import PosteriorSample

NUMBERS = tuple(field.name for field in fields(PosteriorSample) if field.name not in (*PARTS, "shared"))
KINDS = (int, float, bool)
"""Types of the other fields, which may also be None; float64 holds them exactly, integers below 2^53."""


class SampleRows:
    """The form of a run's samples: which tensors they hold, and where each lies in a row.

    Args:
        sample: any of them; all samples of a run have its form.
    """

    def __init__(self, sample: PosteriorSample) -> None:
        self._places: list[tuple[str, str, torch.dtype, torch.Size, slice]] = []
        sizes: dict[torch.dtype, int] = {}
        for part in PARTS:
            for name, tensor in getattr(sample, part).items():
                start = sizes.get(tensor.dtype, 0)
                sizes[tensor.dtype] = start + tensor.numel()
                place = slice(start, start + tensor.numel())
                self._places.append((part, name, tensor.dtype, tensor.shape, place))
        self.dtypes = tuple(sizes)
        self._shared = sample.shared

    def pack(self, samples: Sequence[PosteriorSample], device: torch.device) -> list[Tensor]:
        """Return the samples' tensors, one tensor (S, P) on a device for each of `dtypes`."""
        packed = []
        for dtype in self.dtypes:
            names = [(part, name) for part, name, own, *_ in self._places if own == dtype]
            flat = [getattr(sample, part)[name].reshape(-1).to(device) for sample in samples for part, name in names]
            packed.append(torch.cat(flat).view(len(samples), -1))
        return packed

    def unpack(self, rows: Sequence[Tensor], numbers: Tensor) -> Iterator[PosteriorSample]:
        """Yield the samples that `pack` and `numbers_of` were given; each owns its tensors.

        Args:
            rows: one tensor (S, P) for each of `dtypes`.
            numbers: shape (S, 2·F).
        """
        for index, own in enumerate(numbers.tolist()):
            row = {dtype: tensor[index].clone() for dtype, tensor in zip(self.dtypes, rows, strict=True)}
            held: dict[str, Any] = {part: {} for part in PARTS}
            for part, name, dtype, shape, place in self._places:
                held[part][name] = row[dtype][place].view(shape)
            yield PosteriorSample(**_numbers(own), **held, shared=self._shared)


def numbers_of(samples: Sequence[PosteriorSample]) -> Tensor:
    """Return the values of the samples' other fields and their types, shape (S, 2·F), float64, in the host's memory."""
    table = []
    for sample in samples:
        values = [getattr(sample, name) for name in NUMBERS]
        kinds = [-1 if value is None else KINDS.index(type(value)) for value in values]
        table.append([0.0 if value is None else float(value) for value in values] + list(map(float, kinds)))
    return torch.tensor(table, dtype=torch.float64)


def _numbers(row: Sequence[float]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value, kind in zip(NUMBERS, row[: len(NUMBERS)], row[len(NUMBERS) :], strict=True):
        found[name] = None if kind < 0 else KINDS[int(kind)](value)
    return found
