"""Lower bounds on each datum's likelihood, whose product over all data costs no more than one datum's.

Firefly Monte Carlo (`lightning_sgmcmc.simulation.firefly`) needs few data for an exact posterior if such a bound
B_i ≤ L_i is tight. If log B_i is a sum of functions of θ times numbers of the datum, as a quadratic is, so is
Σ log B_i, and those numbers are summed once.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

LOG_CONSTANT = -math.log(2 * math.pi) / 2


class BoundedLikelihood(ABC):
    """Data with a likelihood L_i(θ), its lower bound B_i(θ), and a prior.

    Attributes:
        num_data: N.
        dimension: d.
    """

    num_data: int
    dimension: int

    @abstractmethod
    def log_likelihood(self, place: Tensor, index: Tensor | None = None) -> Tensor:
        """Return log L_i(θ), shape (n,), for the data with these indices (n,), or for all; θ has shape (d,)."""

    @abstractmethod
    def log_bound(self, place: Tensor, index: Tensor | None = None) -> Tensor:
        """Return log B_i(θ), shape (n,), with the arguments of `log_likelihood`."""

    @abstractmethod
    def log_bounds_sum(self, place: Tensor) -> Tensor:
        """Return Σ_i log B_i(θ) over all data, shape (), at a cost that does not grow with N."""

    def log_prior(self, place: Tensor) -> Tensor:
        """Return log p(θ) up to a constant, shape (); 0 here, a flat prior."""
        return place.new_zeros(())

    def contains(self, place: Tensor) -> bool:
        """Return whether the bound holds at θ; the posterior is truncated to the region where it does."""
        return True


class LogisticBound(BoundedLikelihood):
    """Logistic regression, p(y_i=1) = 1/(1 + exp(-x_iᵀθ)), prior N(0, std²·I), and the bound of Jaakkola and Jordan.

        log L_i = log σ(a),   a = ±x_iᵀθ by y_i
        log B_i = log σ(ξ_i) + (a - ξ_i)/2 - λ(ξ_i)·(a² - ξ_i²),   λ(ξ) = tanh(ξ/2)/(4ξ)

    which touches at a = ±ξ_i. The sums Σx_i·(±1)/2 and Σλ(ξ_i)·x_i·x_iᵀ are computed once.

    Args:
        inputs: x, shape (N, d); a column of ones is the intercept.
        labels: y, shape (N,), 0 and 1.
        prior_std: standard deviation of the prior; infinite means a flat prior.
        tuning: ξ, a number for all data or a tensor (N,); 1.5 is the paper's untuned value.

    Raises:
        ValueError: for wrong shapes, labels that are not 0 and 1, or a prior_std that is not positive.

    Source: Jaakkola & Jordan 1997 (A variational approach to Bayesian logistic regression models); Maclaurin & Adams
    2015 (Firefly Monte Carlo).
    """

    def __init__(self, inputs: Tensor, labels: Tensor, prior_std: float, tuning: Tensor | float = 1.5) -> None:
        if inputs.dim() != 2 or labels.shape != inputs.shape[:1]:
            raise ValueError(
                f"inputs should have shape (N, d) and labels (N,), got {tuple(inputs.shape)} and {tuple(labels.shape)}"
            )
        if not bool(((labels == 0) | (labels == 1)).all()):
            raise ValueError("labels should be 0 and 1")
        if not prior_std > 0:
            raise ValueError(f"prior_std must be positive, got {prior_std}")
        self.num_data, self.dimension = inputs.shape
        self.prior_std = prior_std
        # With the label's sign in the inputs, a = x_iᵀθ.
        self._inputs = inputs * (2 * labels.to(inputs) - 1)[:, None]
        xi = torch.as_tensor(tuning).to(inputs).abs().expand(self.num_data)
        safe = torch.where(xi > 0, xi, 1.0)
        self._curvature = torch.where(xi > 0, torch.tanh(safe / 2) / (4 * safe), 0.125)
        self._constant = logsigmoid(xi) - xi / 2 + self._curvature * xi.square()
        self._sums = (self._constant.sum(), self._inputs.sum(0) / 2, (self._inputs.T * self._curvature) @ self._inputs)

    @classmethod
    def tuned(cls, inputs: Tensor, labels: Tensor, prior_std: float, place: Tensor) -> "LogisticBound":
        """Return the bound that touches every datum's likelihood at a position (d,), such as the posterior's mode."""
        return cls(inputs, labels, prior_std, (inputs @ place.to(inputs)).abs())

    def log_likelihood(self, place: Tensor, index: Tensor | None = None) -> Tensor:
        return logsigmoid(_rows(self._inputs, index) @ place)

    def log_bound(self, place: Tensor, index: Tensor | None = None) -> Tensor:
        logit = _rows(self._inputs, index) @ place
        constant, curvature = _rows(self._constant, index), _rows(self._curvature, index)
        return constant + logit / 2 - curvature * logit.square()

    def log_bounds_sum(self, place: Tensor) -> Tensor:
        constant, linear, quadratic = self._sums
        return constant + linear @ place - place @ quadratic @ place

    def log_prior(self, place: Tensor) -> Tensor:
        return -place.square().sum() / (2 * self.prior_std**2)


class TaylorBound(BoundedLikelihood):
    """N(x_i; μ, σ²) at θ = (μ, log σ), flat prior, and the second-order expansion at the mode minus its error bound.

        log B_i = log L_i(θ*) + ∇log L_i(θ*)ᵀδ + ½·δᵀ∇²log L_i(θ*)δ - M_i/6·(|δ_μ| + |δ_s|)³,   δ = θ - θ*
        M_i = w·max(2, 4u_i, 4u_i²),   u_i = |x_i - μ*| + r_μ,   w = exp(2r_s)/σ*²

    M_i is at least the third derivatives 2e^{-2s}, 4(x_i - μ)e^{-2s}, 4(x_i - μ)²e^{-2s} of log L_i in the region
    |δ_μ| ≤ r_μ, |δ_s| ≤ r_s (the third derivative in μ is 0). The posterior is truncated to this region: choose one
    with practically all of its mass. The sums of x_i, x_i² and M_i are computed once.

    Args:
        values: x, shape (N,).
        radius: r_μ in units of the data and r_s.
        shared: whether all data share the M of the farthest datum, instead of each having its own.

    Raises:
        ValueError: for fewer than two values, values that are all equal, or a radius that is not positive.

    Source: Bardenet, Doucet & Holmes 2017 (On Markov chain Monte Carlo methods for tall data), whose code uses one M
    for all data.
    """

    def __init__(self, values: Tensor, radius: tuple[float, float] = (0.1, 0.1), shared: bool = False) -> None:
        if values.dim() != 1 or len(values) < 2 or not float(values.std()) > 0:
            raise ValueError(f"values should be two or more different numbers, got shape {tuple(values.shape)}")
        if not all(0 < r < math.inf for r in radius):
            raise ValueError(f"radius must be two positive numbers, got {radius}")
        self.num_data, self.dimension = len(values), 2
        self.radius = radius
        self._values = values
        self.mode = torch.stack([values.mean(), values.std(correction=0).log()])
        """θ*, shape (2,)."""
        self._precision = (-2 * self.mode[1]).exp()
        deviations = values - self.mode[0]
        far = deviations.abs() + radius[0]
        third = 4 * self._precision * math.exp(2 * radius[1]) * torch.maximum(far, far.square()).clamp(min=0.5)
        if shared:
            third = third.max().expand(self.num_data)
        # Per datum; log B_i is a sum of these times functions of θ.
        self._terms = torch.stack([torch.ones_like(values), deviations, deviations.square(), third], 1)
        self._sums = self._terms.sum(0)

    def log_likelihood(self, place: Tensor, index: Tensor | None = None) -> Tensor:
        values = _rows(self._values, index)
        return LOG_CONSTANT - place[1] - (values - place[0]).square() * (-2 * place[1]).exp() / 2

    def log_bound(self, place: Tensor, index: Tensor | None = None) -> Tensor:
        return _rows(self._terms, index) @ self._weights(place)

    def log_bounds_sum(self, place: Tensor) -> Tensor:
        return self._sums @ self._weights(place)

    def _weights(self, place: Tensor) -> Tensor:
        """Return the functions of θ that multiply 1, x_i - μ*, its square and M_i."""
        a, b = place - self.mode
        precision = self._precision
        one = LOG_CONSTANT - place[1] - precision * a * a / 2
        return torch.stack(
            [one, precision * a * (1 - 2 * b), precision * (b - b * b - 0.5), -((a.abs() + b.abs()) ** 3) / 6]
        )

    def contains(self, place: Tensor) -> bool:
        away = (place - self.mode).abs()
        return bool(away[0] <= self.radius[0]) and bool(away[1] <= self.radius[1])


def _rows(values: Tensor, index: Tensor | None) -> Tensor:
    return values if index is None else values.index_select(0, index)
