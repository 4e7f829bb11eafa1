"""Passes of samples through their network: the averaged predictive, kept members, and BatchNorm's statistics."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.batches.inputs import (
    LABELS,
    are_inputs,
    as_tensors,
    batches_in,
    check_dtype,
    has_doubtful_target,
    innermost,
    inputs_of,
    leaves_of,
    with_decoder_inputs,
)
from lightning_sgmcmc.chains.execution import MASK_SEED, StatelessCall, borrowed, in_turn, network_state
from lightning_sgmcmc.chains.samples import PosteriorSample, SampleRecord
from lightning_sgmcmc.chains.starts import Holder
from lightning_sgmcmc.chains.together import MOST, States, TogetherCall, dtype_of, grouped, runs_at_once
from lightning_sgmcmc.diagnostics.scores import predictive_entropy
from lightning_sgmcmc.evaluation.averages import WeightedAverage
from lightning_sgmcmc.evaluation.drawn_networks import new_statistics
from lightning_sgmcmc.evaluation.scoring import concatenate, evaluate, hooked, of_observed
from lightning_sgmcmc.likelihoods import Categorical, Likelihood
from lightning_sgmcmc.model import EnergyModel, overrides
from lightning_sgmcmc.namespace import rank_zero_warn
from lightning_sgmcmc.posterior.disk import LEAVE_OUT, DiskStore
from lightning_sgmcmc.posterior.store import MemoryStore, SampleStore
from lightning_sgmcmc.predictions import Members, Mixture, Prediction, RegressionPrediction
from lightning_sgmcmc.process import free_memory
from lightning_sgmcmc.tables import InputColumns
from lightning_sgmcmc.tensors import bad_tensor, widest

SMALL = 64 * 2**20
"""Bytes of the samples' distributions that a prediction keeps unasked."""


class KeptPredictions:
    """Tensors of each batch and sample; all are dropped above `most` bytes."""

    def __init__(self, most: float) -> None:
        self._most = self._room = most
        self._rows: defaultdict[int, list[Mapping[str, Tensor]]] = defaultdict(list)
        """By batch, and in it by sample."""

    def add(self, batch: int, found: Mapping[str, Tensor]) -> None:
        """Keep the next sample's tensors of a batch, first axis n."""
        self._room -= sum(tensor.nbytes for tensor in found.values())
        if self._room < 0:
            self._rows.clear()
        else:
            self._rows[batch].append(found)

    def stacked(self) -> dict[str, Tensor]:
        """Return the tensors by name, shape (S, n, …); {} if they were dropped or there are none."""
        rows = list(self._rows.values())
        names = rows[0][0] if rows else ()
        return {name: torch.cat([torch.stack([of[name] for of in row]) for row in rows], 1) for name in names}

    @property
    def why_dropped(self) -> str:
        """Why there are none, for a message; "" if they were not dropped."""
        if self._room >= 0:
            return ""
        size = f"{self._most / 2**20:.0f} MB"
        return f"all of them take more than {size}: pass return_samples=True to predict, or fewer inputs"


def kept_of(likelihood: Likelihood, output: Tensor, terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of one sample from which its distribution can be made, first axis n."""
    if likelihood.distribution is not None:
        return likelihood.kept_components(output)
    name = likelihood.per_sample_term
    return {name: terms[name]} if name in terms else {}


def with_distributions(
    prediction: Prediction, likelihood: Likelihood | None, kept: KeptPredictions, weights: Tensor
) -> Prediction:
    """Return a prediction that knows the samples' distributions, or why it does not; weights (S,) sum to 1."""
    if kept.why_dropped:
        return prediction.with_kept(None, kept.why_dropped)
    tensors: dict[str, Any] = kept.stacked()
    name, law, term = "the module's own predictive_terms", None, "probabilities"
    if likelihood is not None:
        name, law, term = type(likelihood).__name__, likelihood.distribution, likelihood.per_sample_term
    if law is not None and isinstance(prediction, RegressionPrediction):
        return prediction.with_kept(Mixture(law, tensors, weights))
    if term in tensors and "probabilities" in prediction.parts:
        return prediction.with_kept(Members(tensors[term], weights))
    return prediction.with_kept(None, f"{name} has no `distribution` with components(output)")


# -- checks ------------------------------------------------------------------------------------------------------------


def check_sample(sample: PosteriorSample, model: EnergyModel | None) -> None:
    """Raise ValueError unless a sample is finite and, if there is a model, fits its network."""
    if model is not None:
        check_fits(sample, model)
    bad = bad_tensor(sample.parameters, sample.buffers)
    if bad is not None:
        raise ValueError(
            f"the sample of step {sample.step}, chain {sample.chain} has NaN or infinite numbers in '{bad}'; "
            f"{LEAVE_OUT} it"
        )


def sound_records(store: DiskStore, model: EnergyModel | None) -> list[SampleRecord]:
    """Read all samples; return the records of usable ones, with a warning about the others."""
    sound, reasons = [], [f"line {number} of the manifest is damaged" for number in store.damaged_lines]
    for index, record in enumerate(store.records):
        try:
            check_sample(store[index], model)
            sound.append(record)
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        total = len(store.records) + len(store.damaged_lines)
        rank_zero_warn(f"{len(reasons)} of {total} samples in {store.path} are skipped, the first since {reasons[0]}")
    return sound


def check_fits(sample: PosteriorSample, model: EnergyModel) -> None:
    """Raise ValueError unless a sample's tensors match the model's in names, shapes and types."""
    found = {name: (tuple(t.shape), _kind(t)) for name, t in sample.state.items() if name != MASK_SEED}
    with in_turn(model), model.at_chain(0):
        expected = {name: (tuple(t.shape), _kind(t)) for name, t in network_state(model).items()}
    odd = sorted(k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k))
    if not odd:
        return
    theirs, ours = found.get(odd[0], ("none", "none")), expected.get(odd[0], ("none", "none"))
    part, word = (0, "shape") if theirs[0] != ours[0] else (1, "type")
    known = [(expected[name][0], found[name][0]) for name in odd if name in found and name in expected]
    if len(known) == len(odd) and all(own != one and own[1:] == one for own, one in known):
        raise ValueError(
            f"the network is that of a fit with {ours[0][0]} chains, whose '{odd[0]}' has shape {ours[0]}, and a "
            f"sample's has {theirs[0]}: pass a new network as net=…, or the fit's module as model=…"
        )
    raise ValueError(
        f"the samples belong to another network than the model: '{odd[0]}' has {word} {theirs[part]} in the samples "
        f"and {ours[part]} in the model ({len(odd)} tensors of the sample of step {sample.step} differ; "
        f"{LEAVE_OUT} single samples)"
    )


def _kind(tensor: Tensor) -> str:
    """Return a tensor's type as text: "float32" for every floating-point type, since it may differ from training."""
    return "float32" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")


# -- predictive --------------------------------------------------------------------------------------------------------


CHUNK = 256 * 2**20
"""Bytes of inputs that are kept while all samples predict them, at most."""
HOST_SHARE, CUDA_SHARE = 1 / 8, 1 / 4
"""The shares of free memory for samples that are kept between predictions; the first is also for inputs."""


def average_predictions(
    samples: "ReadySamples", log_weights: Sequence[float], inputs: Any, return_samples: bool
) -> Prediction:
    """Return the predictive distribution averaged over samples with log-weights; see `Posterior.predict`."""
    model, likelihood = samples.model, _likelihood_of(samples.model)
    batches = hooked(batches_in(inputs, model.accepted_arguments), model)
    averages: list[WeightedAverage] = []
    kept = KeptPredictions(math.inf if return_samples else SMALL)
    requested = KeptPredictions(math.inf)
    odd: tuple[int, ...] = ()
    with borrowed(model), torch.no_grad(), samples.shared():
        for chunk in _chunks(_inputs_alone(batches, model), min(CHUNK, HOST_SHARE * free_memory())):
            part = [WeightedAverage() for _ in chunk]
            remaining = iter(log_weights)
            for group in samples.groups():
                weights = list(itertools.islice(remaining, len(group)))
                batches_of_chunk = zip(part, _on(chunk, group.device, group.dtype, samples.columns), strict=True)
                for batch, (average, x) in enumerate(batches_of_chunk, len(averages)):
                    for (terms, own), log_weight in zip(samples.call(group, x), weights, strict=True):
                        average.add(terms, torch.empty(0, device=group.device), log_weight)
                        kept.add(batch, own)
                        if isinstance(x, Tensor) and _rows_of(terms) != len(x):
                            odd = (_rows_of(terms), *x.shape)
                        if return_samples:
                            name = per_sample_term_of(terms) if likelihood is None else likelihood.per_sample_term
                            requested.add(batch, {"each": terms[name]})
            averages += part
    if not averages:
        raise ValueError("x has no inputs to predict")
    if odd:
        rank_zero_warn(
            f"x has the shape {odd[1:]}, so {odd[1]} inputs along its first axis, and the network predicts {odd[0]}: "
            "pass one input alone as x[None]."
        )
    terms = concatenate(average.terms for average in averages)
    if not _rows_of(terms):
        raise ValueError("x has no inputs to predict")
    bad = not_finite(terms)
    if bool(bad.any()):
        rank_zero_warn(
            f"{int(bad.sum())} of {len(bad)} predictions are NaN or infinite, because the network's output overflows "
            "or its inputs are not finite: scale the inputs as in training, or predict in float64."
        )
    describe = prediction_of if likelihood is None else likelihood.prediction
    prediction = describe(terms, requested.stacked().get("each"))
    return with_distributions(prediction, likelihood, kept, torch.tensor(log_weights, dtype=torch.float64).softmax(0))


def _rows_of(terms: Mapping[str, Tensor]) -> int:
    """Return the number of predictions in a likelihood's terms, first axis n."""
    return len(next(iter(terms.values())))


def _likelihood_of(model: Any) -> Likelihood | None:
    """Return the likelihood that defines a module's predictive; None if the module does so itself."""
    return None if overrides(model, "predictive_terms") else model.likelihood


def _predicted(model: Any, inputs: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the terms of one sample, and the tensors that its distribution can be made of."""
    likelihood = _likelihood_of(model)
    if likelihood is None:
        terms = completed(model.predictive_terms(inputs))
        return terms, {name: terms[name] for name in ("probabilities",) if name in terms}
    try:
        output = model.output_of(inputs)
    except RuntimeError as error:
        check_dtype(model, inputs, error)
        raise
    terms = likelihood.terms(output)
    return terms, kept_of(likelihood, output, terms)


class ReadySamples:
    """The states of a store's samples on a model's device, kept between predictions if they take at most an eighth of
    the free host memory, or a quarter of a CUDA device's; others are read again for every `CHUNK` of inputs."""

    def __init__(self, store: SampleStore, model: EnergyModel) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.store = store
        self.columns = store.columns.inputs
        self.records = list(store.records)
        self._groups: list[States] | None = None
        self.call = TogetherCall(model, _predicted)
        self._holder = Holder(model)

    def shared(self) -> AbstractContextManager[None]:
        """Return a context in which the model has what the samples have in common."""
        return self._holder.holding(self.store.shared)

    @property
    def are_kept(self) -> bool:
        """Whether the states stay in memory between predictions, known after the first."""
        return self._groups is not None

    def groups(self) -> Iterator[States]:
        """Yield the samples' states, in their order, in groups that run together."""
        if self._groups is not None:
            yield from self._groups
            return
        kept: list[States] = []
        room = (CUDA_SHARE if self.device.type == "cuda" else HOST_SHARE) * free_memory(self.device)
        at_once, fit = runs_at_once(self.device), True
        for states in grouped(self._states(), lambda state: state, MOST if at_once else 1):
            group = States(states)
            # Known from the first: states kept for a while would lie between the passes' tensors, and pin the heap.
            fit = fit and group.size / len(states) * len(self.records) <= room
            yield group
            if fit:
                kept.append(group)
        if fit:
            together = not at_once and len({group.dtype for group in kept}) == 1
            self._groups = [States([state for group in kept for state in group.each])] if together else kept

    def _states(self) -> Iterator[dict[str, Tensor]]:
        for sample in self.store:
            check_sample(sample, self.model)
            yield {name: tensor.to(self.device) for name, tensor in sample.own_state.items()}


def ready_samples(known: ReadySamples | None, store: SampleStore, model: EnergyModel) -> ReadySamples:
    """Return the known ones, or new ones unless they are of a store's present samples and a model's present device."""
    place = next(model.parameters()).device
    if known is None or (known.store, known.model, known.device) != (store, model, place):
        return ReadySamples(store, model)
    return known if known.records == store.records else ReadySamples(store, model)


def states_in_place(model: EnergyModel, samples: Iterable[PosteriorSample]) -> Iterator[dict[str, Tensor]]:
    """Yield each sample's own tensors on a model's device, while the model has what the samples have in common."""
    holder = Holder(model)
    for sample in samples:
        check_sample(sample, model)
        with holder.holding(sample.shared):
            yield {name: tensor.to(model.device) for name, tensor in sample.own_state.items()}


def average_scores(
    model: EnergyModel, samples: Iterable[PosteriorSample], log_weights: Sequence[float], batches: Sequence[Any]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the likelihood's terms, averaged over samples, and the targets of batches on the model's device."""
    average, target = WeightedAverage(), torch.empty(0)
    with borrowed(model):
        for state, log_weight in zip(states_in_place(model, samples), log_weights, strict=True):
            terms, _, found = of_observed(model, evaluate(model, state, batches, checks=not len(target)))
            assert found is not None  # the model has a likelihood
            average.add(terms, torch.empty(0, device=model.device), log_weight)
            target = found
    return average.terms, target


def with_new_statistics(samples: SampleStore, model: EnergyModel, batches: Iterable[Any]) -> MemoryStore:
    """Return samples with re-estimated BatchNorm statistics; see `Posterior.update_batch_norm`."""
    store = MemoryStore()
    store.take_over(samples)
    device = next(model.parameters()).device
    batches = list(batches) if isinstance(batches, Iterator) else hooked(batches, model)  # read once for each sample
    caller = StatelessCall(model, lambda m, x: m.output_of(x))
    holder = Holder(model)
    with borrowed(model):
        for sample in samples:
            state = {name: tensor.to(device) for name, tensor in sample.own_state.items()}
            inputs = _on(_inputs_alone(batches, model), device, dtype_of(sample.parameters), samples.columns.inputs)
            with holder.holding(sample.shared):
                state = new_statistics(model, state, inputs, caller.call)
            store.append(replace(sample, buffers={name: state[name] for name in sample.buffers}))
    return store


def network_inputs(model: EnergyModel, store: SampleStore, x: Any) -> Iterator[Any]:
    """Yield inputs batch by batch as the network receives them, from what `Posterior.predict` takes."""
    inputs = _inputs_alone(hooked(batches_in(x, model.accepted_arguments), model), model)
    return _on(inputs, model.device, dtype_of(store[0].parameters), store.columns.inputs)


def not_finite(terms: Mapping[str, Tensor]) -> Tensor:
    """Return whether each datum has a number that is NaN or infinite, shape (n,), in tensors with the first axis n."""
    return torch.stack([~term.reshape(len(term), -1).isfinite().all(1) for term in terms.values()]).any(0)


def _chunks(batches: Iterable[Any], most: float) -> Iterator[list[Any]]:
    """Yield lists of batches that take at most some bytes, or of one, read in one pass, since every sample must see the
    same inputs."""
    chunk: list[Any] = []
    size = 0
    for batch in batches:
        own = sum(getattr(leaf, "nbytes", 0) for leaf in leaves_of(batch))
        if chunk and size + own > most:
            yield chunk
            chunk, size = [], 0
        chunk.append(batch)
        size += own
    if chunk:
        yield chunk


def _inputs_alone(batches: Iterable[Any], model: EnergyModel) -> Iterator[Any]:
    """Yield the inputs of batches, which may have targets, and which the model may take apart itself."""
    arguments, own, warned = model.accepted_arguments, overrides(model, "inputs_and_target"), False
    for batch in batches:
        if own and not are_inputs(batch):
            yield model.inputs_and_target(batch)[0]
            continue
        if not warned and has_doubtful_target(batch, arguments):
            warned = True
            rank_zero_warn(
                "predict takes the first of each pair as the inputs and the second as their target, which it ignores, "
                "although forward takes several inputs: if the second is one, pass dicts, {'name': …}, or nest them, "
                "((a, b), y)."
            )
        inputs = inputs_of(batch, arguments)
        if isinstance(inputs, int | float | str):
            raise TypeError(
                f"a batch has {inputs!r} in place of a tensor: pass torch.as_tensor(x) of what the network receives, "
                "posterior.inputs(x) of rows in the data's units, or a data frame"
            )
        if arguments.decodes and isinstance(inputs, Mapping):
            labels = batch.get(LABELS) if isinstance(batch, Mapping) else None
            inputs = with_decoder_inputs(innermost(model.net), inputs, labels)
        yield model.used_of(inputs)


def _on(
    batches: Iterable[Any], device: torch.device, dtype: torch.dtype, columns: InputColumns | None
) -> Iterator[Any]:
    return (as_tensors(inputs, device, dtype, columns) for inputs in batches)


# -- terms of a module's own -------------------------------------------------------------------------------------------


def completed(terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a sample's own terms, first axis n, with those that a prediction's parts need besides."""
    if "probabilities" in terms:
        return {**terms, "sample_entropy": predictive_entropy(terms["probabilities"])}
    if {"mean", "variance"} <= terms.keys():
        mean = widest(terms["mean"])
        return {**terms, "mean": mean, "square": mean.square()}
    return dict(terms)


def per_sample_term_of(terms: Mapping[str, Tensor]) -> str:
    """Return the name of the term that is kept for each sample: the first of the module's own."""
    return next((name for name in ("probabilities", "mean") if name in terms), next(iter(terms)))


def prediction_of(terms: Mapping[str, Tensor], per_sample: Tensor | None) -> Prediction:
    """Return the prediction that averages of `completed` terms describe."""
    if "probabilities" in terms or "square" in terms:
        kind = Categorical if "probabilities" in terms else Likelihood
        return kind().prediction(terms, per_sample)
    samples = {} if per_sample is None else {f"sample_{per_sample_term_of(terms)}": per_sample}
    return Prediction(**terms, **samples)
