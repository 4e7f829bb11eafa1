"""Predictions of classes: one of K, and several labels at once."""

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lightning_sgmcmc.predictions.mixture import Members, generator_of, labels_of, moved, tempered
from lightning_sgmcmc.predictions.prediction import Prediction, checked_quantile
from lightning_sgmcmc.tensors import widest

Own = TypeVar("Own", bound="_OfProbabilities")


class _OfProbabilities(Prediction):
    """Base of the predictions with probabilities, entropies and mutual information."""

    def __init__(
        self,
        probabilities: Tensor,
        entropy: Tensor,
        mutual_information: Tensor,
        sample_probabilities: Tensor | None = None,
    ) -> None:
        super().__init__(
            probabilities=probabilities,
            entropy=entropy,
            mutual_information=mutual_information,
            sample_probabilities=sample_probabilities,
        )

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
        """The samples' mean entropy, in nats: the entropy less the mutual information."""
        return (self.entropy - self.mutual_information).clamp_min(0)

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
        return self._members("quantile").quantile(checked_quantile(q))

    def cdf(self, y: Tensor | float) -> Tensor:
        """Return, by class, the weight of the samples whose probability is at most y, shape of `probabilities`.

        Args:
            y: a probability, or a tensor of them that broadcasts to `probabilities`.

        Raises:
            RuntimeError: if the samples' probabilities are not kept.
        """
        return self._members("cdf").cdf(y)

    def _with_probabilities(self: Own, probabilities: Tensor) -> Own:
        """Return the predictive with other probabilities, and samples whose mean these are.

        Entropy, mutual information, quantiles and `sample_probabilities` are then of one law, and the mutual
        information is at most the entropy. It needs the samples' probabilities, so without them there is none.
        """
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
        found = self.replaced(
            probabilities=probabilities,
            entropy=entropy,
            mutual_information=(entropy - aleatoric).clamp_min(0),
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

    >>> third = torch.full((1, 3), 1 / 3)
    >>> prediction = ClassPrediction(third, torch.tensor([1.0986]), torch.zeros(1))
    >>> prediction
    ClassPrediction(probabilities (1, 3), entropy (1,), mutual_information (1,))
    >>> prediction.mean
    Traceback (most recent call last):
    AttributeError: a ClassPrediction has no 'mean': it has probabilities, entropy, mutual_information
    """

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
