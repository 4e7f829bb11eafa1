"""The base of all likelihoods: what one consists of, and the defaults for distributions of numbers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from lightning_sgmcmc.checks import check_flag, check_within, names_arguments
from lightning_sgmcmc.predictions import ClassPrediction, CountPrediction, Prediction, RegressionPrediction
from lightning_sgmcmc.predictions.distributions import has_cdf, is_discrete
from lightning_sgmcmc.tables.columns import check_broadcasts
from lightning_sgmcmc.tensors import widest

COVERAGE_LEVELS = (0.5, 0.9)
COVERAGES = tuple(f"coverage_{level * 100:.0f}" for level in COVERAGE_LEVELS)


WEIGHTED = (
    "counts some data several times, so the samples would be of no posterior: keep the data as they are, and choose "
    "the class by its cost, or correct the probabilities for another prior, afterwards (docs/howto/decisions.md)"
)


class Likelihood(nn.Module):
    """Density of a target given the network's output; subclass it for your own.

    A likelihood of numbers is a class of `torch.distributions` and its arguments as a function of the output. Log
    densities, averages, metrics, predictions with intervals, and simulated targets come from these two. Parameters of
    the likelihood are sampled with the weights, under the module's prior; store arguments under their names, so
    that a sample store can rebuild it. For other targets define `log_prob`, `terms`, `metrics` and `prediction`. With
    `log_prob` alone a fit has the NLL as its metric, and predictions are those of the module's `predictive_terms`.

    A target that is NaN, or equal to `missing`, is not observed: it has no term in `log_prob`, and evaluations leave it
    out. A target (n, D) may lack some of its numbers.

    Args:
        missing: the value of targets that are not observed, besides NaN; None without one.

    >>> class Gamma(Likelihood):
    ...     '''Positive numbers: output (n, 2), target (n,); shape exp(output_0), rate exp(output_1).'''
    ...
    ...     distribution = torch.distributions.Gamma
    ...
    ...     def components(self, output):
    ...         return {"concentration": output[:, 0].exp(), "rate": output[:, 1].exp()}
    >>> Gamma().log_prob(torch.zeros(1, 2), torch.tensor([2.0]))
    tensor([-2.])
    """

    distribution: type[Any] | None = None
    """The distribution of each number, called with `components` as its arguments."""

    per_sample_term: str = "mean"
    """The entry of `terms` that per-sample predictions keep for each sample."""

    metric_names: tuple[str, ...] = ("nll",)
    """The names that `metrics` returns."""

    applies_itself: tuple[type[nn.Module], ...] = ()
    """Layers that the likelihood applies to the output, so that a network must not end in one."""

    missing: float | None = None

    refused_arguments: ClassVar[Mapping[str, str]] = {
        name: f"{name}=… {WEIGHTED}" for name in ("weight", "class_weight", "pos_weight")
    }
    """Arguments of losses that no density has, by name, and what to do instead."""

    def __init__(self, missing: float | None = None) -> None:
        super().__init__()
        if missing is not None:
            check_within("missing", missing, "(-inf, inf)")
        self.missing = missing

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = any("metric_names" in vars(base) for base in cls.__mro__[: cls.__mro__.index(Likelihood)])
        if cls.distribution is not None and not own:
            cls.metric_names = ("rmse", "nll", *(COVERAGES if has_cdf(cls.distribution) else ()))
        names_arguments(cls)

    def components(self, output: Tensor) -> dict[str, Tensor]:
        """Return the arguments of `distribution` for each number, by name.

        Args:
            output: the network's output, in float32 or float64.

        Returns:
            tensors that broadcast to (n, D) or (n, …), the targets' shape; (n,) is (n, 1).
        """
        raise NotImplementedError(f"{type(self).__name__} needs components(output) for its distribution")

    def num_outputs(self, targets: int) -> int:
        """Return the number of outputs that a network needs.

        Args:
            targets: D of numbers and counts, K of classes.
        """
        return targets

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """Return log p(target | output) of each datum, shape (n,)."""
        target, observed = self.split_missing(target)
        law, target = self._matched(output, target)
        return summed(law.log_prob(target), observed)

    # -- what is not observed -----------------------------------------------------------------------------------------

    def observed_entries(self, target: Tensor) -> Tensor | None:
        """Return whether each entry of a target is observed, in its shape; None if all are, whatever their values."""
        observed = ~target.isnan() if target.is_floating_point() else None
        if self.missing is None:
            return observed
        # torch compares a uint8 156 with -100 as equal.
        known = (target if observed is not None else target.long()) != self.missing
        return known if observed is None else observed & known

    def observed(self, target: Tensor) -> Tensor | None:
        """Return whether each datum has an observed entry, shape (n,); None if all have, whatever their values."""
        entries = self.observed_entries(target)
        return None if entries is None else entries.flatten(1).any(1) if entries.dim() > 1 else entries

    def split_missing(self, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return a target with 0 where it is not observed, for which a density is finite, and `observed_entries`."""
        entries = self.observed_entries(target)
        return (target, None) if entries is None else (target.masked_fill(~entries, 0), entries)

    def has_predictive(self) -> bool:
        """Return whether it says what a predictive consists of; of a `log_prob` alone only densities are averaged."""
        return self.distribution is not None or type(self).terms is not Likelihood.terms

    def terms(self, output: Tensor) -> dict[str, Tensor]:
        """Return the tensors, first axis n, whose average over samples describes the predictive distribution."""
        law = self.law(output)
        mean, variance = law.mean, law.variance
        mean = widest(mean)  # E[f²] - E[f]² below needs the digits
        return {"mean": mean, "square": mean.square(), "variance": variance}

    def target_terms(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the tensors to average that depend on the target, for `metrics`."""
        if self.distribution is None or not has_cdf(self.distribution):
            return {}
        target, observed = self.split_missing(target)
        law, target = self._matched(output, target)
        # The averaged probability integral transform is the mixture's own, so intervals need no stored samples.
        terms = {"cdf": law.cdf(target)}
        if is_discrete(law):
            terms["cdf_below"] = law.cdf(target - 1)
        return {name: where_observed(term, observed, math.nan) for name, term in terms.items()}

    def metrics(
        self, terms: Mapping[str, Tensor], log_density: Tensor, target: Tensor, scale: float | Tensor
    ) -> dict[str, Tensor]:
        """Return metrics of the averaged predictive; all tensors are in host memory if the module is on CUDA.

        The defaults are `rmse`, `nll` and, with a distribution function, the share of targets in the central 50 % and
        90 % intervals. A count on an interval's edge belongs to it by the share that makes the interval exact. All but
        `nll`, which is of an example's numbers together, are of single numbers.

        Args:
            terms: the averages of `terms` and `target_terms`.
            log_density: log of the averaged density of each datum, shape (n,).
            target: the targets.
            scale: the divisor that standardised the targets; a tensor that broadcasts to one target, such as (D,) or
                (C, 1, 1), has one for each of its numbers or channels. Metrics are in the original units.
        """
        mean, observed = terms["mean"], self.observed_entries(target)
        target = columns(target, type(self).__name__)
        errors, cdf, below = mean - target, terms.get("cdf"), terms.get("cdf_below")
        scales = scale if isinstance(scale, Tensor) else torch.tensor([scale], dtype=torch.float64)
        logs, factor = scales.log().expand(mean.shape), 1.0 if isinstance(scale, Tensor) else scale
        if isinstance(scale, Tensor):
            errors = errors * scale
        if observed is not None and not bool(observed.all()):
            entries = observed.reshape(mean.shape)
            errors, logs = errors[entries], logs[entries]
            cdf, below = (None if term is None else term[entries] for term in (cdf, below))
        metrics = {
            "rmse": errors.square().mean().sqrt() * factor,
            "nll": -log_density.mean() + float(logs.sum()) / len(mean),
        }
        if cdf is not None:
            inside = (covered(cdf, below, level) for level in COVERAGE_LEVELS)
            metrics |= {name: share.to(mean.dtype).mean() for name, share in zip(COVERAGES, inside, strict=True)}
        return metrics

    def prediction(self, terms: Mapping[str, Tensor], per_sample: Tensor | None) -> Prediction:
        """Return the predictive that the averages of `terms` describe.

        Args:
            terms: the averages of `terms`.
            per_sample: the entry `per_sample_term` of each sample, first axes (S, n), None without.
        """
        dtype = terms["variance"].dtype
        epistemic = (terms["square"] - terms["mean"].square()).clamp_min(0).to(dtype)
        counts = self.distribution is not None and is_discrete(self.distribution)
        kind = CountPrediction if counts else RegressionPrediction
        return kind(
            mean=terms["mean"].to(dtype),
            std=(epistemic + terms["variance"]).sqrt(),
            epistemic_std=epistemic.sqrt(),
            sample_means=None if per_sample is None else per_sample.to(dtype),
        )

    def scored(self, prediction: Prediction, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a metric compares: class probabilities (m, K) and labels (m,), or means and targets (n, D).

        Where some numbers of some data are not observed, means and targets are those of the others, shape (m,).
        """
        if isinstance(prediction, ClassPrediction):
            return prediction.probabilities, target.long().reshape(-1)
        mean, target, observed = prediction.mean, target.reshape(prediction.mean.shape), self.observed_entries(target)
        if observed is None or bool(observed.all()):
            return mean, target
        entries = observed.reshape(mean.shape)
        return mean[entries], target[entries]

    def reset_parameters(self) -> None:
        """Keep the parameters: every chain begins at the given values, whereas layers are drawn for each chain."""

    # -- checks -------------------------------------------------------------------------------------------------------

    def check_target(self, output: Tensor, target: Tensor) -> None:
        """Check the values of outputs and targets; called with some of a fit's first batches, and after a failure.

        Raises:
            ValueError: if the likelihood has no density for a target, or the outputs are of another kind.
        """
        if self.distribution is None:
            return
        check_finite(type(self).__name__, target)
        target, observed = self.split_missing(target)
        law, numbers = self._matched(output, target)
        assert law.support is not None  # all of torch's have one
        wrong = ~law.support.check(numbers).expand(numbers.shape)
        outside = numbers[where_observed(wrong, observed, False)]
        if outside.numel():
            counts = "counts (0, 1, 2, …) that are not standardised"
            wanted = counts if is_discrete(law) else f"in its support, {law.support}"
            raise ValueError(
                f"{type(self).__name__}: targets must be {wanted}, got {outside.reshape(-1)[0].item():.6g}"
            )

    def check_scaling(self, scale: float | Tensor, target: Tensor) -> None:
        """Check the scaling of a fit's targets, the datamodule's `target_std`, with the first batch.

        Raises:
            ValueError: if it is neither one number nor a tensor that broadcasts to one target.
        """
        if self.distribution is not None:
            check_broadcasts("target_std", scale, columns(target, type(self).__name__))

    def doubt(self, low: float, high: float) -> str | None:
        """Return what is probably wrong if all outputs of a fit's first batches are in [low, high], or None."""
        return None

    def chance_nll(self, target: Tensor) -> float | None:
        """Return the lowest mean NLL per example of a constant output, in nats; None if the likelihood does not know.

        Args:
            target: targets of many data.
        """
        return None

    def energy(self, output: Tensor) -> Tensor | None:
        """Return a score of each input that is larger the less the network knows it, shape (n,); None without one."""
        return None

    # -- the distribution ---------------------------------------------------------------------------------------------

    def law(self, output: Tensor) -> Distribution:
        """Return the distribution of the targets, of their shape (n, …)."""
        if self.distribution is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no distribution of numbers: define distribution and components(output), or "
                "log_prob, terms, metrics and prediction; or predictive_terms(x) of the module for predictions alone"
            )
        law: Distribution = self.distribution(**self.kept_components(output), validate_args=False)
        return law

    def kept_components(self, output: Tensor) -> dict[str, Tensor]:
        """Return the components, all of one shape that starts with the targets', (n, …)."""
        found = self.components(at_least_float32(output))
        names = [name for name, p in found.items() if isinstance(p, Tensor)]
        together = torch.broadcast_tensors(*(found[name] for name in names))
        return {n: p[:, None] if p.dim() == 1 else p for n, p in zip(names, together, strict=True)}

    def _matched(self, output: Tensor, target: Tensor) -> tuple[Distribution, Tensor]:
        law, target = self.law(output), columns(target, type(self).__name__)
        if law.batch_shape != target.shape:
            raise ValueError(
                f"{type(self).__name__}: outputs of shape {tuple(output.shape)} are distributions of shape "
                f"{tuple(law.batch_shape)}, for targets of shape {tuple(target.shape)}"
            )
        return law, target

    def _paired(self, name: str, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return outputs and targets of one shape (n, …), since others would broadcast, and `observed_entries`."""
        target, observed = self.split_missing(target)
        output, target = columns(output, name), columns(target, name)
        if output.shape != target.shape:
            raise ValueError(
                f"{name}: outputs of shape {tuple(output.shape)} for targets of shape {tuple(target.shape)}"
            )
        return output, target, observed


names_arguments(Likelihood)


Scales: TypeAlias = float | Sequence[Any]
"""A number > 0, or lists that broadcast to one target, with one for each of its numbers or channels."""


def positive(likelihood: Likelihood, name: str, value: Scales, learned: bool) -> Any:
    """Register the log of an argument as `log_<name>`, and return its number, or its lists of numbers.

    It is a parameter if it is learned, else a buffer that is not stored.
    """
    check_flag("learned", learned)
    if isinstance(value, Sequence | Tensor | np.ndarray) and not isinstance(value, str):
        try:
            each = np.asarray(value if isinstance(value, Sequence) else value.tolist(), dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} must be a number, or a list with one for each target, got {value!r}") from error
        if not each.size:
            raise ValueError(f"{name} is empty: pass a number, or a list with one for each target")
        each = each.reshape(1) if each.size == 1 else each
        for number in each.flatten().tolist():
            check_within(name, number, "(0, inf)")
        value, log_value = each.tolist(), torch.tensor(np.log(each).tolist())
    else:
        check_within(name, value, "(0, inf)")
        value, log_value = float(value), torch.tensor(math.log(value))
    if learned:
        likelihood.register_parameter(f"log_{name}", nn.Parameter(log_value))
    else:
        likelihood.register_buffer(f"log_{name}", log_value, persistent=False)
    return value


def of_each(log_value: Tensor, output: Tensor, name: str) -> Tensor:
    """Return what `positive` registered, after a check that it broadcasts to an output's numbers, (n, D) or (n, …)."""
    check_broadcasts(name, log_value, output)
    return log_value


def by_number(value: Scales, target: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Yield each number that `positive` returned, with the columns of targets (n, …) to which it belongs, (n, m)."""
    numbers = torch.as_tensor(value)
    place = torch.arange(numbers.numel()).reshape(numbers.shape).expand(target.shape[1:]).flatten()
    for index, own in enumerate(numbers.flatten().tolist()):
        yield own, target.flatten(1)[:, place == index]


def covered(cdf: Tensor, below: Tensor | None, level: float) -> Tensor:
    """Return by how much each target is in the central interval, from P(Y ≤ y): 0 or 1, for counts a share."""
    if below is None:
        return (cdf - 0.5).abs() <= level / 2
    low, high = (1 - level) / 2, (1 + level) / 2
    overlap = (cdf.clamp_max(high) - below.clamp_min(low)).clamp_min(0)
    width = cdf - below
    within = (cdf > low) & (cdf < high)
    return torch.where(width > 0, overlap / width.clamp_min(torch.finfo(cdf.dtype).tiny), within.to(cdf.dtype))


def columns(tensor: Tensor, name: str) -> Tensor:
    """Return numbers of shape (n, …), (n, 1) from (n,)."""
    tensor = at_least_float32(tensor if tensor.is_floating_point() else tensor.float())
    if tensor.dim() == 0:
        raise ValueError(f"{name} needs outputs and targets of shape (n, …), got a single number, shape ()")
    return tensor[:, None] if tensor.dim() == 1 else tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a tensor whose half precision is converted to float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def where_observed(tensor: Tensor, observed: Tensor | None, otherwise: float) -> Tensor:
    """Return a tensor of shape (n, …) with another value where a target, (n, …) or (n,), is not observed."""
    if observed is None:
        return tensor
    return tensor.masked_fill(~(observed if observed.dim() > 1 else observed[:, None]), otherwise)


def summed(each: Tensor, observed: Tensor | None) -> Tensor:
    """Return the sum of the observed numbers' log densities, shape (n,), from those of all, shape (n, …)."""
    return where_observed(each, observed, 0.0).flatten(1).sum(-1)


def check_finite(name: str, target: Tensor) -> None:
    """Raise if a target is infinite; NaN is a target that is not observed."""
    if target.is_floating_point() and bool(target.isinf().any()):
        raise ValueError(f"{name}: targets must be finite numbers, and a batch has infinite ones: correct the data")
