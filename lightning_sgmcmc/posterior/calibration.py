"""Calibration of a posterior's predictions by one number that is fitted on validation data."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.batches.inputs import as_tensors
from lightning_sgmcmc.batches.loader import is_shuffled
from lightning_sgmcmc.chains.samples import SampleRecord
from lightning_sgmcmc.checks import check_choice, check_within
from lightning_sgmcmc.diagnostics import decisions
from lightning_sgmcmc.files import parse_json, read_regular, write_atomically
from lightning_sgmcmc.likelihoods import Likelihood
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.namespace import pl, rank_zero_warn
from lightning_sgmcmc.plain import as_plain, check_known, from_plain
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.manifest import home_of
from lightning_sgmcmc.posterior.predictive import average_scores, not_finite
from lightning_sgmcmc.posterior.store import SampleStore
from lightning_sgmcmc.predictions import (
    ClassPrediction,
    CountPrediction,
    MultiLabelPrediction,
    Prediction,
    RegressionPrediction,
)
from lightning_sgmcmc.predictions.mixture import tempered
from lightning_sgmcmc.predictions.prediction import of_both
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.tables import Columns, as_tensor
from lightning_sgmcmc.tensors import widest


def overconfidence(likelihood: Any, terms: Mapping[str, Tensor], target: Tensor, prior_std: float) -> float | None:
    """Return the temperature of class probabilities with the least NLL, above 1 for predictions that are too sure, with
    a prior N(0, prior_std²) of its logarithm, which stabilises it for few data; None for another kind.

    Source: Guo et al. 2017, section 4.2.
    """
    prediction = likelihood.prediction(terms, None)
    if not isinstance(prediction, ClassPrediction):
        return None
    factors = decisions.factor_grid()
    probabilities, labels = likelihood.scored(prediction, target)
    nll = [decisions.class_nll(tempered(probabilities, factor), labels) for factor in factors.tolist()]
    return decisions.shrunk_factor(torch.tensor(nll, dtype=torch.float64), factors, len(target), prior_std)


# -- calibration -------------------------------------------------------------------------------------------------------


FILE = "calibration.json"
LARGEST_FILE = 2**16
"""In bytes."""


@dataclass(frozen=True)
class Calibration:
    """One number that calibrates the predictions of certain samples.

    Attributes:
        kind: "temperature" of class probabilities, or "std factor" of a predictive standard deviation.
        value: the number; 1 changes nothing, above 1 the predictions were too sure.
        count: number of validation data.
        nll_before, nll_after: mean NLL of these data, in nats per datum.
        samples: identifies the samples and their weights.
    """

    kind: Literal["temperature", "std factor"]
    value: float
    count: int
    nll_before: float
    nll_after: float
    samples: str

    def __str__(self) -> str:
        return f"{self.kind} {self.value:.4g}"

    def applied(self, prediction: Prediction) -> Prediction:
        """Return a calibrated prediction: parts, samples and intervals are of one calibrated law."""
        if isinstance(prediction, ClassPrediction | MultiLabelPrediction):
            return prediction.tempered(self.value)
        assert isinstance(prediction, RegressionPrediction)
        return prediction.stretched(self.value)


def identify(records: Iterable[SampleRecord]) -> str:
    """Return a text that identifies samples with their weights."""
    places = [(r.step, r.cycle, r.chain, r.draw, r.energy, r.log_weight) for r in records]
    return hashlib.blake2b(repr(places).encode(), digest_size=16).hexdigest()


def fit_calibration(model: EnergyModel, store: SampleStore, log_weights: Sequence[float], data: Any) -> Calibration:
    """Fit the number; see `Posterior.calibrate`."""
    batches = batches_of(data, store.columns)
    _warn_of_training_data(model, batches)
    likelihood, identity = model.likelihood, identify(store.records)
    if likelihood is None:
        raise TypeError(f"{type(model).__name__} has no likelihood object to define a predictive: pass likelihood=…")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    converted = [as_tensors(store.columns.received(batch), model.device, dtype) for batch in batches]
    if not converted:
        raise ValueError("calibrate needs validation data, and the loader has none: pass a loader with some batches")
    terms, target = average_scores(model, store, log_weights, converted)
    prediction = likelihood.prediction(terms, None)
    check_predictions(prediction, "calibrate")
    if isinstance(prediction, ClassPrediction | MultiLabelPrediction):
        probabilities, labels = likelihood.scored(prediction, target)
        if isinstance(prediction, MultiLabelPrediction):
            probabilities, labels = of_both(probabilities).reshape(-1, 2), labels.flatten()
        value = decisions.fit_temperature(probabilities, labels)
        if not decisions.SMALLEST * 1.001 < value < decisions.LARGEST / 1.001:
            rank_zero_warn(
                f"The calibration temperature {value:.3g} is at its bound, since the validation data have no finite "
                "optimum (all predictions are right, or no better than chance): use more data."
            )
        before = decisions.class_nll(probabilities, labels)
        after = decisions.class_nll(tempered(probabilities, value), labels)
        return Calibration("temperature", value, len(labels), before, after, identity)
    if isinstance(prediction, RegressionPrediction) and not isinstance(prediction, CountPrediction):
        mean, std = prediction.mean, prediction.std
        _check_numbers("calibrate", mean, target)
        target = target.reshape(mean.shape)
        value = decisions.fit_std_factor(mean, std, target)
        before, after = decisions.gaussian_nll(mean, std, target), decisions.gaussian_nll(mean, std * value, target)
        return Calibration("std factor", value, len(target), before, after, identity)
    raise TypeError(
        f"calibrate scales class probabilities or a standard deviation, and {type(likelihood).__name__} predicts a "
        f"{type(prediction).__name__}"
    )


def check_predictions(prediction: Prediction, what: str) -> None:
    """Raise if a prediction is NaN or infinite, since one such datum makes the fitted number meaningless."""
    count = int(not_finite(prediction.parts).sum())
    if count:
        raise ValueError(
            f"{what} needs finite predictions, and {count} of {len(prediction)} are NaN or infinite: remove inputs "
            "that are not finite from the data, and scale them as in training"
        )


def batches_of(data: Any, columns: Columns, what: str = "calibrate") -> Any:
    """Return the batches of a loader, or of a datamodule's validation data."""
    if isinstance(data, pl.LightningDataModule):
        name = type(data).__name__
        data.prepare_data()
        data.setup("fit")
        columns.check(data)
        data = data.val_dataloader()
        if isinstance(data, list | tuple) and len(data) == 1:
            data = data[0]
        if data is None or (isinstance(data, list | tuple) and not data):
            raise ValueError(f"{what} needs validation data, and {name} has none: pass a loader of other data")
    if isinstance(data, tuple | Tensor | np.ndarray) or data is None or not isinstance(data, Iterable):
        raise TypeError(
            f"{what} needs validation data with targets, got a {type(data).__name__}: pass a loader, a datamodule, "
            "or a list of batches, [(x, y)]"
        )
    return data


def _check_numbers(what: str, mean: Tensor, target: Tensor) -> None:
    """Raise unless targets are the numbers that are predicted."""
    if mean.numel() != target.numel():
        raise TypeError(
            f"{what} compares predictions {tuple(mean.shape)} with the numbers themselves, and the targets have shape "
            f"{tuple(target.shape)}: pass data whose numbers are known, not bounds of them"
        )


def _warn_of_training_data(model: EnergyModel, batches: Any) -> None:
    trainer = getattr(model, "_trainer", None)
    train = getattr(getattr(trainer, "train_dataloader", None), "dataset", None)
    own = getattr(batches, "dataset", None)
    if is_shuffled(batches) or (own is not None and own is train):
        rank_zero_warn(
            "calibrate seems to get training data (its loader shuffles, or has the fit's data set): predictions of "
            "them are too sure, so the calibration would be wrong; pass validation data."
        )


# -- files ------------------------------------------------------------------------------------------------------------


def save_calibration(calibration: Calibration, store: SampleStore) -> None:
    """Write a calibration beside the samples, for `Posterior.load`."""
    if not isinstance(store, DiskStore):
        raise ValueError(
            "save=True needs samples in a folder, and these are in memory or a selection: use Posterior.load(path)"
        )
    content = (json.dumps(as_plain(calibration), indent=2) + "\n").encode()
    write_atomically(home_of(store.path, store.run_id) / FILE, content)


def saved_calibration(store: SampleStore) -> Calibration | None:
    """Return the calibration beside the samples; None, with a warning, if it is damaged or of other samples."""
    if not isinstance(store, DiskStore):
        return None
    path = store.path / FILE
    try:
        content = parse_json(read_regular(path, LARGEST_FILE).decode())
        calibration: Calibration = from_plain(Calibration, content)
        check_known(Calibration, content)
        if not 0 < calibration.value < math.inf:
            raise ValueError("it has no positive number")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        rank_zero_warn(f"{path} is not used, since it cannot be read: {error}; calibrate again.")
        return None
    if calibration.samples != identify(store.records):
        rank_zero_warn(f"{path} is not used, since it was fitted for other samples: calibrate again.")
        return None
    return calibration


# -- conformal ---------------------------------------------------------------------------------------------------------


Method = Literal["threshold", "adaptive"]


@dataclass(frozen=True)
class ConformalPrediction:
    """Sets or intervals with guaranteed coverage.

    Attributes:
        prediction: the predictive that they are made of.
        sets: for classes, whether each class is in the set, shape (n, K); else None.
        low, high: for numbers, the ends of the intervals, shape (n, D); else None.
    """

    prediction: Prediction
    sets: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None

    def contains(self, target: Tensor) -> Tensor:
        """Return whether each target is in its set, shape (n,), or its intervals, (n, D).

        Args:
            target: labels (n,), or numbers (n, D) or (n,) in the units of the prediction.
        """
        target = as_tensor("target", target)
        if self.sets is not None:
            return self.sets.gather(1, target.long().reshape(-1, 1).to(self.sets.device))[:, 0]
        assert self.low is not None
        assert self.high is not None
        target = target.reshape(self.low.shape).to(self.low)
        return (self.low <= target) & (target <= self.high)


@dataclass(frozen=True, eq=False)
class Conformal:
    """Makes sets or intervals of predictions; see `Posterior.conformal`.

    Attributes:
        posterior: the `Posterior`.
        threshold: the calibrated nonconformity: shape () for classes; of a target, such as (D,), for numbers.
        level: the guaranteed coverage.
        method: of class sets.
        seed: of the draws of adaptive sets.
        count: number of calibration data.
    """

    posterior: Any
    threshold: Tensor
    level: float
    method: Method
    seed: int
    count: int

    def __repr__(self) -> str:
        return f"Conformal(level={self.level}, method={self.method!r}, calibration data={self.count})"

    def predict(self, x: Any) -> ConformalPrediction:
        """Return sets or intervals for inputs, in the units of `Posterior.predict`.

        Args:
            x: inputs, as `Posterior.predict` takes them.
        """
        prediction: Prediction = self.posterior.predict(x)
        if isinstance(prediction, ClassPrediction):
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "conformal", "predict"))
            scores = _scores_of_classes(widest(prediction.probabilities), self.method, generator)
            return ConformalPrediction(prediction, sets=scores <= self.threshold.to(scores))
        width = self.threshold.to(prediction.std) * prediction.std
        return ConformalPrediction(prediction, low=prediction.mean - width, high=prediction.mean + width)


def fit_conformal(posterior: Any, model: EnergyModel, data: Any, level: float, method: Method, seed: int) -> Conformal:
    """Return the sets or intervals whose threshold the calibration data determine; see `Posterior.conformal`."""
    check_within("level", level, "(0, 1)")
    check_choice("method", method, ("threshold", "adaptive"))
    batches: Iterable[Any] = batches_of(data, posterior.columns, "conformal")
    scores = []
    standardised = posterior.standardised()
    generator = torch.Generator().manual_seed(derive_seed(seed, "conformal", "fit"))
    for batch in map(posterior.columns.received, batches):
        prediction = standardised.predict([batch])
        check_predictions(prediction, "conformal")
        target = as_tensor("the target", model.inputs_and_target(batch)[1])
        scores.append(_scores(prediction, target, model.likelihood, method, generator).cpu())
    if not scores:
        raise ValueError("conformal needs calibration data, and the loader has none: pass a loader with some batches")
    joined = torch.cat(scores)
    if joined.dim() == 1 or not bool(joined.isnan().any()):
        threshold = decisions.conformal_threshold(joined, level)
    else:  # a number that is not observed is NaN
        observed = (each[~each.isnan()] for each in joined.flatten(1).unbind(1))
        each = [decisions.conformal_threshold(scores, level) for scores in observed]
        threshold = torch.stack(each).reshape(joined.shape[1:])
    return Conformal(posterior, threshold, level, method, seed, len(joined))


def _scores_of_classes(probabilities: Tensor, method: Method, generator: torch.Generator) -> Tensor:
    if method == "threshold":
        return decisions.class_scores(probabilities, False, None)
    u = torch.rand(len(probabilities), generator=generator, dtype=torch.float64)
    return decisions.class_scores(probabilities, True, u.to(probabilities))


def _scores(
    prediction: Prediction, target: Tensor, likelihood: Likelihood | None, method: Method, generator: torch.Generator
) -> Tensor:
    if isinstance(prediction, ClassPrediction) and prediction.probabilities.dim() == 2:
        probabilities = widest(prediction.probabilities)
        known = None if likelihood is None else likelihood.observed(target)
        if known is not None:
            probabilities, target = probabilities[known.to(probabilities.device)], target[known]
        read = getattr(likelihood, "labels", Tensor.long)
        labels = read(target).long().to(probabilities.device)
        return _scores_of_classes(probabilities, method, generator).gather(1, labels[:, None])[:, 0]
    if isinstance(prediction, RegressionPrediction):
        mean, std = widest(prediction.mean), widest(prediction.std)
        _check_numbers("conformal", mean, target)
        target = target.to(mean)
        entries = None if likelihood is None else likelihood.observed_entries(target)
        target = target if entries is None else target.masked_fill(~entries, torch.nan)
        errors = (target.reshape(mean.shape) - mean).abs() / std
        return errors[~errors.isnan().flatten(1).all(1)]
    raise TypeError(
        f"conformal makes sets of classes or intervals of numbers, and {type(likelihood).__name__} predicts a "
        f"{type(prediction).__name__}"
    )
