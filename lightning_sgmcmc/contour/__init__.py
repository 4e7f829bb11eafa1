"""Contour sampling as pure functions of tensors: energy bins, the flattened target, the learning of π, weights."""

from lightning_sgmcmc.contour.auto import ContourChoice, ContourGoals, choose_contour
from lightning_sgmcmc.contour.contour import (
    Contour,
    ContourRules,
    ContourState,
    DecayingStepSize,
    Difference,
    Location,
    Scheme,
    Weighting,
)
from lightning_sgmcmc.contour.learned import ContourWatch, LearnedContour
from lightning_sgmcmc.contour.learner import ChainGroup, ContourLearner
from lightning_sgmcmc.contour.partition import EnergyLaw, EnergyPartition, EnergyRange, bin_index
from lightning_sgmcmc.contour.start import ContourStart, EnergyRecord

__all__ = [
    "ChainGroup",
    "Contour",
    "ContourChoice",
    "ContourGoals",
    "ContourLearner",
    "ContourRules",
    "ContourStart",
    "ContourState",
    "ContourWatch",
    "DecayingStepSize",
    "Difference",
    "EnergyLaw",
    "EnergyPartition",
    "EnergyRange",
    "EnergyRecord",
    "LearnedContour",
    "Location",
    "Scheme",
    "Weighting",
    "bin_index",
    "choose_contour",
]
