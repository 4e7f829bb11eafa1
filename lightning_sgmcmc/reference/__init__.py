"""The truth of small networks: NUTS and Hamiltonian Monte Carlo with full gradients, on the module of a fit."""

from lightning_sgmcmc.reference.chains import DensityDraws, sample_density
from lightning_sgmcmc.reference.report import ReferenceReport, read_report
from lightning_sgmcmc.reference.sampling import ReferencePosterior, sample

__all__ = ["DensityDraws", "ReferencePosterior", "ReferenceReport", "read_report", "sample", "sample_density"]
