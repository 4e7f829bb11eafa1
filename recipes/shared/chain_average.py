"""Predictions averaged over some of a posterior's samples: those of each chain, or of each step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc import BayesianModule
from lightning_sgmcmc.chains.execution import evaluation_mode
from lightning_sgmcmc.evaluation.scoring import Scorer

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
