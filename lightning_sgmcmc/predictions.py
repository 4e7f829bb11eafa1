"""Predictive distributions averaged over posterior samples."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

ON_REQUEST = "sample_"
"""The beginning of the names of parts with one prediction for each sample."""

Kind = TypeVar("Kind", bound="Prediction")


class Prediction:
    """The posterior predictive of n inputs: a `ClassPrediction` or a `RegressionPrediction`.

    Every part is a tensor. A part that this kind does not have, or that was not requested, raises an `AttributeError`
    that says so.

    Args:
        parts: the tensors by name; None leaves a part out.
    """

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

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return dict(vars(self))

    def replaced(self: Kind, **parts: Tensor | None) -> Kind:
        """Return a copy with other tensors in some parts."""
        return type(self)(**{**vars(self), **parts})

    def to(self: Kind, device: torch.device | str) -> Kind:
        """Return a copy on a device."""
        return self.replaced(**{name: part.to(device) for name, part in vars(self).items()})

    def rescaled(self: Kind, mean: Sequence[float], std: Sequence[float]) -> Kind:
        """Return the predictive of y = mean + std·z, where this one is of z; class probabilities have no units.

        Args:
            mean, std: one number, or one for each of the D targets.
        """
        return self

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


class ClassPrediction(Prediction):
    """The predictive of n inputs over K classes.

    Args:
        probabilities: averaged probabilities, shape (n, K).
        entropy: their entropy in nats, shape (n,).
        mutual_information: between label and parameters, shape (n,): the part of the entropy that comes from
            disagreement between samples.
        sample_probabilities: each sample's probabilities, shape (S, n, K), on request.

    >>> third = torch.full((1, 3), 1 / 3)
    >>> prediction = ClassPrediction(third, torch.tensor([1.0986]), torch.zeros(1))
    >>> prediction
    ClassPrediction(probabilities (1, 3), entropy (1,), mutual_information (1,))
    >>> prediction.mean
    Traceback (most recent call last):
    AttributeError: a ClassPrediction has no 'mean': it has probabilities, entropy, mutual_information
    """

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


class RegressionPrediction(Prediction):
    """The predictive of n inputs of D numbers, in the data's units if the posterior knows their scaling.

    Args:
        mean: its mean, shape (n, D).
        std: its standard deviation, shape (n, D).
        epistemic_std: the part of the standard deviation that comes from the parameters, shape (n, D).
        sample_means: each sample's mean, shape (S, n, D), on request.
    """

    def __init__(self, mean: Tensor, std: Tensor, epistemic_std: Tensor, sample_means: Tensor | None = None) -> None:
        super().__init__(mean=mean, std=std, epistemic_std=epistemic_std, sample_means=sample_means)

    def rescaled(self, mean: Sequence[float], std: Sequence[float]) -> "RegressionPrediction":
        shift, factor = (self.mean.new_tensor(values) for values in (mean, std))
        places = {name: part * factor + shift for name, part in self.parts.items() if name in ("mean", "sample_means")}
        widths = {name: part * factor for name, part in self.parts.items() if name in ("std", "epistemic_std")}
        return self.replaced(**places, **widths)
