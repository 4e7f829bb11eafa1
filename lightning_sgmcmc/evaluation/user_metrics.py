"""Metrics of the user's own, for a sample's and the averaged predictive."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torchmetrics import Metric

from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.predictions import RegressionPrediction
from lightning_sgmcmc.tables import TargetScaling


class UserMetrics:
    """Metrics of (prediction, target) by name.

    Args:
        metrics: functions or torchmetrics by name. Each is called with the class probabilities (n, K) and the labels
            (n,), or in regression with the predictive means and the targets, both (n, D) and in the target's own
            units, and returns one number.

    Raises:
        TypeError: if it is no mapping of names to callables.
    """

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
        """Return the metrics of a predictive.

        Args:
            model: the module.
            terms: its likelihood's averaged terms.
            target: the targets.
            scaling: of the targets.
        """
        if not self._metrics or model.likelihood is None or target is None:
            return {}
        prediction = model.likelihood.prediction(terms, None)
        predicted, target = model.likelihood.scored(prediction, target)
        if isinstance(prediction, RegressionPrediction):
            scale, shift = (
                part.to(predicted) if isinstance(part, Tensor) else part for part in (scaling.factor, scaling.shift)
            )
            predicted, target = predicted * scale + shift, target * scale + shift
        found = {}
        for name, metric in self._metrics.items():
            if isinstance(metric, Metric):
                metric.to(predicted.device)
            found[name] = float(metric(predicted, target))
            if isinstance(metric, Metric):
                metric.reset()
        return found
