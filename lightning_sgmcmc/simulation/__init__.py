"""Samplers without a trainer: analytic targets, finite sums, exact references, many chains at once."""

from lightning_sgmcmc.simulation.densities import ContourRun, ExchangeRun, Simulation, descend, simulate
from lightning_sgmcmc.simulation.finite_sums import FiniteSum, GaussianSum, LogisticRegressionSum, NormalModelSum
from lightning_sgmcmc.simulation.firefly import BoundedLikelihood, FireflyRun, LogisticBound, TaylorBound, firefly
from lightning_sgmcmc.simulation.random_walk import RandomWalk, random_walk_metropolis
from lightning_sgmcmc.simulation.subsampled_chains import (
    CalibratedFriction,
    ControlVariateGradient,
    ExponentialGradient,
    FullGradient,
    GradientEstimator,
    SumSamples,
    UniformGradient,
    sample_sum,
)
from lightning_sgmcmc.simulation.switching_diffusion import (
    LinearDiffusions,
    Potentials,
    SwitchingPaths,
    coupled_ornstein_uhlenbeck,
    ornstein_uhlenbeck,
    stationary_moments,
    switching_paths,
    underdamped,
)
from lightning_sgmcmc.simulation.targets import CosineTarget, GaussianMixture, Target, TargetDataModule, TargetModule

__all__ = [
    "BoundedLikelihood",
    "CalibratedFriction",
    "ContourRun",
    "ControlVariateGradient",
    "CosineTarget",
    "ExchangeRun",
    "ExponentialGradient",
    "FiniteSum",
    "FireflyRun",
    "FullGradient",
    "GaussianMixture",
    "GaussianSum",
    "GradientEstimator",
    "LinearDiffusions",
    "LogisticBound",
    "LogisticRegressionSum",
    "NormalModelSum",
    "Potentials",
    "RandomWalk",
    "Simulation",
    "SumSamples",
    "SwitchingPaths",
    "Target",
    "TargetDataModule",
    "TargetModule",
    "TaylorBound",
    "UniformGradient",
    "coupled_ornstein_uhlenbeck",
    "descend",
    "firefly",
    "ornstein_uhlenbeck",
    "random_walk_metropolis",
    "sample_sum",
    "simulate",
    "stationary_moments",
    "switching_paths",
    "underdamped",
]
