"""Priors over the parameters: log densities with their normalising constants."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_within
from lightning_sgmcmc.tensors import as_rows

Scale: TypeAlias = "float | Mapping[str, float]"


class Prior(ABC):
    """A prior log p(θ) over all trainable parameters of one chain; subclass it for your own."""

    @abstractmethod
    def log_prob(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return log p(θ), a tensor of shape ().

        Args:
            parameters: the trainable parameters of one chain by name.
        """

    def log_prob_of_chains(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return log p(θ) of several chains at once, a tensor of shape (C,).

        Args:
            parameters: the trainable parameters by name, each with a leading axis of size C.
        """
        result: Tensor = torch.vmap(self.log_prob)(dict(parameters))
        return result

    def check_names(self, names: Collection[str]) -> None:  # noqa: B027
        """Check the names of the parameters before a fit.

        Raises:
            ValueError: if the prior does not suit a network with these parameters.
        """


class ScalePrior(Prior):
    """Base of the independent priors with one scale for all parameters, or one for each name pattern.

    Args:
        scale: one positive number, or numbers by name pattern (`{"*.bias": 10.0, "net.0.*": 0.5, "*": 1.0}`,
            shell-style). The first pattern that matches a parameter's name applies. Every pattern except "*" has
            to apply to a parameter.
        name: the constructor's name for `scale`, for messages.

    Raises:
        ValueError: if a scale is not a positive number; when a fit begins, if a pattern applies to no parameter.
        TypeError: if a scale is not a number, or a pattern not a text.
    """

    def __init__(self, scale: Scale, name: str) -> None:
        scales = scale if isinstance(scale, Mapping) else {"*": scale}
        if not scales:
            raise ValueError(f"the prior's {name} has no patterns: pass one number, or numbers by pattern")
        for pattern, value in scales.items():
            if not isinstance(pattern, str):
                raise TypeError(f"the prior's {name} has the pattern {pattern!r}: patterns are texts such as '*.bias'")
            _check_scale(f"the prior's {name}", value, pattern)
        self._scales = {pattern: float(value) for pattern, value in scales.items()}
        self._scale_name = name

    def scale_of(self, parameter_name: str) -> float:
        """Return the scale of the first pattern that matches a parameter's name.

        Raises:
            ValueError: if none does.
        """
        for pattern, value in self._scales.items():
            if fnmatchcase(parameter_name, pattern):
                return value
        raise ValueError(
            f"the prior's {self._scale_name} has no pattern for the parameter '{parameter_name}': add one, or '*' for "
            "the rest"
        )

    def check_names(self, names: Collection[str]) -> None:
        applied = {next((p for p in self._scales if fnmatchcase(name, p)), None) for name in names}
        for pattern in self._scales:
            if pattern in applied or pattern == "*":
                continue
            shadowed = next((name for name in names if fnmatchcase(name, pattern)), None)
            if shadowed is None:
                raise ValueError(
                    f"the prior's {self._scale_name} has the pattern '{pattern}', which no trainable parameter matches "
                    f"({', '.join(list(names)[:4])}, …): correct or remove it"
                )
            first = next(p for p in self._scales if fnmatchcase(shadowed, p))
            raise ValueError(
                f"the prior's {self._scale_name} never uses the pattern '{pattern}', because '{first}' comes before it "
                f"and also matches '{shadowed}': put '{pattern}' first"
            )

    def __repr__(self) -> str:
        value: Any = self._scales["*"] if list(self._scales) == ["*"] else self._scales
        return f"{type(self).__name__}({self._scale_name}={value})"


class GaussianPrior(ScalePrior):
    """Independent Gaussians with mean 0: log p(θ) = Σ_j [-θ_j²/(2·std²) - log(std·√(2π))].

    It equals a weight decay of `1/(N·std²)` in a mean loss, so the optimizer should have no weight decay of its own.

    Args:
        std: standard deviation > 0, one for all parameters or by name pattern (see `ScalePrior`).

    Raises:
        ValueError: if std is not positive, or has no pattern for a parameter.

    >>> prior = GaussianPrior({"*.bias": 10.0, "*": 1.0})
    >>> prior.scale_of("net.0.bias"), prior.scale_of("net.0.weight")
    (10.0, 1.0)
    >>> GaussianPrior().log_prob({"w": torch.zeros(2)})
    tensor(-1.8379)
    """

    def __init__(self, std: Scale = 1.0) -> None:
        super().__init__(std, "std")
        self._known: tuple[Any, ...] = ()
        self._known_scales: list[float] = []
        self._constant = 0.0
        self._precisions: Tensor | None = None

    def log_prob(self, parameters: Mapping[str, Tensor]) -> Tensor:
        tensors = tuple(parameters.values())
        known = (*parameters, *[t.numel() for t in tensors], tensors[0].dtype)
        if known != self._known:
            self._known, self._known_scales = known, [self.scale_of(name) for name in parameters]
            normaliser = math.sqrt(2 * math.pi)
            self._constant = -sum(
                t.numel() * math.log(s * normaliser) for t, s in zip(tensors, self._known_scales, strict=True)
            )
            one_scale = len(set(self._known_scales)) == 1
            self._precisions = None if one_scale else tensors[0].new_tensor([1 / s**2 for s in self._known_scales])
        if self._precisions is not None and self._precisions.device != tensors[0].device:
            self._precisions = self._precisions.to(tensors[0].device)
        result: Tensor = _GaussianLogDensity.apply(self._constant, self._known_scales, self._precisions, *tensors)
        return result

    def log_prob_of_chains(self, parameters: Mapping[str, Tensor]) -> Tensor:
        terms = []
        for name, tensor in parameters.items():
            std = self.scale_of(name)
            constant = tensor[0].numel() * math.log(std * math.sqrt(2 * math.pi))
            terms.append(as_rows(tensor, len(tensor)).square().sum(1).mul(-0.5 / std**2).sub(constant))
        return torch.stack(terms).sum(0)


class LaplacePrior(ScalePrior):
    """Independent Laplace distributions with mean 0: log p(θ) = Σ_j [-|θ_j|/scale - log(2·scale)].

    Args:
        scale: scale > 0 (the standard deviation over √2), one for all parameters or by name pattern (see `ScalePrior`).

    Raises:
        ValueError: if the scale is not positive, or has no pattern for a parameter.
    """

    def __init__(self, scale: Scale = 1.0) -> None:
        super().__init__(scale, "scale")

    def log_prob(self, parameters: Mapping[str, Tensor]) -> Tensor:
        terms = []
        for name, tensor in parameters.items():
            scale = self.scale_of(name)
            terms.append(-tensor.abs().sum() / scale - tensor.numel() * math.log(2 * scale))
        return torch.stack(terms).sum()


class StudentTPrior(ScalePrior):
    """Independent Student-t distributions with mean 0 and ν degrees of freedom.

        log p(θ) = Σ_j [-(ν+1)/2·log(1 + θ_j²/(ν·scale²)) + log Γ((ν+1)/2) - log Γ(ν/2) - log(scale·√(νπ))]

    Args:
        df: degrees of freedom ν > 0.
        scale: scale > 0, one for all parameters or by name pattern (see `ScalePrior`).

    Raises:
        ValueError: if ν or the scale is not positive, or no pattern fits a parameter.
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


class _GaussianLogDensity(torch.autograd.Function):
    """constant - Σ_k ‖θ_k/std_k‖²/2 in a few calls for all tensors: a network has dozens, at every step."""

    @staticmethod
    def forward(ctx: Any, constant: float, stds: list[float], precisions: Tensor | None, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.stds = stds
        norms = torch.stack(torch._foreach_norm(tensors))
        if precisions is None:
            return torch.dot(norms, norms).mul_(-0.5 / stds[0] ** 2).add_(constant)
        return torch.dot(norms.square(), precisions).mul_(-0.5).add_(constant)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        (grad,), tensors, stds = grad_outputs, ctx.saved_tensors, ctx.stds
        if torch.is_grad_enabled():  # a second derivative is asked for
            return (None, None, None, *(t * (grad * (-1 / s**2)) for t, s in zip(tensors, stds, strict=True)))
        if len(set(stds)) == 1:
            gradients = torch._foreach_mul(tensors, grad * (-1 / stds[0] ** 2))
        else:
            gradients = torch._foreach_mul(tensors, [-1 / s**2 for s in stds])
            torch._foreach_mul_(gradients, grad)
        return (None, None, None, *gradients)


def _check_scale(name: str, value: Any, pattern: str) -> None:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TypeError(f"{name} must be one number for each pattern, got {value.numel()} numbers for '{pattern}'")
    number = value.item() if isinstance(value, Tensor) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__} for '{pattern}'")
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be a positive number, got {value} for '{pattern}'")


class FlatPrior(Prior):
    """log p(θ) = 0 everywhere, an improper prior: the likelihood must be integrable in θ."""

    def log_prob(self, parameters: Mapping[str, Tensor]) -> Tensor:
        return next(iter(parameters.values())).new_zeros(())

    def __repr__(self) -> str:
        return "FlatPrior()"
