"""Predictions of numbers: real ones, and counts."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lightning_sgmcmc.predictions.mixture import Mixture
from lightning_sgmcmc.predictions.prediction import Prediction, checked_quantile
from lightning_sgmcmc.tables.arrays import as_tensor
from lightning_sgmcmc.tensors import widest, widest_dtype

Own = TypeVar("Own", bound="RegressionPrediction")


class RegressionPrediction(Prediction):
    """The predictive of n inputs of D numbers, in the data's units if the posterior knows their scaling.

    It is the weighted mixture of the samples' distributions: quantiles and intervals are the mixture's own. After
    `Posterior.calibrate` it is that mixture, stretched about its mean by the fitted factor.

    Args:
        mean: its mean, shape (n, D).
        std: its standard deviation, shape (n, D).
        epistemic_std: the part of the standard deviation that comes from the parameters, shape (n, D).
        sample_means: each sample's mean, shape (S, n, D), on request.
    """

    def __init__(self, mean: Tensor, std: Tensor, epistemic_std: Tensor, sample_means: Tensor | None = None) -> None:
        super().__init__(mean=mean, std=std, epistemic_std=epistemic_std, sample_means=sample_means)

    @property
    def total(self) -> Tensor:
        """The standard deviation."""
        return self.std

    @property
    def epistemic(self) -> Tensor:
        """The part of the standard deviation that comes from the parameters."""
        return self.epistemic_std

    @property
    def aleatoric(self) -> Tensor:
        """The root of the samples' mean variance, √(std² - epistemic_std²)."""
        return (self.std.square() - self.epistemic_std.square()).clamp_min(0).sqrt()

    def quantile(self, q: float) -> Tensor:
        """Return the smallest y with P(Y ≤ y) ≥ q, shape (n, D).

        Args:
            q: in (0, 1).

        Raises:
            ValueError: for q out of range.
            RuntimeError: if the samples' distributions are not kept.
        """
        return self._mixture("quantile").quantile(checked_quantile(q)).to(self.mean.dtype)

    def cdf(self, y: Tensor | float) -> Tensor:
        """Return P(Y ≤ y), shape (n, D).

        Args:
            y: shape (n, D), or (n,) of one number each, or a number.

        Raises:
            RuntimeError: if the samples' distributions are not kept.
        """
        return self._mixture("cdf").cdf(self._numbers(y)).to(self.mean.dtype)

    def log_prob(self, y: Tensor | float) -> Tensor:
        """Return the log density (of counts, probability) of each datum's D numbers together, in nats, shape (n,).

        Args:
            y: shape (n, D), or (n,) of one number each.

        Raises:
            RuntimeError: if the samples' distributions are not kept.
        """
        return self._mixture("log_prob").log_prob(self._numbers(y).expand(self.mean.shape))

    def sample(self, num: int, seed: int | torch.Generator = 0) -> Tensor:
        """Return draws from the predictive, shape (num, n, D); the D numbers of an input are of one posterior sample.

        Raises:
            RuntimeError: if the samples' distributions are not kept.
        """
        return self._mixture("sample").sample(self._checked_num(num), seed).to(self.mean.dtype)

    def rescaled(self: Own, mean: Sequence[float], std: Sequence[float]) -> Own:
        shift, factor = (self.mean.new_tensor(values) for values in (mean, std))
        places = {name: part * factor + shift for name, part in self.parts.items() if name in ("mean", "sample_means")}
        widths = {name: part * factor for name, part in self.parts.items() if name in ("std", "epistemic_std")}
        exact = (
            torch.as_tensor(values, dtype=widest_dtype(shift.device), device=shift.device) for values in (mean, std)
        )
        return self.replaced(**places, **widths)._with_scaled(*exact)

    def stretched(self: Own, factor: float) -> Own:
        """Return the predictive stretched about its mean by a factor, and each sample's with it."""
        widths = {"std": self.std * factor, "epistemic_std": self.epistemic_std * factor}
        if "sample_means" in self.parts:
            widths["sample_means"] = self.mean + factor * (self.sample_means - self.mean)
        shift = (1 - factor) * widest(self.mean)
        return self.replaced(**widths)._with_scaled(shift, factor)

    def _with_scaled(self: Own, shift: Tensor | float, factor: Tensor | float) -> Own:
        return self.with_kept(self._kept.scaled(shift, factor)) if isinstance(self._kept, Mixture) else self

    def _mixture(self, what: str) -> Mixture:
        if not isinstance(self._kept, Mixture):
            raise self._not_kept(what)
        return self._kept

    def _numbers(self, y: Tensor | float) -> Tensor:
        numbers = (torch.as_tensor(y) if isinstance(y, int | float) else as_tensor("y", y)).to(self.mean.device)
        if numbers.dim() == 1 and self.mean.shape[1] == 1:
            numbers = numbers[:, None]
        if numbers.dim() not in (0, 2) or (numbers.dim() == 2 and numbers.shape != self.mean.shape):
            raise ValueError(
                f"y should have shape {tuple(self.mean.shape)}, or be a number, got {tuple(numbers.shape)}"
            )
        return numbers

    def _columns(self, level: float | None) -> dict[str, Tensor]:
        return super()._columns(level) | {"aleatoric_std": self.aleatoric}


class CountPrediction(RegressionPrediction):
    """The predictive of n inputs of D counts; its quantiles are integers. Arguments as in `RegressionPrediction`."""

    def rescaled(self: Own, mean: Sequence[float], std: Sequence[float]) -> Own:
        """Return this prediction, since counts have no units.

        Raises:
            ValueError: if the targets were standardised.
        """
        if any(value != 0 for value in mean) or any(value != 1 for value in std):
            raise ValueError(
                "the datamodule standardised its targets (target_mean, target_std), which are counts: leave them as "
                "they are"
            )
        return self
