"""Singular learning theory around a trained network: local learning coefficients, susceptibilities, influences."""

from lightning_sgmcmc.singular.covariances import influence, sample_losses, susceptibility
from lightning_sgmcmc.singular.estimate import LearningCoefficientEstimate
from lightning_sgmcmc.singular.learning_coefficient import (
    LearningCoefficientTruth,
    deep_linear_learning_coefficient,
    learning_coefficient,
    localized,
    reduced_rank_learning_coefficient,
    regular_learning_coefficient,
)

__all__ = [
    "LearningCoefficientEstimate",
    "LearningCoefficientTruth",
    "deep_linear_learning_coefficient",
    "influence",
    "learning_coefficient",
    "localized",
    "reduced_rank_learning_coefficient",
    "regular_learning_coefficient",
    "sample_losses",
    "susceptibility",
]
