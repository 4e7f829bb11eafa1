"""Callbacks for sampling runs; they interact only through the module's controls and samples, and combine freely."""

from pathlib import Path

from lightning_sgmcmc.callbacks.auto_sampling import AutoSampling
from lightning_sgmcmc.callbacks.baselines import SWAG, DeepEnsemble, MCDropout
from lightning_sgmcmc.callbacks.bayesian_model_average import BayesianModelAverage
from lightning_sgmcmc.callbacks.metropolis_test import MetropolisTest
from lightning_sgmcmc.callbacks.posterior_dashboard import PosteriorDashboard
from lightning_sgmcmc.callbacks.run_summary import PredictionWriter, RunSummary
from lightning_sgmcmc.callbacks.sample_collector import SampleCollector
from lightning_sgmcmc.callbacks.schedule import CyclicalSchedule, SamplingSchedule, WarmStart
from lightning_sgmcmc.chains.callback import SamplerCallback
from lightning_sgmcmc.chains.schedule import Schedule
from lightning_sgmcmc.contour.callback import ContourGradient
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.fit.resume import ExactResume
from lightning_sgmcmc.health.callback import ChainHealth
from lightning_sgmcmc.namespace import pl
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


def recommended(
    folder: str | Path | None = None, sampling: Schedule | None = None, name: str = "run"
) -> list[pl.Callback]:
    """Return the five callbacks of a usual run, a list like any other: extend it, or leave one out.

    They are the schedule, `SampleCollector`, `BayesianModelAverage`, `ChainHealth` and `RunSummary`. Whoever changes
    more than these arguments writes the five down; their order in the trainer's list does not matter.

    Args:
        folder: of the samples; None uses `samples` in the run's folder.
        sampling: the schedule; None is `AutoSampling()`, which also chooses prior, sampler and lr.
        name: the run's name in `results.json`.

    Raises:
        TypeError: if `sampling` is no schedule.

    Example::

        trainer = pl.Trainer(max_epochs=100, callbacks=recommended("samples"))
        trainer = pl.Trainer(max_epochs=200, callbacks=[*recommended(sampling=CyclicalSchedule()), EWSG()])
    """
    if sampling is not None and not isinstance(sampling, Schedule):
        called = sampling.__name__ if isinstance(sampling, type) else type(sampling).__name__
        raise TypeError(
            f"sampling should be a schedule, got {called}: pass an object such as SamplingSchedule(every_n_epochs=1), "
            "and append other callbacks to the list"
        )
    schedule = AutoSampling() if sampling is None else sampling
    return [schedule, SampleCollector(folder), BayesianModelAverage(), ChainHealth(), RunSummary(name)]
