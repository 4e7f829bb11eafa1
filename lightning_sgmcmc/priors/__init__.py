"""Priors over the parameters: log densities with their normalising constants."""

from lightning_sgmcmc.priors.base import Prior, Scale, ScalePrior
from lightning_sgmcmc.priors.gaussian import GaussianPrior
from lightning_sgmcmc.priors.heavy_tails import FlatPrior, LaplacePrior, StudentTPrior
from lightning_sgmcmc.priors.hierarchical import HierarchicalPrior

__all__ = [
    "FlatPrior",
    "GaussianPrior",
    "HierarchicalPrior",
    "LaplacePrior",
    "Prior",
    "Scale",
    "ScalePrior",
    "StudentTPrior",
]
