"""Samples of several stores as one."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_sgmcmc.chains.samples import PosteriorSample, SampleRecord, comparable_log_weights
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.posterior.classes import NotDescribableError
from lightning_sgmcmc.posterior.description import describe, first_difference
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.store import SampleStore


class MergedStore(SampleStore):
    """Read-only samples of several stores, one store after another; nothing is copied.

    Args:
        stores: the stores, each with at least one sample.
        masses: the total weight of each store, positive; only their ratios count.
    """

    def __init__(self, stores: Sequence[SampleStore], masses: Sequence[float]) -> None:
        self.columns = stores[0].columns
        self._shared = stores[0].shared
        self.records = []
        self._places: list[tuple[SampleStore, int]] = []
        first = 0
        for store, mass in zip(stores, masses, strict=True):
            log_weights = comparable_log_weights(store.records)
            log_weights = log_weights - torch.logsumexp(log_weights, 0) + math.log(mass)
            for index, (record, log_weight) in enumerate(zip(store.records, log_weights.tolist(), strict=True)):
                own = replace(record, chain=record.chain + first, log_weight=log_weight, comparable=True)
                self.records.append(own)
                self._places.append((store, index))
            first = max(record.chain for record in self.records) + 1

    @property
    def shared(self) -> dict[str, torch.Tensor]:
        """What all samples have in common, as the first store has it."""
        return self._shared

    def append(self, sample: PosteriorSample) -> None:
        raise TypeError("samples cannot be appended to merged stores: use in_memory() first")

    def __getitem__(self, index: int) -> PosteriorSample:
        record, (store, own) = self.records[index], self._places[index]
        return replace(
            store[own], chain=record.chain, log_weight=record.log_weight, comparable=True, shared=self._shared
        )

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        store, own = self._places[index]
        return store.shapes(own)

    def parameters(self, index: int, names: Any) -> dict[str, torch.Tensor]:
        store, own = self._places[index]
        return store.parameters(own, names)

    def keep(self, records: list[SampleRecord]) -> None:
        chosen = {repr(r) for r in records}
        self._only([i for i, r in enumerate(self.records) if repr(r) in chosen])

    def keep_newest(self, count: int) -> set[str]:
        self._only(range(max(len(self.records) - count, 0), len(self.records)))
        return set()

    def _only(self, indices: Sequence[int]) -> None:
        self.records, self._places = [self.records[i] for i in indices], [self._places[i] for i in indices]


def merged_store(
    stores: Sequence[SampleStore], models: Sequence[EnergyModel | None], masses: Sequence[float] | None
) -> MergedStore:
    """Return the samples of several stores as one store; see `Posterior.merge`.

    Raises:
        ValueError: if a store is empty or given twice, its network or its scaling of the targets differs from the
            first one's, its weights are all 0, or masses are not one positive number for each.
    """
    for number, store in enumerate(stores):
        if len(store) == 0:
            raise ValueError(f"posterior {number} of {len(stores)} has no samples to merge: leave it out")
        if any(_share_samples(store, other) for other in stores[:number]):
            raise ValueError(f"posterior {number} is given twice, which would count its samples twice: leave it out")
        if not bool((comparable_log_weights(store.records) > -torch.inf).any()):
            raise ValueError(f"all weights of posterior {number} are 0: leave it out")
        _check_alike(number, store, stores[0], models[number], models[0])
    chosen = [float(len(store)) for store in stores] if masses is None else [float(mass) for mass in masses]
    if len(chosen) != len(stores) or not all(math.isfinite(mass) and mass > 0 for mass in chosen):
        raise ValueError(f"masses must be {len(stores)} positive numbers, one for each posterior, got {masses}")
    return MergedStore(stores, chosen)


def _share_samples(store: SampleStore, other: SampleStore) -> bool:
    """Return whether two stores have a sample of one run in common; runs may have used one folder after another.

    Stores of version 0.1.0, without a run's id, are known by their folders.
    """
    if store is other:
        return True
    if not isinstance(store, DiskStore) or not isinstance(other, DiskStore):
        return False
    if store.run_id is None or other.run_id is None:
        return store.path.resolve() == other.path.resolve() and store.run_id == other.run_id
    places = [{(r.step, r.chain, r.draw, r.checksum) for r in one.records} for one in (store, other)]
    return store.run_id == other.run_id and not places[0].isdisjoint(places[1])


def _check_alike(
    number: int, store: SampleStore, first: SampleStore, model: EnergyModel | None, first_model: EnergyModel | None
) -> None:
    ours, theirs = store.shapes(0), first.shapes(0)
    odd = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if odd:
        raise ValueError(
            f"posterior {number} is of another network than the first: '{odd[0]}' has shape {ours.get(odd[0], 'none')} "
            f"in it and {theirs.get(odd[0], 'none')} in the first; merge samples of one network"
        )
    found = first_difference(_described(first_model), _described(model), "its model")
    if found is not None and model is not None and first_model is not None:
        difference = found.replace("in the samples", "in the first")
        raise ValueError(
            f"posterior {number} is of another network than the first: {difference}; merge samples of one "
            "network and likelihood"
        )
    common, others = store.shared, first.shared
    changed = sorted(
        name
        for name in common.keys() | others.keys()
        if name not in common or name not in others or not torch.equal(common[name], others[name])
    )
    if changed:
        raise ValueError(
            f"posterior {number} has another '{changed[0]}' than the first, which is not sampled and belongs to all "
            "samples: merge runs that sample the same part of one trained network"
        )
    other = first.columns.difference(store.columns)
    if other is not None and not other.startswith("targets"):
        raise ValueError(
            f"posterior {number} was fitted to other data than the first ({other}): merge runs on the same data"
        )
    if store.scaling != first.scaling:
        raise ValueError(
            f"posterior {number} was fitted to targets of another scaling than the first ({store.scaling} and "
            f"{first.scaling}), so its predictions are in other units: merge runs on the same data"
        )


def _described(model: EnergyModel | None) -> Any:
    """Return a model's description, or None if it has none."""
    if model is None:
        return None
    try:
        with model.at_chain(0):
            return describe(model)
    except (NotDescribableError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None
