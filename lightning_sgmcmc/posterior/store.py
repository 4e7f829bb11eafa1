"""Stores of posterior samples: the interface, samples in memory or 16 bits, and views of another store."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.chains.samples import PosteriorSample, SampleRecord, on_cpu, record_of
from lightning_sgmcmc.checks import check_choice
from lightning_sgmcmc.contour.learned import LearnedContour
from lightning_sgmcmc.tables import Columns, TargetScaling

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Narrow:
    """How a store keeps float32 parameters: rounded to 16 bits, after the base is subtracted; float32 again on reading.

        stored = round(θ - base),   read = stored + base

    Buffers, such as running statistics, and scales of a prior are kept as they are.
    """

    dtype: str
    base: Mapping[str, Tensor] = field(default_factory=dict)

    def check(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise unless the parameters of a network are float32."""
        for name, parameter in parameters.items():
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                raise ValueError(
                    f"dtype='{self.dtype}' rounds float32 parameters, and '{name}' is {parameter.dtype}: leave dtype "
                    "out, or sample a float32 network"
                )

    def narrowed(self, sample: PosteriorSample) -> PosteriorSample:
        """Return a sample as it is stored."""
        self.check(sample.parameters)
        return replace(sample, parameters={name: self._narrow(name, p) for name, p in sample.parameters.items()})

    def _narrow(self, name: str, parameter: Tensor) -> Tensor:
        if not parameter.is_floating_point():
            return parameter
        difference = parameter - self.base[name].to(parameter.device) if name in self.base else parameter
        found = difference.to(DTYPES[self.dtype])
        if bool((found.isinf() & parameter.isfinite()).any()):
            raise ValueError(f"'{name}' has numbers above the largest {self.dtype}: pass dtype='bfloat16'")
        return found

    def widened(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return stored parameters as float32."""
        kind, found = DTYPES[self.dtype], dict(parameters)
        for name, tensor in parameters.items():
            if tensor.dtype != kind:
                continue
            found[name] = tensor.float()
            if name in self.base:
                base = self.base[name]
                if base.shape != tensor.shape or base.dtype != torch.float32:
                    raise ValueError(
                        f"the samples' base has '{name}' of shape {tuple(base.shape)} and {base.dtype}, and a sample "
                        f"of {tuple(tensor.shape)}: restore base.safetensors"
                    )
                found[name] += base
        return found


def narrow_dtype(dtype: Any) -> str | None:
    """Return the name of a narrow type, given by its name or as torch has it; None for None and float32."""
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if name in (None, "float32"):
        return None
    check_choice("dtype", name, ("float32", *DTYPES))
    return name


# -- stores ------------------------------------------------------------------------------------------------------------


class SampleStore(ABC):
    """An ordered collection of samples, each with a record."""

    records: list[SampleRecord]

    contour: LearnedContour | None = None
    """The final learned state of a contour sampler, for weights from the final π."""

    is_resampled: bool = False
    """Whether samples were drawn by their weights, so that they are one chain for ArviZ."""

    columns: Columns = Columns()
    """What inputs and targets are, for inputs and predictions in the data's units, as the fit's datamodule has said."""

    @property
    def scaling(self) -> TargetScaling | None:
        """The scaling of the targets; None if they were not scaled, or if unknown."""
        return self.columns.targets

    @scaling.setter
    def scaling(self, scaling: TargetScaling | None) -> None:
        self.columns = replace(self.columns, targets=scaling)

    @property
    def model_description(self) -> Any:
        """Plain data that describe the network, or None."""
        return None

    @property
    def narrow(self) -> Narrow | None:
        """How parameters are stored in 16 bits; None if they are stored as they are."""
        return None

    @property
    def shared(self) -> dict[str, Tensor]:
        """What is not sampled and all samples have in common, by name."""
        return {}

    def take_over(self, other: "SampleStore") -> None:
        """Take what another store knows of its samples together, of which this one gets copies."""
        self.contour, self.columns, self.is_resampled = other.contour, other.columns, other.is_resampled

    @abstractmethod
    def append(self, sample: PosteriorSample) -> None:
        """Add a sample at the end."""

    @abstractmethod
    def __getitem__(self, index: int) -> PosteriorSample: ...

    def place(self, index: int) -> "tuple[SampleStore, int]":
        """Return the store that has a sample, through all views, and its index there."""
        return self, index

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a sample's parameters by name."""
        return {name: tuple(tensor.shape) for name, tensor in self[index].parameters.items()}

    def parameters(self, index: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the named parameters of a sample."""
        parameters = self[index].parameters
        return {name: parameters[name] for name in names}

    def keep(self, records: list[SampleRecord]) -> None:
        """Drop all samples except those with the given records.

        Raises:
            NotImplementedError: for a view of other stores, which is read-only; likewise below.
        """
        raise NotImplementedError

    def keep_newest(self, count: int) -> set[str]:
        """Drop all samples except the newest; return the names of files that can be deleted."""
        raise NotImplementedError

    def set_log_weights(self, log_weights: Sequence[float]) -> None:
        """Replace the log importance weights of all samples, in their order."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[PosteriorSample]:
        return (self[index] for index in range(len(self)))


class MemoryStore(SampleStore):
    """Samples in host memory.

    Args:
        narrow: how parameters are kept in 16 bits; None keeps them as they are.
    """

    def __init__(self, narrow: Narrow | None = None) -> None:
        self.records = []
        self._narrow = narrow
        self._samples: list[PosteriorSample] = []
        self._shared: dict[str, Tensor] = {}

    @property
    def narrow(self) -> Narrow | None:
        return self._narrow

    @property
    def shared(self) -> dict[str, Tensor]:
        return self._shared

    def append(self, sample: PosteriorSample) -> None:
        if not self._shared:
            self._shared = {name: tensor.detach().to("cpu", copy=True) for name, tensor in sample.shared.items()}
        stored = sample if self._narrow is None else self._narrow.narrowed(sample)
        self._samples.append(replace(on_cpu(stored), shared=self._shared))
        self.records.append(record_of(sample))

    def __getitem__(self, index: int) -> PosteriorSample:
        sample = self._samples[index]
        return sample if self._narrow is None else replace(sample, parameters=self._narrow.widened(sample.parameters))

    def set_log_weights(self, log_weights: Sequence[float]) -> None:
        pairs = zip(self._samples, log_weights, strict=True)
        self._samples = [replace(sample, log_weight=weight) for sample, weight in pairs]
        self.records = [record_of(sample) for sample in self._samples]

    def keep(self, records: list[SampleRecord]) -> None:
        chosen = {repr(r) for r in records}
        self._samples = [s for s, r in zip(self._samples, self.records, strict=True) if repr(r) in chosen]
        self.records = [r for r in self.records if repr(r) in chosen]

    def keep_newest(self, count: int) -> set[str]:
        surplus = max(len(self.records) - count, 0)
        del self._samples[:surplus]
        del self.records[:surplus]
        return set()


class StoreView(SampleStore):
    """Read-only samples of other stores, in any order and with repetition, with chains and weights of their own.

    Args:
        places: the store and the index there of each sample.
        records: of the samples, with their chains and weights in this view.
        store: whose columns, shared tensors and, if it is the only one, contour the samples have.
    """

    def __init__(
        self, places: Sequence[tuple[SampleStore, int]], records: list[SampleRecord], store: SampleStore
    ) -> None:
        self._places = list(places)
        self.records = records
        self.columns, self._store = store.columns, store
        self._is_of_one = all(own is store for own, _ in places)
        self.is_resampled = any(own.is_resampled for own, _ in places)

    @property
    def source(self) -> SampleStore | None:
        """The store that all samples are from; None for samples of several."""
        if not self._is_of_one:
            return None
        return self._store.source if isinstance(self._store, StoreView) else self._store

    @property
    def shared(self) -> dict[str, Tensor]:
        return self._store.shared

    @property
    def narrow(self) -> Narrow | None:
        """The store's; None for samples of several stores."""
        return self._store.narrow if self._is_of_one else None

    @property
    def model_description(self) -> Any:
        return self._store.model_description

    @property
    def contour(self) -> LearnedContour | None:  # type: ignore[override]
        """The store's contour; None for samples of several stores."""
        return self._store.contour if self._is_of_one else None

    def append(self, sample: PosteriorSample) -> None:
        raise TypeError("samples cannot be appended to a selection from stores: use in_memory() first")

    def __getitem__(self, index: int) -> PosteriorSample:
        record, (store, place) = self.records[index], self._places[index]
        sample = store[place]
        own = {name: getattr(record, name) for name in ("chain", "log_weight", "comparable")}
        return replace(sample, **own, shared=self.shared or sample.shared)

    def place(self, index: int) -> tuple[SampleStore, int]:
        store, place = self._places[index]
        return store.place(place)

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        store, place = self._places[index]
        return store.shapes(place)

    def parameters(self, index: int, names: Iterable[str]) -> dict[str, Tensor]:
        store, place = self._places[index]
        return store.parameters(place, names)
