"""Scores of chosen samples on chosen data, without a trainer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sgmcmc.batches.padding import with_few_lengths
from lightning_sgmcmc.chains.together import States, TogetherCall
from lightning_sgmcmc.evaluation.averages import Terms
from lightning_sgmcmc.likelihoods import Likelihood

Scores = tuple[Terms, Tensor, Tensor | None]
"""The likelihood's terms (first axis n), log densities (n,) and targets (None without a likelihood)."""


class Scorer:
    """Scores every datum of batches by several samples, in one pass over the batches.

    Args:
        module: a `BayesianModule`, in evaluation mode when it is called; its own weights are not changed.
        compiled: whether torch.compile compiles the samples' common pass, where they run at once.
    """

    def __init__(self, module: nn.Module, compiled: bool = False) -> None:
        self._call = TogetherCall(module, _score, compiled)
        self._net = getattr(module, "net", None) if compiled else None

    def __call__(self, states: Sequence[Mapping[str, Tensor]], batches: Iterable[Any]) -> list[Scores]:
        """Return the scores of each sample.

        Args:
            states: the samples' parameters and buffers, on the module's device.
            batches: batches there.

        Raises:
            ValueError: if there are no batches.
        """
        together = States(states)
        with torch.no_grad():
            used = batches if self._net is None else (with_few_lengths(batch, self._net) for batch in batches)
            found = [list(self._call(together, batch)) for batch in used]
        if not found:
            raise ValueError("batches has no data to evaluate")
        return [_joined(of_sample) for of_sample in zip(*found, strict=True)]


def evaluate(module: nn.Module, state: Mapping[str, Tensor], batches: Iterable[Any]) -> Scores:
    """Score every datum of the batches by one sample.

    Args:
        module: a `BayesianModule`, in evaluation mode; its own weights are not changed.
        state: the sample's parameters and buffers.
        batches: batches on the module's device.

    Returns:
        the likelihood's terms (first axis n), log densities (n,) and targets (None without a likelihood).
    """
    return Scorer(module)([state], batches)[0]


def of_observed(module: nn.Module, scores: Scores) -> Scores:
    """Return scores without the data that have no observed target; numbers that are not observed become NaN."""
    terms, density, target = scores
    likelihood: Likelihood | None = getattr(module, "likelihood", None)
    entries = None if target is None or likelihood is None else likelihood.observed_entries(target)
    if target is None or entries is None or bool(entries.all()):
        return scores
    if target.is_floating_point():
        target = target.masked_fill(~entries, torch.nan)
    known = entries.flatten(1).any(1) if entries.dim() > 1 else entries
    if bool(known.all()):
        return terms, density, target
    return {name: term[known] for name, term in terms.items()}, density[known], target[known]


def _score(module: Any, batch: Any) -> tuple[Any, ...]:
    density, terms, target = module.score(batch)
    return (density, terms) if target is None else (density, terms, target)  # vmap returns tensors only


def _joined(parts: Sequence[tuple[Any, ...]]) -> Scores:
    """Join a sample's scores of successive batches."""
    densities, terms, *targets = zip(*parts, strict=True)
    return concatenate(terms), torch.cat(densities), torch.cat(targets[0]) if targets else None


def concatenate(parts: Iterable[Mapping[str, Tensor]]) -> Terms:
    """Join dictionaries of tensors along the first axis.

    Raises:
        ValueError: if they differ in another axis, such as sequences that are padded batch by batch.
    """
    parts = list(parts)
    for name in parts[0] if parts else ():
        shapes = list(dict.fromkeys(tuple(part[name].shape[1:]) for part in parts))
        if len(shapes) > 1:
            raise ValueError(
                f"the batches' outputs have different shapes, (n, …) with {shapes[0]} and {shapes[1]} for '{name}', "
                "and cannot be joined: pad all batches to one length in collate_fn (padding='max_length')"
            )
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}
