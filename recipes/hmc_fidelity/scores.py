"""What a predictive distribution is judged by: its own scores, and its distance to another."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.datamodules import ArrayDataModule, Split
from lightning_sgmcmc.diagnostics.scores import classification_metrics

PIECE = 1000
"""Data that are predicted at once."""


@dataclass(frozen=True)
class Scores:
    """The scores of a fit or of the reference.

    Attributes:
        probabilities: the predictive of the test data, shape (n, K).
        error, nll: of it.
        ambiguity: see `ambiguity`; NaN where only the average is known.
        validation_nll: NLL of the validation data.
        seconds: processor time of the fit.
    """

    probabilities: Tensor
    error: float
    nll: float
    ambiguity: float
    validation_nll: float
    seconds: float


FAILED = Scores(torch.zeros(0, 0), math.nan, math.nan, math.nan, math.inf, 0.0)
"""Of a fit that diverged."""


def ambiguity(members: Tensor, weights: Tensor) -> float:
    """Return how much better the members' normalised geometric mean is than a member, in nats of NLL.

        A = Σ_s w_s·NLL_s - NLL(p̄) = -log Σ_k exp(Σ_s w_s·log p_sk),   the mean over the data

    where p̄ is the softmax of the mean of the members' logits. It is 0 if all members are equal, and does not depend on
    the labels.

    Args:
        members: probabilities, shape (S, n, K).
        weights: of the members, shape (S,), of sum 1.

    Source: Wood et al. 2023 (A unified theory of diversity in ensemble learning); the tables of bdlx and PX-SGMCMC.
    """
    tiny = torch.finfo(torch.float32).tiny
    mean = (weights.double()[:, None, None] * members.double().clamp_min(tiny).log()).sum(0)
    return float(-mean.logsumexp(-1).mean())


def judged(probabilities: Tensor, targets: Tensor) -> tuple[float, float]:
    """Return the share of wrong classes and the NLL of probabilities (n, K)."""
    found = classification_metrics(probabilities, targets)
    return 1 - float(found["accuracy"]), float(found["nll"])


def scores_of(posterior: Posterior, data: ArrayDataModule, seconds: float) -> Scores:
    """Return the scores of samples.

    Args:
        posterior: the samples with their weights.
        data: the datamodule, after `setup`.
        seconds: processor time that the samples took.
    """
    _, validation, test = data.splits
    members, weights = members_of(posterior, test, data), posterior.weights.cpu().double()
    average = (weights[:, None, None] * members.double()).sum(0)
    on_validation = (weights[:, None, None] * members_of(posterior, validation, data).double()).sum(0)
    return Scores(
        average.float(),
        *judged(average, test.targets),
        ambiguity(members, weights),
        judged(on_validation, validation.targets)[1],
        seconds,
    )


def members_of(posterior: Posterior, part: Split, data: ArrayDataModule) -> Tensor:
    """Return each sample's class probabilities of a part of the data, shape (S, n, K), on the CPU."""
    transform = data.transform()
    found = []
    for inputs in part.inputs.split(PIECE):
        prediction: Any = posterior.predict(inputs if transform is None else transform(inputs), return_samples=True)
        found.append(prediction.sample_probabilities.cpu())
    return torch.cat(found, 1)
