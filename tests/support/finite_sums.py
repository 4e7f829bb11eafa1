"""Sums whose gradients tests know."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_sgmcmc.samplers import Sampler, UnderdampedLangevin
from lightning_sgmcmc.simulation import (
    ExponentialGradient,
    GradientEstimator,
)
from lightning_sgmcmc.simulation.finite_sums import FiniteSum, GaussianSum, LogisticRegressionSum
from lightning_sgmcmc.simulation.subsampled_chains import SumRun, sample_sum


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CENTRES = draws(50, 2)
GAUSSIAN = GaussianSum(CENTRES)
LOGISTIC = LogisticRegressionSum(draws(20, 3), (draws(20, seed=1) > 0).double(), 2.0)
UNDERDAMPED = functools.partial(UnderdampedLangevin, friction=10.0)
EWSG = ExponentialGradient(1, 1)
MIXED = functools.partial(sample_sum, GAUSSIAN, num_chains=20_000, dtype=torch.float64, seed=3)


def begin(
    target: FiniteSum,
    sampler: Callable[..., Sampler],
    estimator: GradientEstimator,
    lr: float,
    x: Tensor,
    seed: int = 0,
) -> SumRun:
    place = nn.Parameter(x.clone())
    rule = sampler([place], lr=lr, num_data=1, temperature=0.7, num_chains=len(x), seed=seed)
    run = SumRun(target, rule, place, seed)
    estimator.begin(run)
    return run


def take(estimator: GradientEstimator, run: SumRun) -> Tensor:
    """Return the gradient of the next step."""
    gradient = estimator.estimate(run, estimator.draw(run, 1)[0])
    run.step += 1
    return gradient
