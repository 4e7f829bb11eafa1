"""Targets of which only bounds are known: numbers below a detection limit, in an interval, or not yet reached."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from lightning_sgmcmc.likelihoods.base import (
    COVERAGE_LEVELS,
    COVERAGES,
    Likelihood,
    at_least_float32,
    covered,
    summed,
    where_observed,
)
from lightning_sgmcmc.predictions import Prediction
from lightning_sgmcmc.predictions.distributions import is_discrete, log_probability_between
from lightning_sgmcmc.tables.arrays import as_tensor
from lightning_sgmcmc.tensors import widest


class Censored(Likelihood):
    """Bounds of numbers as targets: a term is a density of a known number, else the probability between the bounds.

        log p(y|x,θ) = Σ_d log p(y_d)  if lower_d = upper_d,   log P(lower_d < Y_d ≤ upper_d)  else

    The last axis of a target is (lower, upper): shape (n, 2), or (n, D, 2) of D numbers. Equal bounds are an observed
    number; upper = inf is right-censored, such as a duration that has not ended; lower = -inf is left-censored, such as
    a concentration below the detection limit; two NaN are not observed. `right_censored(time, event)` makes such
    targets. With `Gaussian` it is the Tobit model. Censoring must not depend on the number beyond what x explains.

    Predictions are of the number itself, not of its bounds: mean, quantiles, and `survival(t)` = P(Y > t). Metrics are
    `nll`, and the coverage of central intervals, to which a target belongs by the share that makes them exact.

    Args:
        likelihood: of the number: `Gaussian`, `HeteroscedasticGaussian`, `MixtureOfGaussians`, `LogNormal`, `Weibull`,
            or one whose `distribution` has the methods `log_cdf(value)` and `log_survival(value)`.

    Raises:
        TypeError: for a likelihood of counts or classes, or a distribution without these methods.
        ValueError: for a likelihood with a value of its own for missing targets.

    Source: Tobin 1958; Kalbfleisch & Prentice 2002, chapter 3.

    >>> from lightning_sgmcmc.likelihoods import Gaussian
    >>> bounds = torch.tensor([[0.0, 0.0], [0.0, torch.inf], [-1.0, 1.0]])
    >>> Censored(Gaussian()).log_prob(torch.zeros(3), bounds)
    tensor([-0.9189, -0.6931, -0.3817])
    """

    metric_names = ("nll", *COVERAGES)

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        law = getattr(likelihood, "distribution", None)
        if not isinstance(likelihood, Likelihood) or law is None or is_discrete(law):
            raise TypeError(
                f"likelihood should be one of real numbers, such as Gaussian() or Weibull(), got {likelihood}"
            )
        if not all(hasattr(law, name) for name in ("log_cdf", "log_survival")):
            raise TypeError(
                f"likelihood={type(likelihood).__name__} has a {law.__name__}, which has no log_cdf(value) and "
                "log_survival(value): use Gaussian, LogNormal or Weibull, or define them in a subclass of it"
            )
        if likelihood.missing is not None:
            raise ValueError(f"missing={likelihood.missing:g} is no bound: mark missing targets by two NaN")
        self.likelihood = likelihood
        self.distribution = law
        self.applies_itself = likelihood.applies_itself

    def components(self, output: Tensor) -> dict[str, Tensor]:
        return self.likelihood.components(output)

    def terms(self, output: Tensor) -> dict[str, Tensor]:
        return self.likelihood.terms(output)

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        law: Any = self.law(widest(output))
        bounds = self._bounds(target, law)
        low, high = widest(bounds.low), widest(bounds.high)
        has_low, has_high = bounds.has_low, bounds.has_high
        # Every branch gets numbers at which it is finite, so that the gradients of those not chosen are 0.
        point = torch.where(has_low, low, torch.where(has_high & bounds.is_possible, high, 1.0))
        is_between = has_low & has_high & (low < high)
        each = torch.where(has_high, law.log_cdf(point), 0.0)
        each = torch.where(has_low, law.log_survival(point), each)
        between = log_probability_between(law, point, torch.where(is_between, high, point + 1))
        each = torch.where(is_between, between, each)
        each = torch.where(low == high, law.log_prob(point), each)
        each = torch.where(bounds.is_possible, each, -math.inf)
        return summed(each, bounds.is_known).to(at_least_float32(output).dtype)

    def target_terms(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        law = self.law(output)
        bounds = self._bounds(target, law)
        both = {"cdf": bounds.high, "cdf_below": bounds.low}
        return {name: where_observed(law.cdf(at), bounds.is_known, math.nan) for name, at in both.items()}

    def metrics(
        self, terms: Mapping[str, Tensor], log_density: Tensor, target: Tensor, scale: float | Tensor
    ) -> dict[str, Tensor]:
        known = ~terms["cdf"].isnan()
        cdf, below = terms["cdf"][known], terms["cdf_below"][known]
        # Only the density of a number that is known has a unit.
        numbers = int((target[..., 0] == target[..., 1]).sum())
        metrics = {"nll": -log_density.mean() + math.log(float(scale)) * numbers / len(target)}
        inside = (covered(cdf, below, level) for level in COVERAGE_LEVELS)
        return metrics | {name: share.mean() for name, share in zip(COVERAGES, inside, strict=True)}

    def prediction(self, terms: Mapping[str, Tensor], per_sample: Tensor | None) -> Prediction:
        return self.likelihood.prediction(terms, per_sample)

    def scored(self, prediction: Prediction, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and targets of the numbers that are known, shape (m,)."""
        low, high = (part.reshape(prediction.mean.shape) for part in target.unbind(-1))
        return prediction.mean[low == high], low[low == high]

    def chance_nll(self, target: Tensor) -> float | None:
        law: Any = self.distribution
        is_positive = getattr(law.support, "lower_bound", -math.inf) == 0
        bounds = widest(target).reshape(len(target), -1, 2)
        found = sum([_lowest_nll(own, is_positive) for own in bounds.unbind(1)])
        return found / int((~bounds.isnan().any(-1)).any(1).sum()) if math.isfinite(found) else None

    def check_scaling(self, scale: float | Tensor, target: Tensor) -> None:
        if isinstance(scale, Tensor) and scale.numel() > 1:
            raise ValueError(
                f"target_std has shape {tuple(scale.shape)}, but the bounds of a target have one unit: scale both "
                "by one number, or leave them as they are (TableDataModule: task='censored')"
            )

    def check_target(self, output: Tensor, target: Tensor) -> None:
        law = self.law(output)
        bounds, name = self._bounds(target, law), f"Censored({type(self.likelihood).__name__})"
        low, high = bounds.low, bounds.high
        faults = {
            "lower and upper must both be NaN of a target that is not observed": low.isnan() != high.isnan(),
            "lower must be at most upper": low > high,
            f"upper must be in the support, {law.support}, and not standardised": ~bounds.is_possible & (low <= high),
            "bounds that exclude nothing say nothing: pass two NaN": bounds.is_known
            & ~bounds.has_low
            & ~bounds.has_high,
        }
        for fault, where in faults.items():
            if bool(where.any()):
                found = low[where][0].item(), high[where][0].item()
                raise ValueError(f"{name}: {fault}, got (lower, upper) = ({found[0]:.6g}, {found[1]:.6g})")

    def _bounds(self, target: Tensor, law: Any) -> "_Bounds":
        shape = tuple(law.batch_shape)
        if target.dim() < 2 or target.shape[-1] != 2 or not target.is_floating_point():
            raise ValueError(
                "Censored needs targets whose last axis is (lower, upper), shape (n, 2) or (n, …, 2), of a "
                f"floating-point type, got {tuple(target.shape)} of {target.dtype}: see right_censored(time, event)"
            )
        low, high = (at_least_float32(part if part.dim() > 1 else part[:, None]) for part in target.unbind(-1))
        if tuple(low.shape) != shape:
            raise ValueError(f"Censored: outputs are distributions of shape {shape}, for {tuple(low.shape)} bounds")
        end = float(getattr(law.support, "lower_bound", -math.inf))
        return _Bounds(
            low, high, ~(low.isnan() & high.isnan()), low > end, high < math.inf, (high > end) & (low <= high)
        )


class _Bounds(NamedTuple):
    """Bounds of numbers, shape (n, …), whether a number is known at all, has either bound, and can lie between them."""

    low: Tensor
    high: Tensor
    is_known: Tensor
    has_low: Tensor
    has_high: Tensor
    is_possible: Tensor


def _lowest_nll(bounds: Tensor, is_positive: bool) -> float:
    """Return the NLL in nats of bounds, shape (n, 2), under the most likely normal distribution, or of positive numbers
    under the better of a log-normal and a Weibull; NaN of bounds that determine none."""
    low, high = bounds[~bounds.isnan().any(1)].cpu().numpy().T
    if is_positive:
        low = low.clip(0)
    known, begun, ended = low == high, high == math.inf, low <= (0 if is_positive else -math.inf)
    between = ~(known | begun | ended)
    within = np.stack([low, high], 1)[between]
    if len(np.unique(low[known])) + len(within) < 2:
        return math.nan
    data = stats.CensoredData(low[known], left=high[ended], right=low[begun], interval=within)
    laws = (stats.lognorm, stats.weibull_min) if is_positive else (stats.norm,)
    fits = [law(*law.fit(data, **({"floc": 0} if is_positive else {}))) for law in laws]
    return float(
        min(
            -law.logpdf(low[known]).sum()
            - law.logcdf(high[ended]).sum()
            - law.logsf(low[begun]).sum()
            - np.log(law.cdf(within[:, 1]) - law.cdf(within[:, 0])).sum()
            for law in fits
        )
    )


def right_censored(time: Any, event: Any) -> Tensor:
    """Return targets of `Censored`, (n, 2), from durations and whether they have ended.

    Args:
        time: the durations, or those seen so far, shape (n,).
        event: 1 or True if the event came at that time, 0 or False if it had not come yet, shape (n,).

    Raises:
        ValueError: for arrays of other shapes, or other values of `event`.

    Example::

        from lightning_sgmcmc.likelihoods import right_censored

        time, event = [2.0, 5.0], [True, False]  # the second lasted for at least 5
        module = BayesianModule(torch.nn.Linear(3, 1), Censored(Weibull(learned=True)), lr=1e-3)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:2], right_censored(time, event)))

    >>> right_censored([2.0, 5.0], [True, False])
    tensor([[2., 2.],
            [5., inf]])
    """
    times, events = as_tensor("time", time).float(), as_tensor("event", event)
    if times.dim() != 1 or times.shape != events.shape:
        raise ValueError(
            f"time and event should have one shape (n,), got {tuple(times.shape)} and {tuple(events.shape)}"
        )
    if not bool(((events == 0) | (events == 1)).all()):
        raise ValueError(f"event must be 0 or 1, got {events[(events != 0) & (events != 1)][0].item()}")
    return torch.stack([times, times.masked_fill(events == 0, math.inf)], 1)
