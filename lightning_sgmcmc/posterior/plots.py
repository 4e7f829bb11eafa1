"""Figures of a posterior, drawn by `lightning_sgmcmc.figures` from its samples and predictions."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.metrics import classification_metrics, reliability
from lightning_sgmcmc.figures.evaluation import predictions_figure, reliability_figure
from lightning_sgmcmc.figures.run import sample_energy_figure, sample_trace_figure
from lightning_sgmcmc.posterior.export import choose_parameters
from lightning_sgmcmc.posterior.store import SampleStore
from lightning_sgmcmc.predictions import ClassPrediction, Prediction, RegressionPrediction
from lightning_sgmcmc.tables import as_tensor, is_frame
from lightning_sgmcmc.tensors import widest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PANELS = 12

Chains = dict[int, tuple[list[int], list[float]]]


def plot_trace(store: SampleStore, patterns: Sequence[str] | None) -> "Figure":
    """Draw energies or parameters of the samples; see `Posterior.plot_trace`."""
    if len(store) == 0:
        raise ValueError("the posterior has no samples to draw")
    if patterns is None:
        return sample_energy_figure(_by_chain(store, [record.energy for record in store.records]))
    shapes = store.shapes(0)
    names = choose_parameters(shapes, patterns)
    count = sum(math.prod(shapes[name]) for name in names)
    if count > MOST_PANELS:
        raise ValueError(
            f"parameters={list(patterns)} are {count} numbers, and a figure has at most {MOST_PANELS} panels: choose "
            "fewer"
        )
    drawn = [store.parameters(i, names) for i in range(len(store))]
    traces = {}
    for name in names:
        values = torch.stack([widest(own[name]).reshape(-1) for own in drawn])
        for i in range(values.shape[1]):
            traces[name if values.shape[1] == 1 else f"{name}[{i}]"] = _by_chain(store, values[:, i].tolist())
    return sample_trace_figure(traces)


def plot_predictions(prediction: Prediction, x: Any, y: Any) -> "Figure":
    """Draw a predictive of one number; see `Posterior.plot_predictions`."""
    if not isinstance(prediction, RegressionPrediction):
        raise TypeError(
            f"plot_predictions draws predictions of numbers, and these are a {type(prediction).__name__}: use "
            "plot_reliability(x, y) for classes"
        )
    if prediction.mean.shape[1:].numel() != 1:
        raise ValueError(
            f"plot_predictions draws predictions of one number, and each datum has {prediction.mean.shape[1:].numel()}"
        )
    observed = None if y is None else as_tensor("y", y).detach().cpu().reshape(-1).tolist()
    parts = _numbers(prediction.mean), _numbers(prediction.std), _numbers(prediction.epistemic_std)
    columns = x.shape[1] if is_frame(x) else as_tensor("x", x).reshape(len(prediction), -1).shape[1]
    if columns == 1:
        return predictions_figure(as_tensor("x", x).detach().cpu().reshape(-1).tolist(), *parts, observed, "x")
    if observed is None:
        raise ValueError(f"x has {columns} columns, so predictions are drawn against y: pass y=…")
    return predictions_figure(observed, *parts, None, "observed")


def plot_reliability(prediction: Prediction, y: Any) -> "Figure":
    """Draw the reliability of class probabilities; see `Posterior.plot_reliability`."""
    if not isinstance(prediction, ClassPrediction):
        raise TypeError(
            f"plot_reliability draws predictions of classes, and these are a {type(prediction).__name__}: use "
            "plot_predictions(x, y) for numbers"
        )
    probabilities = prediction.probabilities.cpu()
    labels = as_tensor("y", y).long().reshape(-1).cpu()
    confidence, accuracy, count = reliability(probabilities, labels)
    ece = float(classification_metrics(probabilities, labels)["ece"])
    return reliability_figure(confidence.tolist(), accuracy.tolist(), count.tolist(), ece)


def _numbers(part: Tensor) -> list[float]:
    return [float(value) for value in part.detach().cpu().reshape(-1)]


def _by_chain(store: SampleStore, values: Sequence[float]) -> Chains:
    chains: Chains = {}
    for record, value in zip(store.records, values, strict=True):
        steps, own = chains.setdefault(record.chain, ([], []))
        steps.append(record.step)
        own.append(value)
    return chains
