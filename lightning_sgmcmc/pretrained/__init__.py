"""Networks that are trained already, made Bayesian."""

from lightning_sgmcmc.pretrained.bayesianize import bayesianize

__all__ = ["bayesianize"]
