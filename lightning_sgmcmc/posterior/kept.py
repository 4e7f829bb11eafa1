"""What each sample predicts, kept while it is small."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.likelihoods import Likelihood
from lightning_sgmcmc.predictions import Members, Mixture, Prediction, RegressionPrediction

SMALL = 64 * 2**20
"""Bytes of the samples' distributions that a prediction keeps unasked."""


class KeptPredictions:
    """Tensors of each batch and sample, until they are too many.

    Args:
        most: bytes above which all are dropped; infinite keeps them.
    """

    def __init__(self, most: float) -> None:
        self._most = self._room = most
        self._rows: list[list[Mapping[str, Tensor]]] = []
        """By batch, and in it by sample."""

    @property
    def is_dropped(self) -> bool:
        """Whether there were too many."""
        return self._room < 0

    def add(self, batch: int, found: Mapping[str, Tensor]) -> None:
        """Keep the next sample's tensors of a batch, first axis n."""
        if self.is_dropped:
            return
        self._room -= sum(tensor.nbytes for tensor in found.values())
        if self.is_dropped:
            self._rows.clear()
            return
        while len(self._rows) <= batch:
            self._rows.append([])
        self._rows[batch].append(found)

    def stacked(self) -> dict[str, Tensor]:
        """Return the tensors by name, shape (S, n, …); {} if they were dropped or there are none."""
        if not self._rows:
            return {}
        names = self._rows[0][0]
        return {name: torch.cat([torch.stack([of[name] for of in row]) for row in self._rows], 1) for name in names}

    def why_not(self) -> str:
        """Return why there are none, for a message."""
        size = f"{self._most / 2**20:.0f} MB"
        return f"all of them take more than {size}: pass return_samples=True to predict, or fewer inputs"


def kept_of(likelihood: Likelihood, output: Tensor, terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of one sample from which its distribution can be made, first axis n."""
    if likelihood.distribution is not None:
        return likelihood.kept_components(output)
    name = likelihood.per_sample_term
    return {name: terms[name]} if name in terms else {}


def with_distributions(
    prediction: Prediction, likelihood: Likelihood | None, kept: KeptPredictions, weights: Tensor
) -> Prediction:
    """Return a prediction that knows the samples' distributions, or why it does not.

    Args:
        prediction: the averages'.
        likelihood: of the samples; None for a module with its own predictive terms.
        kept: what was kept of the samples.
        weights: the samples', shape (S,), summing to 1.
    """
    if kept.is_dropped:
        return prediction.with_kept(None, kept.why_not())
    tensors: dict[str, Any] = kept.stacked()
    law = likelihood.distribution if likelihood is not None else None
    if law is not None and isinstance(prediction, RegressionPrediction):
        return prediction.with_kept(Mixture(law, tensors, weights))
    probabilities = tensors.get(likelihood.per_sample_term if likelihood is not None else "probabilities")
    if probabilities is not None and "probabilities" in prediction.parts:
        return prediction.with_kept(Members(probabilities, weights))
    name = "the module's own predictive_terms" if likelihood is None else type(likelihood).__name__
    return prediction.with_kept(None, f"{name} has no `distribution` with components(output)")
