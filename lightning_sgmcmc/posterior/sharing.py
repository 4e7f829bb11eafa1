"""A posterior as a folder of its own, with parameters in 16 bits if wanted."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.files import local_path
from lightning_sgmcmc.posterior.calibration import identify, save_calibration
from lightning_sgmcmc.posterior.description import description_for_store
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.narrow import Narrow, narrow_dtype
from lightning_sgmcmc.posterior.store import SampleStore
from lightning_sgmcmc.tensors import widest


def save_samples(posterior: Any, path: str | Path, dtype: Any, base: str | None) -> DiskStore:
    """Write the samples of a posterior to a folder; see `Posterior.save`."""
    folder = local_path(path, "path", "save to a local folder, and copy it; or use push_to_hub")
    store: SampleStore = posterior.store
    name = narrow_dtype(dtype)
    if base not in (None, "mean"):
        raise ValueError(f"base={base!r} is not known: pass 'mean', or None for parameters as they are")
    if base is not None and name is None:
        raise ValueError(f"base={base!r} only helps parameters in 16 bits: pass dtype='bfloat16', or leave base out")
    if len(store) == 0:
        raise RuntimeError("the posterior has no samples to save")
    narrow = store.narrow if dtype is None else None
    if name is not None:
        narrow = Narrow(name, {} if base is None else _means(store))
    first = store[0]
    if narrow is not None:
        narrow.narrowed(first)  # refuses before there is a folder
    description = store.model_description
    if description is None and posterior.model is not None:
        description = description_for_store(posterior.model)
    saved = DiskStore.create(folder, description, store.columns, store.shared or first.shared, narrow)
    for sample in _distinct(store):
        saved.append(sample)
    if store.contour is not None:
        saved.contour = store.contour
    if posterior.calibration is not None:
        save_calibration(replace(posterior.calibration, samples=identify(saved.records)), saved)
    return saved


def _distinct(store: SampleStore) -> Iterable[PosteriorSample]:
    """Yield each sample once; one that was drawn repeatedly, as by `resample`, has the sum of the weights."""
    places: dict[tuple[int, int, int], list[int]] = {}
    for index, record in enumerate(store.records):
        places.setdefault((record.step, record.chain, record.draw), []).append(index)
    for indices in places.values():
        weights = torch.tensor([store.records[index].log_weight for index in indices], dtype=torch.float64)
        yield replace(store[indices[0]], log_weight=float(weights.logsumexp(0)) if len(indices) > 1 else weights.item())


def _means(store: SampleStore) -> dict[str, Tensor]:
    """Return the plain mean of each float32 parameter over the samples."""
    sums: dict[str, Tensor] = {}
    for sample in store:
        for name, parameter in sample.parameters.items():
            if parameter.dtype == torch.float32:
                sums[name] = sums[name] + widest(parameter) if name in sums else widest(parameter)
    return {name: (total / len(store)).float() for name, total in sums.items()}
