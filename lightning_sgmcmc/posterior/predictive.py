"""Passes of samples through their network: the averaged predictive, and BatchNorm's statistics."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_sgmcmc.batches.loader import is_shuffled
from lightning_sgmcmc.chains.sample import PosteriorSample
from lightning_sgmcmc.chains.stateless import StatelessCall, evaluation_mode
from lightning_sgmcmc.evaluation.averages import WeightedAverage
from lightning_sgmcmc.evaluation.batch_norm import new_statistics
from lightning_sgmcmc.evaluation.scoring import concatenate, evaluate
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.posterior.checks import check_sample
from lightning_sgmcmc.posterior.store import SampleStore
from lightning_sgmcmc.predictions import Prediction

CHUNK = 256 * 2**20
"""Bytes of inputs that are kept while all samples predict them."""


def average_predictions(
    model: EnergyModel,
    samples: Iterable[PosteriorSample],
    log_weights: Sequence[float],
    inputs: Any,
    return_samples: bool,
) -> Prediction:
    """Return the predictive distribution averaged over samples with log-weights; see `Posterior.predict`.

    The samples are read several times if the inputs are many.

    Raises:
        RuntimeError: if the model has no likelihood.
        ValueError: if there are no inputs, or a sample is damaged.
    """
    device = next(model.parameters()).device
    likelihood = model.likelihood
    if likelihood is None:
        raise RuntimeError(f"{type(model).__name__} has no likelihood object to define a predictive: pass likelihood=…")
    if isinstance(inputs, tuple):
        raise TypeError(
            f"x is a tuple of {len(inputs)}, which could be a batch (x, y) or several batches: pass the inputs alone, "
            "predict(x), or a list of batches"
        )
    batches = [inputs] if isinstance(inputs, Tensor | np.ndarray) else inputs
    if is_shuffled(batches):
        rank_zero_warn(
            "The loader shuffles, so the predictions are in the order of this one pass: pass a loader in a fixed order "
            "to match them with inputs."
        )
    caller = StatelessCall(model, lambda m, x: m.likelihood.terms(m(x)))
    averages: list[WeightedAverage] = []
    kept: list[Tensor] = []
    with evaluation_mode(model), torch.no_grad():
        for chunk in _chunks(batches):
            part = [WeightedAverage() for _ in chunk]
            of_chunk = []
            for sample, log_weight in zip(samples, log_weights, strict=True):
                check_sample(sample, model)
                state = {name: tensor.to(device) for name, tensor in sample.state.items()}
                of_sample = []
                for average, x in zip(part, _inputs_of(chunk, device, _dtype_of(sample)), strict=True):
                    terms = caller.call(state, x)
                    average.add(terms, torch.empty(0, device=device), log_weight)
                    if return_samples:
                        of_sample.append(terms[likelihood.per_sample_term])
                if return_samples:
                    of_chunk.append(torch.cat(of_sample))
            averages += part
            if return_samples:
                kept.append(torch.stack(of_chunk))
    if not averages:
        raise ValueError("x has no inputs to predict")
    terms = concatenate(average.terms for average in averages)
    warn_of_overflow(terms)
    return likelihood.prediction(terms, torch.cat(kept, 1) if kept else None)


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


def append_with_new_statistics(
    store: SampleStore, model: nn.Module, samples: Iterable[PosteriorSample], batches: Iterable[Any]
) -> None:
    """Append samples with re-estimated BatchNorm statistics to a store; see `Posterior.update_batch_norm`."""
    device = next(model.parameters()).device
    batches = _repeatable(batches)
    caller = StatelessCall(model, lambda m, x: m(x))
    with evaluation_mode(model):
        for sample in samples:
            state = {name: tensor.to(device) for name, tensor in sample.state.items()}
            state = new_statistics(model, state, _inputs_of(batches, device, _dtype_of(sample)), caller.call)
            store.append(replace(sample, buffers={name: state[name] for name in sample.buffers}))


def warn_of_overflow(terms: Mapping[str, Tensor]) -> None:
    """Warn about predictions that are NaN or infinite.

    Args:
        terms: the averaged terms of a predictive, first axis n.
    """
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
        own = sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(batch))
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


def _inputs_of(batches: Iterable[Any], device: torch.device, dtype: torch.dtype) -> Iterator[Tensor]:
    for batch in batches:
        inputs = torch.as_tensor(batch[0] if isinstance(batch, list | tuple) else batch)
        yield inputs.to(device, dtype if inputs.is_floating_point() else inputs.dtype)


def _dtype_of(sample: PosteriorSample) -> torch.dtype:
    """Return the dtype of a sample's weights, in which its network computes; NumPy's floats are float64."""
    return next((p.dtype for p in sample.parameters.values() if p.is_floating_point()), torch.get_default_dtype())
