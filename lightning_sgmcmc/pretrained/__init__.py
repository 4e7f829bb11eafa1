"""Networks that are trained already, made Bayesian."""

from lightning_sgmcmc.pretrained.bayesianize import bayesianize
from lightning_sgmcmc.pretrained.features import FeatureDataModule

__all__ = ["FeatureDataModule", "bayesianize"]
