"""What a run's health report needs to know besides its steps: data, prior, schedule, predictions."""

import math

import torch
from torch.nn.modules.dropout import _DropoutNd

from lightning_sgmcmc.chains.chains import ChainModel, Chains
from lightning_sgmcmc.diagnostics.draws import ChainDiagnostics, ChainGrid, correlation_time, rhat_limit
from lightning_sgmcmc.evaluation.comparison import FOLLOWED, prediction_diagnostics
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.health.verdict import FEWEST_DRAWS, AverageGrowth, RunFacts
from lightning_sgmcmc.likelihoods import ClassLikelihood
from lightning_sgmcmc.priors import GaussianPrior
from lightning_sgmcmc.priors.state import held_rows, without_held
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.sgld import PreconditionedSampler
from lightning_sgmcmc.tensors import widest

RHAT_FALSE_ALARMS = 0.01
"""Probability that the worst R-hat of chains of one law is a finding."""


def facts_of(
    module: ChainModel,
    sampler: Sampler,
    evaluation: Evaluation | None,
    is_optimization: bool,
    acceptance: float | None,
    has_moved_target: bool,
) -> RunFacts:
    """Return what is known of a running fit besides its steps."""
    chains, plan, contour = module.chains, module.plan, module.contour
    predictions, limit = _predictions(evaluation)
    seen, seen_at_once = chains.observed, chains.observed.batch_size * chains.layout.ranks_per_chain
    drops_out = any(isinstance(layer, _DropoutNd) for layer in chains.model.modules())
    of_chains = 1 if chains.stacked is None else 2
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
        growth=_growth(evaluation),
        baseline=None if plan is None else plan.label,
        is_full_batch=0 < (seen.num_data or 0) <= seen_at_once and not drops_out,
        adapting=type(sampler).__name__ if adapts else None,
        acceptance=acceptance,
        has_hidden=sum(weights.dim() > of_chains for weights in chains.trainable.values()) > 1,
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
