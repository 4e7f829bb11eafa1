"""What every kind of prediction has: tensors by name, and the samples' distributions where they are kept."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lightning_sgmcmc.predictions.mixture import Members, Mixture

ON_REQUEST = "sample_"
"""The beginning of the names of parts with one prediction for each sample."""

Kind = TypeVar("Kind", bound="Prediction")
Kept = Mixture | Members


class Prediction:
    """The posterior predictive of n inputs, such as a `ClassPrediction` or a `RegressionPrediction`.

    Every part is a tensor. A part that this kind does not have, or that was not requested, raises an `AttributeError`
    that says so. `quantile`, `interval`, `cdf` and `sample` need the distribution of each sample, which `predict` keeps
    up to 64 MB, or with `return_samples=True`.

    Args:
        parts: the tensors by name; None leaves a part out.
    """

    __slots__ = ("__dict__", "__weakref__", "_kept", "_why_not_kept")

    probabilities: Tensor
    entropy: Tensor
    mutual_information: Tensor
    sample_probabilities: Tensor
    mean: Tensor
    std: Tensor
    epistemic_std: Tensor
    sample_means: Tensor

    def __init__(self, **parts: Tensor | None) -> None:
        vars(self).update((name, part) for name, part in parts.items() if part is not None)
        self._kept: Kept | None = None
        self._why_not_kept = "it is not kept: pass return_samples=True to predict"

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return dict(vars(self))

    def replaced(self: Kind, **parts: Tensor | None) -> Kind:
        """Return a copy with other tensors in some parts."""
        return type(self)(**{**vars(self), **parts}).with_kept(self._kept, self._why_not_kept)

    def with_kept(self: Kind, kept: Kept | None, why_not: str | None = None) -> Kind:
        """Set the samples' distributions, or the reason why they are not kept, and return this prediction."""
        self._kept = kept
        self._why_not_kept = why_not if why_not is not None else self._why_not_kept
        return self

    def without_distributions(self: Kind) -> Kind:
        """Return this prediction without the samples' distributions, as `Trainer.predict` collects all batches'."""
        return self.with_kept(None, "Trainer.predict does not keep it: use Posterior.predict")

    def to(self: Kind, device: torch.device | str) -> Kind:
        """Return a copy on a device."""
        moved = self.replaced(**{name: part.to(device) for name, part in vars(self).items()})
        return moved.with_kept(None if self._kept is None else self._kept.to(device))

    def rescaled(self: Kind, mean: Sequence[float], std: Sequence[float]) -> Kind:
        """Return the predictive of y = mean + std·z, where this one is of z; class probabilities have no units.

        Args:
            mean: one number, or one for each of the D targets.
            std: likewise.
        """
        return self

    # -- uncertainty --------------------------------------------------------------------------------------------------

    @property
    def total(self) -> Tensor:
        """The predictive uncertainty: a standard deviation of numbers, an entropy in nats of classes."""
        raise self._lacks("total")

    @property
    def epistemic(self) -> Tensor:
        """The part of `total` that comes from the parameters, which more data would reduce."""
        raise self._lacks("epistemic")

    @property
    def aleatoric(self) -> Tensor:
        """The part of `total` that each sample expects: noise of the data."""
        raise self._lacks("aleatoric")

    def quantile(self, q: float) -> Tensor:
        """Return a quantile; see the kinds of predictions for what it is of."""
        raise self._lacks("quantile")

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return the bounds of the equal-tailed interval, the quantiles (1 - level)/2 and (1 + level)/2.

        Args:
            level: probability of the interval, in (0, 1).

        Raises:
            ValueError: for a level out of range.
            RuntimeError: if the samples' distributions are not kept.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must be in (0, 1), got {level}: 0.9 is the interval between 5 % and 95 %")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def cdf(self, y: Tensor | float) -> Tensor:
        """Return a distribution function at y; see the kinds of predictions for what it is of."""
        raise self._lacks("cdf")

    def sample(self, num: int, seed: int | torch.Generator = 0) -> Tensor:
        """Return draws from the predictive, with `num` as their first axis.

        Args:
            num: draws of each datum.
            seed: seed of the draws, or a generator on the CPU.
        """
        raise self._lacks("sample")

    def to_pandas(self, level: float | None = None) -> Any:
        """Return a `pandas.DataFrame` with a row for each datum and a column for each number.

        Args:
            level: also return the bounds of the interval of this probability.

        Raises:
            ImportError: without pandas.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: pip install pandas") from error
        columns: dict[str, Any] = {}
        for name, part in self._columns(level).items():
            values = part.detach().cpu()
            if values.dim() > 2:
                raise ValueError(
                    f"to_pandas needs one row for each datum, and {name} has shape {tuple(values.shape)}: read the "
                    "tensors instead"
                )
            if values.dim() == 1 or values.shape[1] == 1:
                columns[name] = values.reshape(-1).numpy()
            else:
                columns |= {f"{name}_{i}": values[:, i].numpy() for i in range(values.shape[1])}
        return pandas.DataFrame(columns)

    def _columns(self, level: float | None) -> dict[str, Tensor]:
        """Return the columns of `to_pandas`, shape (n,) or (n, D)."""
        columns = {name: part for name, part in vars(self).items() if not name.startswith(ON_REQUEST)}
        if level is not None:
            columns["low"], columns["high"] = self.interval(level)
        return columns

    def _checked_num(self, num: int) -> int:
        if num < 1:
            raise ValueError(f"num must be at least 1, got {num}: it counts the draws of each datum")
        return num

    def _not_kept(self, what: str) -> RuntimeError:
        return RuntimeError(f"{what} needs the distribution of each sample; {self._why_not_kept}")

    def _lacks(self, name: str) -> AttributeError:
        return AttributeError(f"a {type(self).__name__} has no {name!r}: it has {', '.join(vars(self))}")

    def __len__(self) -> int:
        first: Tensor = next(part for name, part in vars(self).items() if not name.startswith(ON_REQUEST))
        return len(first)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in vars(self).items())
        return f"{type(self).__name__}({shapes})"

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            parts = vars(self)
            if name.startswith(ON_REQUEST) and name.removeprefix(ON_REQUEST) in (*parts, *(f"{p}s" for p in parts)):
                raise AttributeError(f"{name} was not requested: pass return_samples=True to predict")
            raise AttributeError(f"a {type(self).__name__} has no {name!r}: it has {', '.join(parts)}")


def checked_quantile(q: float) -> float:
    """Return q if it is in (0, 1)."""
    if not 0 < q < 1:
        raise ValueError(f"q must be in (0, 1), got {q}: 0.5 is the median")
    return q
