"""Which training data a loader holds, so that numbers computed from them are not used for others."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from lightning_sgmcmc.evaluation.loader_average import loaders_of

MOST_TENSORS = 16
"""Of a list of an object's tensors that are looked at."""


@dataclass(frozen=True, eq=False)
class HeldData:
    """The data sets of a trainer's training loaders and their tensors at one time; it does not keep them alive.

    Attributes:
        objects: references to the data sets and tensors.
        versions: how often each tensor has been written in place.
    """

    objects: tuple["weakref.ref[Any]", ...]
    versions: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return HeldData, ((), self.versions)  # a copy does not know which data are held

    def is_same(self, other: "HeldData") -> bool:
        """Return whether no data set or tensor was replaced or written in between."""
        if self.versions != other.versions or len(self.objects) != len(other.objects):
            return False
        pairs = zip(self.objects, other.objects, strict=True)
        return all((own := one()) is not None and own is two() for one, two in pairs)


def held_data(trainer: pl.Trainer) -> HeldData:
    """Return what identifies the training data that a trainer holds now."""
    datasets = [getattr(loader, "dataset", None) for loader in loaders_of(trainer.train_dataloader)]
    found = [part for dataset in datasets for part in _parts(dataset, 3)]
    tensors = [part for part in found if isinstance(part, Tensor) and not part.is_inference()]
    return HeldData(tuple(weakref.ref(part) for part in found), tuple(tensor._version for tensor in tensors))


def _parts(dataset: Any, depth: int) -> Iterator[Any]:
    """Yield a data set, those that it is a part of or consists of, and their tensors."""
    if depth == 0 or not hasattr(dataset, "__dict__"):
        return
    yield dataset
    for name, value in vars(dataset).items():
        each = value[:MOST_TENSORS] if isinstance(value, list | tuple) else (value,)
        yield from (part for part in each if isinstance(part, Tensor))
        if name in ("dataset", "datasets"):
            for part in each:
                yield from _parts(part, depth - 1)
