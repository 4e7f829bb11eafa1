"""Firefly Monte Carlo (FlyMC): the exact posterior from few data per step, if likelihoods have a tight lower bound.

Every datum has an indicator z_i ("bright"), which is 1 with probability 1 - B_i(θ)/L_i(θ), so that the joint density

    p(θ)·Π_i [L_i(θ) - B_i(θ)]^{z_i}·B_i(θ)^{1-z_i} = p(θ)·Π_i B_i(θ)·Π_{i: z_i=1} [L_i(θ)/B_i(θ) - 1]

has the posterior as its marginal over θ, and needs the likelihoods of bright data only. A step redraws some of the z
and then moves θ by Metropolis on the joint density. If log B_i is a sum of functions of θ times numbers of the
datum, as a quadratic is, those numbers are summed once: Σ log B_i costs no more than one datum's.

Source: Maclaurin & Adams 2015 (Firefly Monte Carlo: Exact MCMC with subsets of data), Algorithm 1.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.simulation.random_walk import DECAY, check_walk

LOG_CONSTANT = -math.log(2 * math.pi) / 2
TOLERANCE = 1e-9
"""Tolerance, relative to 1 + |log L_i|, for a bound above its likelihood through rounding."""


@dataclass(frozen=True)
class FireflyRun:
    """Results of a chain.

    Attributes:
        draws: positions after the burn-in, shape (S, d).
        bright: number of bright data at the move of θ, for each step, shape (K,), int64.
        evaluations: evaluations of the likelihood with its bound, for each step, shape (K,), int64. The start needs N
            more.
        acceptance: share of accepted moves of θ after the burn-in.
        step_size: step size after the burn-in.
    """

    draws: Tensor
    bright: Tensor
    evaluations: Tensor
    acceptance: float
    step_size: float


def firefly(
    likelihood: "BoundedLikelihood",
    initial: Tensor,
    num_steps: int,
    *,
    resampled: int,
    step_size: float,
    langevin: bool = False,
    burn_in: int = 0,
    target_acceptance: float | None = None,
    keep_every: int = 1,
    seed: int = 0,
) -> FireflyRun:
    """Run one chain; it begins by drawing all z.

    Args:
        likelihood: likelihood of the data, with its bound.
        initial: θ at the start, shape (d,), in the dtype of the data (float64 if bounds are very tight).
        num_steps: steps, including the burn-in.
        resampled: number of data, chosen with replacement, whose z a step redraws, such as N/10.
        step_size: s; a step proposes θ + s·ξ.
        langevin: propose θ + ½s²∇ + sξ with the gradient of the joint log density, for twice the bright evaluations.
        burn_in: steps without draws, in which s is tuned if there is a target.
        target_acceptance: acceptance rate for the tuning of s; None keeps s.
        keep_every: steps between draws that are kept.
        seed: seed of all random numbers.

    Raises:
        ValueError: for an argument out of range or of the wrong shape, a start where the bound does not hold, or, at
            any step, a bound above its likelihood.
    """
    check_walk(num_steps, burn_in, keep_every, "step_size", step_size, target_acceptance)
    check_count("resampled", resampled)
    if initial.shape != (likelihood.dimension,) or not bool(initial.isfinite().all()):
        raise ValueError(
            f"initial should be finite numbers of shape ({likelihood.dimension},), got {tuple(initial.shape)}"
        )
    if not likelihood.contains(initial):
        raise ValueError(f"the bound does not hold at initial={initial.tolist()}: start nearer, or use a wider region")
    chain = _FireflyChain(likelihood, initial.clone(), resampled, langevin, seed)
    log_step, accepted = math.log(step_size), 0
    draws, bright, evaluations = [], [], []
    for k in range(1, num_steps + 1):
        chance, accepts = chain.step(math.exp(log_step))
        bright.append(chain.num_bright)
        evaluations.append(chain.evaluations)
        if k > burn_in:
            accepted += accepts
            if (k - burn_in) % keep_every == 0:
                draws.append(chain.place)
        elif target_acceptance is not None:
            log_step += k**-DECAY * (chance - target_acceptance)
    acceptance = accepted / (num_steps - burn_in)
    counts = torch.tensor([bright, evaluations], dtype=torch.int64)
    return FireflyRun(torch.stack(draws), counts[0], counts[1], acceptance, math.exp(log_step))


class _FireflyChain:
    """θ, the bright data, and their log L_i - log B_i at θ (stale for dark data)."""

    def __init__(
        self, likelihood: "BoundedLikelihood", place: Tensor, resampled: int, langevin: bool, seed: int
    ) -> None:
        self.likelihood = likelihood
        self.place = place
        self.resampled = resampled
        self.langevin = langevin
        self.generator = torch.Generator(place.device).manual_seed(derive_seed(seed, "firefly"))
        self.num_bright = self.evaluations = 0
        self._excess = self._excess_of(place, None)
        uniforms = torch.rand(likelihood.num_data, generator=self.generator, dtype=place.dtype, device=place.device)
        self._bright = uniforms < -torch.expm1(-self._excess)

    def step(self, step_size: float) -> tuple[float, bool]:
        """Redraw some z and move θ; return the proposal's acceptance probability and whether it was accepted."""
        self._resample()
        index = self._bright.nonzero()[:, 0]
        self.num_bright, self.evaluations = len(index), self.resampled
        noise = torch.randn(len(self.place), generator=self.generator, dtype=self.place.dtype)
        limit = float(torch.rand((), generator=self.generator, dtype=torch.float64).log())
        drift: Tensor | float = 0.0
        if self.langevin:
            drift = self._gradient(self.place, index) * (step_size**2 / 2)
            self.evaluations += len(index)
        proposal = self.place + drift + step_size * noise
        if not self.likelihood.contains(proposal):
            return 0.0, False
        excess = self._excess_of(proposal, index)
        self.evaluations += len(index)
        change = self._log_joint(proposal, excess) - self._log_joint(self.place, self._excess[index])
        if self.langevin:
            back = self.place - proposal - self._gradient(proposal, index) * (step_size**2 / 2)
            change = change + noise.square().sum() / 2 - back.square().sum() / (2 * step_size**2)
        log_chance = min(0.0, float(change.nan_to_num(nan=-math.inf)))
        accepts = limit < log_chance
        if accepts:
            self.place = proposal
            self._excess[index] = excess
        return math.exp(log_chance), accepts

    def _resample(self) -> None:
        data, count = self.likelihood.num_data, self.resampled
        index = torch.randint(data, (count,), generator=self.generator)
        uniforms = torch.rand(count, generator=self.generator, dtype=self.place.dtype)
        excess = self._excess_of(self.place, index)
        self._excess[index] = excess
        # If an example was chosen twice, either of its draws is valid.
        self._bright[index] = uniforms < -torch.expm1(-excess)

    def _log_joint(self, place: Tensor, excess: Tensor) -> Tensor:
        """Return the log of the joint density, without dark data's likelihoods; log(L/B - 1) = e + log(1 - exp(-e))."""
        bright = excess.sum() + torch.log(-torch.expm1(-excess)).sum()
        return self.likelihood.log_prior(place) + self.likelihood.log_bounds_sum(place) + bright

    def _gradient(self, place: Tensor, index: Tensor) -> Tensor:
        with torch.enable_grad():
            moved = place.detach().requires_grad_()
            likelihood = self.likelihood
            excess = likelihood.log_likelihood(moved, index) - likelihood.log_bound(moved, index)
            (gradient,) = torch.autograd.grad(self._log_joint(moved, excess), moved)
        return gradient

    def _excess_of(self, place: Tensor, index: Tensor | None) -> Tensor:
        """Return log L_i - log B_i ≥ 0; raise if a bound is above its likelihood by more than rounding."""
        level = self.likelihood.log_likelihood(place, index)
        excess = level - self.likelihood.log_bound(place, index)
        wrong = ~(excess >= -TOLERANCE * (1 + level.abs()))
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            datum = first if index is None else int(index[first])
            raise ValueError(
                f"the bound is not a lower bound: at θ={place.tolist()} log B - log L of datum {datum} is "
                f"{-float(excess[first]):.3g}"
            )
        return excess.clamp(min=0)


# -- likelihoods with bounds ------------------------------------------------------------------------------------------


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
