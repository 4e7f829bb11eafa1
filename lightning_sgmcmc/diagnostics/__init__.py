"""Diagnostics of chains and draws: R-hat, effective sample sizes, temperatures, calibration, geometry.

Pure functions of tensors, and small classes for their results; nothing here depends on a trainer or a module.
"""

from lightning_sgmcmc.diagnostics.acquisition import Acquisition, batch_bald
from lightning_sgmcmc.diagnostics.decisions import (
    SelectiveThreshold,
    agreement,
    aurc,
    class_scores,
    conformal_threshold,
    risk_at_coverage,
    risk_coverage,
    selective_threshold,
    total_variation,
)
from lightning_sgmcmc.diagnostics.draws import (
    ChainDiagnostics,
    ChainGrid,
    autocorrelation,
    autocorrelation_time,
    chain_diagnostics,
    normalised_weights,
    resample,
    weight_efficiency,
    within_groups,
)
from lightning_sgmcmc.diagnostics.geometry import classical_scaling, interpolate, squared_distances, weight_sketch
from lightning_sgmcmc.diagnostics.joint import JointScore, joint_nll
from lightning_sgmcmc.diagnostics.scores import (
    brier_score,
    classification_metrics,
    concordance_index,
    detection_metrics,
    gaussian_mixture_crps,
    interval_score,
    out_of_distribution_metrics,
    pit_histogram,
    predictive_entropy,
    reliability,
    sample_crps,
)
from lightning_sgmcmc.health.assessment import assess
from lightning_sgmcmc.health.findings import Finding, FindingKind
from lightning_sgmcmc.health.report import HealthReport, RunMeasures, Temperatures
from lightning_sgmcmc.health.verdict import RunFacts

__all__ = [
    "Acquisition",
    "ChainDiagnostics",
    "ChainGrid",
    "Finding",
    "FindingKind",
    "HealthReport",
    "JointScore",
    "RunFacts",
    "RunMeasures",
    "SelectiveThreshold",
    "Temperatures",
    "agreement",
    "assess",
    "aurc",
    "autocorrelation",
    "autocorrelation_time",
    "batch_bald",
    "brier_score",
    "chain_diagnostics",
    "class_scores",
    "classical_scaling",
    "classification_metrics",
    "concordance_index",
    "conformal_threshold",
    "detection_metrics",
    "gaussian_mixture_crps",
    "interpolate",
    "interval_score",
    "joint_nll",
    "normalised_weights",
    "out_of_distribution_metrics",
    "pit_histogram",
    "predictive_entropy",
    "reliability",
    "resample",
    "risk_at_coverage",
    "risk_coverage",
    "sample_crps",
    "selective_threshold",
    "squared_distances",
    "total_variation",
    "weight_efficiency",
    "weight_sketch",
    "within_groups",
]
