"""Services around a fit: checks, guards, checkpoints, exact resume, folders, loggers, the progress bar."""

from lightning_sgmcmc.chains.state import NonFiniteEnergyError
from lightning_sgmcmc.chains.trainer import run_folder
from lightning_sgmcmc.fit.resume import ExactResume
from lightning_sgmcmc.fit.safeguards import Safeguards

__all__ = ["ExactResume", "NonFiniteEnergyError", "Safeguards", "run_folder"]
