"""Averages over samples: probabilities of each chain or group, and metrics of averaged logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc import BayesianModule
from lightning_sgmcmc.chains.execution import evaluation_mode
from lightning_sgmcmc.diagnostics.scores import classification_metrics
from lightning_sgmcmc.evaluation.averages import WeightedAverage
from lightning_sgmcmc.evaluation.scoring import Scorer, evaluate

AT_ONCE = 4
"""Samples scored in one pass."""


def chain_probabilities(module: BayesianModule, loader: Any, device: Any) -> tuple[list[Tensor], Tensor]:
    """Return each chain's class probabilities, the uniform average over its samples, and the labels.

    Args:
        module: the module with its posterior.
        loader: the data, in a fixed order.
        device: where to compute.
    """
    return grouped_probabilities(module, loader, device, lambda sample: sample.chain)


def grouped_probabilities(
    module: BayesianModule, loader: Any, device: Any, group: Callable[[Any], int]
) -> tuple[list[Tensor], Tensor]:
    """Return the class probabilities of groups of samples, the uniform average of each group, and the labels.

    Args:
        module: the module with its posterior.
        loader: the data, in a fixed order.
        device: where to compute.
        group: the number of a sample's group; the groups come in the order of their numbers.
    """
    assert module.posterior is not None
    batches = [tuple(part.to(device) for part in batch) for batch in loader]
    groups: dict[int, list[Any]] = {}
    for sample in module.posterior:
        groups.setdefault(group(sample), []).append(sample.state)
    scorer = Scorer(module)
    averages: list[Tensor] = []
    with evaluation_mode(module.to(device)):
        for number in sorted(groups):
            total, states = torch.zeros(()), groups[number]
            for first in range(0, len(states), AT_ONCE):
                own = [{name: value.to(device) for name, value in s.items()} for s in states[first : first + AT_ONCE]]
                for terms, _, _ in scorer(own, batches):
                    total = total + terms["probabilities"].double().cpu()
            averages.append(total / len(states))
    return averages, torch.cat([batch[1] for batch in batches]).cpu()


# -- averaged logits --------------------------------------------------------------------------------------------------


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
