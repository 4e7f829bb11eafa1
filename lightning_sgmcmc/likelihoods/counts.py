"""Likelihoods of counts."""

import math

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from lightning_sgmcmc.likelihoods.base import Likelihood, Scales, by_number, columns, of_each, positive, summed
from lightning_sgmcmc.predictions import distributions
from lightning_sgmcmc.predictions.distributions import negative_binomial_log_prob, poisson_log_prob
from lightning_sgmcmc.tensors import widest

LEAST_LOG_MEAN = -50.0
"""The log of the rate where all counts are 0."""
LOG_R = (-10.0, 15.0)
"""Where a guess's log r is looked for; at the upper end it is Poisson."""


class Poisson(Likelihood):
    """Counts whose variance is their mean: the network's output is the log of the rate.

        log p(y|x,θ) = Σ_d y_d·output_d - exp(output_d) - log y_d!

    Output and target of one shape, (n,), (n, D), sequences (n, T, D) or fields (n, C, H, W), targets 0, 1, 2, … of any
    dtype. `num_data` counts entries of the first axis, such as images.

    Source: McCullagh & Nelder 1989, chapter 6.

    >>> Poisson().log_prob(torch.zeros(1, 1), torch.tensor([[2]]))
    tensor([-1.6931])
    """

    distribution = distributions.Poisson

    def components(self, output: Tensor) -> dict[str, Tensor]:
        return {"rate": columns(output, "Poisson").exp()}

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        output, target, observed = self._paired("Poisson", output, target)
        return summed(poisson_log_prob(target, output), observed)

    def chance_nll(self, target: Tensor) -> float | None:
        counts = widest(columns(target, "Poisson"))
        counts = counts[~counts.flatten(1).isnan().any(1)]
        mean = counts.mean(0)
        return float((mean - torch.xlogy(counts, mean) + torch.lgamma(counts + 1)).flatten(1).sum(-1).mean())


class NegativeBinomial(Likelihood):
    """Counts that vary more than Poisson's: mean m = exp(output), variance m + m²/r.

        log p(y|x,θ) = Σ_d log Γ(y + r) - log Γ(r) - log y! + r·log(r/(r + m)) + y·log(m/(r + m))

    Output and target of one shape, as in `Poisson`, targets 0, 1, 2, … of any dtype. r → ∞ is `Poisson`.

    Args:
        concentration: r > 0; its initial value if it is learned. One number, or a list as in `Gaussian`.
        learned: whether to sample log(r) together with the weights. It is then the module's parameter
            `likelihood.log_concentration`, under the module's prior.
        missing: the value of targets that are not observed, see `Likelihood`.

    Raises:
        ValueError: if the concentration is not positive.

    Source: Lawless 1987.

    >>> NegativeBinomial(1.0).log_prob(torch.zeros(1, 1), torch.tensor([[0]]))
    tensor([-0.6931])
    """

    distribution = distributions.NegativeBinomial
    log_concentration: Tensor

    def __init__(self, concentration: Scales = 1.0, learned: bool = False, missing: float | None = None) -> None:
        super().__init__(missing)
        self.concentration = positive(self, "concentration", concentration, learned)
        self.learned = learned

    def components(self, output: Tensor) -> dict[str, Tensor]:
        log_mean = columns(output, "NegativeBinomial")
        log_r = of_each(self.log_concentration, log_mean, "concentration")
        return {"total_count": log_r.exp(), "logits": log_mean - log_r}

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        output, y, observed = self._paired("NegativeBinomial", output, target)
        log_r = of_each(self.log_concentration, output, "concentration")
        return summed(negative_binomial_log_prob(y, output, log_r), observed)

    def chance_nll(self, target: Tensor) -> float | None:
        every, found = widest(columns(target, "NegativeBinomial")).cpu(), 0.0
        every = every[~every.flatten(1).isnan().any(1)]
        for own, counts in by_number(self.concentration, every):
            log_mean = counts.mean(0).log().clamp_min(LEAST_LOG_MEAN)  # of the most likely constant, whatever r is

            def nll(log_r: float, counts: Tensor = counts, log_mean: Tensor = log_mean) -> float:
                each = negative_binomial_log_prob(counts, log_mean, torch.as_tensor(log_r).to(counts))
                return -float(each.sum(1).mean())

            found += minimize_scalar(nll, bounds=LOG_R, method="bounded").fun if self.learned else nll(math.log(own))
        return float(found)

    def extra_repr(self) -> str:
        return f"concentration={self.concentration}, learned={self.learned}"
