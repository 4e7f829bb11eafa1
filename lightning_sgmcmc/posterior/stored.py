"""Stored samples with their weights: what needs no network, such as selections, weights, tables and export."""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from lightning_sgmcmc.chains.execution import in_turn
from lightning_sgmcmc.chains.samples import PosteriorSample, SampleRecord, comparable_log_weights
from lightning_sgmcmc.chains.together import dtype_of
from lightning_sgmcmc.checks import check_choice, check_count, check_number
from lightning_sgmcmc.contour.learned import LearnedContour
from lightning_sgmcmc.diagnostics.draws import normalised_weights, resample, weight_efficiency
from lightning_sgmcmc.evaluation.comparison import html_table
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.namespace import rank_zero_warn
from lightning_sgmcmc.posterior.calibration import Calibration
from lightning_sgmcmc.posterior.description import description_of, first_difference
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.export import SHOWN, SMALL, ParameterTable, parameter_table, summary, to_inference_data
from lightning_sgmcmc.posterior.manifest import MANIFEST
from lightning_sgmcmc.posterior.predictive import ReadySamples
from lightning_sgmcmc.posterior.store import MemoryStore, SampleStore, StoreView
from lightning_sgmcmc.tables import Columns


def merged_store(
    stores: Sequence[SampleStore], models: Sequence[EnergyModel | None], masses: Sequence[float] | None
) -> StoreView:
    """Return the samples of several stores as one store; see `Posterior.merge`."""
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
    places: list[tuple[SampleStore, int]] = []
    records: list[SampleRecord] = []
    for store, mass in zip(stores, chosen, strict=True):
        first = max((record.chain for record in records), default=-1) + 1
        log_weights = comparable_log_weights(store.records)
        log_weights = log_weights - torch.logsumexp(log_weights, 0) + math.log(mass)
        for index, (record, log_weight) in enumerate(zip(store.records, log_weights.tolist(), strict=True)):
            places.append((store, index))
            records.append(replace(record, chain=record.chain + first, log_weight=log_weight, comparable=True))
    return StoreView(places, records, stores[0])


def _share_samples(store: SampleStore, other: SampleStore) -> bool:
    """Return whether two stores have a sample of one run in common; runs may have used one folder after another."""
    return not _samples_of(store).isdisjoint(_samples_of(other))


def _samples_of(store: SampleStore) -> set[tuple[Any, ...]]:
    """Return what tells the samples of a store, or those that a view is of, from all others."""
    found: set[tuple[Any, ...]] = set()
    for own, index in map(store.place, range(len(store))):
        if isinstance(own, DiskStore):
            record = own.records[index]
            found.add((own.run_id, record.step, record.chain, record.draw, record.checksum))
        else:
            found.add((id(own), index))
    return found


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
    kinds = [dtype_of(own.parameters(0, list(ours)[:1])) for own in (store, first)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"posterior {number} has samples in {kinds[0]} and the first in {kinds[1]}, in which one network cannot "
            "compute: merge runs of one precision"
        )
    found = first_difference(description_of(first_model), description_of(model), "its model", there="first")
    if found is not None and model is not None and first_model is not None:
        raise ValueError(
            f"posterior {number} is of another network than the first: {found}; merge samples of one network and "
            "likelihood"
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
    in_same_units = replace(store.columns, targets=first.columns.targets)  # these have a message below
    other = first.columns.difference(in_same_units)
    if other is not None:
        raise ValueError(
            f"posterior {number} was fitted to other data than the first ({other}): merge runs on the same data"
        )
    if store.scaling != first.scaling:
        raise ValueError(
            f"posterior {number} was fitted to targets of another scaling than the first ({store.scaling} and "
            f"{first.scaling}), so its predictions are in other units: merge runs on the same data"
        )


# -- stored ------------------------------------------------------------------------------------------------------------


Samples = TypeVar("Samples", bound="StoredSamples")


def _novelty_folder(store: SampleStore) -> Path | None:
    """Return the place of the samples for novelty of a store's run; None in memory."""
    return store.path / f"novelty-{store.run_id}" if isinstance(store, DiskStore) else None


class StoredSamples:
    """The part of a `Posterior` that needs no network: samples, weights, selections, export."""

    def __init__(self, store: SampleStore, model: EnergyModel | None = None) -> None:
        if not isinstance(store, SampleStore):
            raise TypeError(
                f"store must be a sample store, got a {type(store).__name__}: open a folder by Posterior.load(path)"
            )
        self.store = store
        self.model = model
        self.calibration: Calibration | None = None
        """What `calibrate` has fitted, which predictions use; None leaves them as they are."""
        self._why_no_model = "no model was given"
        self._ready: ReadySamples | None = None
        self._novelty: Any = None
        """The posterior of `novelty`, whose model this one's takes the place of."""
        self.find_novelty()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_ready": None}

    def __deepcopy__(self: Samples, memo: dict[int, Any]) -> Samples:
        made = memo[id(self)] = type(self).__new__(type(self))
        with nullcontext() if self.model is None else in_turn(self.model):
            vars(made).update(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __len__(self) -> int:
        return len(self.store)

    def __iter__(self) -> Iterator[PosteriorSample]:
        return iter(self.store)

    @overload
    def __getitem__(self, index: int) -> PosteriorSample: ...

    @overload
    def __getitem__(self: Samples, index: slice) -> Samples: ...

    def __getitem__(self: Samples, index: int | slice) -> PosteriorSample | Samples:
        """Return a sample, or the posterior of a slice of them; nothing is copied."""
        if not isinstance(index, slice):
            return self.store[index]
        return self._selected(range(*index.indices(len(self))))

    def __repr__(self) -> str:
        calibrated = f", calibrated: {self.calibration}" if self.calibration is not None else ""
        where = f", {path}" if (path := getattr(self.store, "path", "")) else ""
        return f"Posterior({summary(self.records)}{calibrated}{where})"

    def _repr_html_(self) -> str:
        rows = [(r.step, r.chain, r.cycle, r.energy, r.log_weight) for r in self.records[:SHOWN]]
        more = [] if len(self) <= SHOWN else [("…",) * 5]
        return html_table(repr(self), ("step", "chain", "cycle", "energy", "log-weight"), [*rows, *more])

    # -- novelty ------------------------------------------------------------------------------------------------------

    @property
    def novelty(self: Samples) -> Samples | None:
        """The samples that mutual information is of, in place of those that predict; None without any.

        `AutoSampling(objective="both")` draws them at temperature 1 under a tight prior; they have even weights. They
        are in a folder of their own in that of the samples. Selections keep them whole, and `merge` those of all;
        `compress` and `push_to_hub` drop them, and then all uncertainty is of the samples that predict.
        """
        if self._novelty is not None:
            self._novelty.model, self._novelty._why_no_model = self.model, self._why_no_model
        found: Samples | None = self._novelty
        return found

    def find_novelty(self) -> None:
        """Take the samples for novelty that are in the folder of the samples, if it has some."""
        folder = _novelty_folder(self.store)
        if folder is not None and (folder / MANIFEST).exists():
            self._novelty = type(self)(DiskStore(folder))

    def drop_novelty(self, why: str) -> None:
        """Leave out the samples for novelty, and say what mutual information is of then."""
        self._novelty = None
        rank_zero_warn(f"Mutual information is of the samples that predict from now on, since {why}.")

    def keep_novelty(self, samples: Iterable[PosteriorSample]) -> None:
        """Store samples for novelty beside those that predict: in their folder, or in memory."""
        folder = _novelty_folder(self.store)
        store: SampleStore = MemoryStore()
        if folder is not None:
            if (folder / MANIFEST).exists():  # of a run that has been resumed after its end
                DiskStore(folder).keep([])
                store = DiskStore(folder)
            else:
                own = self.store
                store = DiskStore.create(folder, own.model_description, own.columns, own.shared, own.narrow)
        for sample in samples:
            store.append(replace(sample, log_weight=0.0))
        self._novelty = type(self)(store, self.model)

    @property
    def records(self) -> list[SampleRecord]:
        """The samples' records, available without loading the samples."""
        return self.store.records

    @property
    def log_weights(self) -> Tensor:
        """The samples' log importance weights, shape (S,), float64, up to one constant.

        If each chain learned its own π (a `ContourGradient` of several chains that do not interact), the records'
        log-weights have a constant of their own for each chain. They are then normalised within each chain, so that
        chains count alike.
        """
        return comparable_log_weights(self.records)

    @property
    def weights(self) -> Tensor:
        """The samples' weights, shape (S,), float64, summing to 1."""
        return normalised_weights(self.log_weights)

    @property
    def weight_efficiency(self) -> float:
        """(Σw)²/(S·Σw²) of the S samples' weights, a share in (0, 1]; 1 for equal weights."""
        return weight_efficiency(self.log_weights)

    @property
    def contour(self) -> LearnedContour | None:
        """The final learned state of a contour sampler, None without one.

        Raises:
            ValueError: if its file is damaged.
        """
        return self.store.contour

    def reweighted(self: Samples, by: Literal["sample", "final"] = "final", exponent: float = 1.0) -> Samples:
        """Return this posterior with other importance weights; nothing is copied.

        Args:
            by: "sample" uses the weights from the time of each draw, "final" those from the final π and the samples'
                energies.
            exponent: α of tempered weights w^α; 1 keeps them, 0 makes all of a chain equal.

        Raises:
            ValueError: for another `by`, a negative exponent, or "final" without a learned contour or after `resample`.
        """
        check_choice("by", by, ("sample", "final"))
        check_number("exponent", exponent)
        log_weights, comparable = self.log_weights, None
        if by == "final":
            contour = self.contour
            if self.store.is_resampled:
                raise ValueError(
                    "by='final' would weigh samples twice that resample drew by their weights: use "
                    "posterior.reweighted('final').resample() of the samples before it"
                )
            if contour is None:
                raise ValueError(
                    "by='final' needs the state learned by a contour sampler, and these samples come from a run "
                    "without ContourGradient: use by='sample'"
                )
            energies = torch.tensor([record.energy for record in self.records], dtype=torch.float64)
            chains = torch.tensor([record.chain for record in self.records])
            device = contour.state.log_vector.device
            log_weights = contour.log_weights(energies.to(device), chains.to(device)).cpu()
            comparable = contour.is_shared
        tempered = exponent * log_weights if exponent else torch.zeros_like(log_weights)  # 0·log 0 would be NaN
        return self._selected(range(len(self)), tempered.tolist(), comparable)

    def resample(
        self: Samples,
        count: int | None = None,
        method: Literal["systematic", "multinomial"] = "systematic",
        seed: int = 0,
    ) -> Samples:
        """Return equally weighted samples, drawn with replacement by the weights; nothing is copied.

        Args:
            count: number of draws; None means the number of samples.
            method: "systematic" or "multinomial", see `lightning_sgmcmc.diagnostics.resample`.
            seed: seed of the draw.

        Raises:
            ValueError: for an argument out of range, or weights that are NaN or all 0.

        Source: Deng et al. 2020 (CSGLD), Algorithm 1.
        """
        indices = resample(self.log_weights, count, method, torch.Generator().manual_seed(seed)).tolist()
        chosen = self._selected(indices, [0.0] * len(indices), True)
        chosen.store.is_resampled = True
        return chosen

    def thin(self: Samples, every: int | None = None, count: int | None = None) -> Samples:
        """Return fewer of the samples, evenly spaced within each chain; nothing is copied.

        The kept samples have their own weights, so where weights differ much `resample(count)` keeps more of the
        posterior than `thin(count=count)`.

        Args:
            every: keep each chain's newest sample and every so many-th before it.
            count: keep so many samples in all, the same share of each chain.

        Raises:
            ValueError: unless exactly one of both is given, or count is larger than the number of samples.
        """
        return self._selected(thinned([record.chain for record in self.records], every, count))

    def merge(self: Samples, *others: Samples, masses: Sequence[float] | None = None) -> Samples:
        """Return the samples of this and other posteriors of the same network together; nothing is copied.

        `Posterior.merge(a, b, c)` is `a.merge(b, c)`. Weights are normalised within each posterior first, since the
        constants of two runs' log-weights do not compare. Then each posterior counts by its number of samples, so that
        samples of unweighted runs count alike. The chains are numbered one after another. A calibration is dropped.

        Args:
            others: the other posteriors.
            masses: how much each posterior counts instead, positive, this one first; only the ratios matter.

        Raises:
            ValueError: if one has no samples or is given twice, if networks, likelihoods or the targets' scalings
                differ, or masses are not one positive number for each.
        """
        every = [self, *others]
        models = [one.model for one in every]
        chosen = type(self)(merged_store([one.store for one in every], models, masses), self.model)
        chosen._why_no_model = self._why_no_model
        told = [one.novelty for one in every if one.novelty is not None]
        if len(told) == len(every):  # parts of one posterior have the same
            apart = [one for i, one in enumerate(told) if not any(_share_samples(one.store, o.store) for o in told[:i])]
            chosen._novelty = apart[0].merge(*apart[1:])
        elif told:
            chosen.drop_novelty("only some of the posteriors have samples for it")
        return chosen

    def summary(
        self, parameters: Sequence[str] | None = None, by: Literal["parameter", "element", "layer"] = "parameter"
    ) -> ParameterTable:
        """Return a table of the posterior: mean, standard deviation, split R-hat and effective number of draws.

        The first row is the energy. Parameters of a deep network are not identified (its units can be permuted), so
        chains that agree in their predictions may differ in them: R-hat of the energy and of predictions
        (`to_arviz`) says more about mixing. Mean and sd respect the weights, R-hat and ESS do not.

        Args:
            parameters: names, or shell patterns ("net.0.*"); None means all.
            by: "parameter" has a row for each tensor: its mean and root mean square sd, the largest R-hat and smallest
                ESS of up to 8 of its elements. "layer" joins the tensors of a layer, "element" has a row for each
                number.

        Raises:
            ValueError: if there are no samples, a pattern matches no parameter, or for another `by`.
        """
        return parameter_table(self.store, parameters, by, f"Posterior of {summary(self.records)}")

    @property
    def columns(self) -> Columns:
        """What the inputs and targets of the fit were, as its datamodule said: names, categories, scaling, classes."""
        return self.store.columns

    def inputs(self, x: Any) -> Tensor:
        """Return inputs in the data's units as the network receives them, for `ensemble`, `networks` and `export`.

        Args:
            x: a data frame, whose columns are taken by their names, or an array or list of the training data's columns
                in their order.

        Raises:
            RuntimeError: if the store does not know the columns, since the fit's datamodule did not tell.
            ValueError: for a missing or unknown column, an unknown category, or another number of columns.
        """
        if self.columns.inputs is None:
            raise RuntimeError(
                "the store has no columns of the inputs, since the fit had loaders, or a datamodule without "
                "input_columns: convert x as the training data were"
            )
        return self.columns.inputs.inputs(x)

    def _selected(
        self: Samples,
        indices: Sequence[int],
        log_weights: Sequence[float] | None = None,
        comparable: bool | None = None,
    ) -> Samples:
        """Return the posterior of some samples, with their own weights unless others are given."""
        records = [self.records[index] for index in indices]
        if log_weights is not None:
            pairs = zip(records, log_weights, strict=True)
            records = [replace(record, log_weight=log_weight) for record, log_weight in pairs]
        if comparable is not None:
            records = [replace(record, comparable=comparable) for record in records]
        chosen = type(self)(StoreView([(self.store, index) for index in indices], records, self.store), self.model)
        chosen._why_no_model, chosen._novelty = self._why_no_model, self._novelty
        return chosen

    def in_memory(self: Samples, datamodule: Any = None) -> Samples:
        """Return this posterior with all samples read into memory, for many small predictions.

        Args:
            datamodule: that of the inputs to predict, if there is one.

        Raises:
            ValueError: if its inputs have other columns or units than those of the fit.
        """
        self.columns.check(datamodule, targets=False)
        if isinstance(self.store, MemoryStore):
            return self
        store = MemoryStore()
        for sample in self:
            store.append(sample)
        store.take_over(self.store)
        kept = type(self)(store, self.model)
        kept.calibration, kept._why_no_model = self.calibration, self._why_no_model
        kept._novelty = None if self.novelty is None else self.novelty.in_memory()
        return kept

    def standardised(self: Samples) -> Samples:
        """Return this posterior with predictions in the units of the standardised targets; nothing is copied."""
        chosen = self._selected(range(len(self)))
        chosen.store.columns = replace(self.store.columns, targets=None)
        chosen.calibration = self.calibration
        return chosen

    def to_arviz(
        self,
        parameters: Sequence[str] | None = None,
        predictions: Mapping[str, Tensor] | None = None,
        max_elements: int = SMALL,
        log_likelihood: Tensor | None = None,
    ) -> Any:
        """Return the samples as ArviZ's container: an `InferenceData` (ArviZ 0.x) or a `DataTree` (from 1.0).

        Every variable has the dimensions (chain, draw, …); the coordinate `chain` is the chain's global index. If
        chains have unequal numbers of draws, the oldest draws of longer chains are dropped, with a warning. ArviZ
        weighs all draws alike, so weights that differ are a warning: export `resample(count)`, whose draws are one
        chain. It takes them for draws of the posterior, so another temperature than 1 is a warning.

        The groups: `posterior` holds the chosen parameters by their names in the network. `sample_stats` holds `energy`
        (the mini-batch estimate Ũ, in nats), `lp` = -Ũ (ArviZ's name for the log density at temperature 1, up to a
        constant), `step`, `cycle` and `log_weight`. `posterior_predictive` holds the predictions, `log_likelihood` the
        log densities `y`, which `arviz.loo` needs.

        Args:
            parameters: names, or shell patterns ("net.0.*"). None exports those of at most `max_elements` numbers.
                Parameters of a deep network are not identified (its units can be permuted), so they reveal less about
                mixing than energies and predictions do.
            predictions: each sample's predictions by name, shape (S, …) in the order of the samples.
            max_elements: see `parameters`.
            log_likelihood: that of each datum by each sample, shape (S, n), from `posterior.log_likelihood(data)`;
                `arviz.loo` is right for samples at temperature 1, and too good for colder ones and ensembles.

        Example::

            prediction = posterior.predict(x, return_samples=True)
            data = posterior.to_arviz(predictions={"probabilities": prediction.sample_probabilities})
            arviz.summary(data, group="posterior_predictive")
        """
        return to_inference_data(self.store, parameters, predictions, max_elements, log_likelihood)


# -- thinning ----------------------------------------------------------------------------------------------------------


def thinned(chains: Sequence[int], every: int | None, count: int | None) -> list[int]:
    """Return the indices of the kept samples, in their order, from each sample's chain; see `Posterior.thin`.

    >>> thinned([0, 1, 0, 1, 0, 1], every=2, count=None)
    [0, 1, 4, 5]
    >>> thinned([0, 1, 0, 1, 0, 1], every=None, count=2)
    [4, 5]
    """
    if (every is None) == (count is None):
        raise ValueError(f"thin needs either every=… or count=…, got every={every} and count={count}")
    check_count("every", every)
    check_count("count", count)
    places: dict[int, list[int]] = {}
    for index, chain in enumerate(chains):
        places.setdefault(chain, []).append(index)
    if every is not None:
        return sorted(index for own in places.values() for index in own[::-1][::every])
    assert count is not None
    if count > len(chains):
        raise ValueError(f"count={count} is more than the {len(chains)} samples: pass at most {len(chains)}")
    kept: list[int] = []
    for own, share in zip(places.values(), _shares([len(own) for own in places.values()], count), strict=True):
        kept += [own[len(own) - 1 - j * len(own) // share] for j in range(share)]
    return sorted(kept)


def _shares(lengths: Sequence[int], count: int) -> list[int]:
    """Return whole numbers proportional to lengths that sum to count, by the largest remainders."""
    total = sum(lengths)
    shares = [count * length // total for length in lengths]
    by_remainder = sorted(range(len(lengths)), key=lambda i: -(count * lengths[i] % total))
    for i in by_remainder[: count - sum(shares)]:
        shares[i] += 1
    return shares
