"""A datamodule of any torch data sets."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_sgmcmc.batches.loader import ResumableLoader, as_is
from lightning_sgmcmc.batches.orders import BatchOrder, MakeOrder, check_order
from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.datamodules.base import TensorBatches, replica_of

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
        """Return whether batches are copied into pinned memory, from which a copy to CUDA need not wait.

        Items that are made in this process may be on the device already.
        """
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
