"""Likelihoods of classes: one of K, one of two, pairs, and ordered ones."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.diagnostics.scores import (
    classification_metrics,
    expected_classification_metrics,
    predictive_entropy,
    whole_labels,
)
from lightning_sgmcmc.likelihoods.base import Likelihood, at_least_float32, summed
from lightning_sgmcmc.predictions import ClassPrediction, Prediction
from lightning_sgmcmc.tensors import widest


class ClassLikelihood(Likelihood):
    """Base of the likelihoods of one label among K, by class probabilities.

    A subclass has `log_prob` and `probabilities`, and `labels` if targets are not integer labels (n,).
    """

    per_sample_term = "probabilities"
    metric_names = ("accuracy", "nll", "brier", "ece", "entropy")

    def probabilities(self, output: Tensor) -> Tensor:
        """Return the class probabilities, shape (n, K)."""
        raise NotImplementedError(f"{type(self).__name__} needs probabilities(output)")

    def labels(self, target: Tensor) -> Tensor:
        """Return the labels as int64, shape (n,), from integers of any dtype."""
        return whole_labels(target)

    def _known(self, target: Tensor) -> Tensor:
        """Return the observed labels; the target itself if all are, whatever their values."""
        observed = self.observed_entries(target)
        return target if observed is None else target[observed]

    def scored(self, prediction: Prediction, target: Tensor) -> tuple[Tensor, Tensor]:
        return prediction.probabilities, self.labels(target).reshape(-1)

    def chance_nll(self, target: Tensor) -> float | None:
        counts = widest(self.labels(target).reshape(-1).unique(return_counts=True)[1])
        return float(torch.special.entr(counts / counts.sum()).sum())

    def terms(self, output: Tensor) -> dict[str, Tensor]:
        probabilities = self.probabilities(output)
        return {"probabilities": probabilities, "sample_entropy": predictive_entropy(probabilities)}

    def metrics(
        self, terms: Mapping[str, Tensor], log_density: Tensor, target: Tensor, scale: float | Tensor
    ) -> dict[str, Tensor]:
        metrics = classification_metrics(terms["probabilities"], self.labels(target))
        metrics["nll"] = log_density.neg().mean()  # the same number, without the clamp
        return metrics

    def prediction(self, terms: Mapping[str, Tensor], per_sample: Tensor | None) -> Prediction:
        entropy = predictive_entropy(terms["probabilities"])
        information = (entropy - terms["sample_entropy"]).clamp_min(0)
        return ClassPrediction(terms["probabilities"], entropy, information, per_sample)


NO_LABEL = torch.iinfo(torch.int64).min


class Categorical(ClassLikelihood):
    """Classification: the network's output is K logits, log p(y|x,θ) = log softmax(output)_y.

    Output (n, K), target integer labels (n,), or soft labels: probabilities q (n, K) of a floating-point type, such as
    the shares of several annotators' votes. Their log density is that of fractional counts, Σ_k q_k·log
    softmax(output)_k, so each datum weighs as one label. Metrics are then expected ones, for a label drawn from q: the
    accuracy is the mean q of the most probable class, the NLL the cross-entropy -Σ_k q_k·log p̄_k.

    Args:
        missing: the label of data that are not observed, see `Likelihood`.

    Raises:
        TypeError: for the `weight` and `label_smoothing` of torch's loss, which no density has, with what to do.

    >>> logits = torch.tensor([[0.0, 0.0], [0.0, torch.inf]])
    >>> Categorical().log_prob(torch.zeros(1, 2), torch.tensor([1]))
    tensor([-0.6931])
    >>> Categorical().log_prob(torch.zeros(1, 2), torch.tensor([[0.25, 0.75]]))
    tensor([-0.6931])
    """

    refused_arguments: ClassVar[Mapping[str, str]] = {
        **Likelihood.refused_arguments,
        "label_smoothing": "label_smoothing=… changes the labels, and an average over samples needs none to be "
        "calibrated: leave it out, or pass soft labels (n, K) if the labels are uncertain",
    }

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        if _are_soft(target) and target.shape == output.shape:
            target, _ = self.split_missing(target)
            logs = at_least_float32(output).log_softmax(-1)
            return torch.where(target != 0, target * logs, 0.0).sum(-1)
        if output.dim() != 2 or target.shape != output.shape[:1] or target.is_floating_point():
            raise ValueError(
                "Categorical needs logits of shape (n, K) and integer labels of shape (n,), or probabilities (n, K) of "
                f"a floating-point type, got {tuple(output.shape)} and {tuple(target.shape)} of {target.dtype}"
            )
        # By default torch ignores the label -100, as if the datum were certain.
        ignored, logits = NO_LABEL if self.missing is None else int(self.missing), at_least_float32(output)
        return -F.cross_entropy(logits, target.long(), reduction="none", ignore_index=ignored)

    applies_itself = (nn.Softmax, nn.Softmax2d)

    def check_target(self, output: Tensor, target: Tensor) -> None:
        if output.dim() == 2 and output.shape[1] == 1:
            raise ValueError(
                "Categorical: one logit makes every datum certain, so nothing would be learned: use Bernoulli, or a "
                "network with one output for each class"
            )
        if output.dim() == 2 and len(output) and bool(_are_rows_of_probabilities(output.detach()).all()):
            raise ValueError(
                f"Categorical: the outputs lie in [{output.min().item():.3g}, {output.max().item():.3g}] and each row "
                "sums to 1, but it needs logits: remove the softmax"
            )
        if _are_soft(target):
            _check_soft(target)
            return
        target = self._known(target)
        if target.dim() == 1 and output.dim() == 2 and not target.is_floating_point() and len(target):
            low, high = target.long().min().item(), target.long().max().item()
            if low < 0 or high >= output.shape[1]:
                raise ValueError(
                    f"Categorical: labels from {low} to {high} for {output.shape[1]} logits; labels count from 0, so "
                    "the network needs more outputs or the data other labels (for data without one, missing=…)"
                )

    def probabilities(self, output: Tensor) -> Tensor:
        return at_least_float32(output).softmax(-1)

    def energy(self, output: Tensor) -> Tensor | None:
        """Return -log Σ_k exp(output_k), shape (n,) (Liu et al. 2020, Energy-based out-of-distribution detection)."""
        return -at_least_float32(output).logsumexp(-1)

    def labels(self, target: Tensor) -> Tensor:
        if _are_soft(target):
            raise ValueError(
                f"the targets {tuple(target.shape)} are probabilities, and this needs one label for each datum: pass "
                "data with labels, such as target.argmax(1)"
            )
        return super().labels(target)

    def chance_nll(self, target: Tensor) -> float | None:
        if _are_soft(target):
            return float(torch.special.entr(widest(target).mean(0)).sum())
        return super().chance_nll(target)

    def metrics(
        self, terms: Mapping[str, Tensor], log_density: Tensor, target: Tensor, scale: float | Tensor
    ) -> dict[str, Tensor]:
        if _are_soft(target):
            return expected_classification_metrics(terms["probabilities"], target)
        return super().metrics(terms, log_density, target, scale)


class Bernoulli(ClassLikelihood):
    """Two classes: the network's output is one logit, p(y=1|x,θ) = sigmoid(output).

    Output (n,) or (n, 1), target 0 or 1 of any dtype, shape (n,) or (n, 1). Predictive probabilities have K = 2
    columns.

    Example::

        module = BayesianModule(torch.nn.Linear(2, 1), Bernoulli(), lr=0.1)
    """

    def num_outputs(self, targets: int) -> int:
        return 1

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        logit = self._column(output, "output")
        target, observed = self.split_missing(target)
        label = self._column(target, "target")
        if logit.shape != label.shape:
            raise ValueError(f"Bernoulli: {len(logit)} outputs for {len(label)} targets")
        log_prob = -F.binary_cross_entropy_with_logits(logit, label.to(logit.dtype), reduction="none")
        # Other labels have probability 0; the formula would still return a number for them.
        return summed(log_prob.masked_fill((label != 0) & (label != 1), -math.inf)[:, None], observed)

    applies_itself = (nn.Sigmoid, nn.LogSigmoid, nn.Softmax)

    def doubt(self, low: float, high: float) -> str | None:
        if not 0 <= low <= high <= 1:
            return None
        return (
            f"all outputs lie in [{low:.3g}, {high:.3g}], but Bernoulli needs logits, which are usually negative for "
            "some data: if the network applies a sigmoid, remove it"
        )

    def check_target(self, output: Tensor, target: Tensor) -> None:
        target = self._column(self._known(target), "target")
        odd = target[(target != 0) & (target != 1)]
        if odd.numel():
            raise ValueError(f"Bernoulli: targets must be 0 or 1, got {odd.reshape(-1)[0].item()}")

    def probabilities(self, output: Tensor) -> Tensor:
        logit = self._column(output, "output")
        return torch.stack([torch.sigmoid(-logit), torch.sigmoid(logit)], -1)

    def labels(self, target: Tensor) -> Tensor:
        return self._column(target, "target").long()

    @staticmethod
    def _column(tensor: Tensor, name: str) -> Tensor:
        if tensor.dim() == 2 and tensor.shape[1] == 1:
            tensor = tensor[:, 0]
        if tensor.dim() != 1:
            raise ValueError(f"Bernoulli needs an {name} of shape (n,) or (n, 1), got {tuple(tensor.shape)}")
        return at_least_float32(tensor) if tensor.is_floating_point() else tensor.long()


class PairwiseScore(nn.Module):
    """Scores an item and compares two: the output is score(a) - score(b), the log odds that a is preferred.

        P(a is preferred to b | θ) = sigmoid(score(a) - score(b))

    With the likelihood `Bernoulli` it is Bradley and Terry's model. A batch is ((a, b), y): the items' inputs, first
    axis n each, and y = 1 if a is preferred, else 0; of (winner, loser) pairs all y are 1. Predictions of (a, b) have
    the probabilities (n, 2) that b or a is preferred. A constant added to all scores changes nothing, so only the prior
    fixes it: compare scores, not their level.

    Args:
        net: returns a score for each item, shape (n,) or (n, 1).

    Source: Bradley & Terry 1952.

    >>> compare = PairwiseScore(nn.Linear(2, 1, bias=False))
    >>> a, b = torch.randn(3, 2), torch.randn(3, 2)
    >>> torch.equal(compare(a, b), -compare(b, a))
    True
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise TypeError(f"net should be a torch module that scores an item, got a {type(net).__name__}")
        self.net = net

    def forward(self, a: Any, b: Any) -> Tensor:
        """Return score(a) - score(b), the network's shape.

        Args:
            a, b: inputs of the items, as the network takes them.

        Raises:
            ValueError: if the network returns no single score for each item.
        """
        first: Tensor = self.net(a)
        second: Tensor = self.net(b)
        if first.dim() != 1 and first.shape[1:] != (1,):
            raise ValueError(
                f"PairwiseScore needs one score for each item, shape (n,) or (n, 1), and net returned "
                f"{tuple(first.shape)}: change its last layer"
            )
        return first - second


class Ordinal(ClassLikelihood):
    """Ordered classes: the network's output is one score, and cut points c_1 < … < c_(K-1) divide its line.

        P(y ≤ k | x,θ) = sigmoid(c_(k+1) - output),   k = 0 … K-2

    Output (n,) or (n, 1), target integer labels (n,) or (n, 1) in 0 … K-1. The cut points are parameters, `first_cut`
    and the logarithms of their gaps, sampled under the module's prior. They begin at equal probabilities for score 0.

    Args:
        num_classes: K, at least 3; for two classes use `Bernoulli`.
        missing: the value of targets that are not observed, see `Likelihood`.

    Raises:
        ValueError: for fewer than 3 classes.

    Source: McCullagh 1980 (cumulative logits).

    >>> Ordinal(4).probabilities(torch.zeros(1, 1))
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]], grad_fn=<ExpBackward0>)
    """

    def __init__(self, num_classes: int, missing: float | None = None) -> None:
        super().__init__(missing)
        check_count("num_classes", num_classes)
        if num_classes < 3:
            raise ValueError(f"num_classes must be at least 3, got {num_classes}: use Bernoulli for two classes")
        self.num_classes = num_classes
        cuts = torch.logit(torch.arange(1, num_classes, dtype=torch.float64) / num_classes)
        self.first_cut = nn.Parameter(cuts[0].float())
        self.log_gaps = nn.Parameter(cuts.diff().log().float())

    @property
    def cuts(self) -> Tensor:
        """The cut points in increasing order, shape (K-1,)."""
        return torch.cat([self.first_cut[None], self.first_cut + self.log_gaps.exp().cumsum(0)])

    def num_outputs(self, targets: int) -> int:
        return 1

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        target, observed = self.split_missing(target)
        found = self._log_probabilities(output)
        if target.is_floating_point() or target.shape not in (found.shape[:1], (len(found), 1)):
            raise ValueError(
                f"Ordinal: {len(found)} outputs for integer labels of shape {tuple(target.shape)} and {target.dtype}"
            )
        chosen = -F.nll_loss(found, self.labels(target), reduction="none", ignore_index=NO_LABEL)
        return summed(chosen[:, None], observed)

    def check_target(self, output: Tensor, target: Tensor) -> None:
        target = self._known(target)
        if target.is_floating_point() or not target.numel():
            return
        low, high = target.long().min().item(), target.long().max().item()
        if low < 0 or high >= self.num_classes:
            raise ValueError(
                f"Ordinal: labels from {low} to {high} for num_classes={self.num_classes}; labels count from 0"
            )

    def probabilities(self, output: Tensor) -> Tensor:
        return self._log_probabilities(output).exp()

    def labels(self, target: Tensor) -> Tensor:
        return super().labels(target[:, 0] if target.dim() == 2 and target.shape[1] == 1 else target)

    def _log_probabilities(self, output: Tensor) -> Tensor:
        """Return log p_k, by sigmoid(b) - sigmoid(a) = sigmoid(b)·sigmoid(-a)·(1 - exp(a - b)), shape (n, K)."""
        score = at_least_float32(output)
        if score.dim() == 2 and score.shape[1] == 1:
            score = score[:, 0]
        if score.dim() != 1:
            raise ValueError(f"Ordinal needs an output of shape (n,) or (n, 1), got {tuple(score.shape)}")
        edges = self.cuts.to(score.dtype) - score[:, None]
        up_to, above = F.logsigmoid(edges), F.logsigmoid(-edges)
        gaps = self.log_gaps.to(score.dtype).exp()
        within = up_to[:, 1:] + above[:, :-1] + torch.log(-torch.expm1(-gaps))
        return torch.cat([up_to[:, :1], within, above[:, -1:]], 1)


def _are_soft(target: Tensor) -> bool:
    return target.is_floating_point() and target.dim() == 2


def _check_soft(target: Tensor) -> None:
    """Raise unless soft labels, whose row is NaN if it is not observed, are probabilities."""
    known = target[~target.isnan().all(1)]
    bad = known[~_are_rows_of_probabilities(known)]
    if len(bad):
        values = ", ".join(f"{value:.4g}" for value in bad[0][:4].tolist())
        raise ValueError(
            f"Categorical: soft labels must be probabilities that sum to 1, got a row ({values}"
            f"{', …' if bad.shape[1] > 4 else ''}) with the sum {float(bad[0].sum()):.4g}: divide counts of votes by "
            "their sum (y / y.sum(1, keepdim=True)), or use MultiLabelBernoulli for several labels at once"
        )


def _are_rows_of_probabilities(rows: Tensor) -> Tensor:
    """Return whether each row is in [0, 1] and sums to 1, up to rounding, shape (n,)."""
    tolerance = 1e-4 if rows.dtype in (torch.float32, torch.float64) else 0.02
    return (rows >= 0).all(1) & ((rows.float().sum(1) - 1).abs() <= tolerance)
