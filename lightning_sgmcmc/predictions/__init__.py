"""Predictive distributions averaged over posterior samples."""

from lightning_sgmcmc.predictions.mixture import Members, Mixture
from lightning_sgmcmc.predictions.prediction import (
    ON_REQUEST,
    ClassPrediction,
    CountPrediction,
    MultiLabelPrediction,
    Prediction,
    RegressionPrediction,
)

__all__ = [
    "ON_REQUEST",
    "ClassPrediction",
    "CountPrediction",
    "Members",
    "Mixture",
    "MultiLabelPrediction",
    "Prediction",
    "RegressionPrediction",
]
