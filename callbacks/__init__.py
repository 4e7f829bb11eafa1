"""Callbacks for sampling runs; they interact only through the module's controls and samples, and combine freely."""

from lightning_sgmcmc.callbacks.auto_sampling import AutoSampling, recommended
from lightning_sgmcmc.callbacks.baselines import SWAG, DeepEnsemble, MCDropout
from lightning_sgmcmc.callbacks.bayesian_model_average import BayesianModelAverage
from lightning_sgmcmc.callbacks.metropolis_test import MetropolisTest
from lightning_sgmcmc.callbacks.posterior_dashboard import PosteriorDashboard
from lightning_sgmcmc.callbacks.run_summary import PredictionWriter, RunSummary
from lightning_sgmcmc.callbacks.sample_collector import SampleCollector
from lightning_sgmcmc.callbacks.schedule import CyclicalSchedule, SamplingSchedule, WarmStart
from lightning_sgmcmc.chains.callback import SamplerCallback
from lightning_sgmcmc.contour.callback import ContourGradient
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.fit.resume import ExactResume
from lightning_sgmcmc.health.callback import ChainHealth
from lightning_sgmcmc.singular.callback import LearningCoefficient
from lightning_sgmcmc.subsampling.control_variates import ControlVariates, VarianceReducedEnergy
from lightning_sgmcmc.subsampling.covariance_friction import CovarianceFriction
from lightning_sgmcmc.subsampling.ewsg import EWSG
from lightning_sgmcmc.tempering.replica_exchange import ReplicaExchange

__all__ = [
    "EWSG",
    "SWAG",
    "AutoSampling",
    "BayesianModelAverage",
    "ChainHealth",
    "ContourGradient",
    "ControlVariates",
    "CovarianceFriction",
    "CyclicalSchedule",
    "DeepEnsemble",
    "Evaluation",
    "ExactResume",
    "LearningCoefficient",
    "MCDropout",
    "MetropolisTest",
    "PosteriorDashboard",
    "PredictionWriter",
    "ReplicaExchange",
    "RunSummary",
    "SampleCollector",
    "SamplerCallback",
    "SamplingSchedule",
    "VarianceReducedEnergy",
    "WarmStart",
    "recommended",
]
