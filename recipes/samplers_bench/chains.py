"""Runs of a sampler: chains on a problem with known moments, in the light loop, and fits of small networks."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sgmcmc.batches import ResumableLoader
from lightning_sgmcmc.callbacks import MetropolisTest, SampleCollector, SamplingSchedule, WarmStart
from lightning_sgmcmc.chains.state import NonFiniteEnergyError
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.diagnostics.draws import autocorrelation_time
from lightning_sgmcmc.recipes.samplers_bench.methods import METHODS, NUTS, Settings
from lightning_sgmcmc.recipes.samplers_bench.problems import Problem, generator_of, problem_of
from lightning_sgmcmc.recipes.shared.network_truth import data_of, scores
from lightning_sgmcmc.recipes.shared.small_networks import NETWORKS
from lightning_sgmcmc.recipes.shared.trainers import quiet_trainer, silence_lightning
from lightning_sgmcmc.reference.chains import HamiltonianChains
from lightning_sgmcmc.reference.chains import Settings as ReferenceSettings
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.reversible import ReversibleLangevin, Trajectory
from lightning_sgmcmc.simulation.loop import LightLoop, Recorder, Step, StepPart, chain_normals

DRAWS = 500
"""Most draws of a chain that are kept."""
DIVERGED = 10.0
"""The largest error, which chains that diverge count with."""
TRAJECTORY = 10
"""Steps of a trajectory on which a Metropolis test decides."""
ITERATION = 100.0
"""Gradients of an iteration of NUTS that its warm-up is planned with: about a tree on the Gaussians, the longest."""
STIFFNESS = {"smallest": 2_500.0, "classification": 110.0, "regression": 280_000.0}
"""Largest curvature of U at an optimized network, rounded: the scale of the step sizes that are tried."""
NETWORK_CHAINS = 4
NETWORK_BATCHES = 4
"""Batches of the data."""


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


def best_runs(
    problem: str, noise: str, method: str, settings: Settings, seed: int
) -> tuple[float | None, list[Figures]]:
    """Return a method's best step size on a problem, over the largest stable one, and its runs at that.

    The step size is chosen by the error of runs with the seed after those of the repeats. NUTS has none.
    """
    made = problem_of(problem, noise, settings.noise, settings.batch)
    if method == NUTS:
        return None, [run_nuts(made, settings, seed + repeat) for repeat in range(settings.repeats)]
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
    """Run a sampler's chains side by side and return their figures; `factor` is of the largest stable step size."""
    known = METHODS[method]
    length, steps = 1, settings.gradients
    if known.tested:  # a trajectory costs U of all data once
        length = TRAJECTORY
        steps = max(2, int(settings.gradients / (length + problem.full_cost))) * length
    burn_in = int(settings.burn_in * steps) // length * length
    every = max(1, (steps - burn_in) // DRAWS // length) * length
    lr = known.step_size(factor, problem.stiffness, problem.num_data)
    generator = generator_of(seed, method)
    place = nn.Parameter(problem.start(settings.chains, generator))
    rule = known.build(lr, burn_in)([place], lr=lr, num_data=problem.num_data, num_chains=settings.chains, seed=seed)
    parts: list[StepPart] = [Gradients(problem, generator)]
    if known.tested:
        parts.insert(0, Tests(rule, problem, place, generator))
    loop = LightLoop(rule, place, rule.param_groups[0], chain_normals(seed, place, rule.draws, chunk=1), parts)
    recorder = Recorder(range(burn_in + every, steps + 1, every))
    began = time.process_time()
    with torch.no_grad():
        for step in range(1, steps + 1):
            loop.advance(1)
            recorder.record(step, {"positions": place.detach()[None]})
    seconds = (time.process_time() - began) / steps
    draws = [problem.observe(one) for one in recorder.rows()["positions"]]
    return figures_of(draws, problem, settings.gradients, seconds)


class Gradients(StepPart):
    """A problem's noisy gradients."""

    def __init__(self, problem: Problem, generator: torch.Generator) -> None:
        self._problem, self._generator = problem, generator

    def before(self, step: Step, *numbers: Tensor) -> None:
        step.gradient = self._problem.gradient(step.place, self._generator)


class Tests(StepPart):
    """Decides on the trajectories of a sampler's chains, as the callback `MetropolisTest` does in a fit."""

    def __init__(self, rule: Sampler, problem: Problem, place: nn.Parameter, generator: torch.Generator) -> None:
        assert isinstance(rule, ReversibleLangevin)
        self._trajectory, self._problem, self._generator = Trajectory(rule), problem, generator
        self._position = 0
        self._energy = self._of_all(place)

    def _of_all(self, place: Tensor) -> Tensor:
        return self._problem.energy(place.detach()).double()

    def before(self, step: Step, *numbers: Tensor) -> None:
        if self._position == 0:
            self._trajectory.begin(self._energy)
        self._trajectory.set_place(self._position, TRAJECTORY)

    def after(self, step: Step) -> None:
        self._position = (self._position + 1) % TRAJECTORY
        if self._position == 0:
            uniforms = torch.rand(len(step.place), generator=self._generator, dtype=torch.float64)
            self._trajectory.end(self._of_all(step.place), uniforms.log())
            self._energy = self._trajectory.energy


def run_nuts(problem: Problem, settings: Settings, seed: int) -> Figures:
    """Run NUTS with the full gradient for as much data as the samplers take, and return its figures.

    A gradient of all data counts as `problem.full_cost` gradients, those of the warm-up and of its search for step
    sizes too; chains that trees leave idle cost nothing. The last iteration may exceed the budget, and one draw of each
    chain is made in any case.
    """
    budget, spent = settings.gradients / problem.full_cost, 0.0

    def potential(x: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal spent
        spent += len(x) / settings.chains
        return problem.energy(x).double(), problem.exact_gradient(x)

    warmup = max(5, int(settings.burn_in * budget / ITERATION))
    of_run = ReferenceSettings(warmup=warmup, draws=settings.gradients, seed=seed)
    began = time.process_time()
    chains = HamiltonianChains(potential, problem.start(settings.chains, generator_of(seed, NUTS)), of_run)
    draws: list[Tensor] = []
    while not draws or spent < budget:
        is_draw = not chains.in_warmup
        place = chains.advance().phase.place
        if is_draw:
            draws.append(problem.observe(place))
    seconds = (time.process_time() - began) / max(1.0, spent)
    return figures_of(draws, problem, settings.gradients, seconds)


def figures_of(draws: list[Tensor], problem: Problem, gradients: int, seconds: float) -> Figures:
    """Return the figures of a run, given the functions' values at each draw, shape (C, F)."""
    kept = torch.stack(draws)  # (S, C, F)
    if not bool(kept.isfinite().all()):
        return Figures(DIVERGED, 0.0, seconds)
    return Figures(min(DIVERGED, error_of(kept, problem)), ess_of(kept, problem.dimension, gradients), seconds)


def error_of(draws: Tensor, problem: Problem) -> float:
    """Return the root mean square error of the means of functions (S, C, F), each over its standard deviation."""
    errors = (draws.double().mean((0, 1)) - problem.mean) / problem.std
    return float(errors.square().mean().sqrt())


def ess_of(draws: Tensor, dimension: int, gradients: int) -> float:
    """Return the effective draws of all chains for 1,000 gradients, the median over coordinates; 0 if one stands still,
    or of fewer than four draws.

    Args:
        draws: values of the functions, shape (S, C, F), the coordinates first.
        dimension: d.
        gradients: gradient evaluations of each chain, burn-in included.
    """
    coordinates = draws[..., :dimension]
    if len(draws) < 4 or not bool((coordinates.std(0) > 0).all()):
        return 0.0
    times = autocorrelation_time(coordinates)  # (C, d)
    effective = (len(draws) / times).sum(0)
    return float(effective.median()) / (gradients * draws.shape[1]) * 1000


# -- networks ---------------------------------------------------------------------------------------------------------


def best_fits(name: str, method: str, settings: Settings, seed: int) -> tuple[float, list[dict[str, float]]]:
    """Return a method's best step size on a network, over the largest stable one, and its fits at that.

    The step size is chosen by the distance to the truth of fits with the seed after those of the repeats.
    """
    factor = best_of(
        settings.network_factors, lambda one: fit(name, method, one, settings, seed + settings.repeats)["distance"]
    )
    return factor, [fit(name, method, factor, settings, seed + repeat) for repeat in range(settings.repeats)]


def fit(name: str, method: str, factor: float, settings: Settings, seed: int) -> dict[str, float]:
    """Return "distance" and "nll" of four chains on a network."""
    diverged = {"distance": DIVERGED, "nll": DIVERGED}
    silence_lightning()
    logging.getLogger("lightning_sgmcmc").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    data, known = data_of(name, seed), METHODS[method]
    lr = known.step_size(factor, STIFFNESS[name], len(data.x))
    # A trajectory is an epoch, and its test costs as much data again.
    length = NETWORK_BATCHES if known.tested else 1
    steps = max(2, settings.steps // (2 * length)) * length if known.tested else settings.steps
    warm_start = settings.warm_start // length * length
    burn_in = int(settings.burn_in * steps) // length * length
    every = max(1, (steps - burn_in) // settings.draws // length) * length
    collector = SampleCollector(in_memory=True)
    callbacks: list[Any] = [
        WarmStart(lr=0.01, steps=warm_start),
        SamplingSchedule(burn_in_steps=burn_in, every_n_steps=every),
        *([MetropolisTest()] if known.tested else []),
        collector,
    ]
    sampler: Any = known.build(lr, burn_in)
    module = NETWORKS[name].module(sampler=sampler, lr=lr, num_chains=NETWORK_CHAINS, chain_execution="vmap", seed=seed)
    loader = ResumableLoader(
        TensorBatches(data.x, data.y), batch_size=len(data.x) // NETWORK_BATCHES, seed=seed, drop_last=known.tested
    )
    trainer = quiet_trainer(
        max_steps=steps + warm_start,
        accelerator="cpu",
        callbacks=callbacks,
        enable_checkpointing=False,
    )
    try:
        trainer.fit(module, loader)
    except NonFiniteEnergyError:
        return diverged
    if collector.posterior is None:
        return diverged
    found = scores(name, collector.posterior, data)
    return found if all(map(math.isfinite, found.values())) else diverged
