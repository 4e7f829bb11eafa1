"""Many chains in one module: stacked parameters, initial states, energies, samples, layouts over processes."""

from lightning_sgmcmc.chains.chains import Chains, chains_of, sampler_of
from lightning_sgmcmc.chains.layout import ChainLayout
from lightning_sgmcmc.chains.samples import PosteriorSample, SampleRecord
from lightning_sgmcmc.chains.state import Claims, Stage, StepEnergy
from lightning_sgmcmc.chains.strategy import ChainStrategy

__all__ = [
    "ChainLayout",
    "ChainStrategy",
    "Chains",
    "Claims",
    "PosteriorSample",
    "SampleRecord",
    "Stage",
    "StepEnergy",
    "chains_of",
    "sampler_of",
]
