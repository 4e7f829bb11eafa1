"""Calibration of a posterior's predictions by one number that is fitted on validation data."""

import copy
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.batches.inputs import as_tensors, is_object
from lightning_sgmcmc.batches.loader import is_shuffled
from lightning_sgmcmc.chains.samples import SampleRecord
from lightning_sgmcmc.chains.together import dtype_of
from lightning_sgmcmc.diagnostics import decisions
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.evaluation.scoring import TargetCheck, hooked, is_overridden
from lightning_sgmcmc.files import parse_json, read_regular, write_atomically
from lightning_sgmcmc.likelihoods.base import COVERAGE_LEVELS, COVERAGES
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.namespace import pl, rank_zero_warn
from lightning_sgmcmc.plain import as_plain, check_known, from_plain
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.manifest import home_of
from lightning_sgmcmc.posterior.predictive import average_scores, not_finite
from lightning_sgmcmc.posterior.store import SampleStore
from lightning_sgmcmc.predictions import (
    ON_REQUEST,
    ClassPrediction,
    CountPrediction,
    MultiLabelPrediction,
    Prediction,
    RegressionPrediction,
)
from lightning_sgmcmc.predictions.mixture import tempered
from lightning_sgmcmc.predictions.prediction import of_both
from lightning_sgmcmc.tables import Columns, as_tensor
from lightning_sgmcmc.tensors import exact, widest


def overconfidence(likelihood: Any, terms: Mapping[str, Tensor], target: Tensor, prior_std: float) -> float | None:
    """Return the factor with the least NLL of the data: above 1 for overconfident predictions.

    Of class probabilities it is a temperature, also of soft labels and of several labels at once. Of numbers, counts
    and bounds it stretches the normal score z = Φ⁻¹(P(Y ≤ y)), which is N(0, 1) if predictions are calibrated; without
    a distribution function it stretches the standard deviation. A prior N(0, prior_std²) of its logarithm stabilises
    it for few data. None for another kind of prediction.

    Source: Guo et al. 2017, section 4.2; Dawid 1984 (the probability integral transform).
    """
    prediction = likelihood.prediction(terms, None)
    factors = torch.linspace(math.log(0.3), math.log(4.0), 60, dtype=torch.float64).exp()
    if isinstance(prediction, ClassPrediction | MultiLabelPrediction):
        probabilities, labels = _labels_of(likelihood, prediction, target)
        nll = [decisions.class_nll(tempered(probabilities, factor), labels) for factor in factors.tolist()]
    elif "cdf" in terms:
        cdf, below = terms["cdf"], terms.get("cdf_below", terms["cdf"])
        nll = [decisions.stretched_nll(cdf, below, factor) for factor in factors.tolist()]
    elif isinstance(prediction, RegressionPrediction) and prediction.mean.numel() == target.numel():
        mean, std = prediction.mean, prediction.std
        numbers = target.reshape(mean.shape)
        nll = [decisions.gaussian_nll(mean, std * factor, numbers) for factor in factors.tolist()]
    else:
        return None
    if not all(map(math.isfinite, nll)):
        return None
    return decisions.shrunk_factor(torch.tensor(nll, dtype=torch.float64), factors, len(target), prior_std)


def noise_share(likelihood: Any, terms: Mapping[str, Tensor], target: Tensor) -> float | None:
    """Return the part of the targets' variance that predictions of numbers leave, (1.48·median|y - mean|)²/var(y).

    It is the mean over outputs, and None for classes; NaN targets are left out, and bounds count by their middle. The
    median sees the usual datum, and not the few far ones of a network that fits well.
    """
    prediction = likelihood.prediction(terms, None)
    if not isinstance(prediction, RegressionPrediction):
        return None
    numbers = widest(target if target.numel() == prediction.mean.numel() else target.mean(-1))
    numbers = numbers.reshape(prediction.mean.shape).flatten(1)
    numbers = numbers.masked_fill(numbers.isinf(), math.nan)
    deviation = 1.4826 * (numbers - widest(prediction.mean).flatten(1)).abs().nanmedian(0).values
    variance = (numbers - numbers.nanmean(0)).square().nanmean(0)
    return float((deviation.square() / variance)[variance > 0].nanmean().nan_to_num(0.0))


def unexplained(likelihood: Any, log_densities: Tensor, target: Tensor) -> float:
    """Return which part of a guess's NLL data have that are predicted each without it; of numbers, of their variance.

        nll/guess,   for D numbers exp(2·(nll - guess)/D)

    At most 1, and 1 where a guess has no NLL, or an example none without it.

    Args:
        likelihood: which says what a guess has.
        log_densities: of samples at temperature 1 and their training data, shape (S, n).
        target: of these data.
    """
    if not getattr(likelihood, "learned", True):  # a guess with a fixed noise is worse than one that explains nothing
        likelihood = copy.copy(likelihood)
        likelihood.learned = True
    nll, guess = decisions.leave_one_out_nll(log_densities), likelihood.chance_nll(target)
    if guess is None or not math.isfinite(nll):
        return 1.0
    if likelihood.per_sample_term == "mean":
        return math.exp(min(2 * (nll - guess) * len(target) / int((~target.isnan()).sum()), 0.0))
    return min(nll / guess, 1.0) if guess > 0 else 1.0


def _labels_of(likelihood: Any, prediction: Prediction, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities (m, K) and labels (m,), or the soft labels (m, K); several labels at once are m of two."""
    if isinstance(prediction, MultiLabelPrediction):
        probabilities, labels = likelihood.scored(prediction, target)
        return of_both(probabilities).reshape(-1, 2), labels.flatten()
    if target.is_floating_point() and target.shape == prediction.probabilities.shape:
        return prediction.probabilities, target
    found: tuple[Tensor, Tensor] = likelihood.scored(prediction, target)
    return found


# -- calibration -------------------------------------------------------------------------------------------------------


FILE = "calibration.json"
LARGEST_FILE = 2**16
"""In bytes."""


@dataclass(frozen=True)
class Calibration:
    """One number that calibrates the predictions of certain samples.

    Attributes:
        kind: "temperature" of class probabilities, or "std factor" of a predictive standard deviation.
        value: the number; 1 changes nothing, above 1 the predictions were overconfident.
        count: number of validation data.
        nll_before, nll_after: mean NLL of these data, in nats per example.
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
    batches = batches_of(data, store.columns, model)
    _warn_of_training_data(model, batches)
    likelihood, identity = model.likelihood, identify(store.records)
    if likelihood is None:
        raise TypeError(f"{type(model).__name__} has no likelihood object to define a predictive: pass likelihood=…")
    converted = tensors_of(batches, model, store)
    if not converted:
        raise ValueError("calibrate needs validation data, and the loader has none: pass a loader with some batches")
    terms, target = average_scores(model, store, log_weights, converted)
    prediction = likelihood.prediction(terms, None)
    check_predictions(prediction, "calibrate")
    if isinstance(prediction, ClassPrediction | MultiLabelPrediction):
        probabilities, labels = _labels_of(likelihood, prediction, target)
        value = decisions.fit_temperature(probabilities, labels)
        if value <= decisions.SMALLEST * 1.001:
            value = 1.0  # at the bound all doubt about new data would be gone
            rank_zero_warn(
                f"All {len(labels)} predictions of the validation data are right, so they set no calibration "
                "temperature: it stays 1. Use more validation data."
            )
        elif value >= decisions.LARGEST / 1.001:
            rank_zero_warn(
                f"The calibration temperature {value:.3g} is at its bound, since the predictions of the validation "
                "data are no better than chance."
            )
        before = decisions.class_nll(probabilities, labels)
        after = decisions.class_nll(tempered(probabilities, value), labels)
        return Calibration("temperature", value, len(labels), before, after, identity)
    if isinstance(prediction, RegressionPrediction) and not isinstance(prediction, CountPrediction):
        mean, std = prediction.mean, prediction.std
        check_numbers("calibrate", mean, target)
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
    parts = {name: part for name, part in prediction.parts.items() if not name.startswith(ON_REQUEST)}
    count = int(not_finite(parts).sum())
    if count:
        raise ValueError(
            f"{what} needs finite predictions, and {count} of {len(prediction)} are NaN or infinite: remove inputs "
            "that are not finite from the data, and scale them as in training"
        )


def batches_of(data: Any, columns: Columns, model: EnergyModel, what: str = "calibrate") -> Any:
    """Return the batches of a loader, or of a datamodule's validation data, after the user's hooks."""
    datamodule = data if isinstance(data, pl.LightningDataModule) else None
    if isinstance(data, pl.LightningDataModule):
        name = type(data).__name__
        data.prepare_data()
        data.setup("fit")
        columns.check(data)
        data = data.val_dataloader() if is_overridden("val_dataloader", data) else None
        if isinstance(data, list | tuple) and len(data) == 1:
            data = data[0]
        if data is None or (isinstance(data, list | tuple) and not data):
            raise ValueError(f"{what} needs validation data, and {name} has none: pass a loader of other data")
    is_one = isinstance(data, tuple | Tensor | np.ndarray) or is_object(data)
    if is_one or data is None or not isinstance(data, Iterable):
        raise TypeError(
            f"{what} needs validation data with targets, got a {type(data).__name__}: pass a loader, a datamodule, "
            "or a list of batches, [(x, y)]"
        )
    return hooked(data, model, datamodule)


def tensors_of(batches: Iterable[Any], model: EnergyModel, store: SampleStore) -> list[Any]:
    """Return batches as the network receives them, on its device and in the samples' type."""
    dtype = dtype_of(store[0].parameters)
    return [as_tensors(store.columns.received(batch), model.device, dtype) for batch in batches]


def check_numbers(what: str, mean: Tensor, target: Tensor) -> None:
    """Raise unless targets are the numbers that are predicted."""
    if mean.numel() != target.numel():
        raise TypeError(
            f"{what} compares predictions {tuple(mean.shape)} with the numbers themselves, and the targets have shape "
            f"{tuple(target.shape)}: pass data whose numbers are known, not bounds of them"
        )


def predictions_with_targets(
    posterior: Any, model: EnergyModel, data: Any, what: str, return_samples: bool = False
) -> Iterator[tuple[Prediction, Tensor]]:
    """Yield the prediction of each batch and its targets: labels (n,), -1 where one is
    missing, or numbers (n, D) in the data's units, NaN where one is missing.

    Raises:
        ValueError: if there are no data, or a prediction is not finite.
        TypeError: if the predictive is neither of one class nor of numbers for each input.
    """
    likelihood, scaling, found = model.likelihood, posterior.store.scaling, False
    first, check = posterior.store[0], TargetCheck(model)
    state = {name: tensor.to(model.device) for name, tensor in first.state.items()}
    given = map(posterior.columns.received, batches_of(data, posterior.columns, model, what))
    for place, batch in enumerate(given):
        found = True
        check(state, as_tensors(batch, model.device, dtype_of(first.parameters)), place)
        prediction = posterior.predict([batch], return_samples)
        check_predictions(prediction, what)
        target = as_tensor("the target", model.inputs_and_target(batch)[1])
        if isinstance(prediction, ClassPrediction) and prediction.probabilities.dim() == 2:
            known = None if likelihood is None else likelihood.observed(target)
            read = getattr(likelihood, "labels", Tensor.long)
            labels = read(target if likelihood is None or known is None else likelihood.split_missing(target)[0])
            labels = labels.long().reshape(-1).to(prediction.probabilities.device)
            yield prediction, labels if known is None else labels.masked_fill(~known.to(labels.device), -1)
        elif isinstance(prediction, RegressionPrediction):
            entries = None if likelihood is None else likelihood.observed_entries(target)
            check_numbers(what, prediction.mean, target)
            numbers = widest(target.to(prediction.mean.device)).reshape(prediction.mean.shape)
            if scaling is not None:
                factor, shift = (exact(one).to(numbers) for one in (scaling.factor, scaling.shift))
                numbers = numbers * factor + shift
            yield (
                prediction,
                numbers
                if entries is None
                else numbers.masked_fill(~entries.reshape(numbers.shape).to(numbers.device), torch.nan),
            )
        else:
            raise TypeError(
                f"{what} needs a class or numbers of each input, and {type(likelihood).__name__} predicts a "
                f"{type(prediction).__name__}"
            )
    if not found:
        raise ValueError(f"{what} needs calibration data, and the loader has none: pass a loader with some batches")


def calibrated_metrics(posterior: Any, model: EnergyModel, found: Evaluation, batches: list[Any]) -> dict[str, float]:
    """Return the metrics of calibrated predictions: those of class probabilities, or the coverage of intervals."""
    likelihood, target, calibration = model.likelihood, found.target, posterior.calibration
    if likelihood is None or target is None or found.average is None:
        return {}
    terms = found.average.terms
    prediction = likelihood.prediction(terms, None)
    if isinstance(prediction, ClassPrediction | MultiLabelPrediction):
        prediction = calibration.applied(prediction)
        own = dict(terms) | {likelihood.per_sample_term: prediction.probabilities}
        values = likelihood.metrics(own, torch.full((len(target),), torch.nan), target, 1.0)
        metrics = {name: float(value) for name, value in values.items()}
        if isinstance(prediction, MultiLabelPrediction) or prediction.probabilities.dim() > 2:
            del metrics["nll"]  # the average's is that of a mixture, which probabilities of single labels do not have
        elif math.isnan(metrics["nll"]):  # not so of soft labels
            metrics["nll"] = decisions.class_nll(*likelihood.scored(prediction, target))
        return metrics
    inside: dict[str, list[Tensor]] = {name: [] for name in COVERAGES}
    for one, numbers in predictions_with_targets(posterior, model, batches, "evaluate"):
        for name, level in zip(COVERAGES, COVERAGE_LEVELS, strict=True):
            low, high = one.interval(level)
            inside[name].append(((numbers >= low) & (numbers <= high))[~numbers.isnan()])
    return {name: float(torch.cat(each).float().mean()) for name, each in inside.items()}


def _warn_of_training_data(model: EnergyModel, batches: Any) -> None:
    trainer = getattr(model, "_trainer", None)
    train = getattr(getattr(trainer, "train_dataloader", None), "dataset", None)
    own = getattr(batches, "dataset", None)
    if is_shuffled(batches) or (own is not None and own is train):
        rank_zero_warn(
            "calibrate seems to get training data (its loader shuffles, or has the fit's data set): predictions of "
            "them are overconfident, so the calibration would be wrong; pass validation data."
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
