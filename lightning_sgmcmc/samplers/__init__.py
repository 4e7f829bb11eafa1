"""Samplers: torch optimizers that draw from a posterior.

There is one subject in each file. `sampler.py` has their base class, `law.py` the law of one step and `noise.py` the
injected noise.
"""

from lightning_sgmcmc.samplers.contract import check_contract
from lightning_sgmcmc.samplers.law import StepLaw
from lightning_sgmcmc.samplers.mclmc import MCLMC, pMCLMC
from lightning_sgmcmc.samplers.reversible import AMAGOLD, GGMC
from lightning_sgmcmc.samplers.sampler import Sampler
from lightning_sgmcmc.samplers.sghmc import SGHMC, ScaleAdaptedSGHMC, pSGHMC
from lightning_sgmcmc.samplers.sgld import SGLD, AdamSGLD, pSGLD
from lightning_sgmcmc.samplers.sgnht import SGNHT
from lightning_sgmcmc.samplers.underdamped import UnderdampedLangevin

__all__ = [
    "AMAGOLD",
    "GGMC",
    "MCLMC",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "AdamSGLD",
    "Sampler",
    "ScaleAdaptedSGHMC",
    "StepLaw",
    "UnderdampedLangevin",
    "check_contract",
    "pMCLMC",
    "pSGHMC",
    "pSGLD",
]
