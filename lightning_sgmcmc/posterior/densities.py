"""Each sample's log density of each datum, in the data's units, and the joint NLL of several data together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sgmcmc.batches.inputs import as_tensors
from lightning_sgmcmc.chains.execution import dtype_of, evaluation_mode
from lightning_sgmcmc.checks import check_choice, check_count
from lightning_sgmcmc.diagnostics.joint import JointScore, dyadic_groups, joint_nll, nearest_groups, random_groups
from lightning_sgmcmc.evaluation.scoring import evaluate
from lightning_sgmcmc.likelihoods import Likelihood
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.namespace import rank_zero_warn
from lightning_sgmcmc.posterior.calibration import batches_of
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
    received = (store.columns.received(batch) for batch in batches_of(data, store.columns, what))
    dtype = dtype_of(store[0].parameters)
    batches = [as_tensors(batch, model.device, dtype) for batch in received]
    if not batches:
        raise ValueError(f"{what} needs data, and the loader has none: pass a loader with some batches")
    found, target, scaling = [], torch.empty(0), store.scaling
    with evaluation_mode(model):
        for state in states_in_place(model, store):
            _, density, own = evaluate(model, state, batches)
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
    if sampling is None:
        of_classes = model.likelihood is not None and model.likelihood.per_sample_term == "probabilities"
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
