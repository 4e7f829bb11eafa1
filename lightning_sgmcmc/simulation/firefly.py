"""Firefly Monte Carlo (FlyMC): the exact posterior from few data per step, if likelihoods have a tight lower bound.

Every datum has an indicator z_i ("bright"), which is 1 with probability 1 - B_i(θ)/L_i(θ), so that the joint density

    p(θ)·Π_i [L_i(θ) - B_i(θ)]^{z_i}·B_i(θ)^{1-z_i} = p(θ)·Π_i B_i(θ)·Π_{i: z_i=1} [L_i(θ)/B_i(θ) - 1]

has the posterior as its marginal over θ, and needs the likelihoods of bright data only. A step redraws some of the z
and then moves θ by Metropolis on the joint density.

Source: Maclaurin & Adams 2015 (Firefly Monte Carlo: Exact MCMC with subsets of data), Algorithm 1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.simulation.likelihood_bounds import BoundedLikelihood
from lightning_sgmcmc.simulation.random_walk import DECAY

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
    likelihood: BoundedLikelihood,
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
    check_count("num_steps", num_steps)
    check_count("resampled", resampled)
    check_count("burn_in", burn_in, 0)
    check_count("keep_every", keep_every)
    _check_arguments(likelihood, initial, num_steps, step_size, burn_in, target_acceptance, keep_every)
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

    def __init__(self, likelihood: BoundedLikelihood, place: Tensor, resampled: int, langevin: bool, seed: int) -> None:
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
        # If a datum was chosen twice, either of its draws is valid.
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


def _check_arguments(
    likelihood: BoundedLikelihood,
    initial: Tensor,
    num_steps: int,
    step_size: float,
    burn_in: int,
    target_acceptance: float | None,
    keep_every: int,
) -> None:
    if initial.shape != (likelihood.dimension,) or not bool(initial.isfinite().all()):
        raise ValueError(
            f"initial should be finite numbers of shape ({likelihood.dimension},), got {tuple(initial.shape)}"
        )
    if not likelihood.contains(initial):
        raise ValueError(f"the bound does not hold at initial={initial.tolist()}: start nearer, or use a wider region")
    if num_steps < burn_in + keep_every:
        raise ValueError(f"num_steps={num_steps} leaves no draw after burn_in={burn_in} with keep_every={keep_every}")
    if not 0 < step_size < math.inf:
        raise ValueError(f"step_size must be positive and finite, got {step_size}")
    if target_acceptance is not None and not 0 < target_acceptance < 1:
        raise ValueError(f"target_acceptance must lie in (0, 1), got {target_acceptance}")
