"""How well a posterior's predictions separate inputs from elsewhere from known ones, by several scores."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.chains.execution import StatelessCall, evaluation_mode
from lightning_sgmcmc.diagnostics.scores import detection_metrics
from lightning_sgmcmc.evaluation.comparison import html_table
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.posterior.calibration import check_predictions
from lightning_sgmcmc.posterior.predictive import network_inputs, states_in_place
from lightning_sgmcmc.posterior.store import SampleStore
from lightning_sgmcmc.predictions import ClassPrediction, Prediction, RegressionPrediction
from lightning_sgmcmc.tensors import widest

COLUMNS = ("score", "auroc", "aupr_out", "aupr_in", "fpr95")


@dataclass(frozen=True, repr=False)
class Detection:
    """The separation of inputs from elsewhere by each score, as text and, in a notebook, as a table.

    Attributes:
        metrics: by score, its `auroc`, `aupr_out`, `aupr_in` and `fpr95`, see `diagnostics.detection_metrics`.
        known: each score of the known inputs, shape (n,); larger is stranger.
        unknown: likewise of the inputs from elsewhere, shape (m,).
    """

    metrics: Mapping[str, Mapping[str, float]]
    known: Mapping[str, Tensor] = field(repr=False)
    unknown: Mapping[str, Tensor] = field(repr=False)

    def __str__(self) -> str:
        rows = [COLUMNS, *((name, *(f"{own[c]:.3f}" for c in COLUMNS[1:])) for name, own in self.metrics.items())]
        widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
        first = [row[0].ljust(widths[0]) for row in rows]
        rest = ["  ".join(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)) for row in rows]
        return "\n".join(f"{name}  {numbers}" for name, numbers in zip(first, rest, strict=True))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(name, *(own[column] for column in COLUMNS[1:])) for name, own in self.metrics.items()]
        return html_table("Inputs from elsewhere", COLUMNS, rows)


def detect(posterior: Any, model: EnergyModel, known: Any, unknown: Any) -> Detection:
    """Return the separation by each score; see `Posterior.detect`."""
    each = [_scores(posterior, model, x) for x in (known, unknown)]
    names = [name for name in each[0] if name in each[1]]
    metrics = {name: detection_metrics(each[0][name], each[1][name]) for name in names}
    plain = {name: {metric: float(value) for metric, value in own.items()} for name, own in metrics.items()}
    return Detection(plain, *each)


def _scores(posterior: Any, model: EnergyModel, x: Any) -> dict[str, Tensor]:
    """Return the scores of inputs, each of shape (n,); larger is stranger."""
    x = list(x) if isinstance(x, Iterator) else x  # it is read twice
    prediction: Prediction = posterior.predict(x)
    check_predictions(prediction, "detect")
    if isinstance(prediction, RegressionPrediction):
        parts = {"std": prediction.std, "epistemic_std": prediction.epistemic_std}
        # Several numbers have a unit each: the mean logarithm orders inputs alike in every unit.
        return {name: widest(part).clamp_min(1e-300).log().flatten(1).mean(1).cpu() for name, part in parts.items()}
    if not isinstance(prediction, ClassPrediction) or prediction.probabilities.dim() != 2:
        raise TypeError(
            f"detect needs a class or numbers of each input, and these predictions are a {type(prediction).__name__} "
            "of several: pass scores of your own to diagnostics.detection_metrics"
        )
    scores = {"entropy": prediction.entropy, "max_probability": -prediction.probabilities.max(1).values}
    if "mutual_information" in prediction.parts:
        scores["mutual_information"] = prediction.mutual_information
    energy = _energies(model, posterior.store, posterior.weights, x)
    found = scores if energy is None else scores | {"energy": energy}
    return {name: widest(score).cpu() for name, score in found.items()}


def _energies(model: EnergyModel, store: SampleStore, weights: Tensor, x: Any) -> Tensor | None:
    """Return the mean over samples of the likelihood's energy of each input, shape (n,); None if it has none."""
    likelihood = model.likelihood
    if likelihood is None:
        return None
    batches = list(network_inputs(model, store, x))
    call, total = StatelessCall(model, lambda m, inputs: m.likelihood.energy(m.output_of(inputs))), torch.zeros(())
    with evaluation_mode(model), torch.no_grad():
        for state, weight in zip(states_in_place(model, store), weights.tolist(), strict=True):
            found = [call.call(state, batch) for batch in batches]
            if any(own is None for own in found):
                return None
            total = total + weight * widest(torch.cat(found)).cpu()
    return total
