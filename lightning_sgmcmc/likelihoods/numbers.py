"""Likelihoods of real numbers: Gaussian ones, Student's t, and mixtures."""

import functools
import math

import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

from lightning_sgmcmc.checks import check_count, check_kind, check_within
from lightning_sgmcmc.likelihoods.base import (
    Likelihood,
    Scales,
    by_number,
    check_finite,
    columns,
    of_each,
    positive,
    summed,
    where_observed,
)
from lightning_sgmcmc.predictions import distributions
from lightning_sgmcmc.predictions.distributions import Normal, NormalMixture, student_t_normaliser
from lightning_sgmcmc.tensors import widest

MOST_FITTED = 16
"""Numbers of each datum above which their most likely distributions are not looked for."""


class Gaussian(Likelihood):
    """Regression: y = output + noise, log p(y|x,θ) = Σ_d log N(y_d; output_d, std²).

    Output and target of one shape: (n,), (n, D), sequences (n, T, D) or fields (n, C, H, W). An example is one entry of
    the first axis, and its log density is the sum over its numbers, so `num_data` counts sequences and images.

    Args:
        std: standard deviation of the noise, > 0, in the units of the (standardised) target; its initial value if it
            is learned. One number is of all D; a list has one for each, (D,), or nested ones for channels, (C, 1, 1).
        learned: whether to sample log(std) together with the weights. It is then the module's parameter
            `likelihood.log_std`, under the module's prior.
        missing: the value of targets that are not observed, see `Likelihood`.

    Raises:
        ValueError: if std is not positive.

    >>> Gaussian(std=2.0).log_prob(torch.zeros(1, 1), torch.tensor([[2.0]]))
    tensor([-2.1121])
    """

    distribution = Normal
    log_std: Tensor

    def __init__(self, std: Scales = 1.0, learned: bool = False, missing: float | None = None) -> None:
        super().__init__(missing)
        self.std = positive(self, "std", std, learned)
        self.learned = learned

    def check_target(self, output: Tensor, target: Tensor) -> None:
        check_finite(type(self).__name__, target)

    def chance_nll(self, target: Tensor) -> float | None:
        variance = _variance(columns(target, "Gaussian"))
        noise = variance if self.learned else torch.as_tensor(self.std).to(variance).square().expand_as(variance)
        return float((variance / noise + (2 * math.pi * noise).log()).sum() / 2) if bool((noise > 0).all()) else None

    def extra_repr(self) -> str:
        return f"std={self.std}, learned={self.learned}"

    def components(self, output: Tensor) -> dict[str, Tensor]:
        loc = columns(output, "Gaussian")
        return {"loc": loc, "scale": of_each(self.log_std, loc, "std").exp()}

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        output, target, observed = self._paired("Gaussian", output, target)
        log_std = of_each(self.log_std, output, "std")
        standardised = (target - output) / log_std.exp()
        return summed(-standardised.square() / 2 - log_std - math.log(2 * math.pi) / 2, observed)

    def terms(self, output: Tensor) -> dict[str, Tensor]:
        mean = columns(output, "Gaussian")
        variance = (2 * of_each(self.log_std, mean, "std")).exp().expand_as(mean)
        mean = widest(mean)  # E[f²] - E[f]² below needs the digits
        return {"mean": mean, "square": mean.square(), "variance": variance}

    def target_terms(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        output, target, observed = self._paired("Gaussian", output, target)
        scale = of_each(self.log_std, output, "std").exp()
        return {"cdf": where_observed(torch.special.ndtr((target - output) / scale), observed, math.nan)}


class HeteroscedasticGaussian(Likelihood):
    """Regression with noise that depends on the input: the network has an output for each mean and each scale.

        p(y|x,θ) = Π_d N(y_d; m_d, s_d²),   s_d = min_std + std·softplus(a_d)/log 2

    Output (n, 2·D), first the D means m, then the D numbers a; target (n, D), or (n,) if D is 1. Fields have outputs
    (n, 2·C, H, W) for targets (n, C, H, W); sequences with the numbers last, (n, T, 2·D) for (n, T, D), need axis=-1.
    `num_data` counts images or sequences, whose log density is the sum over their numbers.

    Args:
        std: the scale where its output is 0 (besides min_std), > 0, in the units of the (standardised) target.
        min_std: the smallest scale, > 0, which bounds the density of repeated data.
        missing: the value of targets that are not observed, see `Likelihood`.
        axis: the axis of the output that has first the means, then the numbers a.

    Raises:
        ValueError: for a number out of range.

    Source: Nix & Weigend 1994.

    >>> HeteroscedasticGaussian(std=1.0, min_std=1e-6).log_prob(torch.zeros(1, 2), torch.tensor([0.0]))
    tensor([-0.9189])
    """

    distribution = Normal

    def __init__(self, std: float = 1.0, min_std: float = 1e-3, missing: float | None = None, axis: int = 1) -> None:
        super().__init__(missing)
        check_within("std", std, "(0, inf)")
        check_within("min_std", min_std, "(0, inf)")
        self.std = std
        self.min_std = min_std
        self.axis = _checked_axis(axis)

    def num_outputs(self, targets: int) -> int:
        return 2 * targets

    def components(self, output: Tensor) -> dict[str, Tensor]:
        _check_multiple(type(self).__name__, output, 2, self.axis)
        mean, raw = output.chunk(2, self.axis)
        return {"loc": mean, "scale": self.min_std + self.std / math.log(2) * F.softplus(raw)}

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        own = self.kept_components(output)
        mean, target, observed = self._paired(f"HeteroscedasticGaussian(axis={self.axis})", own["loc"], target)
        standardised = (target - mean) / own["scale"]
        return summed(-standardised.square() / 2 - own["scale"].log() - math.log(2 * math.pi) / 2, observed)

    def chance_nll(self, target: Tensor) -> float | None:
        variance = _variance(columns(target, type(self).__name__))
        return float((1 + (2 * math.pi * variance).log()).sum() / 2) if bool((variance > 0).all()) else None

    def extra_repr(self) -> str:
        return f"std={self.std}, min_std={self.min_std}, axis={self.axis}"


class StudentT(Likelihood):
    """Robust regression: y = output + scale·t, t of Student's distribution with df degrees of freedom.

    Output and target of one shape, as in `Gaussian`. Outliers have a bounded influence; df → ∞ is `Gaussian`.

    Args:
        df: degrees of freedom, > 2, so that predictions have a standard deviation.
        scale: > 0, in the units of the (standardised) target; its initial value if it is learned. One number, or a list
            as in `Gaussian`.
        learned: whether to sample log(scale) together with the weights. It is then the module's parameter
            `likelihood.log_scale`, under the module's prior.
        missing: the value of targets that are not observed, see `Likelihood`.

    Raises:
        ValueError: for a number out of range.

    Source: Lange et al. 1989.

    >>> StudentT(df=4.0).log_prob(torch.zeros(1, 1), torch.zeros(1, 1))
    tensor([-0.9808])
    """

    distribution = distributions.StudentT
    log_scale: Tensor

    def __init__(
        self, df: float = 4.0, scale: Scales = 1.0, learned: bool = False, missing: float | None = None
    ) -> None:
        super().__init__(missing)
        check_within("df", df, "(2, inf)")
        self.df = float(df)
        self.scale = positive(self, "scale", scale, learned)
        self.learned = learned

    def components(self, output: Tensor) -> dict[str, Tensor]:
        loc = columns(output, "StudentT")
        return {"df": torch.full_like(loc, self.df), "loc": loc, "scale": of_each(self.log_scale, loc, "scale").exp()}

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        output, target, observed = self._paired("StudentT", output, target)
        log_scale, half = of_each(self.log_scale, output, "scale"), (self.df + 1) / 2
        z = (target - output) / log_scale.exp()
        return summed(_normaliser(self.df) - half * (z.square() / self.df).log1p() - log_scale, observed)

    def chance_nll(self, target: Tensor) -> float | None:
        numbers = widest(columns(target, "StudentT")).flatten(1)
        if numbers.shape[1] > MOST_FITTED or not bool((_variance(numbers) > 0).all()):
            return None
        found = 0.0
        for scale, several in by_number(self.scale, numbers.cpu()):
            fixed = {"fdf": self.df} | ({} if self.learned else {"fscale": scale})
            for own in several.unbind(1):
                known = own[~own.isnan()].numpy()
                found -= float(stats.t.logpdf(known, *stats.t.fit(known, **fixed)).sum())
        return found / len(numbers) if len(numbers) else None

    def extra_repr(self) -> str:
        return f"df={self.df}, scale={self.scale}, learned={self.learned}"


class MixtureOfGaussians(Likelihood):
    """Regression with several modes: a mixture of J Gaussians for each number (a mixture density network).

        p(y|x,θ) = Π_d Σ_j w_dj·N(y_d; m_dj, s_dj²),   w_d = softmax(a_d),   s_dj = min_std + std·softplus(b_dj)/log 2

    Output (n, 3·J·D): for each of the D numbers J of a, J of m and J of b; target (n, D), or (n,) if D is 1. Fields
    have outputs (n, 3·J·C, H, W); sequences with the numbers last, (n, T, 3·J·D), need axis=-1.

    Args:
        num_components: J, at least 2.
        std: the scales where their outputs are 0 (besides min_std), > 0, in the units of the (standardised) target.
        min_std: the smallest scale, > 0, which bounds the density of repeated data.
        missing: the value of targets that are not observed, see `Likelihood`.
        axis: the axis of the output that has the numbers a, m and b.

    Raises:
        ValueError: for a number out of range.

    Source: Bishop 1994.

    >>> MixtureOfGaussians(2, min_std=1e-6).log_prob(torch.zeros(1, 6), torch.tensor([0.0]))
    tensor([-0.9189])
    """

    distribution = NormalMixture

    def __init__(
        self,
        num_components: int,
        std: float = 1.0,
        min_std: float = 1e-3,
        missing: float | None = None,
        axis: int = 1,
    ) -> None:
        super().__init__(missing)
        check_count("num_components", num_components)
        if num_components < 2:
            raise ValueError(
                f"num_components must be at least 2, got {num_components}: use HeteroscedasticGaussian for one"
            )
        check_within("std", std, "(0, inf)")
        check_within("min_std", min_std, "(0, inf)")
        self.num_components = num_components
        self.std = std
        self.min_std = min_std
        self.axis = _checked_axis(axis)

    def num_outputs(self, targets: int) -> int:
        return 3 * self.num_components * targets

    def components(self, output: Tensor) -> dict[str, Tensor]:
        name = f"MixtureOfGaussians({self.num_components})"
        _check_multiple(name, output, 3 * self.num_components, self.axis)
        place = self.axis % output.dim()
        each = output.unflatten(place, (-1, 3, self.num_components)).unbind(place + 1)
        logits, loc, raw = (part.movedim(place + 1, -1) for part in each)
        return {"logits": logits, "loc": loc, "scale": self.min_std + self.std / math.log(2) * F.softplus(raw)}

    def extra_repr(self) -> str:
        own = f"num_components={self.num_components}, std={self.std}, min_std={self.min_std}"
        return f"{own}, axis={self.axis}"


def doubt_of_noise(likelihood: Gaussian | StudentT, spread: Tensor) -> str | None:
    """Return why a noise does not suit standardised targets: it is as large as their spread, or one for several."""
    name, noise = ("std", likelihood.std) if isinstance(likelihood, Gaussian) else ("scale", likelihood.scale)
    made, several = type(likelihood).__name__, spread.numel()
    if not likelihood.learned and float(torch.as_tensor(noise).max()) >= 1:
        return (
            f"{made}({name}={noise}) says that the noise is as large as the spread of the standardised targets, so "
            f"intervals are too wide: pass {made}(learned=True), or the noise's {name} over the standard deviation of "
            "the targets."
        )
    if several > 1 and spread.dim() == 1 and isinstance(noise, float):
        return (
            f"{made} has one noise for all {several} targets, so intervals are too wide for some and too narrow "
            f"for others: pass {made}({name}=[{noise}] * {several}, learned=True) for one each."
        )
    return None


def _checked_axis(axis: int) -> int:
    check_kind("axis", axis, int, optional=False)
    if axis == 0:
        raise ValueError("axis=0 is the axis of the data: pass 1 for a convolution's channels, -1 for the last axis")
    return axis


def _check_multiple(name: str, output: Tensor, width: int, axis: int) -> None:
    """Raise unless the output has `width` numbers for each target along an axis."""
    is_there = output.dim() >= 2 and -output.dim() < axis < output.dim()
    if not is_there or output.shape[axis] % width:
        raise ValueError(
            f"{name} needs {width} outputs for each target along axis={axis}, shape (n, {width}·D, …), got "
            f"{tuple(output.shape)}: pass axis=-1 if they are along the last axis"
        )


@functools.cache
def _normaliser(df: float) -> float:
    """Return the constant of Student's log density, computed once, not with every step."""
    return float(student_t_normaliser(torch.tensor(df, dtype=torch.float64)))


def _variance(target: Tensor) -> Tensor:
    """Return the variance of the observed numbers at each place of a target."""
    numbers = widest(target)
    return (numbers - numbers.nanmean(0)).square().nanmean(0)
