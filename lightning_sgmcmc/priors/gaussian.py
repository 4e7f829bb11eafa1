"""Gaussian priors: one scale, scales by name pattern or by fan-in, and centres."""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_positive
from lightning_sgmcmc.priors.base import STATE, RowDensity, ScalePrior, check_patterns, log_of, own_parameters
from lightning_sgmcmc.priors.centers import GivenCenter, is_centered
from lightning_sgmcmc.tensors import as_rows

Std: TypeAlias = "float | Literal['fan_in'] | Mapping[str, float | Literal['fan_in']]"
Center: TypeAlias = "str | Path | Mapping[str, Any] | None"

CENTER = f"{STATE}.center."


class Distances(NamedTuple):
    """The parameters of one chain or of all chains, the positions of those with a centre, and their centres."""

    tensors: tuple[Tensor, ...]
    where: tuple[int, ...]
    centers: list[Tensor] | None

    def differences(self) -> tuple[Tensor, ...]:
        """Return θ - c of each tensor; the tensor itself where c = 0."""
        if not self.centers:
            return self.tensors
        result = list(self.tensors)
        shifted = torch._foreach_sub([self.tensors[i] for i in self.where], self.centers)
        for index, difference in zip(self.where, shifted, strict=True):
            result[index] = difference
        return tuple(result)


class GaussianPrior(ScalePrior):
    """Independent Gaussians: log p(θ) = Σ_j [-(θ_j - c_j)²/(2·std²) - log(std·√(2π))], with mean c = 0 by default.

    It equals a weight decay of `1/(N·std²)` in a mean loss (towards c), so the optimizer should have no weight decay of
    its own.

    With std "fan_in" a tensor of two or more axes has std = gain/√fan_in, with the fan-in of torch.nn.init: the inputs
    of each output, `shape[1]·shape[2]·…`. Its sums then have the same variance whatever the layer's width. Tensors of
    fewer axes (biases, scales of normalisation layers, log-variances) have no fan and std 1.

    Args:
        std: standard deviation > 0 or "fan_in", one for all parameters or by name pattern (see `ScalePrior`):
            `{"*.bias": 1.0, "*": "fan_in"}`.
        gain: > 0, of "fan_in": √2 for ReLU networks (variance 2/fan_in), 1 for tanh and linear layers (1/fan_in).
        center: c. None is 0; "start" is each chain's own start, the state with which its fit begins; otherwise a state
            dict or the path of a file with one (a checkpoint, a sample's safetensors file). The network's own names are
            found too, without "net.". A run resumes only with the same centre.
        centered: patterns of the parameters with a centre; the others have c = 0. None is all of them.

    Raises:
        ValueError: if std or gain is not positive, or the centre's file is missing or damaged; when a fit begins, if
            std has no pattern for a parameter, or the centre no tensor of its name and shape.
        TypeError: if an argument has the wrong type.

    Source: Neal 1996 (Bayesian Learning for Neural Networks, section 2.1.2: scales of 1/√width); He et al. 2015
    (Delving Deep into Rectifiers, eq. 10: variance 2/fan_in).

    >>> prior = GaussianPrior({"*.bias": 10.0, "*": 1.0})
    >>> prior.scale_of("net.0.bias"), prior.scale_of("net.0.weight")
    (10.0, 1.0)
    >>> GaussianPrior().log_prob({"w": torch.zeros(2)})
    tensor(-1.8379)
    >>> GaussianPrior("fan_in", gain=1.0).scale_of("net.0.weight", shape=(100, 64))
    0.125
    """

    words = ("fan_in",)
    is_default = False
    """Whether nobody has chosen the scales, so that `AutoSampling` does around the centre: that of `bayesianize`."""

    def __init__(
        self,
        std: Std = 1.0,
        gain: float = math.sqrt(2),
        center: Center = None,
        centered: Sequence[str] | None = None,
    ) -> None:
        super().__init__(std, "std")
        check_positive("the prior's gain", gain)
        self.gain = float(gain)
        self.center: Literal["start"] | GivenCenter | None = None
        if center is not None:
            self.center = "start" if isinstance(center, str) and center == "start" else GivenCenter(center)
        self.centered = _checked_patterns(centered, center)
        self._by_shape = "fan_in" in self._scales.values() or self.center is not None
        self._known: tuple[Any, ...] = ()
        self._known_scales: list[float] = []
        self._constants: list[float] = []
        self._constant = 0.0
        self._precisions: Tensor | None = None
        self._count = 0
        self._where: tuple[int, ...] = ()
        self._centers: list[Tensor] = []

    # -- scales and centres -------------------------------------------------------------------------------------------

    def _scale_by(self, word: str, parameter_name: str, shape: Sequence[int] | None) -> float:
        if shape is None:
            raise ValueError(f"std='{word}' depends on the shape of '{parameter_name}': pass shape=…")
        return self.gain / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else 1.0

    def initial_state(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return each chain's centre, NaN until its start is known; nothing unless it is "start"."""
        if self.center != "start":
            return {}
        names = [name for name in parameters if is_centered(name, self.centered)]
        return {f"center.{name}": torch.full_like(parameters[name], math.nan).detach() for name in names}

    def check_names(self, names: Collection[str]) -> None:
        super().check_names(names)
        if self.centered is not None:
            check_patterns("the prior's centered", self.centered, names)

    def distances(self, parameters: Mapping[str, Tensor], chains: bool = False) -> Distances:
        """Return the parameters and their centres.

        Args:
            parameters: as for `log_prob`.
            chains: whether they have a leading axis of chains.

        Raises:
            ValueError: if the centre does not suit them, or is each chain's start and no fit has begun.
        """
        values = tuple(parameters.values())
        self._prepare(parameters, values, chains)
        if self.center is None:
            return Distances(values if len(values) == self._count else values[: self._count], (), None)
        centers = self._centers
        if self.center == "start":
            centers = [*values[len(values) - len(self._where) :]]
        elif centers and centers[0].device != values[0].device:
            centers = self._centers = [tensor.to(values[0].device) for tensor in centers]
        return Distances(values[: self._count], self._where, centers)

    def _prepare(self, parameters: Mapping[str, Tensor], values: tuple[Tensor, ...], chains: bool) -> None:
        """Compute what depends on names, shapes and dtype alone; kept for the next call."""
        sizes = [value.shape for value in values] if self._by_shape else [value.numel() for value in values]
        held: Mapping[str, int] = getattr(parameters, "held", {})
        known = (chains, *parameters, *sizes, *held.items(), values[0].dtype)
        if known == self._known:
            return
        own = own_parameters(parameters)
        shapes = {name: value.shape[1:] if chains else value.shape for name, value in own.items()}
        scales = [self.scale_of(name, shape) for name, shape in shapes.items()]
        centred = [name for name in own if self.center is not None and is_centered(name, self.centered)]
        if self.center == "start" and sum(name.startswith(CENTER) for name in parameters) != len(centred):
            raise ValueError(
                "the prior's center='start' is known once a fit has begun: fit first, or pass a state dict"
            )
        if isinstance(self.center, GivenCenter):
            given = [self.center.tensor_for(name, shapes[name], held.get(name)) for name in centred]
            self._centers = [tensor.to(values[0]) for tensor in given]
        self._where = tuple(map(list(own).index, centred))
        counts, normaliser = [shape.numel() for shape in shapes.values()], math.sqrt(2 * math.pi)
        self._constants = [count * math.log(s * normaliser) for count, s in zip(counts, scales, strict=True)]
        self._constant = -sum(self._constants)
        self._precisions = None if len(set(scales)) == 1 else values[0].new_tensor([1 / s**2 for s in scales])
        self._known_scales, self._count, self._known = scales, len(own), known

    # -- the density --------------------------------------------------------------------------------------------------

    def log_prob(self, parameters: Mapping[str, Tensor]) -> Tensor:
        tensors, distances = tuple(parameters.values()), None
        if self.center is None:  # in every step of most runs
            self._prepare(parameters, tensors, False)
            tensors = tensors[: self._count]
        else:
            distances = self.distances(parameters)
            tensors = distances.tensors
        if self._precisions is not None and self._precisions.device != tensors[0].device:
            self._precisions = self._precisions.to(tensors[0].device)
        result: Tensor = _GaussianLogDensity.apply(
            self._constant, self._known_scales, self._precisions, distances, *tensors
        )
        return result

    def log_prob_of_chains(self, parameters: Mapping[str, Tensor]) -> Tensor:
        differences = self.distances(parameters, chains=True).differences()
        terms = [
            as_rows(difference, len(difference)).square().sum(1).mul(-0.5 / std**2).sub(constant)
            for difference, std, constant in zip(differences, self._known_scales, self._constants, strict=True)
        ]
        return torch.stack(terms).sum(0)

    def differences_of_rows(self, parameters: Mapping[str, Tensor]) -> RowDensity:
        """Return θ - c of each coordinate, shape (C, P), as a function of the rows and the prior's tensors.

        Args:
            parameters: as for `of_rows`.
        """
        self.distances(parameters, chains=True)
        own = own_parameters(parameters)
        if self.center is None:
            return lambda rows, state: rows
        if self.center == "start":
            gaps = [tensor.new_zeros(()).expand(as_rows(tensor, len(tensor)).shape) for tensor in own.values()]
            centred = {place: f"{CENTER}{name}" for place, name in enumerate(own) if place in self._where}

            def from_start(rows: Tensor, state: Mapping[str, Tensor]) -> Tensor:
                parts = list(gaps)
                for place, name in centred.items():
                    parts[place] = as_rows(state[name], len(rows))
                return rows - torch.cat(parts, 1)

            return from_start
        parts = [tensor.new_zeros(tensor.shape[1:]) for tensor in own.values()]
        for place, center in zip(self._where, self._centers, strict=True):
            parts[place] = center
        given = torch.cat([part.reshape(-1).to(parts[0]) for part in parts])
        return lambda rows, state: rows - given

    def of_rows(self, parameters: Mapping[str, Tensor]) -> RowDensity:
        std, differences = self.scales_of_columns(parameters), self.differences_of_rows(parameters)
        count = sum(tensor[0].numel() for tensor in own_parameters(parameters).values())
        constant = -log_of(std, count) - count * math.log(math.sqrt(2 * math.pi))
        precision = 1 / std**2

        def log_prob(rows: Tensor, state: Mapping[str, Tensor]) -> Tensor:
            squares = differences(rows, state).square()
            if isinstance(precision, Tensor):
                return (squares * precision).sum(1).mul(-0.5).add(constant)
            return squares.sum(1).mul(-0.5 * precision).add(constant)

        return log_prob

    def __repr__(self) -> str:
        value: Any = self._scales["*"] if list(self._scales) == ["*"] else self._scales
        options = [f"std={value!r}"]
        if "fan_in" in self._scales.values():
            options.append(f"gain={self.gain:.6g}")
        if self.center is not None:
            options.append(f"center={self.center!r}")
        if self.centered is not None:
            options.append(f"centered={list(self.centered)}")
        return f"{type(self).__name__}({', '.join(options)})"


def _checked_patterns(centered: Any, center: Any) -> tuple[str, ...] | None:
    if centered is None:
        return None
    if center is None:
        raise ValueError(f"the prior's centered={centered!r} needs a centre: pass center='start' or a state dict")
    patterns = tuple(centered) if isinstance(centered, Sequence) and not isinstance(centered, str) else ()
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"the prior's centered must be a list of name patterns such as ['net.0.*'], got {centered!r}")
    return patterns


class _GaussianLogDensity(torch.autograd.Function):
    """constant - Σ_k ‖(θ_k - c_k)/std_k‖²/2 in a few calls for all tensors: a network has dozens, at every step."""

    @staticmethod
    def forward(
        ctx: Any,
        constant: float,
        stds: list[float],
        precisions: Tensor | None,
        distances: Distances | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.stds, ctx.distances = stds, None if distances is None else distances._replace(tensors=())
        norms = torch.stack(torch._foreach_norm(tensors if distances is None else distances.differences()))
        if precisions is None:
            return torch.dot(norms, norms).mul_(-0.5 / stds[0] ** 2).add_(constant)
        return torch.dot(norms.square(), precisions).mul_(-0.5).add_(constant)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        (grad,), stds = grad_outputs, ctx.stds
        tensors = ctx.saved_tensors
        if ctx.distances is not None:
            tensors = ctx.distances._replace(tensors=tensors).differences()
        if torch.is_grad_enabled():  # a second derivative is asked for
            return (None, None, None, None, *(t * (grad * (-1 / s**2)) for t, s in zip(tensors, stds, strict=True)))
        if len(set(stds)) == 1:
            gradients = torch._foreach_mul(tensors, grad * (-1 / stds[0] ** 2))
        else:
            gradients = torch._foreach_mul(tensors, [-1 / s**2 for s in stds])
            torch._foreach_mul_(gradients, grad)
        return (None, None, None, None, *gradients)
