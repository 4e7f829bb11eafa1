"""Calibration of a posterior's predictions by one number that is fitted on validation data."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sgmcmc.batches.inputs import as_tensors
from lightning_sgmcmc.batches.loader import is_shuffled
from lightning_sgmcmc.chains.sample import PosteriorSample, SampleRecord
from lightning_sgmcmc.diagnostics.calibration import (
    LARGEST,
    SMALLEST,
    class_nll,
    fit_std_factor,
    fit_temperature,
    gaussian_nll,
    tempered,
)
from lightning_sgmcmc.files import parse_json, read_regular, write_atomically
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.posterior.aside import home_of
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.predictive import average_scores
from lightning_sgmcmc.posterior.store import SampleStore
from lightning_sgmcmc.predictions import (
    ClassPrediction,
    CountPrediction,
    MultiLabelPrediction,
    Prediction,
    RegressionPrediction,
)
from lightning_sgmcmc.predictions.classes import of_both
from lightning_sgmcmc.tables import Columns

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


def fit_calibration(
    model: EnergyModel,
    samples: Iterable[PosteriorSample],
    log_weights: Sequence[float],
    data: Any,
    identity: str,
    columns: Columns,
) -> Calibration:
    """Fit the number; see `Posterior.calibrate`.

    Raises:
        TypeError: if the model has no likelihood, or one with another kind of predictive.
        ValueError: if there are no data.
    """
    batches = batches_of(data, columns)
    _warn_of_training_data(model, batches)
    likelihood = model.likelihood
    if likelihood is None:
        raise TypeError(f"{type(model).__name__} has no likelihood object to define a predictive: pass likelihood=…")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    converted = [as_tensors(columns.received(batch), model.device, dtype) for batch in batches]
    if not converted:
        raise ValueError("calibrate needs validation data, and the loader has none: pass a loader with some batches")
    terms, target = average_scores(model, samples, log_weights, converted)
    prediction = likelihood.prediction(terms, None)
    check_predictions(prediction, "calibrate")
    if isinstance(prediction, ClassPrediction | MultiLabelPrediction):
        probabilities, labels = likelihood.scored(prediction, target)
        if isinstance(prediction, MultiLabelPrediction):
            probabilities, labels = of_both(probabilities).reshape(-1, 2), labels.flatten()
        value = fit_temperature(probabilities, labels)
        before = class_nll(probabilities, labels)
        after = class_nll(tempered(probabilities, value), labels)
        _warn_of_bounds(value)
        return Calibration("temperature", value, len(labels), before, after, identity)
    if isinstance(prediction, RegressionPrediction) and not isinstance(prediction, CountPrediction):
        mean, std = prediction.mean, prediction.std
        target = target.reshape(mean.shape)
        value = fit_std_factor(mean, std, target)
        before, after = gaussian_nll(mean, std, target), gaussian_nll(mean, std * value, target)
        return Calibration("std factor", value, len(target), before, after, identity)
    raise TypeError(
        f"calibrate scales class probabilities or a standard deviation, and {type(likelihood).__name__} predicts a "
        f"{type(prediction).__name__}"
    )


def check_predictions(prediction: Prediction, what: str) -> None:
    """Raise if a prediction is NaN or infinite, since one such datum makes the fitted number meaningless.

    Args:
        prediction: of the validation data.
        what: the method that needs them, for the message.

    Raises:
        ValueError: with the number of such data.
    """
    finite = [part.reshape(len(part), -1).isfinite().all(1) for part in prediction.parts.values()]
    count = int((~torch.stack(finite).all(0)).sum())
    if count:
        raise ValueError(
            f"{what} needs finite predictions, and {count} of {len(prediction)} are NaN or infinite: remove inputs "
            "that are not finite from the data, and scale them as in training"
        )


def batches_of(data: Any, columns: Columns, what: str = "calibrate") -> Any:
    """Return the batches of a loader, or of a datamodule's validation data.

    Args:
        data: the loader, list of batches or datamodule.
        columns: what inputs and targets of the samples' fit are.
        what: the method that needs them, for messages.

    Raises:
        TypeError: for data of another type.
        ValueError: for a datamodule without validation data, or with data in other units than the fit's.
    """
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


def _warn_of_training_data(model: EnergyModel, batches: Any) -> None:
    trainer = getattr(model, "_trainer", None)
    train = getattr(getattr(trainer, "train_dataloader", None), "dataset", None)
    own = getattr(batches, "dataset", None)
    if is_shuffled(batches) or (own is not None and own is train):
        rank_zero_warn(
            "calibrate seems to get training data (its loader shuffles, or has the fit's data set): predictions of "
            "them are too sure, so the calibration would be wrong; pass validation data."
        )


def _warn_of_bounds(value: float) -> None:
    if not SMALLEST * 1.001 < value < LARGEST / 1.001:
        rank_zero_warn(
            f"The calibration temperature {value:.3g} is at its bound, since the validation data have no finite "
            "optimum (all predictions are right, or no better than chance): use more data."
        )


# -- files ------------------------------------------------------------------------------------------------------------


def save_calibration(calibration: Calibration, store: SampleStore) -> None:
    """Write a calibration beside the samples, for `Posterior.load`.

    Raises:
        ValueError: if the samples are in no folder.
    """
    if not isinstance(store, DiskStore):
        raise ValueError(
            "save=True needs samples in a folder, and these are in memory or a selection: use Posterior.load(path)"
        )
    write_atomically(
        home_of(store.path, store.run_id) / FILE, (json.dumps(asdict(calibration), indent=2) + "\n").encode()
    )


def saved_calibration(store: SampleStore) -> Calibration | None:
    """Return the calibration beside the samples; None, with a warning, if it is damaged or of other samples."""
    if not isinstance(store, DiskStore):
        return None
    path = store.path / FILE
    try:
        content = parse_json(read_regular(path, LARGEST_FILE).decode())
        calibration = Calibration(**content)
        sound = calibration.kind in ("temperature", "std factor") and math.isfinite(calibration.value)
        if not sound or calibration.value <= 0:
            raise ValueError("it has no positive number")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        rank_zero_warn(f"{path} is not used, since it cannot be read: {error}; calibrate again.")
        return None
    if calibration.samples != identify(store.records):
        rank_zero_warn(f"{path} is not used, since it was fitted for other samples: calibrate again.")
        return None
    return calibration
