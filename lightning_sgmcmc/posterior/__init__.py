"""Samples after the run: stores in memory and on disk, predictions, export to ArviZ."""

from lightning_sgmcmc.posterior.posterior import Posterior

__all__ = ["Posterior"]
