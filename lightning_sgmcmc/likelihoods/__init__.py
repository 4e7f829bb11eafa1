"""Likelihoods: the density of a target given the network's output, and the predictive distribution.

A likelihood has three parts. `log_prob` returns the log-density of each datum. `terms` returns the tensors whose
averages over posterior samples describe the predictive distribution. `metrics` and `prediction` turn these averages
into metrics and predictions. Averages are over probabilities and moments, never over logits.
"""

from lightning_sgmcmc.likelihoods.base import Likelihood
from lightning_sgmcmc.likelihoods.classes import Bernoulli, Categorical, ClassLikelihood, Ordinal
from lightning_sgmcmc.likelihoods.counts import NegativeBinomial, Poisson
from lightning_sgmcmc.likelihoods.labels import MultiLabelBernoulli, PixelCategorical, TokenCategorical
from lightning_sgmcmc.likelihoods.numbers import Gaussian, HeteroscedasticGaussian, MixtureOfGaussians, StudentT

__all__ = [
    "Bernoulli",
    "Categorical",
    "ClassLikelihood",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "MixtureOfGaussians",
    "MultiLabelBernoulli",
    "NegativeBinomial",
    "Ordinal",
    "PixelCategorical",
    "Poisson",
    "StudentT",
    "TokenCategorical",
]
