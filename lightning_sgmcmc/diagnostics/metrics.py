"""Metrics for predictive distributions: pure functions of tensors."""

import math

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, multiclass_accuracy, multiclass_calibration_error

CALIBRATION_BINS = 15


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """Return -Σ_k p_k·log p_k for each row, in nats; (n, K) to (n,).

    >>> predictive_entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    tensor([0.0000, 0.6931])
    """
    return torch.special.entr(probabilities).sum(-1)


def brier_score(probabilities: Tensor, target: Tensor) -> Tensor:
    """Return the mean over the data of Σ_k (p_k - 1{k=y})².

    Args:
        probabilities: shape (n, K).
        target: labels in 0..K-1, shape (n,).

    >>> brier_score(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([0, 1]))
    tensor(0.2500)
    """
    p_true = probabilities.gather(-1, target[:, None]).squeeze(-1)
    return (probabilities.square().sum(-1) - 2 * p_true + 1).mean()


def classification_metrics(probabilities: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return accuracy, nll (nats per datum), brier, ece (15 bins, L1) and the mean predictive entropy.

    Args:
        probabilities: shape (n, K).
        target: labels in 0..K-1, shape (n,).
    """
    num_classes = probabilities.shape[-1]
    p_true = probabilities.gather(-1, target[:, None]).squeeze(-1)
    return {
        "accuracy": multiclass_accuracy(probabilities, target, num_classes, average="micro"),
        "nll": -p_true.clamp_min(torch.finfo(p_true.dtype).tiny).log().mean(),
        "brier": brier_score(probabilities, target),
        "ece": multiclass_calibration_error(probabilities, target, num_classes, n_bins=CALIBRATION_BINS, norm="l1"),
        "entropy": predictive_entropy(probabilities).mean(),
    }


def out_of_distribution_metrics(known: Tensor, unknown: Tensor) -> dict[str, Tensor]:
    """Return how well predictions detect inputs from another distribution, for which every class is wrong.

    `auroc`: for detection by predictive entropy, the probability that an unknown input has the higher entropy (ties
    count half). `entropy`: their mean predictive entropy in nats. `brier`: the mean over inputs and classes of the
    squared probability, 1/n·Σ_i 1/K·Σ_k p_ik², between 1/K² (uniform) and 1/K (certain).

    Args:
        known: probabilities of the evaluation data, shape (n, K).
        unknown: probabilities of the out-of-distribution data, shape (m, K).

    Source: Deng et al. 2022 (ICSGLD), section 5.3; the Brier score as in the authors' code.
    """
    entropies = torch.cat([predictive_entropy(known), predictive_entropy(unknown)]) / math.log(known.shape[-1])
    labels = torch.cat([torch.zeros(len(known)), torch.ones(len(unknown))]).long().to(entropies.device)
    return {
        "auroc": binary_auroc(entropies.clamp(0, 1), labels),
        "entropy": predictive_entropy(unknown).mean(),
        "brier": unknown.square().mean(),
    }


def reliability(probabilities: Tensor, target: Tensor, bins: int = CALIBRATION_BINS) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean confidence, accuracy and number of data per confidence bin, each of shape (bins,).

    Args:
        probabilities: shape (n, K).
        target: labels in 0..K-1, shape (n,).
        bins: number of equal bins of (0, 1].
    """
    confidence, predicted = probabilities.max(-1)
    index = (confidence * bins).ceil().long().clamp(1, bins) - 1
    count = torch.zeros(bins, dtype=torch.float64)
    total_confidence, total_correct = count.clone(), count.clone()
    index, confidence, correct = index.cpu(), confidence.cpu().double(), (predicted == target).cpu().double()
    count.index_add_(0, index, torch.ones_like(confidence))
    total_confidence.index_add_(0, index, confidence)
    total_correct.index_add_(0, index, correct)
    filled = count.clamp_min(1)
    return total_confidence / filled, total_correct / filled, count
