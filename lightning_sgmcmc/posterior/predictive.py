"""Passes of samples through their network: the averaged predictive, and BatchNorm's statistics."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_sgmcmc.batches.inputs import as_tensors, batches_in, has_doubtful_target, inputs_of, plain
from lightning_sgmcmc.batches.loader import is_shuffled
from lightning_sgmcmc.chains.sample import PosteriorSample
from lightning_sgmcmc.chains.stateless import StatelessCall, evaluation_mode
from lightning_sgmcmc.chains.together import MOST, States, TogetherCall, dtype_of, grouped, runs_at_once
from lightning_sgmcmc.evaluation.averages import WeightedAverage
from lightning_sgmcmc.evaluation.batch_norm import new_statistics
from lightning_sgmcmc.evaluation.scoring import concatenate, evaluate
from lightning_sgmcmc.model import EnergyModel, overrides
from lightning_sgmcmc.posterior.checks import check_sample
from lightning_sgmcmc.posterior.store import MemoryStore, SampleStore
from lightning_sgmcmc.predictions import Prediction

CHUNK = 256 * 2**20
"""Bytes of inputs that are kept while all samples predict them."""
KEPT = 256 * 2**20
"""Bytes of samples in host memory that are kept between predictions."""


def average_predictions(
    samples: "ReadySamples", log_weights: Sequence[float], inputs: Any, return_samples: bool
) -> Prediction:
    """Return the predictive distribution averaged over samples with log-weights; see `Posterior.predict`.

    The samples are read several times if the inputs are many.

    Raises:
        RuntimeError: if the model has no likelihood.
        ValueError: if there are no inputs, or a sample is damaged.
    """
    model = samples.model
    likelihood = model.likelihood
    if likelihood is None:
        raise RuntimeError(f"{type(model).__name__} has no likelihood object to define a predictive: pass likelihood=…")
    batches = batches_in(inputs, model.accepted_arguments)
    if is_shuffled(batches):
        rank_zero_warn(
            "The loader shuffles, so the predictions are in the order of this one pass: pass a loader in a fixed order "
            "to match them with inputs."
        )
    averages: list[WeightedAverage] = []
    kept: list[Tensor] = []
    with evaluation_mode(model), torch.no_grad():
        for chunk in _chunks(_inputs_alone(batches, model)):
            part = [WeightedAverage() for _ in chunk]
            of_chunk: list[Tensor] = []
            remaining = iter(log_weights)
            for group in samples.groups():
                weights = list(itertools.islice(remaining, len(group)))
                of_group = []
                for average, x in zip(part, _on(chunk, group.device, group.dtype), strict=True):
                    each = []
                    for terms, log_weight in zip(samples.call(group, x), weights, strict=True):
                        average.add(terms, torch.empty(0, device=group.device), log_weight)
                        if return_samples:
                            each.append(terms[likelihood.per_sample_term])
                    if return_samples:
                        of_group.append(torch.stack(each))
                if return_samples:
                    of_chunk.append(torch.cat(of_group, 1))
            averages += part
            if return_samples:
                kept.append(torch.cat(of_chunk))
    if not averages:
        raise ValueError("x has no inputs to predict")
    terms = concatenate(average.terms for average in averages)
    warn_of_overflow(terms)
    return likelihood.prediction(terms, torch.cat(kept, 1) if kept else None)


class ReadySamples:
    """The states of a store's samples on a model's device, ready to predict; kept between predictions if they fit.

    Kept states take at most `KEPT` bytes in host memory, or a quarter of a CUDA device's free memory; others are read
    from the store for every prediction, and for every `CHUNK` of its inputs.

    Args:
        store: the samples.
        model: their model.
    """

    def __init__(self, store: SampleStore, model: EnergyModel) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._store = store
        self._records = list(store.records)
        self._groups: list[States] | None = None
        self.call = TogetherCall(model, lambda m, x: m.likelihood.terms(m.output_of(x)))

    def are_of(self, store: SampleStore, model: EnergyModel) -> bool:
        """Return whether these are a store's present samples, on a model's present device."""
        same = store is self._store and model is self.model and next(model.parameters()).device == self.device
        return same and store.records == self._records

    def groups(self) -> Iterator[States]:
        """Yield the samples' states, in their order, in groups that run together.

        Raises:
            ValueError: if a sample is damaged, or belongs to another network.
        """
        if self._groups is not None:
            yield from self._groups
            return
        kept: list[States] = []
        room = _room(self.device)
        for states in grouped(self._states(), lambda state: state, MOST if runs_at_once(self.device) else 1):
            group = States(states)
            yield group
            room -= group.size
            kept.append(group)
            if room < 0:
                kept.clear()
        if room >= 0:
            together = not runs_at_once(self.device) and len({group.dtype for group in kept}) == 1
            self._groups = [States([state for group in kept for state in group.each])] if together else kept

    def _states(self) -> Iterator[dict[str, Tensor]]:
        for sample in self._store:
            check_sample(sample, self.model)
            yield {name: tensor.to(self.device) for name, tensor in sample.state.items()}


def ready_samples(known: ReadySamples | None, store: SampleStore, model: EnergyModel) -> ReadySamples:
    """Return the known ones, or new ones unless they are of a store's present samples and a model's present device."""
    if known is not None and known.are_of(store, model):
        return known
    return ReadySamples(store, model)


def _room(device: torch.device) -> float:
    """Return how many bytes of states may be kept on a device."""
    return KEPT if device.type != "cuda" else torch.cuda.mem_get_info(device)[0] / 4


def average_scores(
    model: EnergyModel, samples: Iterable[PosteriorSample], log_weights: Sequence[float], batches: Sequence[Any]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the likelihood's terms, averaged over samples, and the targets of batches on the model's device."""
    average, target = WeightedAverage(), torch.empty(0)
    with evaluation_mode(model):
        for sample, log_weight in zip(samples, log_weights, strict=True):
            check_sample(sample, model)
            state = {name: tensor.to(model.device) for name, tensor in sample.state.items()}
            terms, _, found = evaluate(model, state, batches)
            assert found is not None  # the model has a likelihood
            average.add(terms, torch.empty(0, device=model.device), log_weight)
            target = found
    return average.terms, target


def with_new_statistics(samples: SampleStore, model: EnergyModel, batches: Iterable[Any]) -> MemoryStore:
    """Return samples with re-estimated BatchNorm statistics; see `Posterior.update_batch_norm`."""
    store = MemoryStore()
    store.scaling = samples.scaling
    device = next(model.parameters()).device
    batches = _repeatable(batches)
    caller = StatelessCall(model, lambda m, x: m.output_of(x))
    with evaluation_mode(model):
        for sample in samples:
            state = {name: tensor.to(device) for name, tensor in sample.state.items()}
            inputs = _on(_inputs_alone(batches, model), device, dtype_of(sample.parameters))
            state = new_statistics(model, state, inputs, caller.call)
            store.append(replace(sample, buffers={name: state[name] for name in sample.buffers}))
    return store


def warn_of_overflow(terms: Mapping[str, Tensor]) -> None:
    """Warn about predictions that are NaN or infinite.

    Args:
        terms: the averaged terms of a predictive, first axis n.
    """
    if bool(torch.stack([term.isfinite().all() for term in terms.values()]).all()):
        return
    bad = torch.stack([~term.reshape(len(term), -1).isfinite().all(1) for term in terms.values()])
    count = int(bad.any(0).sum())
    if count:
        rank_zero_warn(
            f"{count} of {bad.shape[1]} predictions are NaN or infinite, because the network's output overflows or its "
            "inputs are not finite: scale the inputs as in training, or predict in float64."
        )


def _chunks(batches: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield lists of batches, read in one pass, since every sample must see the same inputs.

    A list holds about `CHUNK` bytes, or one batch; the samples are read once for each list.
    """
    chunk: list[Any] = []
    size = 0
    for batch in batches:
        own = sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(plain(batch)))
        if chunk and size + own > CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(batch)
        size += own
    if chunk:
        yield chunk


def _repeatable(batches: Iterable[Any]) -> Iterable[Any]:
    """Return batches that can be iterated repeatedly, once per sample: those of an iterator are stored."""
    return list(batches) if isinstance(batches, Iterator) else batches


def _inputs_alone(batches: Iterable[Any], model: EnergyModel) -> Iterator[Any]:
    """Yield the inputs of batches, which may have targets.

    A batch of a form that the model takes apart itself goes through its `inputs_and_target`.
    """
    arguments, own, warned = model.accepted_arguments, overrides(model, "inputs_and_target"), False
    for batch in batches:
        if own and isinstance(batch, list | tuple | Mapping):
            yield model.inputs_and_target(batch)[0]
            continue
        if not warned and has_doubtful_target(batch, arguments):
            warned = True
            rank_zero_warn(
                "predict takes the first of each pair as the inputs and the second as their target, which it ignores, "
                "although forward takes several inputs: if the second is one, pass dicts, {'name': …}, or nest them, "
                "((a, b), y)."
            )
        yield model.used_of(inputs_of(batch, arguments))


def _on(batches: Iterable[Any], device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    return (as_tensors(inputs, device, dtype) for inputs in batches)
