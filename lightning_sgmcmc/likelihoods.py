"""Likelihoods: the density of a target given the network's output, and the predictive distribution.

A likelihood has three parts. `log_prob` returns the log-density of each datum. `terms` returns the tensors whose
averages over posterior samples describe the predictive distribution. `metrics` and `prediction` turn these averages
into metrics and predictions. Averages are over probabilities and moments, never over logits.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_sgmcmc.checks import check_flag, check_within
from lightning_sgmcmc.diagnostics.metrics import classification_metrics, predictive_entropy
from lightning_sgmcmc.predictions import ClassPrediction, Prediction, RegressionPrediction


class Likelihood(nn.Module, ABC):
    """Density of a target given the network's output; subclass it for your own."""

    per_sample_term: str
    """The entry of `terms` that per-sample predictions keep for each sample."""

    metric_names: tuple[str, ...] = ("nll",)
    """The names that `metrics` returns."""

    applies_itself: tuple[type[nn.Module], ...] = ()
    """Layers that the likelihood applies to the output, so that a network must not end in one."""

    @abstractmethod
    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """Return log p(target | output) of each datum, shape (n,)."""

    @abstractmethod
    def terms(self, output: Tensor) -> dict[str, Tensor]:
        """Return the tensors, first axis n, whose average over samples describes the predictive distribution."""

    def check_target(self, output: Tensor, target: Tensor) -> None:
        """Check the values of outputs and targets; called with some of a fit's first batches, and after a failure.

        Raises:
            ValueError: if the likelihood has no density for a target, or the outputs are of another kind.
        """

    def doubt(self, low: float, high: float) -> str | None:
        """Return what is probably wrong if all outputs of a fit's first batches are in [low, high], or None."""
        return None

    def target_terms(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the tensors to average that depend on the target, for `metrics`."""
        return {}

    def chance_nll(self, target: Tensor) -> float | None:
        """Return the lowest mean NLL per datum of a constant output, in nats; None if the likelihood does not know.

        Args:
            target: targets of many data.
        """
        return None

    @abstractmethod
    def metrics(
        self, terms: Mapping[str, Tensor], log_density: Tensor, target: Tensor, scale: float
    ) -> dict[str, Tensor]:
        """Return metrics of the averaged predictive; all tensors are in host memory if the module is on CUDA.

        Args:
            terms: the averages of `terms` and `target_terms`.
            log_density: log of the averaged density of each datum, shape (n,).
            target: the targets.
            scale: the divisor that standardised the targets; metrics are in the original units.
        """

    @abstractmethod
    def prediction(self, terms: Mapping[str, Tensor], per_sample: Tensor | None) -> Prediction:
        """Return the predictive that the averages of `terms` describe."""


class _ClassLikelihood(Likelihood):
    """Base of the likelihoods with class probabilities."""

    per_sample_term = "probabilities"
    metric_names = ("accuracy", "nll", "brier", "ece", "entropy")

    def probabilities(self, output: Tensor) -> Tensor:
        raise NotImplementedError

    def labels(self, target: Tensor) -> Tensor:
        return target

    def chance_nll(self, target: Tensor) -> float | None:
        counts = self.labels(target).reshape(-1).unique(return_counts=True)[1].double()
        return float(torch.special.entr(counts / counts.sum()).sum())

    def terms(self, output: Tensor) -> dict[str, Tensor]:
        probabilities = self.probabilities(output)
        return {"probabilities": probabilities, "sample_entropy": predictive_entropy(probabilities)}

    def metrics(
        self, terms: Mapping[str, Tensor], log_density: Tensor, target: Tensor, scale: float
    ) -> dict[str, Tensor]:
        metrics = classification_metrics(terms["probabilities"], self.labels(target))
        metrics["nll"] = -log_density.mean()  # the same number, without the clamp
        return metrics

    def prediction(self, terms: Mapping[str, Tensor], per_sample: Tensor | None) -> Prediction:
        entropy = predictive_entropy(terms["probabilities"])
        return ClassPrediction(
            probabilities=terms["probabilities"],
            entropy=entropy,
            mutual_information=(entropy - terms["sample_entropy"]).clamp_min(0),
            sample_probabilities=per_sample,
        )


NO_LABEL = torch.iinfo(torch.int64).min


class Categorical(_ClassLikelihood):
    """Classification: the network's output is K logits, log p(y|x,θ) = log softmax(output)_y.

    Output (n, K), target integer labels (n,).

    >>> logits = torch.tensor([[0.0, 0.0], [0.0, torch.inf]])
    >>> Categorical().log_prob(torch.zeros(1, 2), torch.tensor([1]))
    tensor([-0.6931])
    """

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        if output.dim() != 2 or target.shape != output.shape[:1] or target.is_floating_point():
            raise ValueError(
                "Categorical needs logits of shape (n, K) and integer labels of shape (n,), got "
                f"{tuple(output.shape)} and {tuple(target.shape)} of {target.dtype}"
            )
        # By default torch ignores the label -100, as if the datum were certain.
        return -F.cross_entropy(_at_least_float32(output), target, reduction="none", ignore_index=NO_LABEL)

    applies_itself = (nn.Softmax, nn.Softmax2d)

    def check_target(self, output: Tensor, target: Tensor) -> None:
        if output.dim() == 2 and output.shape[1] == 1:
            raise ValueError(
                "Categorical: one logit makes every datum certain, so nothing would be learned: use Bernoulli, or a "
                "network with one output for each class"
            )
        if output.dim() == 2 and len(output) and _are_probabilities(output):
            raise ValueError(
                f"Categorical: the outputs lie in [{output.min().item():.3g}, {output.max().item():.3g}] and each row "
                "sums to 1, but it needs logits: remove the softmax"
            )
        if target.dim() == 1 and output.dim() == 2 and not target.is_floating_point() and len(target):
            low, high = target.min().item(), target.max().item()
            if low < 0 or high >= output.shape[1]:
                raise ValueError(
                    f"Categorical: labels from {low} to {high} for {output.shape[1]} logits; labels count from 0, so "
                    "the network needs more outputs or the data other labels"
                )

    def probabilities(self, output: Tensor) -> Tensor:
        return _at_least_float32(output).softmax(-1)


class Bernoulli(_ClassLikelihood):
    """Two classes: the network's output is one logit, p(y=1|x,θ) = sigmoid(output).

    Output (n,) or (n, 1), target 0 or 1 of any dtype, shape (n,) or (n, 1). Predictive probabilities have K = 2
    columns.
    """

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        logit = self._column(output, "output")
        label = self._column(target, "target")
        if logit.shape != label.shape:
            raise ValueError(f"Bernoulli: {len(logit)} outputs for {len(label)} targets")
        log_prob = -F.binary_cross_entropy_with_logits(logit, label.to(logit.dtype), reduction="none")
        # Other labels have probability 0; the formula would still return a number for them.
        return log_prob.masked_fill((label != 0) & (label != 1), -math.inf)

    applies_itself = (nn.Sigmoid, nn.LogSigmoid, nn.Softmax)

    def doubt(self, low: float, high: float) -> str | None:
        if not 0 <= low <= high <= 1:
            return None
        return (
            f"all outputs lie in [{low:.3g}, {high:.3g}], but Bernoulli needs logits, which are usually negative for "
            "some data: if the network applies a sigmoid, remove it"
        )

    def check_target(self, output: Tensor, target: Tensor) -> None:
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
        return _at_least_float32(tensor) if tensor.is_floating_point() else tensor


class Gaussian(Likelihood):
    """Regression: y = output + noise, log p(y|x,θ) = Σ_d log N(y_d; output_d, std²).

    Output and target (n, D) or (n,).

    Args:
        std: standard deviation of the noise, > 0, in the units of the (standardised) target; its initial value if it
            is learned.
        learned: whether to sample log(std) together with the weights. It is then the module's parameter
            `likelihood.log_std`, under the module's prior.

    Raises:
        ValueError: if std is not positive.

    >>> Gaussian(std=2.0).log_prob(torch.zeros(1, 1), torch.tensor([[2.0]]))
    tensor([-2.1121])
    """

    per_sample_term = "mean"
    metric_names = ("rmse", "nll", "coverage_50", "coverage_90")
    coverage_levels = (0.5, 0.9)

    def __init__(self, std: float = 1.0, learned: bool = False) -> None:
        super().__init__()
        check_within("std", std, "(0, inf)")
        check_flag("learned", learned)
        self.std = float(std)
        self.learned = learned
        log_std = torch.tensor(math.log(std))
        if learned:
            self.log_std = nn.Parameter(log_std)
        else:
            self.register_buffer("log_std", log_std, persistent=False)

    def check_target(self, output: Tensor, target: Tensor) -> None:
        if target.is_floating_point() and not target.isfinite().all():
            raise ValueError("Gaussian: targets must be finite numbers, and a batch has NaN or infinite ones")

    def chance_nll(self, target: Tensor) -> float | None:
        variance = self._columns(target).double().var(0, correction=0)
        noise = variance if self.learned else torch.full_like(variance, self.std**2)
        return float((variance / noise + (2 * math.pi * noise).log()).sum() / 2) if bool((noise > 0).all()) else None

    def extra_repr(self) -> str:
        return f"std={self.std}, learned={self.learned}"

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        output, target = self._matched(output, target)
        standardised = (target - output) / self.log_std.exp()
        return (-standardised.square() / 2 - self.log_std - math.log(2 * math.pi) / 2).sum(-1)

    def terms(self, output: Tensor) -> dict[str, Tensor]:
        mean = self._columns(output)
        variance = (2 * self.log_std).exp().expand_as(mean)
        if mean.device.type != "mps":  # which has no float64
            mean = mean.double()  # E[f²] - E[f]² below needs the digits
        return {"mean": mean, "square": mean.square(), "variance": variance}

    def target_terms(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        # The averaged probability integral transform is the mixture's own, so intervals need no stored samples.
        output, target = self._matched(output, target)
        return {"cdf": torch.special.ndtr((target - output) / self.log_std.exp())}

    def metrics(
        self, terms: Mapping[str, Tensor], log_density: Tensor, target: Tensor, scale: float
    ) -> dict[str, Tensor]:
        mean, target = self._matched(terms["mean"], target)
        metrics = {
            "rmse": (mean - target).square().mean().sqrt() * scale,
            "nll": -log_density.mean() + mean.shape[1] * math.log(scale),
        }
        for level in self.coverage_levels:
            inside = (terms["cdf"] - 0.5).abs() <= level / 2
            metrics[f"coverage_{level * 100:.0f}"] = inside.to(mean.dtype).mean()
        return metrics

    def prediction(self, terms: Mapping[str, Tensor], per_sample: Tensor | None) -> Prediction:
        dtype = terms["variance"].dtype
        epistemic = (terms["square"] - terms["mean"].square()).clamp_min(0).to(dtype)
        return RegressionPrediction(
            mean=terms["mean"].to(dtype),
            std=(epistemic + terms["variance"]).sqrt(),
            epistemic_std=epistemic.sqrt(),
            sample_means=None if per_sample is None else per_sample.to(dtype),
        )

    @staticmethod
    def _columns(tensor: Tensor) -> Tensor:
        tensor = _at_least_float32(tensor)
        if tensor.dim() == 1:
            return tensor[:, None]
        if tensor.dim() != 2:
            raise ValueError(f"Gaussian needs outputs and targets of shape (n, D) or (n,), got {tuple(tensor.shape)}")
        return tensor

    def _matched(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        output, target = self._columns(output), self._columns(target)
        if output.shape != target.shape:
            raise ValueError(
                f"Gaussian: outputs of shape {tuple(output.shape)} for targets of shape {tuple(target.shape)}"
            )
        return output, target


def _are_probabilities(output: Tensor) -> bool:
    """Return whether all rows are in [0, 1] and sum to 1, up to rounding."""
    tolerance = 1e-4 if output.dtype in (torch.float32, torch.float64) else 0.02
    rows = output.detach().float()
    return bool(((rows >= 0).all() & ((rows.sum(1) - 1).abs() <= tolerance).all()).item())


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
