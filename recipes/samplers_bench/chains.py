"""Chains on a problem with known moments, in a plain loop over a sampler, and the figures of their draws."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_sgmcmc.diagnostics.samples import autocorrelation_time
from lightning_sgmcmc.recipes.samplers_bench.methods import METHODS
from lightning_sgmcmc.recipes.samplers_bench.problems import Problem, generator_of, problem_of
from lightning_sgmcmc.recipes.samplers_bench.settings import Settings

DRAWS = 500
"""Most draws of a chain that are kept."""
DIVERGED = 10.0
"""The largest error, which chains that diverge count with."""


@dataclass(frozen=True)
class Figures:
    """The figures of a run.

    Attributes:
        error: root mean square, over the functions, of the error of the draws' mean over the function's standard
            deviation.
        ess: effective draws of all chains for 1,000 gradients, the median over coordinates.
        seconds: processor time of a step of all chains.
    """

    error: float
    ess: float
    seconds: float


def best_runs(problem: str, noise: str, method: str, settings: Settings, seed: int) -> tuple[float, list[Figures]]:
    """Return a method's best step size on a problem, over the largest stable one, and its runs at that.

    The step size is chosen by the error of runs with the seed after those of the repeats.
    """
    made = problem_of(problem, noise, settings.noise, settings.batch)
    factor = best_of(settings.factors, lambda one: run(made, method, one, settings, seed + settings.repeats).error)
    return factor, [run(made, method, factor, settings, seed + repeat) for repeat in range(settings.repeats)]


def best_of(factors: Sequence[float], error: Callable[[float], float]) -> float:
    """Return the factor of the smallest error, found by descent from the middle to a neighbour that is better.

    >>> best_of((8.0, 4.0, 2.0, 1.0), lambda factor: abs(factor - 4.0))
    4.0
    """
    known: dict[int, float] = {}

    def of(place: int) -> float:
        if place not in known:
            known[place] = error(factors[place])
        return known[place]

    here = len(factors) // 2
    while True:
        near = [place for place in (here + 1, here - 1) if 0 <= place < len(factors)]
        better = min((here, *near), key=of)
        if better == here:
            return factors[here]
        here = better


def run(problem: Problem, method: str, factor: float, settings: Settings, seed: int) -> Figures:
    """Run a sampler's chains side by side and return their figures.

    Args:
        problem: the posterior.
        method: name in `METHODS`.
        factor: the step size over the largest stable one.
        settings: the recipe's.
        seed: of the sampler's noise and of the gradients'.
    """
    known = METHODS[method]
    lr = known.step_size(factor, problem.stiffness, problem.num_data)
    burn_in = int(settings.burn_in * settings.gradients)
    every = max(1, (settings.gradients - burn_in) // DRAWS)
    generator = generator_of(seed, method)
    place = nn.Parameter(problem.start(settings.chains, generator))
    rule = known.build(lr, burn_in)(
        [place], lr=lr, num_data=problem.num_data, num_chains=settings.chains, seed=seed, noise_ahead=False
    )
    draws = []
    began = time.process_time()
    with torch.no_grad():
        for step in range(settings.gradients):
            place.grad = problem.gradient(place, generator)
            rule.step()
            if step >= burn_in and (step - burn_in + 1) % every == 0:
                draws.append(problem.observe(place.detach()))
    seconds = (time.process_time() - began) / settings.gradients
    kept = torch.stack(draws)  # (S, C, F)
    if not bool(kept.isfinite().all()):
        return Figures(DIVERGED, 0.0, seconds)
    return Figures(min(DIVERGED, error_of(kept, problem)), ess_of(kept, problem.dimension, settings.gradients), seconds)


def error_of(draws: Tensor, problem: Problem) -> float:
    """Return the root mean square error of the means of functions, each over its standard deviation.

    Args:
        draws: values of the functions, shape (S, C, F).
        problem: has their exact moments.
    """
    errors = (draws.double().mean((0, 1)) - problem.mean) / problem.std
    return float(errors.square().mean().sqrt())


def ess_of(draws: Tensor, dimension: int, gradients: int) -> float:
    """Return the effective draws of all chains for 1,000 gradients, the median over coordinates; 0 if one stands still.

    Args:
        draws: values of the functions, shape (S, C, F), the coordinates first.
        dimension: d.
        gradients: gradient evaluations of each chain, burn-in included.
    """
    coordinates = draws[..., :dimension]
    if not bool((coordinates.std(0) > 0).all()):
        return 0.0
    times = autocorrelation_time(coordinates)  # (C, d)
    effective = (len(draws) / times).sum(0)
    return float(effective.median()) / (gradients * draws.shape[1]) * 1000
