"""Priors other than Gaussian: Laplace, Student-t, flat."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_within
from lightning_sgmcmc.priors.base import Prior, RowDensity, Scale, ScalePrior, log_of, own_parameters


class LaplacePrior(ScalePrior):
    """Independent Laplace distributions with mean 0: log p(θ) = Σ_j [-|θ_j|/scale - log(2·scale)].

    Args:
        scale: scale > 0 (the standard deviation over √2), one for all parameters or by name pattern (see `ScalePrior`).

    Raises:
        ValueError: if the scale is not positive, or has no pattern for a parameter.

    Example::

        module = BayesianModule(net, Categorical(), LaplacePrior(scale=0.1), lr=0.1)
    """

    def __init__(self, scale: Scale = 1.0) -> None:
        super().__init__(scale, "scale")

    def log_prob(self, parameters: Mapping[str, Tensor]) -> Tensor:
        terms = []
        for name, tensor in parameters.items():
            scale = self.scale_of(name)
            terms.append(-tensor.abs().sum() / scale - tensor.numel() * math.log(2 * scale))
        return torch.stack(terms).sum()

    def of_rows(self, parameters: Mapping[str, Tensor]) -> RowDensity:
        scale, count = self.scales_of_columns(parameters), _count(parameters)
        constant = -log_of(scale, count) - count * math.log(2)
        return lambda rows, state: constant - (rows / scale).abs().sum(1)


class StudentTPrior(ScalePrior):
    """Independent Student-t distributions with mean 0 and ν degrees of freedom.

        log p(θ) = Σ_j [-(ν+1)/2·log(1 + θ_j²/(ν·scale²)) + log Γ((ν+1)/2) - log Γ(ν/2) - log(scale·√(νπ))]

    Args:
        df: degrees of freedom ν > 0.
        scale: scale > 0, one for all parameters or by name pattern (see `ScalePrior`).

    Raises:
        ValueError: if ν or the scale is not positive, or no pattern fits a parameter.

    Example::

        module = BayesianModule(net, Categorical(), StudentTPrior(df=3.0, scale={"*.bias": 1.0, "*": 0.1}), lr=0.1)
    """

    def __init__(self, df: float = 3.0, scale: Scale = 1.0) -> None:
        super().__init__(scale, "scale")
        check_within("the prior's df", df, "(0, inf)")
        self.df = float(df)

    def log_prob(self, parameters: Mapping[str, Tensor]) -> Tensor:
        df = self.df
        terms = []
        for name, tensor in parameters.items():
            scale = self.scale_of(name)
            constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - math.log(scale * math.sqrt(df * math.pi))
            kernel = torch.log1p(tensor.square() / (df * scale**2)).sum()
            terms.append(tensor.numel() * constant - (df + 1) / 2 * kernel)
        return torch.stack(terms).sum()

    def of_rows(self, parameters: Mapping[str, Tensor]) -> RowDensity:
        df, scale, count = self.df, self.scales_of_columns(parameters), _count(parameters)
        each = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - math.log(math.sqrt(df * math.pi))
        constant = count * each - log_of(scale, count)
        return lambda rows, state: constant - (df + 1) / 2 * torch.log1p((rows / scale).square() / df).sum(1)


class FlatPrior(Prior):
    """log p(θ) = 0 everywhere, an improper prior: the likelihood must be integrable in θ.

    Example::

        module = BayesianModule(net, Categorical(), FlatPrior(), lr=0.1)
    """

    def log_prob(self, parameters: Mapping[str, Tensor]) -> Tensor:
        return next(iter(parameters.values())).new_zeros(())

    def of_rows(self, parameters: Mapping[str, Tensor]) -> RowDensity:
        return lambda rows, state: rows.new_zeros(len(rows))

    def __repr__(self) -> str:
        return "FlatPrior()"


def _count(parameters: Mapping[str, Tensor]) -> int:
    """Return the coordinates of one chain, from parameters with a leading axis of chains."""
    return sum(tensor[0].numel() for tensor in own_parameters(parameters).values())
