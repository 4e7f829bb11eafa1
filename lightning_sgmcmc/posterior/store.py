"""Stores of posterior samples: the interface, samples in memory, and views of another store."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from lightning_sgmcmc.chains.samples import PosteriorSample, SampleRecord, on_cpu, record_of
from lightning_sgmcmc.contour.learned import LearnedContour
from lightning_sgmcmc.tables import Columns, TargetScaling


class SampleStore(ABC):
    """An ordered collection of samples, each with a record."""

    records: list[SampleRecord]

    contour: LearnedContour | None = None
    """The final learned state of a contour sampler, for weights from the final π."""

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
    def shared(self) -> dict[str, Tensor]:
        """What is not sampled and all samples have in common, by name."""
        return {}

    @abstractmethod
    def append(self, sample: PosteriorSample) -> None:
        """Add a sample at the end."""

    @abstractmethod
    def __getitem__(self, index: int) -> PosteriorSample: ...

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a sample's parameters by name."""
        return {name: tuple(tensor.shape) for name, tensor in self[index].parameters.items()}

    def parameters(self, index: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the named parameters of a sample."""
        parameters = self[index].parameters
        return {name: parameters[name] for name in names}

    @abstractmethod
    def keep(self, records: list[SampleRecord]) -> None:
        """Drop all samples except those with the given records."""

    @abstractmethod
    def keep_newest(self, count: int) -> set[str]:
        """Drop all samples except the newest; return the names of files that can be deleted."""

    def set_log_weights(self, log_weights: Sequence[float]) -> None:
        """Replace the log importance weights of all samples, in their order.

        Raises:
            NotImplementedError: for a view of another store, which has weights of its own.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[PosteriorSample]:
        return (self[index] for index in range(len(self)))


class MemoryStore(SampleStore):
    """Samples in host memory."""

    def __init__(self) -> None:
        self.records = []
        self._samples: list[PosteriorSample] = []
        self._shared: dict[str, Tensor] = {}

    @property
    def shared(self) -> dict[str, Tensor]:
        return self._shared

    def append(self, sample: PosteriorSample) -> None:
        if not self._shared:
            self._shared = {name: tensor.detach().to("cpu", copy=True) for name, tensor in sample.shared.items()}
        self._samples.append(replace(on_cpu(sample), shared=self._shared))
        self.records.append(record_of(sample))

    def __getitem__(self, index: int) -> PosteriorSample:
        return self._samples[index]

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
    """Read-only selection of another store's samples, in any order and with repetition, with its own weights.

    Args:
        log_weights: their log importance weights in this view.
        comparable: whether these compare across chains; None keeps what the samples' records say.
    """

    def __init__(
        self,
        store: SampleStore,
        indices: Sequence[int],
        log_weights: Sequence[float],
        comparable: bool | None = None,
    ) -> None:
        self._store = store
        self.columns = store.columns
        self._indices = list(indices)
        self.records = []
        for index, log_weight in zip(indices, log_weights, strict=True):
            record = store.records[index]
            known = record.comparable if comparable is None else comparable
            self.records.append(replace(record, log_weight=log_weight, comparable=known))

    @property
    def shared(self) -> dict[str, Tensor]:
        return self._store.shared

    @property
    def contour(self) -> LearnedContour | None:  # type: ignore[override]
        """The other store's contour."""
        return self._store.contour

    def append(self, sample: PosteriorSample) -> None:
        raise TypeError("samples cannot be appended to a selection from a store: use in_memory() first")

    def __getitem__(self, index: int) -> PosteriorSample:
        record = self.records[index]
        sample = self._store[self._indices[index]]
        return replace(sample, log_weight=record.log_weight, comparable=record.comparable)

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        return self._store.shapes(self._indices[index])

    def parameters(self, index: int, names: Iterable[str]) -> dict[str, Tensor]:
        return self._store.parameters(self._indices[index], names)

    def keep(self, records: list[SampleRecord]) -> None:
        chosen = {repr(r) for r in records}
        kept = [(i, r) for i, r in zip(self._indices, self.records, strict=True) if repr(r) in chosen]
        self._indices, self.records = [i for i, _ in kept], [r for _, r in kept]

    def keep_newest(self, count: int) -> set[str]:
        surplus = max(len(self.records) - count, 0)
        self._indices, self.records = self._indices[surplus:], self.records[surplus:]
        return set()
