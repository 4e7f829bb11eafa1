"""Estimators of scikit-learn: fit and predict on tables, with the posterior of a network behind them."""

import copy
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_consistent_length, check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn
from torch.distributions import constraints

from lightning_sgmcmc.callbacks import AutoSampling, SampleCollector
from lightning_sgmcmc.chains.execution import in_turn
from lightning_sgmcmc.chains.schedule import Schedule
from lightning_sgmcmc.checks import check_count, check_within, names_arguments
from lightning_sgmcmc.datamodules import TableDataModule
from lightning_sgmcmc.datamodules.base import random_split
from lightning_sgmcmc.datamodules.table import Task
from lightning_sgmcmc.likelihoods import Categorical, Censored, ClassLikelihood, Gaussian, Likelihood
from lightning_sgmcmc.model import EnergyModel, check_part
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.posterior.posterior import Posterior
from lightning_sgmcmc.predictions import Prediction
from lightning_sgmcmc.predictions.distributions import is_discrete
from lightning_sgmcmc.priors import FlatPrior, Prior
from lightning_sgmcmc.schedules import WarmUpAndDecay
from lightning_sgmcmc.seeding import derive_seed, reseed_everything, unchanged_generators
from lightning_sgmcmc.tables.arrays import (
    as_series,
    check_same_rows,
    is_categorical,
    is_frame,
    is_table,
    with_categories,
)
from lightning_sgmcmc.tables.columns import plain
from lightning_sgmcmc.tensors import copied

__all__ = ["BayesianClassifier", "BayesianRegressor"]

LEAST_EPOCHS, LEAST_STEPS = 20, 2_000
"""Of a fit without max_epochs, which has both."""
ROWS = 4_096
"""Inputs that are predicted at once, with the distribution of each sample."""
WEIGHTED = (
    "sample_weight is not supported: an example counts once in a posterior, and a weighted loss has none. Repeat rows "
    "that were observed several times; for costs of errors choose the decision by predict_proba or posterior_, and for "
    "other shares of classes in use correct predict_proba by the ratio of the shares"
)

Self = TypeVar("Self", bound="_BayesianEstimator")


_FITS = nn.Module()
"""What fits in several threads take turns with, since they seed the default generators."""


class _BayesianEstimator(BaseEstimator):
    """What the two estimators share: arguments, the fit, and predictions of rows."""

    posterior_: Posterior
    refused_arguments = Likelihood.refused_arguments

    def __init__(
        self,
        net: nn.Module | Callable[[int], nn.Module] | None = None,
        likelihood: Likelihood | None = None,
        prior: Prior | float | None = None,
        hidden: Sequence[int] = (50, 50),
        max_epochs: int | None = None,
        batch_size: int = 100,
        num_chains: int = 4,
        num_samples: int = 80,
        validation_fraction: float = 0.1,
        callbacks: Sequence[pl.Callback] | None = None,
        module: dict[str, Any] | None = None,
        trainer: dict[str, Any] | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        self.net = net
        self.likelihood = likelihood
        self.prior = prior
        self.hidden = hidden
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.num_chains = num_chains
        self.num_samples = num_samples
        self.validation_fraction = validation_fraction
        self.callbacks = callbacks
        self.module = module
        self.trainer = trainer
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    # -- fit ----------------------------------------------------------------------------------------------------------

    def _sample(self: Self, x: Any, y: Any, likelihood: Likelihood, task: Task, outputs: int) -> Self:
        """Sample the posterior, given rows that were checked."""
        self._check_arguments()
        seed = _seed_of(self.random_state)
        likelihood = copy.deepcopy(likelihood)
        with in_turn(_FITS), unchanged_generators(()), _quiet(bool(self.verbose)):
            reseed_everything(derive_seed(seed, "network"))
            labels = torch.as_tensor(np.unique(y, return_inverse=True)[1]) if task == "classes" else None
            train, val = _parts(len(y), self.validation_fraction, seed, labels)
            if not len(train):
                raise ValueError(f"X has {len(y)} rows, of which validation takes {len(val)}: pass two or more")
            size = min(self.batch_size, len(train))
            data = TableDataModule(x, y, size, task=task, splits=(train, val, []))
            data.setup("fit")
            net = self._network(data.splits[0].inputs[:2], likelihood.num_outputs(outputs))
            settings = {"num_chains": self.num_chains, "compile": False, "seed": seed} | (self.module or {})
            module = BayesianModule(*copied((net, likelihood)), copy.deepcopy(self.prior), **settings)
            self._trainer(math.ceil(len(train) / size)).fit(module, datamodule=data)
        if module.posterior is None or len(module.posterior) == 0:
            raise RuntimeError("the fit drew no samples: pass a larger max_epochs, or a schedule that draws some")
        self.plan_ = module.plan
        # A model of its own, since the module belongs to a run, which would be pickled too.
        store = module.posterior.in_memory().store
        self._has_names = bool(data.input_columns.names)
        self.posterior_ = Posterior(store, EnergyModel(net, likelihood, FlatPrior()))
        return self

    def _check_arguments(self) -> None:
        for name in ("batch_size", "num_chains", "num_samples"):
            check_count(name, getattr(self, name), optional=False)
        check_count("max_epochs", self.max_epochs)
        if isinstance(self.hidden, str) or not isinstance(self.hidden, Iterable):
            raise TypeError(f"hidden must be the widths of layers, such as (50, 50), got {self.hidden!r}")
        for width in self.hidden:
            check_count("a width of hidden", width, optional=False)
        for name, taken in (("trainer", {"callbacks"}), ("module", {"net", "likelihood", "prior"})):
            twice = sorted(taken & (getattr(self, name) or {}).keys())
            if twice:
                raise ValueError(f"{name} has {twice[0]!r}, which is an argument of its own: pass {twice[0]}=…")
        check_within("validation_fraction", self.validation_fraction, "[0, 1)")

    def _network(self, inputs: Tensor, outputs: int) -> nn.Module:
        """Return the network, which gets some inputs to try."""
        width = inputs.shape[1]
        if isinstance(self.net, nn.Module):
            net = copied(self.net)
        elif self.net is not None:
            net = self.net(width)
        else:
            widths = [width, *self.hidden]
            layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
            net = nn.Sequential(*layers, nn.Linear(widths[-1], outputs))
        if not isinstance(net, nn.Module):
            raise TypeError(
                f"net must be a module, or a function of the number of inputs that returns one, got {net!r}"
            )
        try:
            with torch.no_grad():
                copied(net).eval()(inputs)
        except RuntimeError as error:
            raise ValueError(
                f"net does not accept these data, which have {width} inputs after encoding: pass a function of that "
                f"number that returns a network ({error})"
            ) from error
        return net

    def _trainer(self, batches: int) -> pl.Trainer:
        own = [copy.deepcopy(callback) for callback in self.callbacks or ()]
        epochs = self.max_epochs or max(LEAST_EPOCHS, math.ceil(LEAST_STEPS / batches))
        if not any(isinstance(callback, Schedule) for callback in own):
            std = float(self.prior) if isinstance(self.prior, int | float) else None
            draws = math.ceil(self.num_samples / self.num_chains)
            own.append(schedule := AutoSampling(num_draws=draws, prior_std=std))
            if not {"max_steps", "max_epochs"} & (self.trainer or {}).keys():
                self._check_length(schedule.warm_up, draws, epochs, batches)
        if not any(isinstance(callback, SampleCollector) for callback in own):
            own.append(SampleCollector(in_memory=True))
        silent = ("logger", "enable_checkpointing", "enable_model_summary")
        settings: dict[str, Any] = {
            "max_epochs": epochs,
            "accelerator": "cpu",
            "devices": 1,
            "enable_progress_bar": bool(self.verbose),
            "num_sanity_val_steps": 0,
            "check_val_every_n_epoch": epochs,  # the schedule evaluates its samples itself
        }
        return pl.Trainer(**(settings | dict.fromkeys(silent, False) | (self.trainer or {})), callbacks=own)

    def _check_length(self, warm_up: float, draws: int, epochs: int, batches: int) -> None:
        try:
            WarmUpAndDecay(epochs * batches, warm_up, draws)
        except ValueError as error:
            least = math.ceil(draws / (1 - warm_up) / batches)
            raise ValueError(
                f"max_epochs={epochs} makes {epochs * batches} steps, too few for num_samples={self.num_samples} of "
                f"{self.num_chains} chains: pass max_epochs={least} or more, or fewer samples"
            ) from error

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _rows(self, x: Any, first: bool) -> Any:
        """Return rows as a frame, if the fit's were one, or as an array (n, columns) of numbers."""
        if is_frame(x) and (first or self._has_names):
            validate_data(self, x, skip_check_array=True, reset=first)
            if min(x.shape) == 0:
                raise ValueError(f"X has shape {x.shape}: pass at least one row and one column")
            return with_categories(x) if first else x
        least = 2 if first else 1
        return validate_data(
            self, x, dtype=np.float64, reset=first, ensure_all_finite="allow-nan", ensure_min_samples=least
        )

    def _predictions(self, x: Any, return_samples: bool = False) -> Iterator[Prediction]:
        """Yield the predictive of some rows after another."""
        check_is_fitted(self)
        inputs = self.posterior_.inputs(self._rows(x, first=False))
        for rows in inputs.split(ROWS):
            yield self.posterior_.predict(rows, return_samples)


names_arguments(_BayesianEstimator)


class BayesianClassifier(ClassifierMixin, _BayesianEstimator):
    """A classifier of scikit-learn whose probabilities are averages over samples of a network's posterior.

        p(y|x) = Σ_s w_s·p(y|x, θ_s)

    `net=None` is a perceptron of the width of the data. Inputs are standardised by the rows of the fit. A frame of
    pandas keeps the names of its columns; columns of texts or of the type "category" become an input of 0 or 1 for
    each value. A missing number becomes the mean, and a further input says where it is missing.

    A share of the rows is for validation, on which `AutoSampling` chooses prior and weights. Its draws are a cold
    ensemble; for samples of the posterior itself pass a schedule, and a sampler by `module`.

    Args:
        net: a network, which is copied; or a function of the number of inputs that returns one; None is a perceptron.
        likelihood: of classes; None is `Categorical`.
        prior: a prior; a number is the scale with which `AutoSampling` begins, and None leaves that to it.
        hidden: widths of the perceptron's hidden layers, with ReLU.
        max_epochs: passes over the data; None is 20 or more, and 2,000 steps or more.
        batch_size: data of a step.
        num_chains: chains, which start apart.
        num_samples: samples of all chains together, of which `AutoSampling` draws the same number in each.
        validation_fraction: share of the rows that are for validation, in [0, 1). With 0 the training data choose
            the temperature, and nothing the weights, which predicts better below about a hundred rows.
        callbacks: further callbacks of the trainer, copied for each fit; a schedule among them replaces `AutoSampling`,
            and a `SampleCollector` the one in memory.
        module: further arguments of `BayesianModule`, such as `dict(sampler=SGHMC, lr=0.01)` for a schedule of yours.
        trainer: further arguments of the trainer; by default it takes the CPU, and writes no logs or checkpoints.
        random_state: a number repeats the fit bit for bit; None draws another seed for each. Global generators are left
            alone.
        verbose: show a progress bar, and what the library says of its choices.

    Attributes:
        posterior_: the `Posterior`, for all else: `predict`, `calibrate`, `conformal`, `ensemble`, `summary`.
        plan_: the `RunPlan` of the fit.
        classes_: the labels in the order of `predict_proba`.
        n_features_in_: columns of X.
        feature_names_in_: their names, if they are all texts.

    Raises:
        ValueError: at the fit, for rows that are not finite numbers, a y of one class, or arguments out of range.
        TypeError: at the fit, for `sample_weight`, or a likelihood of numbers.

    Example::

        from lightning_sgmcmc.estimators import BayesianClassifier

        x = torch.randn(60, 2).numpy()
        labels = ["yes" if a > b else "no" for a, b in x]
        model = BayesianClassifier(hidden=(8,), max_epochs=40, batch_size=20, random_state=0).fit(x, labels)
        print(model.predict(x[:3]), model.predict_proba(x[:3]))
    """

    classes_: np.ndarray

    def fit(self, X: Any, y: Any, **others: Any) -> "BayesianClassifier":
        """Sample the posterior.

        Args:
            X: rows, shape (n, columns): a data frame, or numbers.
            y: labels of any type, shape (n,).
            others: refused, with the reason for `sample_weight`.
        """
        _refuse(others)
        check_part("likelihood", self.likelihood, Likelihood)
        x = self._rows(X, first=True)
        check_same_rows(X, y)
        given = as_series(y)
        y = _targets(type(self).__name__, y, numeric=False)
        check_consistent_length(x, y)
        if y.ndim > 1:
            raise ValueError(
                f"y has the shape {y.shape}, and must have one label a row: pass y.argmax(1) of one-hot labels, and "
                "for several labels scikit-learn's MultiOutputClassifier of this estimator"
            )
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_.tolist()[0]!r}: a classifier needs at least two")
        likelihood = Categorical() if self.likelihood is None else self.likelihood
        if not isinstance(likelihood, ClassLikelihood):
            raise TypeError(f"likelihood={likelihood!r} has no classes: use BayesianRegressor, or Categorical()")
        named = self.classes_[labels] if self.classes_.dtype.kind in "OUS" else labels
        if is_table(given) and given.ndim == 1 and is_categorical(given) and given.cat.ordered:
            named = given.reset_index(drop=True)
        return self._sample(x, named, likelihood, "classes", len(self.classes_))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the averaged probabilities of the classes, shape (n, K), in the order of `classes_`."""
        found = np.concatenate([numbers(part.probabilities) for part in self._predictions(X)])
        names = list(self.posterior_.columns.classes)  # an ordered category's have an order of their own
        found = found[:, [names.index(plain(label)) for label in self.classes_]] if names else found
        return np.asarray(found / found.sum(1, keepdims=True))  # scikit-learn's scores look at the last digits

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable labels, shape (n,)."""
        places = self.predict_proba(X).argmax(1)
        return self.classes_[places]


class BayesianRegressor(RegressorMixin, _BayesianEstimator):
    """A regressor of scikit-learn with standard deviations and intervals, by samples of a network's posterior.

        p(y|x) = Σ_s w_s·p(y|x, θ_s)

    `net=None` is a perceptron of the width of the data. Inputs are standardised by the rows of the fit. A frame of
    pandas keeps the names of its columns; columns of texts or of the type "category" become an input of 0 or 1 for
    each value. A missing number becomes the mean, and a further input says where it is missing.
    Targets are standardised too, unless the likelihood is of counts; predictions are in the data's units.

    A share of the rows is for validation, on which `AutoSampling` chooses prior and weights. Its draws are a cold
    ensemble; for samples of the posterior itself pass a schedule, and a sampler by `module`.

    Args:
        net: a network, which is copied; or a function of the number of inputs that returns one; None is a perceptron.
        likelihood: of numbers or counts, such as `HeteroscedasticGaussian()` or `Poisson()`; None is `Gaussian` with
            learned noise, one for each target. Scales are in units of the standardised targets.
        prior: a prior; a number is the scale with which `AutoSampling` begins, and None leaves that to it.
        hidden: widths of the perceptron's hidden layers, with ReLU.
        max_epochs: passes over the data; None is 20 or more, and 2,000 steps or more.
        batch_size: data of a step.
        num_chains: chains, which start apart.
        num_samples: samples of all chains together, of which `AutoSampling` draws the same number in each.
        validation_fraction: share of the rows that are for validation, in [0, 1). With 0 the training data choose
            the temperature, and nothing the weights, which predicts better below about a hundred rows.
        callbacks: further callbacks of the trainer, copied for each fit; a schedule among them replaces `AutoSampling`,
            and a `SampleCollector` the one in memory.
        module: further arguments of `BayesianModule`, such as `dict(sampler=SGHMC, lr=0.01)` for a schedule of yours.
        trainer: further arguments of the trainer; by default it takes the CPU, and writes no logs or checkpoints.
        random_state: a number repeats the fit bit for bit; None draws another seed for each. Global generators are left
            alone.
        verbose: show a progress bar, and what the library says of its choices.

    Attributes:
        posterior_: the `Posterior`, for all else: `predict`, `calibrate`, `conformal`, `ensemble`, `summary`.
        plan_: the `RunPlan` of the fit.
        n_features_in_: columns of X.
        feature_names_in_: their names, if they are all texts.

    Raises:
        ValueError: at the fit, for rows that are not finite numbers, or arguments out of range.
        TypeError: at the fit, for `sample_weight`, or a likelihood of classes.

    Example::

        from lightning_sgmcmc.estimators import BayesianRegressor

        x = torch.randn(60, 2).numpy()
        model = BayesianRegressor(hidden=(8,), max_epochs=40, batch_size=20, random_state=0).fit(x, x[:, 0])
        mean, std = model.predict(x, return_std=True)
        low, high = model.predict_interval(x, level=0.9).T
    """

    def fit(self, X: Any, y: Any, **others: Any) -> "BayesianRegressor":
        """Sample the posterior.

        Args:
            X: rows, shape (n, columns): a data frame, or numbers.
            y: targets, shape (n,) or (n, D).
            others: refused, with the reason for `sample_weight`.
        """
        _refuse(others)
        check_part("likelihood", self.likelihood, Likelihood)
        x = self._rows(X, first=True)
        likelihood = Gaussian(std=0.5, learned=True) if self.likelihood is None else self.likelihood
        if isinstance(likelihood, ClassLikelihood):
            raise TypeError(
                f"likelihood={likelihood!r} is of classes: use BayesianClassifier, or Gaussian(learned=True)"
            )
        law = likelihood.distribution
        is_positive = getattr(law, "support", None) in (constraints.positive, constraints.nonnegative)
        if isinstance(likelihood, Censored) or is_positive:
            raise TypeError(
                f"likelihood={type(likelihood).__name__} is of bounds or positive numbers, which this estimator would "
                "standardise: fit a BayesianModule with a TableDataModule, or the logarithm of y with "
                "Gaussian(learned=True)"
            )
        check_same_rows(X, y)
        y = _targets(type(self).__name__, y, numeric=True)
        check_consistent_length(x, y)
        task: Task = "counts" if law is not None and is_discrete(law) else "regression"
        self._is_single = y.ndim == 1
        if self.likelihood is None and not self._is_single:
            likelihood = Gaussian(std=[0.5] * y.shape[1], learned=True)
        return self._sample(x, y, likelihood, task, 1 if y.ndim == 1 else y.shape[1])

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the predictive mean, shape (n,) or (n, D) as y was.

        Args:
            X: rows.
            return_std: also return the predictive standard deviation, that of noise and parameters together.
        """
        found = [(numbers(part.mean), numbers(part.std)) for part in self._predictions(X)]
        mean, std = (self._shaped(np.concatenate(parts)) for parts in zip(*found, strict=True))
        return (mean, std) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> np.ndarray:
        """Return the bounds of the equal-tailed interval of y, shape (n, 2) or (n, 2, D).

        They are quantiles of the mixture of the samples' distributions. How many targets they contain is not
        guaranteed; `posterior_.conformal` and MAPIE make intervals that guarantee it.

        Args:
            X: rows.
            level: probability of the interval, in (0, 1).
        """
        bounds = [part.interval(level) for part in self._predictions(X, return_samples=True)]
        return np.stack(
            [self._shaped(np.concatenate([numbers(p) for p in part])) for part in zip(*bounds, strict=True)], 1
        )

    def _shaped(self, values: np.ndarray) -> np.ndarray:
        return values[:, 0] if self._is_single else values


# -- arguments and rows ------------------------------------------------------------------------------------------------


def _refuse(others: dict[str, Any]) -> None:
    """Raise TypeError for arguments of `fit` that are not its own."""
    if "sample_weight" in others:
        raise TypeError(WEIGHTED)
    if others:
        raise TypeError(f"fit takes X and y, got {', '.join(others)} besides: pass settings to the constructor")


def _targets(name: str, y: Any, numeric: bool) -> np.ndarray:
    """Return targets as an array, (n,) of one column."""
    if y is None:
        raise ValueError(f"{name} requires y to be passed, but the target y is None")
    found = check_array(y, ensure_2d=False, dtype="numeric" if numeric else None, input_name="y")
    return np.asarray(column_or_1d(y, warn=True) if found.ndim == 2 and found.shape[1] == 1 else found)


def _seed_of(random_state: Any) -> int:
    """Return a run's seed; None takes one from the system, and NumPy's global generator is left alone."""
    if random_state is None:
        return int(np.random.default_rng().integers(2**31))
    return int(check_random_state(random_state).randint(2**31 - 1))


def _parts(count: int, fraction: float, seed: int, labels: Tensor | None) -> list[Tensor]:
    """Return the rows for the fit and those for validation, at least one of each unless the fraction is 0."""
    train, val = random_split(count, (fraction,), seed, labels, check=False)
    if len(val) == 0 and fraction > 0:
        train, val = random_split(count, (fraction,), seed, None, check=False)
    if len(val) == 0 and fraction > 0:
        train, val = train[:-1], train[-1:]
    return [train, val]


def numbers(values: Tensor) -> np.ndarray:
    """Return a tensor as float64."""
    return values.detach().cpu().double().numpy()


@contextmanager
def _quiet(verbose: bool) -> Iterator[None]:
    """Keep Lightning's remarks out of the output, and unless verbose this library's on its choices."""
    logger = logging.getLogger(pl.__name__)
    level = logger.level
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=pl.__name__.replace(".", r"\."))
            if not verbose:
                logger.setLevel(logging.WARNING)
            yield
    finally:
        logger.setLevel(level)
