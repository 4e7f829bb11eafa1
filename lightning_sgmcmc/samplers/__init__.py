"""Samplers: torch optimizers that sample. One update rule a file; `base.py` holds what they share."""

from lightning_sgmcmc.samplers.base import Sampler
from lightning_sgmcmc.samplers.law import StepLaw
from lightning_sgmcmc.samplers.psgld import pSGLD
from lightning_sgmcmc.samplers.sghmc import SGHMC
from lightning_sgmcmc.samplers.sgld import SGLD
from lightning_sgmcmc.samplers.sgnht import SGNHT
from lightning_sgmcmc.samplers.underdamped import UnderdampedLangevin

__all__ = ["SGHMC", "SGLD", "SGNHT", "Sampler", "StepLaw", "UnderdampedLangevin", "pSGLD"]
