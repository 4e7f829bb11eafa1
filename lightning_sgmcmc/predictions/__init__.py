"""Predictive distributions averaged over posterior samples."""

from lightning_sgmcmc.predictions.classes import ClassPrediction, MultiLabelPrediction
from lightning_sgmcmc.predictions.mixture import Members, Mixture
from lightning_sgmcmc.predictions.numbers import CountPrediction, RegressionPrediction
from lightning_sgmcmc.predictions.prediction import ON_REQUEST, Prediction

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
