"""Contour sampling as pure functions of tensors: energy bins, the flattened target, the learning of π, weights."""

from lightning_sgmcmc.contour.auto import ContourChoice, ContourGoals, choose_contour
from lightning_sgmcmc.contour.contour import (
    Contour,
    ContourRules,
    ContourState,
    DecayingStepSize,
    Difference,
    Scheme,
    Weighting,
)
from lightning_sgmcmc.contour.learned import LearnedContour
from lightning_sgmcmc.contour.partition import EnergyPartition

__all__ = [
    "Contour",
    "ContourChoice",
    "ContourGoals",
    "ContourRules",
    "ContourState",
    "DecayingStepSize",
    "Difference",
    "EnergyPartition",
    "LearnedContour",
    "Scheme",
    "Weighting",
    "choose_contour",
]
