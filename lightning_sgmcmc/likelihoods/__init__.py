"""Likelihoods: the density of a target given the network's output, and the predictive distribution.

A likelihood has three parts. `log_prob` returns the log-density of each datum. `terms` returns the tensors whose
averages over posterior samples describe the predictive distribution. `metrics` and `prediction` turn these averages
into metrics and predictions. Averages are over probabilities and moments, never over logits.
"""

from lightning_sgmcmc.likelihoods.base import Likelihood
from lightning_sgmcmc.likelihoods.censored import Censored, right_censored
from lightning_sgmcmc.likelihoods.classes import Bernoulli, Categorical, ClassLikelihood, Ordinal, PairwiseScore
from lightning_sgmcmc.likelihoods.counts import NegativeBinomial, Poisson
from lightning_sgmcmc.likelihoods.durations import LogNormal, Weibull
from lightning_sgmcmc.likelihoods.labels import MultiLabelBernoulli, PixelCategorical, TokenCategorical
from lightning_sgmcmc.likelihoods.numbers import Gaussian, HeteroscedasticGaussian, MixtureOfGaussians, StudentT

__all__ = [
    "Bernoulli",
    "Categorical",
    "Censored",
    "ClassLikelihood",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "LogNormal",
    "MixtureOfGaussians",
    "MultiLabelBernoulli",
    "NegativeBinomial",
    "Ordinal",
    "PairwiseScore",
    "PixelCategorical",
    "Poisson",
    "StudentT",
    "TokenCategorical",
    "Weibull",
    "right_censored",
]
