"""Loaders and datamodules made with wrong arguments: what the user does | the sentence that follows."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_sgmcmc import ResumableLoader
from lightning_sgmcmc.datamodules import DatasetDataModule, DigitsDataModule, TensorBatches, UCIRegressionDataModule
from tests.support.small_run import data, loader

Made = Callable[..., Any]
BATCHES: Made = functools.partial(ResumableLoader, data(), 8)
MODULE: Made = functools.partial(DatasetDataModule, data())

LOADERS: list[tuple[Made, dict[str, Any], type[Exception], str]] = [
    (BATCHES, {"num_workers": -1}, ValueError, "num_workers must be at least 0, got -1"),
    (BATCHES, {"num_workers": 0.5}, TypeError, "num_workers must be a whole number, got 0.5 of type float"),
    (BATCHES, {"seed": -1}, ValueError, "seed must be at least 0, got -1"),
    (BATCHES, {"seed": "1"}, TypeError, "seed must be a whole number, got '1' of type str"),
    (BATCHES, {"chain": -1}, ValueError, "chain must be at least 0, got -1"),
    (BATCHES, {"rank": 5, "num_replicas": 2}, ValueError, "rank must be below num_replicas=2, got 5"),
    (BATCHES, {"num_replicas": 0}, ValueError, "num_replicas must be at least 1, got 0"),
    (BATCHES, {"order": "random"}, TypeError, "order must be a function that makes an order of the data, got 'random'"),
    (ResumableLoader, {"dataset": data(), "batch_size": 1.5}, TypeError, "batch_size must be a whole number, got 1.5"),
    (
        ResumableLoader,
        {"dataset": data(), "batch_size": True},
        TypeError,
        "batch_size must be a whole number, got",
    ),
    (ResumableLoader, {"dataset": data(), "batch_size": "8"}, TypeError, "batch_size must be a whole number, got '8'"),
    (ResumableLoader, {"dataset": [], "batch_size": 8}, ValueError, "there is no batch of 0 data on 1 ranks"),
    (
        ResumableLoader,
        {"dataset": loader(), "batch_size": 8},
        TypeError,
        "dataset is a DataLoader, which counts batches, not data: pass its dataset (loader.dataset)",
    ),
    (
        ResumableLoader,
        {"dataset": data(), "batch_size": 100, "drop_last": True},
        ValueError,
        "batch_size=100 with drop_last=True leaves no batch of 24 data on 1 ranks",
    ),
]

MODULES: list[tuple[Made, dict[str, Any], type[Exception], str]] = [
    (DatasetDataModule, {"train": loader()}, TypeError, "train is a DataLoader, which counts batches, not data: pass"),
    (DatasetDataModule, {"train": BATCHES()}, TypeError, "train is a ResumableLoader, which counts batches, not data"),
    (
        DatasetDataModule,
        {"train": TensorDataset},
        TypeError,
        "train=TensorDataset is a class: pass an instance",
    ),
    (DatasetDataModule, {"train": None}, TypeError, "train is None: pass a data set with the training data"),
    (MODULE, {"val": loader()}, TypeError, "val is a DataLoader, which counts batches, not data: pass its dataset"),
    (MODULE, {"test": loader()}, TypeError, "test is a DataLoader, which counts batches, not data: pass its dataset"),
    (MODULE, {"batch_size": 2.5}, TypeError, "batch_size must be a whole number, got 2.5 of type float"),
    (MODULE, {"batch_size": True}, TypeError, "batch_size must be a whole number, got True of type bool"),
    (MODULE, {"num_workers": -1}, ValueError, "num_workers must be at least 0, got -1"),
    (MODULE, {"num_data": 24.0}, TypeError, "num_data must be a whole number, got 24.0 of type float"),
    (MODULE, {"num_data": 3}, ValueError, "num_data=3 contradicts the training data, of which there are 24: leave it"),
    (
        MODULE,
        {"order": "x"},
        TypeError,
        "order must be a function that makes an order of the data, got 'x'",
    ),
    (DigitsDataModule, {"batch_size": 1.5}, TypeError, "batch_size must be a whole number, got 1.5 of type float"),
    (DigitsDataModule, {"order": "x"}, TypeError, "order must be a function that makes an order of the data, got 'x'"),
    (DigitsDataModule, {"seed": -1}, ValueError, "seed must be at least 0, got -1"),
    (DigitsDataModule, {"val_fraction": -1}, ValueError, "val_fraction must be in [0, 1), got -1"),
    (
        UCIRegressionDataModule,
        {"name": "iris", "root": "x"},
        ValueError,
        "name must be one of boston-housing",
    ),
]

TENSORS: list[tuple[Made, dict[str, Any], type[Exception], str]] = [
    (
        functools.partial(TensorBatches, [1, 2]),
        {},
        TypeError,
        "tensors must be torch tensors, got a list",
    ),
    (TensorBatches, {}, ValueError, "tensors must have the same length, got lengths []"),
    (functools.partial(TensorBatches, torch.zeros(3), torch.zeros(4)), {}, ValueError, "got lengths [3, 4]"),
]


@pytest.mark.parametrize(("make", "options", "error", "sentence"), [*LOADERS, *MODULES, *TENSORS])
def test_construction(make: Made, options: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as caught:
        make(**options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value), "one sentence"
