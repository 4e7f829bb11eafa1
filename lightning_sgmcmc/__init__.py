"""Bayesian deep learning by stochastic-gradient MCMC as ordinary PyTorch Lightning training."""

from lightning_sgmcmc.clustered_order import ClusteredOrder, cluster_data
from lightning_sgmcmc.contour import Contour, DecayingStepSize, EnergyPartition, LearnedContour
from lightning_sgmcmc.data_order import ResumableLoader
from lightning_sgmcmc.distributed import ChainStrategy
from lightning_sgmcmc.energy_guard import NonFiniteEnergyError
from lightning_sgmcmc.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Prediction
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.posterior import Posterior
from lightning_sgmcmc.priors import FlatPrior, GaussianPrior, LaplacePrior, Prior, StudentTPrior
from lightning_sgmcmc.samplers import SGHMC, SGLD, SGNHT, Sampler, UnderdampedLangevin, pSGLD
from lightning_sgmcmc.schedules import Annealing, PolynomialDecay
from lightning_sgmcmc.store import PosteriorSample
from lightning_sgmcmc.switching import SwitchingBatchSampler, SwitchingOrder

__all__ = [
    "SGHMC",
    "SGLD",
    "SGNHT",
    "Annealing",
    "BayesianModule",
    "Bernoulli",
    "Categorical",
    "ChainStrategy",
    "ClusteredOrder",
    "Contour",
    "DecayingStepSize",
    "EnergyPartition",
    "FlatPrior",
    "Gaussian",
    "GaussianPrior",
    "LaplacePrior",
    "LearnedContour",
    "Likelihood",
    "NonFiniteEnergyError",
    "PolynomialDecay",
    "Posterior",
    "PosteriorSample",
    "Prediction",
    "Prior",
    "ResumableLoader",
    "Sampler",
    "StudentTPrior",
    "SwitchingBatchSampler",
    "SwitchingOrder",
    "UnderdampedLangevin",
    "cluster_data",
    "pSGLD",
]
