"""Likelihoods of positive numbers, such as durations: log-normal and Weibull's."""

import math

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from lightning_sgmcmc.likelihoods.base import Likelihood, Scales, by_number, columns, of_each, positive, summed
from lightning_sgmcmc.predictions import distributions
from lightning_sgmcmc.tensors import widest

LOG_K = (-4.0, 5.0)
"""Where a guess's log k is looked for."""


class LogNormal(Likelihood):
    """Positive numbers with multiplicative noise: the network's output is the log of the median.

        log p(y|x,θ) = Σ_d log N(log y_d; output_d, std²) - log y_d

    Output and target of one shape, as in `Gaussian`, targets above 0: durations, prices, concentrations. They must not
    be centred; a division by a unit is a constant of the output. `Censored(LogNormal())` is for durations that have
    not ended.

    Args:
        std: standard deviation of log y, > 0; its initial value if it is learned. One number, or a list as in
            `Gaussian`.
        learned: whether to sample log(std) together with the weights. It is then the module's parameter
            `likelihood.log_std`, under the module's prior.
        missing: the value of targets that are not observed, see `Likelihood`.

    Raises:
        ValueError: if std is not positive.

    Source: Kalbfleisch & Prentice 2002, chapter 2 (accelerated failure times).

    >>> LogNormal().log_prob(torch.zeros(1, 1), torch.tensor([[1.0]]))
    tensor([-0.9189])
    """

    distribution = distributions.LogNormal
    log_std: Tensor

    def __init__(self, std: Scales = 1.0, learned: bool = False, missing: float | None = None) -> None:
        super().__init__(missing)
        self.std = positive(self, "std", std, learned)
        self.learned = learned

    def components(self, output: Tensor) -> dict[str, Tensor]:
        loc = columns(output, "LogNormal")
        return {"loc": loc, "scale": of_each(self.log_std, loc, "std").exp()}

    def chance_nll(self, target: Tensor) -> float | None:
        logs = _logs_of(self, target)
        variance = (logs - logs.nanmean(0)).square().nanmean(0)
        noise = variance if self.learned else torch.as_tensor(self.std).to(variance).square().expand_as(variance)
        if not bool((noise > 0).all()):
            return None
        return float(((2 * math.pi * noise).log() / 2 + variance / noise / 2 + logs.nanmean(0)).sum())

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return _of_positive(self, output, target)

    def extra_repr(self) -> str:
        return f"std={self.std}, learned={self.learned}"


class Weibull(Likelihood):
    """Positive numbers whose hazard is a power of time: the network's output is the log of the scale.

        P(Y > y|x,θ) = exp(-(y/exp(output))^k),   a hazard that rises for k > 1, falls for k < 1

    Output and target of one shape, as in `Gaussian`, targets above 0, such as durations until a failure. They must not
    be centred. `Censored(Weibull())` is for those that have not ended. k = 1 is the exponential distribution.

    Args:
        concentration: k > 0; its initial value if it is learned. One number, or a list as in `Gaussian`.
        learned: whether to sample log(k) together with the weights. It is then the module's parameter
            `likelihood.log_concentration`, under the module's prior.
        missing: the value of targets that are not observed, see `Likelihood`.

    Raises:
        ValueError: if the concentration is not positive.

    Source: Kalbfleisch & Prentice 2002, chapter 2.

    >>> Weibull().log_prob(torch.zeros(1, 1), torch.tensor([[2.0]]))
    tensor([-2.])
    """

    distribution = distributions.Weibull
    log_concentration: Tensor

    def __init__(self, concentration: Scales = 1.0, learned: bool = False, missing: float | None = None) -> None:
        super().__init__(missing)
        self.concentration = positive(self, "concentration", concentration, learned)
        self.learned = learned

    def components(self, output: Tensor) -> dict[str, Tensor]:
        log_scale = columns(output, "Weibull")
        return {
            "log_scale": log_scale,
            "concentration": of_each(self.log_concentration, log_scale, "concentration").exp(),
        }

    def chance_nll(self, target: Tensor) -> float | None:
        found = 0.0
        for own, logs in by_number(self.concentration, _logs_of(self, target).cpu()):
            middle = logs.nanmean(0)

            def nll(log_k: float, logs: Tensor = logs, middle: Tensor = middle) -> float:
                # of the most likely scale, whose k-th power is the mean of y^k
                power = (math.exp(log_k) * (logs - middle)).exp().nanmean(0).log()
                return float((1 - log_k + power + middle).sum())

            found += minimize_scalar(nll, bounds=LOG_K, method="bounded").fun if self.learned else nll(math.log(own))
        return float(found) if math.isfinite(found) else None

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return _of_positive(self, output, target)

    def extra_repr(self) -> str:
        return f"concentration={self.concentration}, learned={self.learned}"


def _logs_of(likelihood: Likelihood, target: Tensor) -> Tensor:
    """Return the logarithms of positive numbers, NaN of those that are not observed, shape (n, …)."""
    entries = likelihood.observed_entries(target)
    return widest(columns(target if entries is None else target.masked_fill(~entries, math.nan), "durations")).log()


def _of_positive(likelihood: Likelihood, output: Tensor, target: Tensor) -> Tensor:
    """Return log densities, -∞ of targets that are not positive; those that are not observed have no term."""
    entries = likelihood.observed_entries(target)
    target = target if entries is None else target.masked_fill(~entries, 1)
    law, numbers = likelihood._matched(output, target)
    each = law.log_prob(torch.where(numbers > 0, numbers, 1.0))
    return summed(torch.where(numbers > 0, each, -math.inf), entries)
