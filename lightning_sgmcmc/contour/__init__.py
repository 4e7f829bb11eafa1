"""Contour sampling as pure functions of tensors: energy bins, the flattened target, the learning of π, weights."""

from lightning_sgmcmc.contour.auto import ContourChoice, ContourGoals, choose_contour
from lightning_sgmcmc.contour.chain_group import ChainGroup
from lightning_sgmcmc.contour.contour import Contour, ContourState, Location
from lightning_sgmcmc.contour.energy_law import EnergyLaw
from lightning_sgmcmc.contour.energy_range import EnergyRange
from lightning_sgmcmc.contour.learned import LearnedContour
from lightning_sgmcmc.contour.learner import ContourLearner
from lightning_sgmcmc.contour.partition import EnergyPartition, bin_index
from lightning_sgmcmc.contour.rules import ContourRules, DecayingStepSize, Difference, Scheme, Weighting
from lightning_sgmcmc.contour.start import ContourStart
from lightning_sgmcmc.contour.warm_up import EnergyRecord
from lightning_sgmcmc.contour.watch import ContourWatch

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
