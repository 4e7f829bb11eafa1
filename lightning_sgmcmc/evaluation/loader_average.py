"""Evaluation of the collected samples on one data set, updated with every sample, with a user's own metrics."""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_sgmcmc.batches.loader import flat_loaders
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.diagnostics.scores import mean_interval, out_of_distribution_metrics
from lightning_sgmcmc.evaluation.averages import ChainsAverage, CycleAverage, WeightedAverage
from lightning_sgmcmc.evaluation.comparison import ChainComparison, html_table
from lightning_sgmcmc.evaluation.scoring import Scores
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.predictions import RegressionPrediction
from lightning_sgmcmc.tables import TargetScaling
from lightning_sgmcmc.tensors import widest


@dataclass
class Kept:
    """Log densities log p(y|x) of one predictive, shape (n,), float32, on the CPU, their negative mean in nats per
    example, and the index of the sample that it is, or that was added last."""

    density: Tensor
    nll: float
    index: int


@dataclass
class PerDatumScores:
    """Log densities of the best single sample, of the best average, of the first cycle's average, and their mean over
    the single samples: four numbers an example. The best are chosen by their NLL on the same data, which favours
    them."""

    kept: dict[str, Kept] = field(default_factory=dict)
    _first_cycle: int | None = None
    _is_prefix: bool = True

    def add(self, index: int, cycle: int, own: Tensor, average: Tensor) -> None:
        """Add a sample's log p(y|x,θ) of each datum, shape (n,), and that of the average of all so far, empty while all
        weights are 0."""
        self._keep("best_single", own, index, if_lower=True)
        self._keep("mean_single", self._mean(own, index), index)
        if not len(average):
            return
        self._keep("best_average", average, index, if_lower=True)
        self._first_cycle = cycle if self._first_cycle is None else self._first_cycle
        in_first = cycle == self._first_cycle
        last = self.kept.get("first_cycle")
        if in_first and (last is None or last.index == index - 1):
            self._keep("first_cycle", average, index)
        elif in_first:
            self._is_prefix = False  # the first cycle's samples did not come first

    def _mean(self, own: Tensor, index: int) -> Tensor:
        """Return the mean over the samples so far of each datum's log density."""
        earlier = self.kept.get("mean_single")
        if earlier is None or len(earlier.density) != len(own):
            return own
        before = widest(earlier.density)
        return before + (own.detach().cpu().to(before) - before) / (index + 1)

    def _keep(self, name: str, density: Tensor, index: int, if_lower: bool = False) -> None:
        nll = -float(density.mean())
        if not if_lower or (math.isfinite(nll) and (name not in self.kept or nll < self.kept[name].nll)):
            self.kept[name] = Kept(density.detach().to("cpu", torch.float32, copy=True), nll, index)

    def first_cycle(self, count: int) -> Kept | None:
        """Return the average of the first cycle's samples; None if there is one cycle only, or if it is not known."""
        found = self.kept.get("first_cycle")
        return found if found is not None and self._is_prefix and found.index + 1 < count else None

    def gain(self, name: str, average: Tensor) -> tuple[float, tuple[float, float]] | None:
        """Return how much lower the NLL of the average, shape (n,), is than that of a kept predictive, and the 95 %
        interval."""
        found = self.kept.get(name)
        if found is None or len(found.density) != len(average):
            return None
        difference = average.cpu().double() - widest(found.density)
        return float(difference.mean()), mean_interval(difference)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers and tensors."""
        return {
            "kept": {name: dict(vars(one)) for name, one in self.kept.items()},
            "first_cycle": self._first_cycle,
            "is_prefix": self._is_prefix,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self.kept = {name: Kept(**one) for name, one in state["kept"].items()}
        self._first_cycle, self._is_prefix = state["first_cycle"], state["is_prefix"]


# -- user metrics ------------------------------------------------------------------------------------------------------


class UserMetrics:
    """Metrics by name, functions or torchmetrics, of class probabilities (n, K) and labels (n,), or in regression of
    the predictive means and the targets, both (n, D) and in the target's own units."""

    def __init__(self, metrics: Mapping[str, Callable[..., Any]] | None) -> None:
        if metrics is not None and (isinstance(metrics, Metric) or not hasattr(metrics, "items")):
            raise TypeError(
                f"metrics must be a dictionary of metrics by name, got a {type(metrics).__name__}: pass "
                "metrics={'name': …}"
            )
        self._metrics: dict[str, Any] = dict((metrics or {}).items())
        for name, metric in self._metrics.items():
            if not callable(metric):
                raise TypeError(f"metrics: '{name}' should be a metric or a function, got a {type(metric).__name__}")

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics' names."""
        return tuple(self._metrics)

    def __repr__(self) -> str:
        return str(list(self._metrics)) if self._metrics else "None"

    def check(self, model: EnergyModel) -> None:
        """Raise ValueError if the model has no likelihood, or its likelihood has a metric of the same name."""
        if not self._metrics:
            return
        if model.likelihood is None:
            raise ValueError("metrics needs a predictive, which a module's own log_likelihood has not: omit metrics")
        known = sorted(set(self._metrics) & set(model.likelihood.metric_names))
        if known:
            raise ValueError(f"metrics has a '{known[0]}', as the likelihood itself: give it another name")

    def values(
        self, model: EnergyModel, terms: Mapping[str, Tensor], target: Tensor | None, scaling: TargetScaling
    ) -> dict[str, float]:
        """Return the metrics of a predictive."""
        if not self._metrics or model.likelihood is None or target is None:
            return {}
        prediction = model.likelihood.prediction(terms, None)
        predicted, target = model.likelihood.scored(prediction, target)
        if isinstance(prediction, RegressionPrediction):
            predicted, target = (widest(part) if scaling.is_far else part for part in (predicted, target))
            scale, shift = (
                part.to(predicted) if isinstance(part, Tensor) else part for part in (scaling.factor, scaling.shift)
            )
            predicted, target = predicted * scale + shift, target * scale + shift
        return {name: self._value(metric, predicted, target) for name, metric in self._metrics.items()}

    @staticmethod
    def _value(metric: Any, predicted: Tensor, target: Tensor) -> float:
        if not isinstance(metric, Metric):
            return float(metric(predicted, target))
        value = float(metric.to(predicted.device)(predicted, target))
        metric.reset()
        return value


# -- held data ---------------------------------------------------------------------------------------------------------


MOST_TENSORS = 16
"""Of a list of a data set's tensors, those that are looked at."""


@dataclass(frozen=True, eq=False)
class HeldData:
    """The data sets of a trainer's training loaders and their tensors at one time, as weak references, and how often
    each tensor has been written in place."""

    objects: tuple["weakref.ref[Any]", ...]
    versions: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return HeldData, ((), self.versions)  # a copy does not know which data are held

    def is_same(self, other: "HeldData") -> bool:
        """Return whether no data set or tensor was replaced or written in between."""
        if self.versions != other.versions or len(self.objects) != len(other.objects):
            return False
        pairs = zip(self.objects, other.objects, strict=True)
        return all((own := one()) is not None and own is two() for one, two in pairs)


def held_data(trainer: pl.Trainer) -> HeldData:
    """Return what identifies the training data that a trainer holds now."""
    datasets = [getattr(loader, "dataset", None) for loader in flat_loaders(trainer.train_dataloader)]
    found = [part for dataset in datasets for part in _parts(dataset, 3)]
    tensors = [part for part in found if isinstance(part, Tensor) and not part.is_inference()]
    return HeldData(tuple(weakref.ref(part) for part in found), tuple(tensor._version for tensor in tensors))


def _parts(dataset: Any, depth: int) -> Iterator[Any]:
    """Yield a data set, those that it is a part of or consists of, and their tensors."""
    if depth == 0 or not hasattr(dataset, "__dict__"):
        return
    yield dataset
    for name, value in vars(dataset).items():
        each = value[:MOST_TENSORS] if isinstance(value, list | tuple) else (value,)
        yield from (part for part in each if isinstance(part, Tensor))
        if name in ("dataset", "datasets"):
            for part in each:
                yield from _parts(part, depth - 1)


# -- running sums ------------------------------------------------------------------------------------------------------


@dataclass
class _ChainWeights:
    """A chain's importance weights w = exp(l): how many, the largest l, and Σw and Σw² relative to it."""

    count: int = 0
    largest: float = -math.inf
    total: float = 0.0
    squares: float = 0.0
    first: float | None = None
    are_equal: bool = True

    def add(self, log_weight: float) -> None:
        """Add a sample's log-weight."""
        self.first = log_weight if self.first is None else self.first
        self.are_equal &= log_weight == self.first
        self.count += 1
        if log_weight > self.largest:
            factor = math.exp(self.largest - log_weight)
            self.total, self.squares, self.largest = self.total * factor, self.squares * factor**2, log_weight
        if log_weight > -math.inf:
            weight = math.exp(log_weight - self.largest)
            self.total, self.squares = self.total + weight, self.squares + weight**2


class _Sums:
    """Sums over the samples of an evaluation, to which each look adds the samples that are new."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._summed = 0
        self._totals: list[float] = []
        self._weighed = 0
        self._chains: dict[float, _ChainWeights] = {}

    def means(self, names: list[str], members: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return the mean of each metric over the samples."""
        if names != self._names or len(members) < self._summed:
            self._names, self._summed, self._totals = names, 0, [0.0] * len(names)
        for member in members[self._summed :]:
            self._totals = [total + member[name] for total, name in zip(self._totals, names, strict=True)]
        self._summed = len(members)
        return {name: total / len(members) for name, total in zip(names, self._totals, strict=True)}

    def weight_efficiency(
        self, log_weights: Sequence[float], members: Sequence[Mapping[str, float]], comparable: bool
    ) -> float | None:
        """Return `weight_efficiency` of the samples' weights, of weights that do not compare within each chain."""
        if len(log_weights) < self._weighed:
            self._weighed, self._chains = 0, {}
        for log_weight, member in zip(log_weights[self._weighed :], members[self._weighed :], strict=True):
            self._chains.setdefault(member["chain"], _ChainWeights()).add(log_weight)
        self._weighed = len(log_weights)
        chains = list(self._chains.values())
        counted = [chain for chain in chains if chain.largest > -math.inf]
        are_equal = all(chain.are_equal for chain in chains)
        alike = {chain.first if comparable else chain.count for chain in chains}
        if len(log_weights) < 2 or not counted or (are_equal and len(alike) == 1 and len(counted) == len(chains)):
            return None
        top = max(chain.largest for chain in counted)
        shares = [math.exp(chain.largest - top) if comparable else 1 / chain.total for chain in counted]
        total = sum(chain.total * share for chain, share in zip(counted, shares, strict=True))
        squares = sum(chain.squares * share**2 for chain, share in zip(counted, shares, strict=True))
        return total**2 / (len(log_weights) * squares)


# -- loader average ----------------------------------------------------------------------------------------------------


@dataclass(repr=False)
class Evaluation:
    """Evaluation of the collected samples on one data set.

    Attributes:
        members: for each sample its step, chain, cycle and own metrics.
        running: for each sample the metrics of the average of all samples so far, NaN while all weights are 0.
        average: the average's tensors (see `WeightedAverage`), for figures.
        target: the targets, shape (n, …), None if the module has no likelihood.
        ood: for each set of out-of-distribution data, the average's tensors there.
        log_weights: for each sample its log importance weight.
        comparable: whether these compare across chains; otherwise they are normalised within each chain.
        chains: comparison of the chains.
        per_datum: log densities of each datum, for paired comparisons.
        guessing: metrics of a prediction without the inputs: the classes' shares in these data, or mean and spread.
        groups: by a group's label, its number of data ("count"), the average's metrics there, and those of guessing by
            the group's own targets ("guessing nll", …).
        calibrated: metrics of the average as `Posterior.calibrate` has scaled it, {} without that: those of class
            probabilities, or the shares of targets in central intervals. Of an example's several labels there is no
            "nll", but "label_nll", "pixel_nll" or "token_nll" of single ones.
    """

    members: list[dict[str, float]] = field(default_factory=list)
    running: list[dict[str, float]] = field(default_factory=list)
    average: WeightedAverage | None = None
    target: Tensor | None = None
    ood: dict[str, WeightedAverage] = field(default_factory=dict)
    log_weights: list[float] = field(default_factory=list)
    comparable: bool = True
    chains: ChainComparison = field(default_factory=ChainComparison)
    per_datum: PerDatumScores = field(default_factory=PerDatumScores)
    guessing: dict[str, float] = field(default_factory=dict)
    groups: dict[str, dict[str, float]] = field(default_factory=dict)
    calibrated: dict[str, float] = field(default_factory=dict)
    _sums: _Sums = field(default_factory=_Sums, init=False, compare=False)

    @property
    def weight_efficiency(self) -> float | None:
        """(Σw)²/(S·Σw²) of the importance weights, in (0, 1]; None if all are equal or all are 0."""
        return self._sums.weight_efficiency(self.log_weights, self.members, self.comparable)

    @property
    def pit(self) -> Tensor | tuple[Tensor, Tensor] | None:
        """The average's P(Y ≤ y) at each observed target, of counts the pair P(Y < y) and P(Y ≤ y), for
        `diagnostics.pit_histogram`; None if the likelihood has none."""
        terms = {} if self.average is None else self.average.terms
        cdf, below = terms.get("cdf"), terms.get("cdf_below")
        if cdf is None:
            return None
        observed = ~cdf.isnan()
        if not bool(observed.all()):
            cdf, below = cdf[observed], None if below is None else below[observed]
        return cdf if below is None else (below, cdf)

    def __repr__(self) -> str:
        single = self.single
        calibrated = {name: f", calibrated {value:.4g}" for name, value in self.calibrated.items()}
        own = {name: f"(single {value:.4g}{calibrated.get(name, '')})" for name, value in single.items()}
        metrics = (f"{name} {value:.4g} {own[name]}" for name, value in self.bma.items())
        return f"Evaluation({', '.join([f'{len(self.members)} sample{self._plural}', *metrics])})"

    def _repr_html_(self) -> str:
        single, deviations = self.single, self.single_std
        columns = ["metric", "guessing", "mean single sample", "standard deviation", "model average"]
        columns += ["calibrated average"] if self.calibrated else []
        rows = [
            (name, self.guessing.get(name, ""), single[name], deviations[name], value, self.calibrated.get(name, ""))
            for name, value in self.bma.items()
        ]
        table = html_table(
            f"{len(self.members)} posterior sample{self._plural}", columns, [row[: len(columns)] for row in rows]
        )
        if not self.groups:
            return table
        names = list(next(iter(self.groups.values())))
        own = [(label, *(values.get(name, "") for name in names)) for label, values in self.groups.items()]
        return table + html_table("The average by group", ("group", *names), own)

    @property
    def _plural(self) -> str:
        return "" if len(self.members) == 1 else "s"

    @property
    def bma(self) -> dict[str, float]:
        """The metrics of the average of all samples."""
        return self.running[-1] if self.running else {}

    @property
    def single(self) -> dict[str, float]:
        """The single samples' metrics, averaged over the samples."""
        return self._sums.means(list(self.bma), self.members) if self.members else {}

    @property
    def best_single(self) -> dict[str, float]:
        """The metrics of the single sample with the lowest NLL, chosen on these data; {} if it is not known."""
        found = self.per_datum.kept.get("best_single")
        return {} if found is None else {name: self.members[found.index][name] for name in self.bma}

    @property
    def first_cycle(self) -> dict[str, float]:
        """The metrics of the average of the first cycle's samples; {} without a second cycle."""
        found = self.per_datum.first_cycle(len(self.members))
        return {} if found is None else self.running[found.index]

    @property
    def single_std(self) -> dict[str, float]:
        """The single samples' standard deviation of each metric (NaN for one sample)."""
        count = len(self.members)
        deviations = {}
        for name, mean in self.single.items():
            squares = sum((m[name] - mean) ** 2 for m in self.members)
            deviations[name] = math.sqrt(squares / (count - 1)) if count > 1 else math.nan
        return deviations


SAVED = ("members", "running", "target", "log_weights", "comparable")
"""What a checkpoint has of an `Evaluation` as it is."""


class LoaderAverage:
    """The running average over the data of one loader, and over out-of-distribution data."""

    def __init__(self, cycle_weights: str, metrics: UserMetrics | None = None) -> None:
        self._metrics = metrics if metrics is not None else UserMetrics(None)
        self.evaluation = Evaluation()
        self._cycle_weights = cycle_weights
        self._total = self._new()
        self._ood: dict[str, ChainsAverage | CycleAverage] = {}

    def _new(self) -> ChainsAverage | CycleAverage:
        return ChainsAverage() if self._cycle_weights == "uniform" else CycleAverage()

    def add(
        self,
        module: EnergyModel,
        sample: PosteriorSample,
        scores: Scores,
        scaling: TargetScaling,
        log_likelihood: float,
        ood_terms: Mapping[str, dict[str, Tensor]],
    ) -> None:
        """Add a sample; `log_likelihood` is log p(D|θ) of all training data, if the weights need it."""
        terms, log_density, target = scores
        self._check_order(target)

        def add(total: ChainsAverage | CycleAverage, terms: dict[str, Tensor], density: Tensor) -> WeightedAverage:
            place: dict[str, Any] = {"chain": sample.chain, "cycle": sample.cycle, "log_likelihood": log_likelihood}
            if isinstance(total, ChainsAverage):
                place = {"chain": None if sample.comparable else sample.chain}
            total.add(terms, density, sample.log_weight, **place)
            return total.combined()

        average = add(self._total, terms, log_density)
        known = average.log_total > -math.inf  # False while all weights are 0
        own = metrics_of(module, terms, log_density, target, scaling)
        running = metrics_of(module, average.terms, average.log_density, target, scaling) if known else {}
        own |= self._metrics.values(module, terms, target, scaling)
        running |= self._metrics.values(module, average.terms, target, scaling) if known else {}
        for name, unknown in ood_terms.items():
            ood = self.evaluation.ood[name] = add(self._ood.setdefault(name, self._new()), unknown, log_density[:0])
            own |= _ood_figures(name, terms, unknown)
            running |= _ood_figures(name, average.terms, ood.terms) if known else {}
        evaluation = self.evaluation
        if not evaluation.guessing:
            evaluation.guessing = guessing_metrics(module, terms, target, scaling)
        evaluation.members.append({"step": sample.step, "chain": sample.chain, "cycle": sample.cycle} | own)
        evaluation.log_weights.append(sample.log_weight)
        evaluation.running.append(running if known else dict.fromkeys(own, math.nan))
        evaluation.average = average
        evaluation.comparable &= sample.comparable
        evaluation.per_datum.add(len(evaluation.members) - 1, sample.cycle, log_density, average.log_density)
        evaluation.chains.add(sample.chain, sample.log_weight, terms, log_density, sample.comparable)

    def _check_order(self, target: Tensor | None) -> None:
        known = self.evaluation.target
        if known is not None and target is not None and not _equal(known.to(target.device), target):
            raise ValueError(
                "the evaluation data came in another order than for the previous sample, so predictions cannot be "
                "averaged: create the validation or test loader with shuffle=False"
            )
        self.evaluation.target = target

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers and tensors."""
        evaluation = self.evaluation
        return {name: getattr(evaluation, name) for name in SAVED} | {
            "total": self._total.state_dict(),
            "ood": {name: total.state_dict() for name, total in self._ood.items()},
            "chains": evaluation.chains.state_dict(),
            "per_datum": evaluation.per_datum.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self._total.load_state_dict(state["total"])
        self._ood = {}
        for name, saved in state["ood"].items():
            self._ood[name] = self._new()
            self._ood[name].load_state_dict(saved)
        evaluation = self.evaluation = Evaluation(**{name: copy(state[name]) for name in SAVED})
        evaluation.average = self._total.combined()
        evaluation.ood = {name: total.combined() for name, total in self._ood.items()}
        evaluation.chains.load_state_dict(state["chains"])
        evaluation.per_datum.load_state_dict(state["per_datum"])


def metrics_of(
    module: EnergyModel, terms: Mapping[str, Tensor], log_density: Tensor, target: Tensor | None, scaling: TargetScaling
) -> dict[str, float]:
    """Return the likelihood's metrics for a predictive, or its NLL if the module has no likelihood; an `rmse_<target>`
    each for several targets, or channels, with scalings of their own."""
    if module.likelihood is None or target is None:
        return {"nll": -log_density.mean().item()}
    factor = scaling.factor
    if isinstance(factor, Tensor):
        module.likelihood.check_scaling(factor, target)
        factor = factor.to(terms.get("mean", log_density))
    metrics = module.likelihood.metrics(terms, log_density, target, factor)
    found = {name: float(value) for name, value in metrics.items()}
    axis = scaling.axis
    if isinstance(factor, Tensor) and axis is not None and "mean" in terms and "rmse" in found:
        errors = (terms["mean"] - target.reshape(terms["mean"].shape)) * factor
        each = errors.square().movedim(axis, -1).flatten(0, -2).nanmean(0).sqrt().tolist()
        found |= {f"rmse_{name}": value for name, value in zip(scaling.labels, each, strict=True)}
    return found


def group_metrics(
    module: EnergyModel, evaluation: Evaluation, scaling: TargetScaling, user: UserMetrics, labels: Any
) -> dict[str, dict[str, float]]:
    """Return the average's metrics in each group of the evaluated data, whose groups are the array `labels`, (n,)."""
    average, target, found = evaluation.average, evaluation.target, {}
    if average is None or average.log_total == -math.inf:
        return {}
    for label in sorted(set(labels.tolist()), key=str):
        rows = torch.as_tensor(labels == label, device=average.log_density.device)
        terms, density = {n: t[rows] for n, t in average.terms.items()}, average.log_density[rows]
        known = None if target is None else target[rows]
        own = metrics_of(module, terms, density, known, scaling) | user.values(module, terms, known, scaling)
        guess = guessing_metrics(module, terms, known, scaling)
        named = {f"guessing {name}": value for name, value in guess.items() if name in ("accuracy", "nll", "rmse")}
        found[str(label)] = {"count": len(density)} | own | named
    return found


GUESSED = ("accuracy", "exact", "nll", "label_nll", "brier", "rmse")
"""Metrics that a guess has; its calibration says nothing."""


def guessing_metrics(
    module: EnergyModel, terms: Mapping[str, Tensor], target: Tensor | None, scaling: TargetScaling
) -> dict[str, float]:
    """Return the metrics of the best prediction that is the same for all data; {} if it is not known.

    Classes have their shares, counts the likelihood's best constant output, numbers the better of it and a normal law
    of their mean and variance, bounds the most likely normal, log-normal or Weibull one. `terms` are of any prediction.
    """
    likelihood: Any = module.likelihood
    if likelihood is None or target is None or not len(target):
        return {}
    nll = likelihood.chance_nll(target)
    density = torch.full((len(target),), math.nan if nll is None else -nll, device=target.device)
    if "probabilities" in terms:
        probabilities = terms["probabilities"]
        if target.is_floating_point() and target.shape == probabilities.shape:  # soft labels
            shares = target.mean(0).to(probabilities)
        else:
            labels = likelihood.labels(target).reshape(-1)
            shares = torch.bincount(labels.cpu(), minlength=probabilities.shape[-1]).to(probabilities) / len(labels)
        guess = {"probabilities": shares}
    elif "label_probabilities" in terms or "mean" in terms:
        name = "mean" if "mean" in terms else "label_probabilities"
        if target.numel() != terms[name].numel():  # bounds, of which only the NLL is known
            guess = {name: torch.full_like(terms[name][0], math.nan) for name in ("cdf", "cdf_below") if name in terms}
            return _metrics_of_guess(module, guess, density, target, scaling)
        filled, entries = likelihood.split_missing(target)
        numbers = filled.to(terms[name]).reshape(terms[name].shape)
        known = torch.ones_like(numbers) if entries is None else entries.reshape(numbers.shape).to(numbers)
        mean = (numbers * known).sum(0) / known.sum(0)
        guess = {name: mean}
        if name == "mean":
            squares = (numbers - mean).square() * known
            variance = squares.sum(0) / known.sum(0)
            guess |= {"square": mean.square(), "variance": variance}
            if "cdf_below" not in terms:
                logs = (2 * math.pi * variance).log() * known + squares / variance
                normal = -logs.flatten(1).sum(1) / 2
                density = density if nll is not None and -nll > float(normal.mean()) else normal
    else:
        return {}
    return _metrics_of_guess(module, guess, density, target, scaling)


def _metrics_of_guess(
    module: EnergyModel, guess: Mapping[str, Tensor], density: Tensor, target: Tensor, scaling: TargetScaling
) -> dict[str, float]:
    """Return the metrics of a prediction whose terms are the same for all data."""
    constant = {name: value.expand(len(target), *value.shape) for name, value in guess.items()}
    try:
        found = metrics_of(module, constant, density, target, scaling)
    except KeyError:  # metrics of a user's likelihood may need other terms
        return {}
    wanted = {name: value for name, value in found.items() if name.startswith(GUESSED)}
    return {name: value for name, value in wanted.items() if not math.isnan(value)}


def _equal(first: Tensor, second: Tensor) -> bool:
    """Return whether targets are equal; NaN, a target that is not observed, is equal to NaN."""
    if torch.equal(first, second):
        return True
    both = first.shape == second.shape and first.is_floating_point() and second.is_floating_point()
    return both and bool(((first == second) | (first.isnan() & second.isnan())).all())


def _ood_figures(name: str, known: Mapping[str, Tensor], unknown: Mapping[str, Tensor]) -> dict[str, float]:
    per_sample = (known["sample_entropy"], unknown["sample_entropy"]) if "sample_entropy" in known else None
    metrics = out_of_distribution_metrics(known["probabilities"], unknown["probabilities"], per_sample)
    return {f"ood_{name}_{metric}": float(value) for metric, value in metrics.items()}
