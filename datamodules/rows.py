"""Batches of the rows of Hugging Face data sets, which hold plain lists or tensors by column."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

TABLES = ("datasets.arrow_dataset.Dataset", "datasets.iterable_dataset.IterableDataset")


def is_table_of_rows(data: Any) -> bool:
    """Return whether this is a data set of the package datasets, which need not be installed."""
    return any(f"{cls.__module__}.{cls.__qualname__}" in TABLES for cls in type(data).__mro__)


def collate_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a batch of rows: by column a tensor of numbers, shape (n, …), or a list of other values.

    Numbers in lists, such as tokens, must be equally many in all rows.

    Raises:
        ValueError: if they are not.

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
