"""Scores that need all samples together, or a reference: computed for stored samples, not during a fit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.chains.sample import SampleRecord, comparable_log_weights
from lightning_sgmcmc.diagnostics.samples import normalised_weights
from lightning_sgmcmc.diagnostics.scores import gaussian_mixture_crps, gaussian_mixture_quantile, interval_score
from lightning_sgmcmc.diagnostics.selective import aurc, risk_at_coverage
from lightning_sgmcmc.evaluation.reference import Reference
from lightning_sgmcmc.predictions.distributions import Normal
from lightning_sgmcmc.tensors import widest

INTERVAL = 0.9
COVERAGE = 0.8
BLOCK = 2**22
"""Numbers of (sample, datum) pairs that are in one block of data."""


class StoredScores:
    """Collects the samples' predictions of one loader's data, and scores each and their average.

    Gaussian likelihoods' average is a mixture of Gaussians, whose CRPS and 90 % interval score are exact. Classes
    have the area under the risk-coverage curve, the error rate of the surest 80 %, and agreement with a reference.

    Args:
        likelihood: the module's.
        scale: the divisor of the targets, or of each, (D,); scores are in the original units.
        reference: a predictive to compare with, or None.
        with_scores: whether scores other than the reference's are wanted.
    """

    def __init__(self, likelihood: Any, scale: float | Tensor, reference: Reference | None, with_scores: bool) -> None:
        self._reference = reference if reference is not None and reference.probabilities is not None else None
        self._likelihood = likelihood
        self._with_scores = with_scores
        self._is_gaussian = with_scores and getattr(likelihood, "distribution", None) is Normal
        self._scales = scale if isinstance(scale, Tensor) else None
        self._scale = 1.0 if isinstance(scale, Tensor) else scale
        self._records: list[SampleRecord] = []
        self._means: list[Tensor] = []
        self._stds: list[Tensor] = []

    def add(self, record: SampleRecord, terms: Mapping[str, Tensor], target: Tensor | None) -> dict[str, float]:
        """Add a sample; return its own scores.

        Args:
            record: its record.
            terms: the likelihood's terms.
            target: the targets.
        """
        found: dict[str, float] = {}
        if self._reference is not None:
            found |= self._of_reference(terms)
        found |= self._selective(terms, target)
        if self._is_gaussian and target is not None:
            self._records.append(record)
            self._means.append(terms["mean"].float().cpu())
            self._stds.append(terms["variance"].sqrt().float().cpu())
            one = torch.ones(1, dtype=torch.float64)
            found |= self._scores(one, self._means[-1][None], self._stds[-1][None], target)
        return found

    def of_average(self, terms: Mapping[str, Tensor], target: Tensor | None) -> dict[str, float]:
        """Return the scores of the weighted average of all samples.

        Args:
            terms: the averaged terms.
            target: the targets.
        """
        found: dict[str, float] = {}
        if self._reference is not None:
            found |= self._of_reference(terms)
        found |= self._selective(terms, target)
        if self._means and target is not None:
            weights = normalised_weights(comparable_log_weights(self._records))
            found |= self._scores(weights, torch.stack(self._means), torch.stack(self._stds), target)
        return found

    def _of_reference(self, terms: Mapping[str, Tensor]) -> dict[str, float]:
        assert self._reference is not None
        if "probabilities" not in terms:
            raise ValueError("reference compares class probabilities, and these predictions have none: omit reference")
        return self._reference.values(terms["probabilities"])

    def _selective(self, terms: Mapping[str, Tensor], target: Tensor | None) -> dict[str, float]:
        if not self._with_scores or target is None or "probabilities" not in terms or terms["probabilities"].dim() != 2:
            return {}
        read = getattr(self._likelihood, "labels", None)
        labels = (read(target) if read is not None else target).long()
        probabilities = terms["probabilities"]
        risk = risk_at_coverage(probabilities, labels, COVERAGE)
        return {"aurc": float(aurc(probabilities, labels)), f"risk_{COVERAGE * 100:.0f}": float(risk)}

    def _scores(self, weights: Tensor, means: Tensor, stds: Tensor, target: Tensor) -> dict[str, float]:
        target = target.cpu().double().reshape(means.shape[1:])
        crps, missed = 0.0, 0.0
        size = max(BLOCK // max(means[:, :1].numel(), 1), 1)
        for first in range(0, len(target), size):
            own = slice(first, first + size)
            mean, std, y = widest(means[:, own]), widest(stds[:, own]), target[own]
            crps += self._total(gaussian_mixture_crps(weights, mean, std, y))
            ends = [gaussian_mixture_quantile(weights, mean, std, q) for q in (0.5 - INTERVAL / 2, 0.5 + INTERVAL / 2)]
            missed += self._total(interval_score(ends[0], ends[1], y, INTERVAL))
        factor = self._scale / max(int((~target.isnan()).sum()), 1)
        return {"crps": crps * factor, f"interval_score_{INTERVAL * 100:.0f}": missed * factor}

    def _total(self, each: Tensor) -> float:
        """Return the sum over observed targets (n, D), each in its unit."""
        return float((each if self._scales is None else each * self._scales.to(each)).nansum())
