"""Datamodules of any torch data sets, and of training data that arrive during the run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_sgmcmc.batches.loader import ResumableLoader, as_is
from lightning_sgmcmc.batches.orders import BatchOrder, MakeOrder, check_order
from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.datamodules.base import TensorBatches, replica_of
from lightning_sgmcmc.namespace import pl

TABLES = ("datasets.arrow_dataset.Dataset", "datasets.iterable_dataset.IterableDataset")
"""Classes of the package datasets, which need not be installed."""


class DatasetDataModule(pl.LightningDataModule):
    """Wraps data sets: torch's, of pairs (x, y) or of dicts with "labels", or Hugging Face's, of rows by column.

    The rows of a `datasets.Dataset`, of format torch or of plain lists, become a dict batch (see `collate_rows`); what
    the network's `forward` does not accept, is not passed to it.

    A `ResumableLoader` loads the training data, so a run continues exactly from any step, with any number of workers.
    Training data without a length are loaded by a `DataLoader`. A `TensorDataset` is indexed by whole batches, as the
    other datamodules' data, which is faster and has the same draws.

    Args:
        train: the training data; N is its length.
        val: validation data, or None.
        test: test data, or None; also the data of `predict`.
        batch_size: data per batch.
        num_workers: loading processes.
        num_data: N, for training data without a length only.
        drop_last: leave out the last batch of an epoch if it is smaller; N stays the whole training set.
        order: makes the order of the training data, see `ResumableLoader`.
        collate_fn: makes a batch of a list of items, such as `DataCollatorWithPadding(tokenizer)` of transformers;
            None is torch's default, or `collate_rows`.

    Raises:
        ValueError: if batch_size is below 1, N is missing, or num_data contradicts the training data's length.
    """

    def __init__(
        self,
        train: Dataset[Any],
        val: Dataset[Any] | None = None,
        test: Dataset[Any] | None = None,
        batch_size: int = 100,
        num_workers: int = 0,
        num_data: int | None = None,
        drop_last: bool = False,
        order: MakeOrder = BatchOrder,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        check_count("batch_size", batch_size, optional=False)
        check_count("num_workers", num_workers, least=0, optional=False)
        check_count("num_data", num_data)
        for name, part in (("train", train), ("val", val), ("test", test)):
            _check_data_set(name, part)
        check_order(order)
        length = len(train) if hasattr(train, "__len__") else None
        if length is None and num_data is None:
            raise ValueError("the training data have no length: give num_data, the number of data N")
        if length is not None and num_data not in (None, length):
            raise ValueError(
                f"num_data={num_data} contradicts the training data, of which there are {length}: leave it out"
            )
        self.train = train
        self.val = val
        self.test = test
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.drop_last = drop_last
        self.order = order
        self.collate_fn = collate_rows if collate_fn is None and is_table_of_rows(train) else collate_fn
        self._num_data = num_data

    @property
    def num_data(self) -> int:
        """N: the present length of the training data, or the given number."""
        return self._num_data or len(self.train)  # type: ignore[arg-type]

    def _pins(self, dataset: Dataset[Any]) -> bool:
        """Return whether batches are copied into pinned memory: items of this process may be on the device already."""
        device = getattr(getattr(self.trainer, "strategy", None), "root_device", None)
        on_host = dataset.device.type == "cpu" if isinstance(dataset, TensorBatches) else self.num_workers > 0
        return isinstance(device, torch.device) and device.type == "cuda" and on_host

    def _loader(self, dataset: Dataset[Any] | None, drop_last: bool = False) -> Any:
        if dataset is None:
            return []  # how Lightning expresses that there is no loader
        dataset = self._by_whole_batches(dataset)
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            drop_last=drop_last,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=self._pins(dataset),
            collate_fn=as_is if isinstance(dataset, TensorBatches) else self.collate_fn,
        )

    def _by_whole_batches(self, dataset: Dataset[Any]) -> Dataset[Any]:
        if type(dataset) is TensorDataset and self.collate_fn is None and dataset.tensors:
            return TensorBatches(*dataset.tensors)
        return dataset

    def train_dataloader(self) -> Any:
        if not hasattr(self.train, "__len__"):
            return self._loader(self.train, self.drop_last)
        dataset = self._by_whole_batches(self.train)
        return ResumableLoader(
            dataset,
            self.batch_size,
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            order=self.order,
            collate_fn=self.collate_fn,
            pin_memory=self._pins(dataset),
            **replica_of(self),
        )

    def val_dataloader(self) -> Any:
        return self._loader(self.val)

    def test_dataloader(self) -> Any:
        return self._loader(self.test)

    def predict_dataloader(self) -> Any:
        return self._loader(self.test)


def _check_data_set(name: str, data: Any) -> None:
    """Raise unless `data` can be a data set."""
    if isinstance(data, DataLoader | ResumableLoader):
        raise TypeError(
            f"{name} is a {type(data).__name__}, which counts batches, not data: pass its dataset (loader.dataset)"
        )
    if type(data).__module__ == "datasets.dataset_dict" or type(data) is dict:
        raise TypeError(f"{name} holds the data sets {', '.join(map(repr, data))}: pass one, {name}=data['train']")
    if isinstance(data, type):
        raise TypeError(f"{name}={data.__name__} is a class: pass an instance, {name}={data.__name__}(…)")
    if data is None and name == "train":
        raise TypeError("train is None: pass a data set with the training data")


# -- rows of Hugging Face data sets -----------------------------------------------------------------------------------


def is_table_of_rows(data: Any) -> bool:
    """Return whether this is a data set of the package datasets, which need not be installed."""
    return any(f"{cls.__module__}.{cls.__qualname__}" in TABLES for cls in type(data).__mro__)


def collate_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a batch of rows: by column a tensor of numbers, shape (n, …), or a list of other values.

    Numbers in lists, such as tokens, must be equally many in all rows.

    >>> collate_rows([{"ids": [1, 2], "label": 0, "text": "a"}, {"ids": [3, 4], "label": 1, "text": "b"}])
    {'ids': tensor([[1, 2],
            [3, 4]]), 'label': tensor([0, 1]), 'text': ['a', 'b']}
    """
    return {name: _column(name, [row[name] for row in rows]) for name in rows[0]}


def _column(name: str, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor | np.ndarray):
        tensors = [torch.as_tensor(value) for value in values]
        _check_alike(name, [tuple(tensor.shape) for tensor in tensors])
        return torch.stack(tensors)
    if isinstance(first, bool | int | float | np.number):
        return torch.tensor(values)
    if isinstance(first, list) and _is_numeric(first):
        _check_alike(name, [len(value) for value in values])
        return torch.tensor(values)
    return values


def _is_numeric(value: Any) -> bool:
    while isinstance(value, list):
        if not value:
            return False
        value = value[0]
    return isinstance(value, bool | int | float)


def _check_alike(name: str, sizes: list[Any]) -> None:
    if len(set(sizes)) > 1:
        raise ValueError(
            f"the rows of a batch have '{name}' of sizes {min(sizes)} to {max(sizes)}: pad them in advance "
            "(padding='max_length'), or pass collate_fn=DataCollatorWithPadding(tokenizer)"
        )


# -- data that arrive during the run -----------------------------------------------------------------------------------


class StreamDataModule(pl.LightningDataModule):
    """Training data that arrive during the run: `append` adds them, and they count from the next epoch on.

        U(θ) = -Σ_{i=1..N} log p(y_i|x_i,θ) - log p(θ),    N = min(data appended so far, capacity)

    When an epoch begins, the module reads N again, and energies, prior and noise follow it; momenta adapt within their
    friction time. With a capacity the newest data replace the oldest. The posterior then conditions on the data that
    are held, and N is their number, not the number of all data seen: data that are gone have no weight.

    A trainer reads the number of batches of an epoch once, so it is fixed; an epoch is a round of the stream, for
    instance the steps between two observations. Append from a callback when an epoch begins or after its last batch,
    the same data on all ranks. The data held are part of a checkpoint. In a run that may be resumed, append in
    `on_train_batch_end`, since Lightning omits `on_train_epoch_start` after a checkpoint at an epoch's last batch.
    Other data renew the snapshot of `ControlVariates` and its kind when an epoch begins, and the energies of
    `MetropolisTest`, which refuses data that change within a trajectory.

    Args:
        batch_size: data per batch, at most as many as there are when the fit begins.
        batches_per_epoch: steps of an epoch.
        capacity: the largest N; None keeps all data.
        order: makes the order of the data, such as `CyclicOrder` (see `ResumableLoader`).

    Raises:
        ValueError: if a number is below 1, if the tensors of `append` do not fit together, or if a fit begins with
            fewer data than a batch.

    Example::

        from lightning_sgmcmc.datamodules import StreamDataModule

        data = StreamDataModule(batch_size=512, batches_per_epoch=16, capacity=4096)
        data.append(torch.randn(1024, 3), torch.randn(1024, 1))  # a callback of the trainer appends more
    """

    restores_data = True
    """Whether the data are part of a checkpoint, so that a resumed run has them."""

    def __init__(
        self,
        batch_size: int,
        batches_per_epoch: int,
        capacity: int | None = None,
        order: MakeOrder = BatchOrder,
    ) -> None:
        super().__init__()
        check_count("batch_size", batch_size)
        check_count("batches_per_epoch", batches_per_epoch)
        check_count("capacity", capacity, least=batch_size)
        check_order(order)
        self.batch_size = batch_size
        self.order = order
        self.batches_per_epoch = batches_per_epoch
        self.capacity = capacity
        self._held = TensorBatches(torch.empty(0))

    def append(self, *tensors: Tensor) -> None:
        """Add data: the parts of a batch, x and y for instance, as tensors of one length. A call copies the data held.

        Raises:
            ValueError: if lengths differ, or shapes or dtypes are not those of the data held.
        """
        added = TensorBatches(*(tensor.detach() for tensor in tensors))
        if self.num_data > 0:
            kinds = [[(tuple(t.shape[1:]), t.dtype) for t in data.tensors] for data in (self._held, added)]
            if kinds[0] != kinds[1]:
                raise ValueError(f"the data held have (shape, dtype) {kinds[0]}, got {kinds[1]}: append data alike")
            added = TensorBatches(*(torch.cat(pair) for pair in zip(self._held.tensors, added.tensors, strict=True)))
        self._held.tensors = tuple(tensor[-self.capacity :] if self.capacity else tensor for tensor in added.tensors)

    @property
    def num_data(self) -> int:
        """N, the number of data held."""
        return len(self._held)

    def setup(self, stage: str) -> None:
        """Check that there are data.

        Raises:
            ValueError: if there are fewer than a batch.
        """
        if self.num_data < self.batch_size:
            raise ValueError(
                f"the stream holds {self.num_data} data, fewer than batch_size={self.batch_size}: append more before "
                "the fit, or choose smaller batches"
            )

    def training_data(self) -> TensorBatches:
        """Return the data held, the oldest first."""
        return self._held

    def train_dataloader(self) -> Any:
        return ResumableLoader(
            self._held,
            self.batch_size,
            drop_last=True,
            order=self.order,
            batches_per_epoch=self.batches_per_epoch,
            **replica_of(self),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": list(self._held.tensors)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._held.tensors = tuple(state_dict["tensors"])
