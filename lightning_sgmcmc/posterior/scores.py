"""Metrics of a posterior's predictions on any data, of all of them and by group; see `Posterior.evaluate`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.batches.inputs import as_tensors
from lightning_sgmcmc.chains.execution import evaluation_mode
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.evaluation.loader_average import Evaluation, LoaderAverage, UserMetrics, group_metrics
from lightning_sgmcmc.evaluation.scoring import evaluate, of_observed
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.posterior.calibration import batches_of
from lightning_sgmcmc.posterior.predictive import states_in_place
from lightning_sgmcmc.posterior.store import SampleStore
from lightning_sgmcmc.tables import TargetScaling


def evaluate_samples(
    model: EnergyModel,
    store: SampleStore,
    log_weights: Sequence[float],
    data: Any,
    metrics: Mapping[str, Callable[..., Any]] | None,
    group: Any,
) -> Evaluation:
    """Return the metrics of samples and of their average; see `Posterior.evaluate`."""
    user = UserMetrics(metrics)
    user.check(model)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    batches = [
        as_tensors(store.columns.received(batch), model.device, dtype)
        for batch in batches_of(data, store.columns, "evaluate")
    ]
    scaling, average = store.scaling or TargetScaling(), LoaderAverage("uniform", user)
    observed: Tensor | None = None
    with evaluation_mode(model):
        for record, log_weight, state in zip(store.records, log_weights, states_in_place(model, store), strict=True):
            scores = evaluate(model, state, batches)
            target = scores[2]
            if observed is None:
                known = None if target is None or model.likelihood is None else model.likelihood.observed(target)
                observed = torch.ones(len(scores[1]), dtype=torch.bool) if known is None else known.cpu()
            sample = PosteriorSample(record.step, record.cycle, record.chain, record.energy, log_weight)
            average.add(model, sample, of_observed(model, scores), scaling, 0.0, {})
    evaluation = average.evaluation
    if group is not None and observed is not None:
        evaluation.groups = group_metrics(model, evaluation, scaling, user, _labels(group, observed))
    return evaluation


def _labels(group: Any, observed: Tensor) -> np.ndarray:
    """Return the group of each observed datum, as an array (n,)."""
    labels = np.asarray(group.cpu() if isinstance(group, Tensor) else group)
    if labels.shape != (len(observed),):
        raise ValueError(
            f"group should have a label for each of the {len(observed)} data, in their order, got shape {labels.shape}"
        )
    return labels[observed.numpy()]
