"""Averages over samples: metrics of the posterior predictive on validation, test and out-of-distribution data."""

from lightning_sgmcmc.evaluation.averages import CycleAverage, WeightedAverage
from lightning_sgmcmc.evaluation.comparison import ChainComparison
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.evaluation.reference import cifar10_hmc, read_probabilities
from lightning_sgmcmc.evaluation.scoring import evaluate

__all__ = [
    "ChainComparison",
    "CycleAverage",
    "Evaluation",
    "WeightedAverage",
    "cifar10_hmc",
    "evaluate",
    "read_probabilities",
]
