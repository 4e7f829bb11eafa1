"""The test figures of the samples' averaged logits."""

from typing import Any

import torch

from lightning_sgmcmc import BayesianModule
from lightning_sgmcmc.chains.stateless import evaluation_mode
from lightning_sgmcmc.diagnostics.metrics import classification_metrics
from lightning_sgmcmc.evaluation.averages import WeightedAverage
from lightning_sgmcmc.evaluation.scoring import evaluate


def logit_average(module: BayesianModule, loader: Any, device: Any) -> dict[str, float]:
    """Return accuracy and NLL of the samples' averaged logits, which is what the authors' program averages.

    Args:
        module: the module, whose posterior's weights count.
        loader: the test data.
        device: where to compute.
    """
    assert module.posterior is not None
    total = WeightedAverage()
    target = None
    batches = [tuple(part.to(device) for part in batch) for batch in loader]
    with evaluation_mode(module.to(device)):
        for sample in module.posterior:
            state = {name: tensor.to(device) for name, tensor in sample.state.items()}
            terms, density, target = evaluate(module, state, batches)
            # Logarithms of probabilities are logits but for a constant of each image.
            total.add({"logits": terms["probabilities"].double().clamp_min(1e-38).log()}, density, sample.log_weight)
    assert target is not None
    found = classification_metrics(torch.softmax(total.terms["logits"], -1), target)
    return {name: float(found[name]) for name in ("accuracy", "nll")}
