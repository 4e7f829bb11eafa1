"""The settings that decide what a run samples, as plain data, and their comparison with a checkpoint's."""

import inspect
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler

from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.chains.callback import text_of
from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.layout import layout_of
from lightning_sgmcmc.chains.starts import text_of_start
from lightning_sgmcmc.chains.trainer import declared
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.factories import name_of
from lightning_sgmcmc.samplers.sampler import CONTROLS
from lightning_sgmcmc.seeding import device_text, reseed, reseed_everything, unchanged_generators

ITEMS = 8
TOLERANCE = 1e-3
"""Relative difference of equal data: decoders and augmentation round differently on different machines."""


def fingerprint(loader: Any) -> dict[str, Any]:
    """Return the length of a loader's data set and, if known, one number for each part of a few of its data."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, ResumableLoader | DataLoader) or not hasattr(dataset, "__len__"):
        return {"length": None, "numbers": []}
    length = len(dataset)  # type: ignore[arg-type]
    indices = sorted({round(place * (length - 1) / (ITEMS - 1)) for place in range(ITEMS)}) if length else []
    in_memory = hasattr(dataset, "whole_batch") or hasattr(dataset, "tensors")
    # A data set that only workers read may hold files that must not be opened before.
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


# -- settings ----------------------------------------------------------------------------------------------------------

Settings = dict[str, Any]


def settings_of(trainer: pl.Trainer, module: ChainModel, sampler: Sampler) -> Settings:
    """Return a run's settings by name, as plain data."""
    settings: Settings = {
        "prior": text_of(module.prior),
        "likelihood": text_of(module.likelihood),
        "temperature": _plain(module.temperature),
        "num_data": module.num_data,
        "lr": _lr(module.lr, sampler),
        "seed": module.chains.seeds.stated,
        "sampler": name_of(type(sampler)),
        "chain_start": text_of_start(module.chains.start),
        "sampled": _sampled(module),
    }
    for name in inspect.signature(type(sampler)).parameters:
        values = [group[name] for group in sampler.param_groups if name in group]
        if values and name not in ("params", *CONTROLS) and not any(isinstance(v, Tensor) for v in values):
            settings[f"sampler.{name}"] = _collapsed([_plain(value) for value in values])
    for callback in declared(trainer):
        settings |= {name: _plain(value) for name, value in callback.settings().items()}
    if trainer.train_dataloader is None:
        trainer.fit_loop.setup_data()
    if isinstance(trainer.train_dataloader, ResumableLoader):
        settings["order"] = text_of(trainer.train_dataloader.order)
    settings["data"] = fingerprint(trainer.train_dataloader)
    return settings


def _sampled(module: ChainModel) -> str:
    """Return which parameters are sampled, as text."""
    chains = module.chains
    if not chains.sharing.names:
        return "all"
    return f"{len(chains.trainable)} tensors, crc32 {zlib.crc32(' '.join(chains.trainable).encode()):08x}"


def differences(saved: Settings, own: Settings, seed_given: bool) -> list[str]:
    """Return the names of the settings that differ and that both have; a run without a seed takes the checkpoint's."""
    names = [name for name in own if name in saved and (name != "seed" or seed_given)]
    return [
        name
        for name in names
        if not (is_same_data(saved[name], own[name]) if name == "data" else saved[name] == own[name])
    ]


def check_settings(saved: Settings, own: Settings, seed_given: bool, allow: Sequence[str]) -> None:
    """Raise unless a run has the checkpoint's settings, except those in `allow` (a part's name includes its own)."""
    unknown = [name for name in allow if not any(is_allowed(key, [name]) for key in own)]
    if unknown:
        raise ValueError(f"allow={list(allow)} names no setting '{unknown[0]}': the settings are {', '.join(own)}")
    names = [name for name in differences(saved, own, seed_given) if not is_allowed(name, allow)]
    if not names:
        return
    listed = "; ".join(f"{name} {_shown(name, saved)} there, {_shown(name, own)} here" for name in names)
    raise ValueError(
        f"the checkpoint is of a run with other settings ({listed}): resume with its settings, start a new run, or "
        f"pass the callback ExactResume(allow={names})"
    )


def is_allowed(name: str, allow: Iterable[str]) -> bool:
    """Return whether a setting, or the part that it belongs to, is among the allowed names."""
    return any(name == one or name.startswith(f"{one}.") for one in allow)


def check_ranks(trainer: pl.Trainer, settings: Settings) -> Settings:
    """Return rank zero's settings; raise unless ranks agree on N, on divided data, and on a shared chain's device."""
    if trainer.world_size == 1 or not torch.distributed.is_initialized():
        return settings
    everyone: list[Any] = [None] * trainer.world_size
    device = f"{device_text(trainer.strategy.root_device)} (torch {torch.__version__})"
    torch.distributed.all_gather_object(everyone, (settings, device))
    first, loader = everyone[0][0], trainer.train_dataloader
    divided = isinstance(loader, ResumableLoader) or isinstance(getattr(loader, "sampler", None), DistributedSampler)
    _check_devices([device for _, device in everyone], layout_of(trainer, 1).ranks_per_chain)
    for rank, (other, _) in enumerate(everyone):
        if other["num_data"] != first["num_data"]:
            raise ValueError(
                f"rank {rank} has {other['num_data']} training data and rank 0 has {first['num_data']}, so they would "
                "sample different posteriors: give every rank the whole data set, of which each takes its share"
            )
        if divided and not is_same_data(other["data"], first["data"]):
            raise ValueError(
                f"rank {rank} has other training data than rank 0: give every rank the same data set, of which each "
                "takes its share"
            )
    return dict(first)


def _check_devices(devices: Sequence[str], ranks_per_chain: int) -> None:
    for rank, device in enumerate(devices):
        first = rank - rank % ranks_per_chain
        if device != devices[first]:
            raise ValueError(
                f"rank {rank} runs on {device} and rank {first} on {devices[first]}, whose random numbers differ, and "
                "they share a chain: use one kind of device and one torch for them, or a chain for each rank "
                "(strategy='chains')"
            )


def is_seeded(module: ChainModel) -> bool:
    """Return whether a run was given a seed, by the module's argument or by `seed_everything`."""
    return module.chains.seeds.given is not None or "PL_GLOBAL_SEED" in os.environ


def _plain(value: Any) -> Any:
    """Return numbers, texts and lists of them as they are, and anything else as text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else text_of(value)


def _lr(given: Any, sampler: Sampler) -> Any:
    """Return the step size, or one for each chain of the run, or one for each parameter group."""
    values = [group["lr"] for group in sampler.param_groups]
    if isinstance(given, Sequence | Mapping) or any(isinstance(value, Tensor) for value in values):
        return _plain(given)
    return _collapsed([float(value) for value in values])


def _collapsed(values: list[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else values


def check_saved(settings: Mapping[str, Any]) -> None:
    """Raise ValueError unless the settings in a checkpoint are plain data."""
    data = settings.get("data", {"length": None, "numbers": []})
    try:
        json.dumps(settings)
        sound = all(isinstance(number, int | float) for number in data["numbers"]) and "length" in data
    except (TypeError, ValueError, LookupError, RecursionError):
        sound = False
    if not sound:
        raise ValueError("the checkpoint is damaged: its settings are no plain data; resume from another")


def _shown(name: str, settings: Mapping[str, Any]) -> str:
    value = settings[name]
    if name != "data":
        return str(value)
    return f"{value['length']} items beginning with {[float(f'{x:.4g}') for x in value['numbers'][:2]]}"
