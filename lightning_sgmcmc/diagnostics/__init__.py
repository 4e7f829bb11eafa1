"""Diagnostics of chains and draws: R-hat, effective sample sizes, temperatures, calibration, geometry.

Pure functions of tensors, and small classes for their results; nothing here depends on a trainer or a module.
"""

from lightning_sgmcmc.diagnostics.assessment import assess
from lightning_sgmcmc.diagnostics.chains import ChainDiagnostics, ChainGrid, chain_diagnostics
from lightning_sgmcmc.diagnostics.estimates import Observations
from lightning_sgmcmc.diagnostics.findings import Finding, FindingKind
from lightning_sgmcmc.diagnostics.geometry import classical_scaling, interpolate, squared_distances, weight_sketch
from lightning_sgmcmc.diagnostics.health import HealthReport, RunMeasures, Temperatures
from lightning_sgmcmc.diagnostics.metrics import (
    brier_score,
    classification_metrics,
    out_of_distribution_metrics,
    predictive_entropy,
    reliability,
)
from lightning_sgmcmc.diagnostics.observer import StepObserver
from lightning_sgmcmc.diagnostics.samples import (
    autocorrelation,
    autocorrelation_time,
    normalised_weights,
    resample,
    wasserstein_distance,
    weight_efficiency,
    within_groups,
)
from lightning_sgmcmc.diagnostics.verdict import RunFacts

__all__ = [
    "ChainDiagnostics",
    "ChainGrid",
    "Finding",
    "FindingKind",
    "HealthReport",
    "Observations",
    "RunFacts",
    "RunMeasures",
    "StepObserver",
    "Temperatures",
    "assess",
    "autocorrelation",
    "autocorrelation_time",
    "brier_score",
    "chain_diagnostics",
    "classical_scaling",
    "classification_metrics",
    "interpolate",
    "normalised_weights",
    "out_of_distribution_metrics",
    "predictive_entropy",
    "reliability",
    "resample",
    "squared_distances",
    "wasserstein_distance",
    "weight_efficiency",
    "weight_sketch",
    "within_groups",
]
