"""What a run's health report needs to know besides its steps: data, prior, schedule, predictions."""

import math

import numpy as np
import torch
from torch.nn.modules.dropout import _DropoutNd

from lightning_sgmcmc.chains.chains import ChainModel, Chains
from lightning_sgmcmc.diagnostics.draws import (
    FEWEST_EFFECTIVE,
    MAX_BATCHES,
    ChainDiagnostics,
    ChainGrid,
    autocorrelation_time,
    chain_diagnostics,
    correlation_time,
    mean_and_error,
    rhat_limit,
    student_quantile,
)
from lightning_sgmcmc.evaluation.comparison import FOLLOWED, prediction_diagnostics
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.health.verdict import FEWEST_DRAWS, AverageGrowth, EarlyEnergy, ParameterMixing, RunFacts
from lightning_sgmcmc.likelihoods import ClassLikelihood
from lightning_sgmcmc.posterior.export import element, parameter_draws
from lightning_sgmcmc.posterior.store import SampleStore
from lightning_sgmcmc.priors import GaussianPrior
from lightning_sgmcmc.priors.state import held_rows, without_held
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.sgld import PreconditionedSampler
from lightning_sgmcmc.tensors import widest

RHAT_FALSE_ALARMS = 0.01
"""Probability that the worst R-hat of chains of one law is a finding."""
MOST_DRAWS = 500
"""Draws of a chain that are read, evenly spaced, to see how the parameters mix."""


def facts_of(
    module: ChainModel,
    sampler: Sampler,
    evaluation: Evaluation | None,
    is_optimization: bool,
    acceptance: float | None,
    has_moved_target: bool,
    is_final: bool,
) -> RunFacts:
    """Return what is known of a running fit besides its steps; only the final report looks at the samples."""
    chains, plan, contour = module.chains, module.plan, module.contour
    predictions, limit = _predictions(evaluation)
    seen, seen_at_once = chains.observed, chains.observed.batch_size * chains.layout.ranks_per_chain
    drops_out = any(isinstance(layer, _DropoutNd) for layer in chains.model.modules())
    of_chains = 1 if chains.stacked is None else 2
    samples = _grid_of_samples(module) if is_final else None
    has_hidden = sum(weights.dim() > of_chains for weights in chains.trainable.values()) > 1
    adapts = isinstance(sampler, PreconditionedSampler) and sampler.always_adapts
    return RunFacts(
        temperature=0.0 if is_optimization else None,
        num_chains=chains.layout.total_chains,
        num_data=seen.num_data,
        chance_nll=chance_nll(chains),
        has_classes=isinstance(chains.model.likelihood, ClassLikelihood),
        prior_norm=prior_norm(chains),
        relaxation_times=None if plan is None else plan.relaxation_times,
        is_cyclical=chains.progress.num_cycles is not None,
        contour=None if contour is None else contour.use(),
        predictions=predictions,
        rhat_limit=limit,
        parameters=None if has_hidden or samples is None else _parameters(chains, *samples),
        early=None if samples is None else _early_energy(*samples),
        growth=_growth(evaluation),
        baseline=None if plan is None else plan.label,
        is_full_batch=0 < (seen.num_data or 0) <= seen_at_once and not drops_out,
        adapting=type(sampler).__name__ if adapts else None,
        acceptance=acceptance,
        has_hidden=has_hidden,
        has_moved_target=has_moved_target,
    )


def chance_nll(chains: Chains) -> float | None:
    """Return the NLL per example of a model that knows the labels' frequencies alone, by the fit's first batches."""
    energies, likelihood = chains.energies, chains.model.likelihood
    first = None if energies is None else energies.first_batches
    if first is None or likelihood is None or not first.targets:
        return None
    try:
        target = torch.cat(first.targets)
        known = likelihood.observed(target)
        found = likelihood.chance_nll(target if known is None else target[known])
    except (RuntimeError, ValueError):  # targets of a form of the user's own
        return None
    return found if found is not None and math.isfinite(found) else None


def prior_norm(chains: Chains) -> tuple[float, float] | None:
    """Return (a, b) with ‖θ‖²/(d·σ²) = a - b·log p(θ) for a Gaussian prior around 0, None for another."""
    prior = chains.model.prior
    if type(prior) is not GaussianPrior or prior.center is not None:
        return None
    zeros = {name: torch.zeros_like(p if chains.stacked is None else p[0]) for name, p in chains.trainable.items()}
    entries = without_held(zeros, held_rows(chains.model))
    dimension = sum(p.numel() for p in entries.values())
    if dimension == 0:
        return None
    with torch.no_grad():
        peak = float(prior.log_prob(entries))
    return 2 * peak / dimension, 2 / dimension


def _predictions(evaluation: Evaluation | None) -> tuple[ChainDiagnostics | None, float]:
    """Return the worst diagnostics of the predictions, and the R-hat that chains of one law rarely exceed."""
    if evaluation is None or not evaluation.chains.chains:
        return None, math.inf
    grid = ChainGrid.of_chains(evaluation.chains.chains)
    if grid.draws < FEWEST_DRAWS:
        return None, math.inf
    found = prediction_diagnostics(evaluation.chains)
    time = correlation_time(grid.arrange(evaluation.chains.densities))
    return found, rhat_limit(len(grid.chains), grid.draws, RHAT_FALSE_ALARMS / FOLLOWED, time)


def _grid_of_samples(module: ChainModel) -> tuple[SampleStore, ChainGrid] | None:
    """Return a run's samples and their places; None without some of each chain, of one temperature and one weight."""
    posterior = module.posterior
    if posterior is None or len(posterior) == 0 or posterior.weight_efficiency < 1 - 1e-6:
        return None
    if len({record.temperature for record in posterior.records}) > 1:
        return None
    grid = ChainGrid.of_chains([record.chain for record in posterior.records])
    is_whole = grid.draws >= FEWEST_DRAWS and len(grid.chains) == module.chains.layout.total_chains
    return (posterior.store, grid) if is_whole else None


def _early_energy(store: SampleStore, grid: ChainGrid) -> EarlyEnergy | None:
    """Return the energies of the first quarter of the samples and of the others; None for few samples."""
    energies = grid.arrange([record.energy for record in store.records]).mean(0)
    if len(energies) < MAX_BATCHES or not np.isfinite(energies).all():
        return None
    parts = np.array_split(energies, MAX_BATCHES)
    means = torch.tensor([part.mean() for part in parts], dtype=torch.float64)
    counts = torch.tensor([len(part) for part in parts], dtype=torch.float64)
    quarter = MAX_BATCHES // 4
    first = float((means[:quarter] * counts[:quarter]).sum() / counts[:quarter].sum())
    later, error = map(float, mean_and_error(means[quarter:], counts[quarter:]))
    # By the fluctuations of the later ones: a stationary quarter's mean has three times their mean's variance.
    quantile = student_quantile(RHAT_FALSE_ALARMS / 10, MAX_BATCHES - quarter - 1)
    return EarlyEnergy(first, later, quantile * 2 * error)


def _parameters(chains: Chains, store: SampleStore, grid: ChainGrid) -> ParameterMixing | None:
    """Return how the samples of a run mix, by up to `FOLLOWED` of their numbers."""
    kept = np.unique(np.linspace(0, grid.draws - 1, min(grid.draws, MOST_DRAWS)).round().astype(int))
    grid = ChainGrid(grid.chains, grid.positions[:, kept], grid.dropped)
    names = [name for name in store.shapes(0) if name in chains.trainable]
    try:
        drawn = parameter_draws(store, grid, names)
    except (OSError, ValueError):  # files that are gone or damaged, of which those who read them are told
        return None
    if not drawn:
        return None
    labels = [element(name, own.shape[2:], i) for name, own in drawn.items() for i in range(own[0, 0].size)]
    values = np.concatenate([own.reshape(*own.shape[:2], -1) for own in drawn.values()], 2)
    watched = np.unique(np.linspace(0, len(labels) - 1, min(len(labels), FOLLOWED)).round().astype(int))
    found = []
    for i in watched:
        one = chain_diagnostics(values[:, :, i])
        time = _time_of(values[:, :, i])
        limit = rhat_limit(len(grid.chains), len(kept), RHAT_FALSE_ALARMS / len(watched), time)
        found.append(ParameterMixing(labels[i], one.rhat, limit, one.ess_bulk, len(labels)))
    known = [one for one in found if math.isfinite(one.rhat)]
    return max(known, key=lambda one: (one.rhat > one.limit, -one.ess), default=None)


def _time_of(values: np.ndarray) -> float:
    """Return the draws (chain, draw) worth an independent one, where a slow part may hide behind a fast one."""
    moves = values[np.ptp(values, 1) > 0]
    slow = float(autocorrelation_time(torch.from_numpy(moves.T.copy())).mean()) if len(moves) else 1.0
    most = max(1.0, values.shape[1] / 2 / FEWEST_EFFECTIVE)
    return min(max(slow, correlation_time(values[:, :, None])), most)


def _growth(evaluation: Evaluation | None) -> AverageGrowth | None:
    """Return how the average changed with its samples, None for weighted ones, whose worth differs."""
    if evaluation is None or evaluation.average is None or evaluation.weight_efficiency is not None:
        return None
    best = evaluation.per_datum.kept.get("best_average")
    gain = evaluation.per_datum.gain("best_average", evaluation.average.log_density)
    if best is None or gain is None or best.index + 1 >= len(evaluation.members):
        return None
    nll = -float(widest(evaluation.average.log_density).mean())
    single = [member["nll"] for member in evaluation.members]
    shift = evaluation.running[-1]["nll"] - nll  # the units of the targets
    return AverageGrowth(
        best.index + 1, len(single), best.nll, nll, [value - shift for value in single], gain[1][1] < 0
    )
