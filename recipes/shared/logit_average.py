"""Test metrics of the samples' averaged logits."""

from typing import Any

import torch

from lightning_sgmcmc import BayesianModule
from lightning_sgmcmc.chains.execution import evaluation_mode
from lightning_sgmcmc.diagnostics.scores import classification_metrics
from lightning_sgmcmc.evaluation.averages import WeightedAverage
from lightning_sgmcmc.evaluation.scoring import evaluate


def logit_average(module: BayesianModule, loader: Any, device: Any) -> dict[str, float]:
    """Return accuracy and NLL of the samples' averaged logits, the average of the authors' program.

    Args:
        module: the module with its posterior; the samples' weights are used.
        loader: the test data.
        device: where to compute.
    """
    assert module.posterior is not None
    total = WeightedAverage()
    target = None
    batches = [tuple(part.to(device) for part in batch) for batch in loader]
    with evaluation_mode(module.to(device)):
        for sample, log_weight in zip(module.posterior, module.posterior.log_weights.tolist(), strict=True):
            state = {name: tensor.to(device) for name, tensor in sample.state.items()}
            terms, density, target = evaluate(module, state, batches)
            # Log probabilities equal logits up to a constant for each image.
            total.add({"logits": terms["probabilities"].double().clamp_min(1e-38).log()}, density, log_weight)
    assert target is not None
    found = classification_metrics(torch.softmax(total.terms["logits"], -1), target)
    return {name: float(found[name]) for name in ("accuracy", "nll")}
