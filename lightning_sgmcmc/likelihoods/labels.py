"""Likelihoods of many labels of one datum: several at once, pixels, and tokens."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_sgmcmc.checks import check_kind
from lightning_sgmcmc.diagnostics.scores import classification_metrics, predictive_entropy, whole_labels
from lightning_sgmcmc.likelihoods.base import Likelihood, at_least_float32, summed
from lightning_sgmcmc.predictions import ClassPrediction, MultiLabelPrediction, Prediction
from lightning_sgmcmc.tensors import widest


class MultiLabelBernoulli(Likelihood):
    """Several labels at once: the network has one logit for each, log p(y|x,θ) = Σ_l log Bernoulli(y_l).

    Output (n, L), target (n, L) of 0 and 1 of any dtype. The average is over the probabilities of each label; metrics
    are of single labels, but `nll` of an example's together; `exact` is the share of data whose labels are all
    right.

    >>> MultiLabelBernoulli().log_prob(torch.zeros(1, 3), torch.tensor([[0, 1, 1]]))
    tensor([-2.0794])
    """

    per_sample_term = "label_probabilities"
    metric_names = ("accuracy", "exact", "nll", "label_nll", "brier", "entropy")
    applies_itself = (nn.Sigmoid, nn.LogSigmoid, nn.Softmax)

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        if output.dim() != 2 or output.shape != target.shape:
            raise ValueError(
                "MultiLabelBernoulli needs logits and targets of shape (n, L), got "
                f"{tuple(output.shape)} and {tuple(target.shape)}"
            )
        logits = at_least_float32(output)
        target, observed = self.split_missing(_numbers(target))
        each = -F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="none")
        # Other labels have probability 0; the formula would still return a number for them.
        return summed(each.masked_fill((target != 0) & (target != 1), -math.inf), observed)

    def check_target(self, output: Tensor, target: Tensor) -> None:
        target, observed = _numbers(target), self.observed_entries(target)
        target = target if observed is None else target[observed]
        odd = target[(target != 0) & (target != 1)]
        if odd.numel():
            raise ValueError(f"MultiLabelBernoulli: targets must be 0 or 1, got {odd.reshape(-1)[0].item()}")

    def doubt(self, low: float, high: float) -> str | None:
        if not 0 <= low <= high <= 1:
            return None
        return (
            f"all outputs lie in [{low:.3g}, {high:.3g}], but MultiLabelBernoulli needs logits, which are usually "
            "negative for some data: if the network applies a sigmoid, remove it"
        )

    def chance_nll(self, target: Tensor) -> float | None:
        share = widest(target).nanmean(0)
        return float((torch.special.entr(share) + torch.special.entr(1 - share)).sum())

    def terms(self, output: Tensor) -> dict[str, Tensor]:
        probabilities = at_least_float32(output).sigmoid()
        return {"label_probabilities": probabilities, "sample_entropy": _binary_entropy(probabilities)}

    def metrics(
        self, terms: Mapping[str, Tensor], log_density: Tensor, target: Tensor, scale: float | Tensor
    ) -> dict[str, Tensor]:
        p, target, observed = terms["label_probabilities"], _numbers(target), self.observed_entries(target)
        right = (p > 0.5) == (target > 0.5)
        exact = right.all(-1)
        if observed is not None and not bool(observed.all()):
            exact = (right | ~observed).all(-1)
            p, target, right = p[observed], target[observed], right[observed]
        return {
            "accuracy": right.to(p.dtype).mean(),
            "exact": exact.to(p.dtype).mean(),
            "nll": log_density.neg().mean(),
            "label_nll": F.binary_cross_entropy(widest(p), target.to(widest(p).dtype)),
            "brier": 2 * (p - target.to(p.dtype)).square().mean(),  # over both classes, as Bernoulli's
            "entropy": _binary_entropy(p).mean(),
        }

    def prediction(self, terms: Mapping[str, Tensor], per_sample: Tensor | None) -> Prediction:
        entropy = _binary_entropy(terms["label_probabilities"])
        information = (entropy - terms["sample_entropy"]).clamp_min(0)
        return MultiLabelPrediction(terms["label_probabilities"], entropy, information, per_sample)

    def scored(self, prediction: Prediction, target: Tensor) -> tuple[Tensor, Tensor]:
        observed = self.observed_entries(target)
        if observed is None or bool(observed.all()):
            return prediction.probabilities, target.long()
        return prediction.probabilities[observed], target[observed].long()


class _DenseCategorical(Likelihood):
    """Base of the likelihoods with a label for each of an example's places: its pixels or tokens."""

    per_sample_term = "dense_probabilities"
    applies_itself = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax)
    axis: int
    """The axis of the output that has the classes."""
    most_axes = 64
    expected: str
    """The shapes of output and target in words."""

    def __init__(self, ignore_index: int = -100) -> None:
        check_kind("ignore_index", ignore_index, int, optional=False)
        super().__init__(ignore_index)
        self.ignore_index = ignore_index

    def _logits(self, output: Tensor) -> Tensor:
        """Return logits with the classes last, shape (n, …, K)."""
        if not 3 <= output.dim() <= self.most_axes:
            raise ValueError(f"{type(self).__name__} needs {self.expected}, got an output {tuple(output.shape)}")
        return at_least_float32(output).movedim(self.axis, -1)

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        logits = self._logits(output)
        if target.shape != logits.shape[:-1] or target.is_floating_point():
            raise ValueError(
                f"{type(self).__name__} needs {self.expected}, got {tuple(output.shape)} and {tuple(target.shape)} of "
                f"{target.dtype}"
            )
        each = F.cross_entropy(logits.movedim(-1, 1), target.long(), reduction="none", ignore_index=self.ignore_index)
        return -each.flatten(1).sum(-1)

    def check_target(self, output: Tensor, target: Tensor) -> None:
        if target.is_floating_point():
            return
        target = whole_labels(target)
        counted = target[target != self.ignore_index]
        classes = output.shape[self.axis]
        if counted.numel():
            low, high = counted.min().item(), counted.max().item()
            if low < 0 or high >= classes:
                raise ValueError(
                    f"{type(self).__name__}: labels from {low} to {high} for {classes} classes: labels count from 0, "
                    f"and places without one have ignore_index={self.ignore_index}"
                )

    def chance_nll(self, target: Tensor) -> float | None:
        target = whole_labels(target)
        counts = widest(target[target != self.ignore_index].unique(return_counts=True)[1])
        return float(torch.special.entr(counts / counts.sum()).sum() * counts.sum() / len(target))

    def terms(self, output: Tensor) -> dict[str, Tensor]:
        probabilities = self._logits(output).softmax(-1)
        return {"dense_probabilities": probabilities, "sample_entropy": predictive_entropy(probabilities)}

    def metrics(
        self, terms: Mapping[str, Tensor], log_density: Tensor, target: Tensor, scale: float | Tensor
    ) -> dict[str, Tensor]:
        probabilities, labels = self._counted(terms["dense_probabilities"], target)
        found = classification_metrics(probabilities, labels)
        nll, place = found.pop("nll"), next(name for name in self.metric_names if name.endswith("_nll"))
        return found | {place: nll, "nll": log_density.neg().mean()} | self._more_metrics(probabilities, labels)

    def _more_metrics(self, probabilities: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {}

    def prediction(self, terms: Mapping[str, Tensor], per_sample: Tensor | None) -> Prediction:
        entropy = predictive_entropy(terms["dense_probabilities"])
        information = (entropy - terms["sample_entropy"]).clamp_min(0)
        return ClassPrediction(terms["dense_probabilities"], entropy, information, per_sample)

    def scored(self, prediction: Prediction, target: Tensor) -> tuple[Tensor, Tensor]:
        return self._counted(prediction.probabilities, target)

    def _counted(self, probabilities: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities (m, K) and labels (m,) of the places that count."""
        labels = whole_labels(target)  # torch compares a uint8 156 with -100 as equal
        counts = labels != self.ignore_index
        return probabilities[counts], labels[counts]

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}"


class PixelCategorical(_DenseCategorical):
    """Segmentation: a label for each pixel, log p(y|x,θ) = Σ over the pixels that count of log softmax(output)_y.

    Output (n, K, …) as of a convolution, target integer labels (n, …). An example is an image: its log-likelihood is
    the sum over its pixels, so `num_data` counts images. Predictive probabilities have the classes last, (n, …, K).
    `nll` is of the image's pixels together, `pixel_nll` the mean of single pixels, `iou` the classes' mean intersection
    over union.

    Args:
        ignore_index: label of the pixels that do not count.

    >>> PixelCategorical().log_prob(torch.zeros(1, 2, 3, 3), torch.zeros(1, 3, 3, dtype=torch.int64))
    tensor([-6.2383])
    """

    metric_names = ("accuracy", "nll", "pixel_nll", "brier", "ece", "entropy", "iou")
    axis = 1
    expected = "logits of shape (n, K, …) and integer labels of shape (n, …)"

    def _more_metrics(self, probabilities: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"iou": mean_iou(probabilities.argmax(-1), labels, probabilities.shape[-1])}


class TokenCategorical(_DenseCategorical):
    """A label for each token, log p(y|x,θ) = Σ over the tokens that count of log softmax(output)_y.

    Output (n, T, K), target integer labels (n, T). An example is a sequence: its log-likelihood is the sum over its
    tokens, so `num_data` counts sequences. The target of a language model is the next token at each place. A causal
    model of transformers whose batches are dicts with labels=input_ids gets it from these, shifted by one, without
    what the attention mask hides. `nll` is of the sequence's tokens together, `token_nll` the mean of single tokens.

    Args:
        ignore_index: label of the tokens that do not count, such as padding.

    >>> TokenCategorical().log_prob(torch.zeros(1, 3, 2), torch.tensor([[0, 1, -100]]))
    tensor([-1.3863])
    """

    metric_names = ("accuracy", "nll", "token_nll", "brier", "ece", "entropy")
    axis = -1
    most_axes = 3
    expected = "logits of shape (n, T, K) and integer labels of shape (n, T)"


def mean_iou(predicted: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return the mean, over the classes that occur, of |predicted ∩ true|/|predicted ∪ true|.

    >>> mean_iou(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), 3)
    tensor(0.5000)
    """
    both = torch.bincount(labels[predicted == labels], minlength=num_classes)
    union = torch.bincount(labels, minlength=num_classes) + torch.bincount(predicted, minlength=num_classes) - both
    return (both[union > 0] / union[union > 0]).mean()


def _numbers(target: Tensor) -> Tensor:
    return target if target.is_floating_point() else target.long()


def _binary_entropy(probabilities: Tensor) -> Tensor:
    return torch.special.entr(probabilities) + torch.special.entr(1 - probabilities)
