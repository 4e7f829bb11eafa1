"""Bayesian deep learning by stochastic-gradient MCMC as ordinary PyTorch Lightning training."""

from importlib.metadata import version

from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.batches.orders import ClusteredOrder, CyclicOrder, SymmetricOrder, cluster_data
from lightning_sgmcmc.batches.switching import SwitchingBatchSampler, SwitchingOrder
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.chains.state import NonFiniteEnergyError
from lightning_sgmcmc.chains.strategy import ChainStrategy
from lightning_sgmcmc.contour import (
    Contour,
    ContourGoals,
    ContourRules,
    DecayingStepSize,
    EnergyPartition,
    LearnedContour,
)
from lightning_sgmcmc.expansion import expand
from lightning_sgmcmc.likelihoods import (
    Bernoulli,
    Categorical,
    Censored,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    LogNormal,
    MixtureOfGaussians,
    MultiLabelBernoulli,
    NegativeBinomial,
    Ordinal,
    PixelCategorical,
    Poisson,
    StudentT,
    TokenCategorical,
    Weibull,
)
from lightning_sgmcmc.loops import SampleWriter
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.posterior.posterior import Posterior
from lightning_sgmcmc.predictions import (
    ClassPrediction,
    CountPrediction,
    MultiLabelPrediction,
    Prediction,
    RegressionPrediction,
)
from lightning_sgmcmc.pretrained import FeatureDataModule, bayesianize
from lightning_sgmcmc.priors import (
    FlatPrior,
    GaussianPrior,
    HierarchicalPrior,
    LaplacePrior,
    Prior,
    StudentTPrior,
)
from lightning_sgmcmc.samplers import (
    AMAGOLD,
    GGMC,
    MCLMC,
    SGHMC,
    SGLD,
    SGNHT,
    AdamSGLD,
    Sampler,
    ScaleAdaptedSGHMC,
    UnderdampedLangevin,
    pMCLMC,
    pSGHMC,
    pSGLD,
)
from lightning_sgmcmc.schedules import Annealing, Patience, PolynomialDecay

__version__ = version("lightning-sgmcmc")

__all__ = [
    "AMAGOLD",
    "GGMC",
    "MCLMC",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "AdamSGLD",
    "Annealing",
    "BayesianModule",
    "Bernoulli",
    "Categorical",
    "Censored",
    "ChainStrategy",
    "ClassPrediction",
    "ClusteredOrder",
    "Contour",
    "ContourGoals",
    "ContourRules",
    "CountPrediction",
    "CyclicOrder",
    "DecayingStepSize",
    "EnergyPartition",
    "FeatureDataModule",
    "FlatPrior",
    "Gaussian",
    "GaussianPrior",
    "HeteroscedasticGaussian",
    "HierarchicalPrior",
    "LaplacePrior",
    "LearnedContour",
    "Likelihood",
    "LogNormal",
    "MixtureOfGaussians",
    "MultiLabelBernoulli",
    "MultiLabelPrediction",
    "NegativeBinomial",
    "NonFiniteEnergyError",
    "Ordinal",
    "Patience",
    "PixelCategorical",
    "Poisson",
    "PolynomialDecay",
    "Posterior",
    "PosteriorSample",
    "Prediction",
    "Prior",
    "RegressionPrediction",
    "ResumableLoader",
    "SampleWriter",
    "Sampler",
    "ScaleAdaptedSGHMC",
    "StudentT",
    "StudentTPrior",
    "SwitchingBatchSampler",
    "SwitchingOrder",
    "SymmetricOrder",
    "TokenCategorical",
    "UnderdampedLangevin",
    "Weibull",
    "__version__",
    "bayesianize",
    "cluster_data",
    "expand",
    "pMCLMC",
    "pSGHMC",
    "pSGLD",
]
