"""Scores of samples and of their average on any data: log densities, the joint NLL, metrics, by group too."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.batches.loader import is_shuffled
from lightning_sgmcmc.chains.execution import borrowed
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.checks import check_choice, check_count
from lightning_sgmcmc.diagnostics.draws import normalised_weights
from lightning_sgmcmc.diagnostics.joint import JointScore, dyadic_groups, joint_nll, nearest_groups, random_groups
from lightning_sgmcmc.evaluation.loader_average import Evaluation, LoaderAverage, UserMetrics, group_metrics
from lightning_sgmcmc.evaluation.scoring import evaluate, of_observed
from lightning_sgmcmc.likelihoods import Likelihood
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.namespace import rank_zero_warn
from lightning_sgmcmc.posterior.calibration import batches_of, calibrated_metrics, tensors_of
from lightning_sgmcmc.posterior.predictive import states_in_place
from lightning_sgmcmc.posterior.store import SampleStore
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.tables.columns import TargetScaling
from lightning_sgmcmc.tensors import exact, widest

Sampling = Literal["dyadic", "nearest", "random"]


@dataclass(frozen=True)
class Densities:
    """Log densities of the data with an observed target, float64 (S, n), the batches that they are of, and which of
    the batches' data have one, shape (n,), None if all have."""

    values: Tensor
    batches: Sequence[Any]
    observed: Tensor | None


def log_densities(model: EnergyModel, store: SampleStore, data: Any, what: str) -> Densities:
    """Return the log density of each datum by each sample; see `Posterior.log_likelihood`."""
    batches = tensors_of(batches_of(data, store.columns, model, what), model, store)
    if not batches:
        raise ValueError(f"{what} needs data, and the loader has none: pass a loader with some batches")
    found, target, scaling = list[Tensor](), torch.empty(0), store.scaling
    with borrowed(model):
        for state in states_in_place(model, store):
            _, density, own = evaluate(model, state, batches, checks=not found)
            if density.dim() != 1:
                raise TypeError(
                    f"{what} needs a log density of each datum, shape (n,), and the module's has the shape "
                    f"{tuple(density.shape)}"
                )
            found.append(widest(density).cpu())
            target = target if own is None else own
    likelihood = model.likelihood
    values = torch.stack(found)
    if likelihood is None or not len(target):
        return Densities(values, batches, None)
    if scaling is not None:
        values = values - _log_units(likelihood, target, scaling)
    observed = likelihood.observed(target)
    if observed is None or bool(observed.all()):
        return Densities(values, batches, None)
    return Densities(values[:, observed.cpu()], batches, observed.cpu())


def _log_units(likelihood: Likelihood, target: Tensor, scaling: TargetScaling) -> Tensor:
    """Return Σ_d log std_d over the observed numbers of each target, which a density in the data's units lacks."""
    logs = exact(scaling.factor).log()
    entries = likelihood.observed_entries(target)
    known = widest((torch.ones(target.shape) if entries is None else entries).cpu())
    return ((known if known.dim() > 1 else known[:, None]) * logs).flatten(1).sum(1)


def joint_score(
    model: EnergyModel, store: SampleStore, weights: Tensor, data: Any, tau: int, sampling: Sampling | None, seed: int
) -> JointScore:
    """Return the joint NLL of groups of data; see `Posterior.joint_nll`."""
    check_count("tau", tau, optional=False)
    densities = log_densities(model, store, data, "joint_nll")
    likelihood: Any = model.likelihood
    of_classes = likelihood is not None and likelihood.per_sample_term == "probabilities"
    for batch in densities.batches if of_classes else ():
        likelihood.labels(model.inputs_and_target(batch)[1])  # soft ones are no outcome, which has a joint probability
    if sampling is None:
        sampling = "dyadic" if of_classes else "nearest"
    check_choice("sampling", sampling, ("dyadic", "nearest", "random"))
    generator = torch.Generator().manual_seed(derive_seed(seed, "joint nll"))
    count = densities.values.shape[1]
    if sampling == "nearest":
        groups = nearest_groups(_inputs(model, densities), tau, generator)
    else:
        groups = (dyadic_groups if sampling == "dyadic" else random_groups)(count, tau, generator)
    score = joint_nll(densities.values, groups, weights)
    if tau > 1 and score.effective_samples < 2 < float(weights.square().sum().reciprocal()):
        rank_zero_warn(
            f"The joint NLL at tau={tau} rests on {score.effective_samples:.1f} of {len(weights)} samples in the "
            "median group, so it is too high by an unknown amount: draw more samples, or lower tau."
        )
    return score


def _inputs(model: EnergyModel, densities: Densities) -> Tensor:
    parts = [model.inputs_and_target(batch)[0] for batch in densities.batches]
    if not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(
            "sampling='nearest' needs inputs that are one tensor, between which it takes distances, and these are "
            f"{type(parts[0]).__name__}: use sampling='random'"
        )
    joined = torch.cat([part.detach().cpu().flatten(1) for part in parts])
    return joined if densities.observed is None else joined[densities.observed]


# -- metrics -----------------------------------------------------------------------------------------------------------


def evaluate_samples(
    posterior: Any, model: EnergyModel, data: Any, metrics: Mapping[str, Callable[..., Any]] | None, group: Any
) -> Evaluation:
    """Return the metrics of samples and of their average; see `Posterior.evaluate`."""
    user = UserMetrics(metrics)
    user.check(model)
    store, log_weights = posterior.store, posterior.log_weights.tolist()
    normalised_weights(posterior.log_weights)  # raises if they are NaN, or all zero
    given = batches_of(data, store.columns, model, "evaluate")
    if group is not None and is_shuffled(given):
        raise ValueError(
            "group has the labels in the data's order, and the loader shuffles: pass a loader in a fixed order "
            "(shuffle=False)"
        )
    if posterior.calibration is not None:
        given = list(given)  # read twice
    batches = tensors_of(given, model, store)
    scaling, average = store.scaling or TargetScaling(), LoaderAverage("uniform", user)
    observed: Tensor | None = None
    with borrowed(model):
        for record, log_weight, state in zip(store.records, log_weights, states_in_place(model, store), strict=True):
            scores = evaluate(model, state, batches, checks=observed is None)
            target = scores[2]
            if observed is None:
                known = None if target is None or model.likelihood is None else model.likelihood.observed(target)
                observed = torch.ones(len(scores[1]), dtype=torch.bool) if known is None else known.cpu()
            sample = PosteriorSample(record.step, record.cycle, record.chain, record.energy, log_weight)
            average.add(model, sample, of_observed(model, scores), scaling, 0.0, {})
    evaluation = average.evaluation
    if group is not None and observed is not None:
        evaluation.groups = group_metrics(model, evaluation, scaling, user, _labels(group, observed))
    if posterior.calibration is not None:
        evaluation.calibrated = calibrated_metrics(posterior, model, evaluation, given)
    return evaluation


def _labels(group: Any, observed: Tensor) -> np.ndarray:
    """Return the group of each observed datum as text, an array (n,); a label that is missing is a group too."""
    labels = np.asarray(group.cpu() if isinstance(group, Tensor) else group)
    if labels.shape != (len(observed),):
        raise ValueError(
            f"group should have a label for each of the {len(observed)} data, in their order, got shape {labels.shape}"
        )
    return np.array(list(map(str, labels[observed.numpy()].tolist())))
