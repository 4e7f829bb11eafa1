"""Metrics for predictive distributions: pure functions of tensors."""

import math

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, multiclass_accuracy

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
    p_true = probabilities.gather(-1, whole_labels(target)[:, None]).squeeze(-1)
    return (probabilities.square().sum(-1) - 2 * p_true + 1).mean()


def classification_metrics(probabilities: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return accuracy, nll (nats per datum), brier, ece (15 bins, L1) and the mean predictive entropy.

    Args:
        probabilities: shape (n, K).
        target: labels in 0..K-1, shape (n,).
    """
    num_classes, target = probabilities.shape[-1], whole_labels(target)
    p_true = probabilities.gather(-1, target[:, None]).squeeze(-1)
    return {
        "accuracy": multiclass_accuracy(probabilities, target, num_classes, average="micro"),
        "nll": -p_true.clamp_min(torch.finfo(p_true.dtype).tiny).log().mean(),
        "brier": brier_score(probabilities, target),
        "ece": calibration_error(probabilities, target),
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


def calibration_error(probabilities: Tensor, target: Tensor, bins: int = CALIBRATION_BINS) -> Tensor:
    """Return the expected calibration error, Σ_b n_b/n·|accuracy_b - confidence_b| over the bins of `reliability`.

    Args:
        probabilities: shape (n, K).
        target: labels in 0..K-1, shape (n,).
        bins: number of equal bins of [0, 1].

    Source: Guo et al. 2017, eq. (3).

    >>> certain = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    >>> calibration_error(certain, torch.tensor([0, 1]))
    tensor(0.5000)
    """
    confidence, predicted = probabilities.max(-1)
    gap = confidence - (predicted == whole_labels(target)).to(confidence.dtype)
    total = torch.zeros(bins, dtype=gap.dtype, device=gap.device)
    return total.index_add(0, confidence_bin(confidence, bins), gap).abs().sum() / len(gap)


def confidence_bin(confidence: Tensor, bins: int = CALIBRATION_BINS) -> Tensor:
    """Return each confidence's bin, from 0, among the equal bins [0, 1/B], (1/B, 2/B], …, ((B-1)/B, 1].

    >>> confidence_bin(torch.tensor([0.0, 0.6, 0.61, 1.0]), 10)
    tensor([0, 5, 6, 9])
    """
    # The edges in the confidences' own precision, so that k/B is the upper edge of its bin in each of them.
    edges = (torch.arange(1, bins, dtype=torch.float64) / bins).to(confidence)
    return torch.bucketize(confidence.contiguous(), edges)


def whole_labels(target: Tensor) -> Tensor:
    """Return labels of any integer dtype as int64, which torch's indexing needs.

    Raises:
        ValueError: for labels that are not integers.
    """
    if target.is_floating_point() or target.is_complex():
        raise ValueError(f"labels must be integers, got {target.dtype}: convert them by .long()")
    return target.long()


def reliability(probabilities: Tensor, target: Tensor, bins: int = CALIBRATION_BINS) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean confidence, accuracy and number of data per confidence bin, each of shape (bins,).

    Args:
        probabilities: shape (n, K).
        target: labels in 0..K-1, shape (n,).
        bins: number of equal bins of [0, 1]; an edge belongs to the bin below it.
    """
    confidence, predicted = probabilities.max(-1)
    index = confidence_bin(confidence, bins)
    count = torch.zeros(bins, dtype=torch.float64)
    total_confidence, total_correct = count.clone(), count.clone()
    index, confidence, correct = (
        index.cpu(),
        confidence.cpu().double(),
        (predicted == whole_labels(target)).cpu().double(),
    )
    count.index_add_(0, index, torch.ones_like(confidence))
    total_confidence.index_add_(0, index, confidence)
    total_correct.index_add_(0, index, correct)
    filled = count.clamp_min(1)
    return total_confidence / filled, total_correct / filled, count
