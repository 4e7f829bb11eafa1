"""Selective prediction: the risk of the predictions that a model is surest of."""

import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.metrics import whole_labels
from lightning_sgmcmc.tensors import widest


def risk_coverage(uncertainty: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coverages k/n and the risks, the mean loss of the k surest predictions, k = 1 … n, each of shape (n,).

    Predictions of equal uncertainty count alike: each has the mean loss of all that are equal.

    Args:
        uncertainty: of each prediction, shape (n,); larger is less sure.
        loss: of each prediction, shape (n,), such as 1 for a wrong class and 0 for a right one.

    Source: Geifman & El-Yaniv 2017; El-Yaniv & Wiener 2010.
    """
    if uncertainty.shape != loss.shape or uncertainty.dim() != 1 or not len(loss):
        raise ValueError(
            f"uncertainty and loss should both have the shape (n,), n > 0, got {tuple(uncertainty.shape)} and "
            f"{tuple(loss.shape)}"
        )
    values, group = uncertainty.unique(return_inverse=True)
    count = widest(torch.bincount(group, minlength=len(values)))
    mean = torch.zeros_like(count).index_add_(0, group, widest(loss)) / count
    shared = mean[group[uncertainty.argsort()]]
    steps = torch.arange(1, len(loss) + 1, dtype=count.dtype, device=loss.device)
    return steps / len(loss), shared.cumsum(0) / steps


def aurc(probabilities: Tensor, target: Tensor) -> Tensor:
    """Return the area under the risk-coverage curve of class predictions by their largest probability, in [0, 1].

    It is the mean over coverages of the error rate of the surest predictions: smaller is better, and 0 needs no errors.

    Args:
        probabilities: shape (n, K).
        target: labels in 0..K-1, shape (n,).

    Source: Geifman et al. 2019 (Bias-reduced uncertainty estimation).

    >>> p = torch.tensor([[0.9, 0.1], [0.4, 0.6]])  # the second, less sure, is wrong
    >>> aurc(p, torch.tensor([0, 0]))
    tensor(0.2500)
    """
    return risk_coverage(*_errors(probabilities, target))[1].mean().float()


def risk_at_coverage(probabilities: Tensor, target: Tensor, coverage: float = 0.8) -> Tensor:
    """Return the error rate of the surest predictions, those with the largest probabilities.

    Args:
        probabilities: shape (n, K).
        target: labels in 0..K-1, shape (n,).
        coverage: share of the data that are predicted, in (0, 1].
    """
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage must be in (0, 1], got {coverage}")
    risks = risk_coverage(*_errors(probabilities, target))[1]
    return risks[max(round(coverage * len(risks)), 1) - 1].float()


def _errors(probabilities: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    largest, predicted = probabilities.max(-1)
    return -largest, (predicted != whole_labels(target)).float()
