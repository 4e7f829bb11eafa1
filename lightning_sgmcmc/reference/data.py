"""All training data of a run, as batches on a module's device."""

import hashlib
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from lightning_sgmcmc.batches.rows import rows_of
from lightning_sgmcmc.datamodules.loading import TensorBatches, evaluation_loader
from lightning_sgmcmc.evaluation.full_data import indices_of, plain_data
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.seeding import unchanged_generators

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Lightning's hooks of a batch, of the datamodule if it defines them and else of the module."""


def all_batches(model: EnergyModel, data: Any, batch_size: int) -> list[Any]:
    """Return all training data in the data set's order, without augmentation where a datamodule has its plain data.

    Args:
        model: the model, whose device and dtype the batches get.
        data: a pair of tensors (x, y), a data set, a loader of one, or a datamodule.
        batch_size: data in a batch at most.

    Raises:
        TypeError: if `data` has another type.
        ValueError: if the data have no length, there are none, or a part of them is NaN.
    """
    datamodule = data if isinstance(data, pl.LightningDataModule) else None
    with unchanged_generators([model.device]):
        loader = _loader(data, batch_size)
        batches = [_moved(batch, model, datamodule) for batch in loader]
    if not batches:
        raise ValueError("the data set is empty: a posterior needs data")
    _check_numbers(batches)
    return batches


def count_of(data: Any) -> int | None:
    """Return the number of data that a datamodule declares as `num_data`, or None."""
    declared = getattr(data, "num_data", None)
    return None if declared is None else int(declared)


def length_of(model: EnergyModel, batches: Sequence[Any]) -> int:
    """Return N: the log-likelihoods that the batches have, at the model's present parameters."""
    with torch.no_grad():
        return sum(len(model.log_likelihood(batch)) for batch in batches)


def digest(values: Any) -> str:
    """Return a short hash of all tensors in nested lists, tuples and dictionaries."""
    found = hashlib.blake2b(digest_size=8)
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor):
            plain = leaf.detach().cpu().contiguous()
            found.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
            found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _loader(data: Any, batch_size: int) -> Any:
    if isinstance(data, pl.LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
        return _in_order(loader, plain_data(data), batch_size)
    if isinstance(data, Sequence) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        return evaluation_loader(TensorBatches(*data), batch_size)
    if isinstance(data, TensorBatches):
        return evaluation_loader(data, batch_size)
    if isinstance(data, Dataset):
        return _in_order(DataLoader(data), data, batch_size)
    if hasattr(data, "dataset"):
        return _in_order(data, None, batch_size)
    raise TypeError(
        f"data must be a pair of tensors (x, y), a data set, a loader or a datamodule, got {type(data).__name__}"
    )


def _in_order(loader: Any, dataset: Any, batch_size: int) -> Any:
    rows = rows_of(loader)
    if rows.dataset is None:
        raise ValueError(
            f"{type(loader).__name__} has no data set with a length, and every gradient is one of all data: pass a "
            "data set, a loader of one, or tensors (x, y)"
        )
    return rows.loader(range(len(indices_of(rows, "reference.sample"))), dataset, batch_size)


def _moved(batch: Any, model: EnergyModel, datamodule: pl.LightningDataModule | None) -> Any:
    """Return a batch on the model's device, in its dtype, through the user's hooks."""
    for name in HOOKS:
        of_data = datamodule is not None and is_overridden(name, datamodule)
        hook = getattr(datamodule if of_data else model, name)
        batch = hook(batch, model.device, 0) if name == "transfer_batch_to_device" else hook(batch, 0)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())

    def converted(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return model.used_of(pytree.tree_map(converted, batch))


def _check_numbers(batches: Sequence[Any]) -> None:
    counts: dict[int, int] = {}
    for batch in batches:
        for place, leaf in enumerate(pytree.tree_leaves(batch)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                counts[place] = counts.get(place, 0) + int(leaf.isnan().sum())
    bad = {place: count for place, count in counts.items() if count}
    if bad:
        place, count = next(iter(bad.items()))
        raise ValueError(
            f"the training data hold {count} NaN in part {place} of a batch (0 is the first tensor), and no energy is "
            "finite with them: remove or impute these data"
        )
