"""Posterior samples after a run: stores in memory and on disk, predictions, export to ArviZ."""

from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.distillation import Distillation, Student
from lightning_sgmcmc.posterior.networks import Ensemble
from lightning_sgmcmc.posterior.posterior import Posterior
from lightning_sgmcmc.posterior.store import MemoryStore, SampleStore

__all__ = ["DiskStore", "Distillation", "Ensemble", "MemoryStore", "Posterior", "SampleStore", "Student"]
