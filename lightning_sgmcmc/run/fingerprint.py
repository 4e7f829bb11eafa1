"""A fingerprint of the training data: whether two runs, or two ranks, have the same data."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler

from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.seeding import reseed, reseed_everything, unchanged_generators

ITEMS = 8
TOLERANCE = 1e-3
"""Relative difference of equal data: decoders and augmentation round differently on different machines."""


def fingerprint(loader: Any) -> dict[str, Any]:
    """Return the length of a loader's data set and, if known, one number for each part of a few of its data.

    Data are read where the run reads them in this process too, or if they are in memory; data sets that only workers
    read may hold files that must not be opened before. Torch's, NumPy's and Python's generators are unchanged.
    """
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, ResumableLoader | DataLoader) or not hasattr(dataset, "__len__"):
        return {"length": None, "numbers": []}
    length = len(dataset)  # type: ignore[arg-type]
    indices = sorted({round(place * (length - 1) / (ITEMS - 1)) for place in range(ITEMS)}) if length else []
    in_memory = hasattr(dataset, "whole_batch") or hasattr(dataset, "tensors")
    if not indices or not (in_memory or loader.num_workers == 0):
        return {"length": length, "numbers": []}
    device = getattr(dataset, "device", None)
    try:
        with unchanged_generators([device] if isinstance(device, torch.device) else []):
            numbers, again = _numbers(dataset, indices, device), _numbers(dataset, indices, device)
    except Exception:  # whatever a data set raises for plain indices: then its data have no numbers
        numbers, again = [], []
    return {"length": length, "numbers": numbers if numbers == again else []}


def is_same_data(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two fingerprints may be of the same data."""
    if first["length"] != second["length"] and None not in (first["length"], second["length"]):
        return False
    one, other = first["numbers"], second["numbers"]
    if not one or not other:
        return True
    close = (math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for a, b in zip(one, other, strict=False))
    return len(one) == len(other) and all(close)


def is_divided(loader: Any) -> bool:
    """Return whether ranks divide one data set, so that all should have the same."""
    return isinstance(loader, ResumableLoader) or isinstance(getattr(loader, "sampler", None), DistributedSampler)


def _numbers(dataset: Any, indices: Sequence[int], device: Any) -> list[float]:
    reseed_everything(0)
    if isinstance(device, torch.device):
        reseed(0, device)
    batch = dataset.whole_batch(indices) if hasattr(dataset, "whole_batch") else [dataset[i] for i in indices]
    return [number for leaf in tree_leaves(batch) for number in _number(leaf)]


def _number(leaf: Any) -> list[float]:
    """Return a number that depends on all entries of a tensor or array, and on their order."""
    try:
        values = leaf.detach() if isinstance(leaf, Tensor) else torch.as_tensor(np.asarray(leaf))
        values = values.reshape(-1).cpu().double().nan_to_num()
    except (TypeError, ValueError, RuntimeError):
        return []
    weights = torch.linspace(1, 2, len(values), dtype=torch.float64)
    return [float(values @ weights) / max(1, len(values))]
