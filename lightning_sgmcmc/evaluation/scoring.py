"""Scores of chosen samples on chosen data, without a trainer."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sgmcmc.chains.stateless import StatelessCall
from lightning_sgmcmc.evaluation.averages import Terms


def evaluate(
    module: nn.Module, state: Mapping[str, Tensor], batches: Iterable[Any]
) -> tuple[Terms, Tensor, Tensor | None]:
    """Score every datum of the batches by one sample.

    Args:
        module: a `BayesianModule`, in evaluation mode; its own weights are not changed.
        state: the sample's parameters and buffers.
        batches: batches on the module's device.

    Returns:
        the likelihood's terms (first axis n), log densities (n,) and targets (None without a likelihood).
    """
    scorer = StatelessCall(module, lambda m, batch: m.score(batch))
    densities, terms, targets = [], [], []
    with torch.no_grad():
        for batch in batches:
            density, batch_terms, target = scorer.call(state, batch)
            densities.append(density)
            terms.append(batch_terms)
            targets.append(target)
    if not densities:
        raise ValueError("batches has no data to evaluate")
    target = None if targets[0] is None else torch.cat(targets)
    return concatenate(terms), torch.cat(densities), target


def concatenate(parts: Iterable[Mapping[str, Tensor]]) -> Terms:
    """Join dictionaries of tensors along the first axis."""
    parts = list(parts)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}
