"""The posterior predictive of inputs: what every kind of prediction has, and the kinds, of classes and of numbers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lightning_sgmcmc.predictions.mixture import Members, Mixture, generator_of, labels_of, moved, tempered
from lightning_sgmcmc.tables.arrays import as_tensor
from lightning_sgmcmc.tables.columns import check_broadcasts
from lightning_sgmcmc.tensors import exact, sent, widest, widest_dtype

ON_REQUEST = "sample_"
"""The beginning of the names of parts with one prediction for each sample."""

Kind = TypeVar("Kind", bound="Prediction")
OfClasses = TypeVar("OfClasses", bound="_OfProbabilities")
OfNumbers = TypeVar("OfNumbers", bound="RegressionPrediction")
Kept = Mixture | Members
Scale = float | Sequence[float] | Tensor


class Prediction:
    """The posterior predictive of n inputs, such as a `ClassPrediction` or a `RegressionPrediction`.

    Every part is a tensor. A part that this kind does not have, or that was not requested, raises an `AttributeError`
    that says so. `quantile`, `interval`, `cdf` and `sample` need the distribution of each sample, which `predict` keeps
    up to 64 MB, or with `return_samples=True`.

    Args:
        parts: the tensors by name; None leaves a part out.
    """

    __slots__ = ("__dict__", "__weakref__", "_index", "_kept", "_names", "_why_not_kept")

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
        self._names: tuple[Any, ...] = ()
        self._index: Any = None
        self._why_not_kept = "it is not kept: pass return_samples=True to predict"

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return dict(vars(self))

    def replaced(self: Kind, **parts: Tensor | None) -> Kind:
        """Return a copy with other tensors in some parts."""
        copy = type(self)(**{**vars(self), **parts}).with_kept(self._kept, self._why_not_kept)
        return copy.named(self._names, self._index)

    def with_kept(self: Kind, kept: Kept | None, why_not: str | None = None) -> Kind:
        """Set the samples' distributions, or the reason why they are not kept, and return this prediction."""
        self._kept = kept
        self._why_not_kept = why_not if why_not is not None else self._why_not_kept
        return self

    def named(self: Kind, names: Sequence[Any], index: Any = None) -> Kind:
        """Set the names of the classes or targets, and the index of a frame's rows; return this prediction."""
        self._names, self._index = tuple(names), index
        return self

    def without_distributions(self: Kind) -> Kind:
        """Return this prediction without the samples' distributions, as `Trainer.predict` collects all batches'."""
        return self.with_kept(None, "Trainer.predict does not keep it: use Posterior.predict")

    def to(self: Kind, device: torch.device | str) -> Kind:
        """Return a copy on a device."""
        moved = self.replaced(**{name: part.to(device) for name, part in vars(self).items()})
        return moved.with_kept(None if self._kept is None else self._kept.to(device))

    def rescaled(self: Kind, mean: Scale, std: Scale, is_far: bool = False) -> Kind:
        """Return the predictive of y = mean + std·z, where this one is of z; class probabilities have no units.

        Args:
            mean: one number, one for each of the D targets, or a tensor that broadcasts to one target: (C, 1, 1) has
                one for each channel of a field (C, H, W).
            std: likewise.
            is_far: whether the mean is so many std from 0 that numbers should be float64.

        Raises:
            ValueError: for a tensor that does not broadcast, or (C,) for a field.
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
        """Return a `pandas.DataFrame` with a row for each example and a column for each number.

        Classes and several targets have the names that they have in the fit's data, and rows of a frame its index.

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
                own = self._labels(values.shape[1])
                columns |= {f"{name}_{i}": values[:, place].numpy() for place, i in enumerate(own)}
        frame = pandas.DataFrame(columns, index=self._index)
        if isinstance(self, ClassPrediction) and "label" in frame:
            known = (~self.probabilities.isnan().any(-1)).tolist()
            frame["label"] = [
                self.classes[i] if is_known else None for i, is_known in zip(frame["label"], known, strict=True)
            ]
        return frame

    def _labels(self, count: int) -> tuple[Any, ...]:
        """Return the names of classes or targets, or their numbers."""
        return self._names if len(self._names) == count else tuple(range(count))

    def _columns(self, level: float | None) -> dict[str, Tensor]:
        """Return the columns of `to_pandas`, shape (n,) or (n, D)."""
        columns = {name: part for name, part in vars(self).items() if not name.startswith(ON_REQUEST)}
        if level is not None:
            columns["low"], columns["high"] = self.interval(level)
        return columns

    @staticmethod
    def _checked_num(num: int) -> int:
        if num < 1:
            raise ValueError(f"num must be at least 1, got {num}: it counts the draws of each datum")
        return num

    @staticmethod
    def _checked_quantile(q: float) -> float:
        if torch.as_tensor(q).dim():
            raise TypeError(f"q must be one number, got a {type(q).__name__} of several: call quantile for each")
        if not 0 < q < 1:
            raise ValueError(f"q must be in (0, 1), got {q}: 0.5 is the median")
        return q

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
            raise self._lacks(name)


# -- classes: one of K, and several labels at once ---------------------------------------------------------------------


class _OfProbabilities(Prediction):
    """Base of the predictions with probabilities, entropies and mutual information."""

    def __init__(
        self,
        probabilities: Tensor,
        entropy: Tensor,
        mutual_information: Tensor,
        sample_probabilities: Tensor | None = None,
        expected_entropy: Tensor | None = None,
    ) -> None:
        parts = {"probabilities": probabilities, "entropy": entropy, "mutual_information": mutual_information}
        super().__init__(**parts, sample_probabilities=sample_probabilities, expected_entropy=expected_entropy)

    def with_epistemic_of(self: OfClasses, other: Prediction) -> OfClasses:
        """Return this predictive with the mutual information of other samples; `aleatoric` stays that of its own.

        A calibrated one of many inputs has neither, and stays as it is.
        """
        if "mutual_information" not in vars(self):
            return self
        return self.replaced(expected_entropy=self.aleatoric, mutual_information=other.mutual_information)

    @property
    def total(self) -> Tensor:
        """The entropy, in nats."""
        return self.entropy

    @property
    def epistemic(self) -> Tensor:
        """The mutual information, in nats."""
        return self.mutual_information

    @property
    def aleatoric(self) -> Tensor:
        """The mean entropy of the samples that predict, in nats: the entropy less their mutual information."""
        known: Tensor | None = vars(self).get("expected_entropy")
        return known if known is not None else (self.entropy - self.mutual_information).clamp_min(0)

    def quantile(self, q: float) -> Tensor:
        """Return a quantile, over the weighted samples, of each class's probability, shape of `probabilities`.

        It describes the uncertainty of the probability itself: the smallest value that samples of weight q or more do
        not exceed.

        Args:
            q: in (0, 1).

        Raises:
            ValueError: for q out of range.
            RuntimeError: if the samples' probabilities are not kept.
        """
        return self._members("quantile").quantile(self._checked_quantile(q))

    def cdf(self, y: Tensor | float) -> Tensor:
        """Return, by class, the weight of the samples whose probability is at most y, shape of `probabilities`.

        Args:
            y: a probability, or a tensor of them that broadcasts to `probabilities`.

        Raises:
            RuntimeError: if the samples' probabilities are not kept.
        """
        return self._members("cdf").cdf(y)

    def _with_probabilities(self: OfClasses, probabilities: Tensor) -> OfClasses:
        """Return the predictive with other probabilities, and samples whose mean these are, so that all parts are of
        one law; without the samples' probabilities there is no mutual information."""
        entropy = torch.special.entr(self._by_class(probabilities)).sum(-1)
        kept = self._kept
        if not isinstance(kept, Members):
            found = self.replaced(probabilities=probabilities, entropy=entropy, sample_probabilities=None)
            vars(found).pop("mutual_information")
            return found
        # The mean of what is kept differs from the average, which was taken batch by batch, by rounding.
        before = torch.einsum("s,s...->...", widest(kept.weights.to(kept.probabilities)), widest(kept.probabilities))
        wanted = self._by_class(probabilities)
        each = moved(self._by_class(kept.probabilities), self._by_class(before), wanted)
        own = torch.special.entr(widest(each)).sum(-1)
        aleatoric = torch.einsum("s,s...->...", kept.weights.to(own), own).to(entropy.dtype)
        each = each if each.shape == kept.probabilities.shape else each[..., 1]
        is_of_others = "expected_entropy" in vars(self)
        found = self.replaced(
            probabilities=probabilities,
            entropy=entropy,
            mutual_information=self.mutual_information if is_of_others else (entropy - aleatoric).clamp_min(0),
            expected_entropy=aleatoric if is_of_others else None,
            sample_probabilities=each if "sample_probabilities" in vars(self) else None,
        )
        return found.with_kept(Members(each, kept.weights))

    if not TYPE_CHECKING:  # as in `Prediction`

        def __getattr__(self, name: str) -> Any:
            if name in ("mutual_information", "epistemic", "aleatoric"):
                raise AttributeError(
                    f"{name} of calibrated predictions needs the distribution of each sample; {self._why_not_kept}"
                )
            return super().__getattr__(name)

    def _by_class(self, probabilities: Tensor) -> Tensor:
        """Return probabilities with an axis of classes, which sum to 1."""
        return probabilities

    def _members(self, what: str) -> Members:
        if not isinstance(self._kept, Members):
            raise self._not_kept(what)
        return self._kept


class ClassPrediction(_OfProbabilities):
    """The predictive of n inputs over K classes, of each input or of each of its pixels or tokens.

    Args:
        probabilities: averaged probabilities, shape (n, K), or (n, …, K) of pixels and tokens.
        entropy: their entropy in nats, shape (n,) or (n, …).
        mutual_information: between label and parameters, shape (n,) or (n, …): the part of the entropy that comes from
            disagreement between samples.
        sample_probabilities: each sample's probabilities, shape (S, n, …, K), on request.
        expected_entropy: the mean entropy of the samples that predict, where mutual_information is of other samples
            (`Posterior.novelty`); None where it is the entropy less the mutual information.

    >>> third = torch.full((1, 3), 1 / 3)
    >>> prediction = ClassPrediction(third, torch.tensor([1.0986]), torch.zeros(1))
    >>> prediction
    ClassPrediction(probabilities (1, 3), entropy (1,), mutual_information (1,))
    >>> prediction.mean
    Traceback (most recent call last):
    AttributeError: a ClassPrediction has no 'mean': it has probabilities, entropy, mutual_information
    """

    @property
    def classes(self) -> tuple[Any, ...]:
        """The classes in the order of the probabilities: the names that the fit's data have, or 0 to K-1."""
        return self._labels(self.probabilities.shape[-1])

    def sample(self, num: int, seed: int | torch.Generator = 0) -> Tensor:
        """Return labels drawn from the predictive, shape (num, n), or (num, n, …) of pixels and tokens.

        The pixels or tokens of an input are drawn from one posterior sample, since its parameters are theirs in common.

        Raises:
            RuntimeError: for pixels or tokens, if the samples' probabilities are not kept.
        """
        num, generator = self._checked_num(num), generator_of(seed)
        if self.probabilities.dim() == 2:
            return labels_of(self.probabilities.expand(num, *self.probabilities.shape), generator)
        return labels_of(self._members("sample").chosen(num, generator), generator)

    def tempered(self, temperature: float) -> "ClassPrediction":
        """Return p̄_k^(1/T)/Σ_j p̄_j^(1/T), with samples whose mean it is; see `_with_probabilities`."""
        return self._with_probabilities(tempered(self.probabilities, temperature))

    def _columns(self, level: float | None) -> dict[str, Tensor]:
        return {"label": self.probabilities.argmax(-1)} | super()._columns(level)


class MultiLabelPrediction(_OfProbabilities):
    """The predictive of n inputs with L labels, each of which is 0 or 1.

    Args:
        probabilities: averaged probability of each label, shape (n, L).
        entropy: of each label, in nats, shape (n, L).
        mutual_information: between each label and the parameters, in nats, shape (n, L).
        sample_probabilities: each sample's probabilities, shape (S, n, L), on request.
        expected_entropy: see `ClassPrediction`.
    """

    def sample(self, num: int, seed: int | torch.Generator = 0) -> Tensor:
        """Return draws of all labels, 0 or 1, shape (num, n, L); the labels of an input are of one posterior sample.

        Raises:
            RuntimeError: if the samples' probabilities are not kept.
        """
        num, generator = self._checked_num(num), generator_of(seed)
        return labels_of(of_both(self._members("sample").chosen(num, generator)), generator)

    def tempered(self, temperature: float) -> "MultiLabelPrediction":
        """Return p̄^(1/T)/(p̄^(1/T) + (1-p̄)^(1/T)) of each label, with samples whose mean it is."""
        return self._with_probabilities(tempered(of_both(self.probabilities), temperature)[..., 1])

    def _by_class(self, probabilities: Tensor) -> Tensor:
        return of_both(probabilities)


def of_both(probabilities: Tensor) -> Tensor:
    """Return the probabilities of 0 and 1, shape (…) to (…, 2)."""
    return torch.stack([1 - probabilities, probabilities], -1)


# -- numbers: real ones, and counts ------------------------------------------------------------------------------------


class RegressionPrediction(Prediction):
    """The predictive of n inputs of D numbers, in the data's units if the posterior knows their scaling.

    It is the weighted mixture of the samples' distributions: quantiles and intervals are the mixture's own. After
    `Posterior.calibrate` it is that mixture, stretched about its mean by the fitted factor. Of fields and sequences,
    (n, C, H, W) or (n, T, D) takes the place of (n, D).

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
        return self._mixture("quantile").quantile(self._checked_quantile(q)).to(self.mean.dtype)

    def cdf(self, y: Tensor | float) -> Tensor:
        """Return P(Y ≤ y), shape (n, D).

        Args:
            y: shape (n, D), or (n,) of one number each, or a number.

        Raises:
            RuntimeError: if the samples' distributions are not kept.
        """
        return self._mixture("cdf").cdf(self._numbers(y)).to(self.mean.dtype)

    def survival(self, y: Tensor | float) -> Tensor:
        """Return P(Y > y) = 1 - cdf(y), shape (n, D); of durations the probability to last longer than y."""
        return 1 - self.cdf(y)

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

    def rescaled(self: OfNumbers, mean: Scale, std: Scale, is_far: bool = False) -> OfNumbers:
        check_broadcasts("mean", mean, self.mean)
        check_broadcasts("std", std, self.mean)
        wide = widest_dtype(self.mean.device)
        both = [torch.as_tensor(values, dtype=wide, device=self.mean.device) for values in (mean, std)]
        shift, factor = both if is_far else (values.to(self.mean.dtype) for values in both)
        parts = {name: part.to(shift.dtype) for name, part in self.parts.items()}
        places = {name: part * factor + shift for name, part in parts.items() if name in ("mean", "sample_means")}
        widths = {name: part * factor for name, part in parts.items() if name in ("std", "epistemic_std")}
        return self.replaced(**places, **widths)._with_scaled(*both)

    def stretched(self: OfNumbers, factor: float) -> OfNumbers:
        """Return the predictive stretched about its mean by a factor, and each sample's with it."""
        widths = {"std": self.std * factor, "epistemic_std": self.epistemic_std * factor}
        if "sample_means" in self.parts:
            widths["sample_means"] = self.mean + factor * (self.sample_means - self.mean)
        shift = (1 - factor) * widest(self.mean)
        return self.replaced(**widths)._with_scaled(shift, factor)

    def _with_scaled(self: OfNumbers, shift: Tensor | float, factor: Tensor | float) -> OfNumbers:
        return self.with_kept(self._kept.scaled(shift, factor)) if isinstance(self._kept, Mixture) else self

    def _mixture(self, what: str) -> Mixture:
        if not isinstance(self._kept, Mixture):
            raise self._not_kept(what)
        return self._kept

    def _numbers(self, y: Tensor | float) -> Tensor:
        own = exact(y) if isinstance(y, int | float) else as_tensor("y", y)
        numbers = sent(own, self.mean.device)
        if numbers.dim() == 1 and self.mean.shape[1:] == (1,):
            numbers = numbers[:, None]
        if numbers.dim() > 0 and numbers.shape != self.mean.shape:
            raise ValueError(
                f"y should have shape {tuple(self.mean.shape)}, or be a number, got {tuple(numbers.shape)}"
            )
        return numbers

    def _columns(self, level: float | None) -> dict[str, Tensor]:
        return super()._columns(level) | {"aleatoric_std": self.aleatoric}


class CountPrediction(RegressionPrediction):
    """The predictive of n inputs of D counts; its quantiles are integers. Arguments as in `RegressionPrediction`."""

    def rescaled(self: OfNumbers, mean: Scale, std: Scale, is_far: bool = False) -> OfNumbers:
        """Return this prediction, since counts have no units.

        Raises:
            ValueError: if the targets were standardised.
        """
        if bool((torch.as_tensor(mean) != 0).any()) or bool((torch.as_tensor(std) != 1).any()):
            raise ValueError(
                "the datamodule standardised its targets (target_mean, target_std), which are counts: leave them as "
                "they are"
            )
        return self
