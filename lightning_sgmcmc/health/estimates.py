"""Estimates of a chain's temperatures, mini-batch noise and energy drift, with joint intervals.

Under the target exp(-U/τ) every tensor of n parameters has

    E[(θ - c)·∂U/∂θ]/n = τ  for any constant c        (configurational temperature, integration by parts)
    E[m·m]/(n·σ²) = 1,  σ² the variance of a momentum coordinate at τ        (kinetic temperature over τ)

For rules without momentum m is the step itself, with σ² = 2·lr·τ/N and E[Δθ·Δθ] = lr²·E[g·g] + n·σ². In equilibrium
E‖θ - c‖² is constant, and then this is the configurational temperature too, with a much smaller error:
E[(θ - c)·∂U]/n = τ·(1 + lr·N·E[g·g]/(2·n·τ)).

Too large a step, and the noise of mini-batch gradients, heat the chain: temperatures are above τ. A chain that has not
yet spread from its optimized start has a configurational temperature below τ.

Source: Wenzel et al. 2020, "How Good is the Bayes Posterior in Deep Neural Networks Really?", section 4 and appendix I.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.draws import (
    BatchMeans,
    chi_square_interval,
    mean_and_error,
    merge_batches,
    student_quantile,
    without_warm_up,
)
from lightning_sgmcmc.health.report import EnergySummary, Interval, Temperatures
from lightning_sgmcmc.samplers.law import StepLaw
from lightning_sgmcmc.tensors import Control, inner_products, square_norms

NUM_ROWS = 4
KINETIC, PLAIN, ANCHORED, NOISE = range(NUM_ROWS)
"""Rows of `Observations.values`."""
MIN_BATCHES = 8
"""With fewer batches there are no findings."""
WIDEST, FARTHEST, BLAZING, HIGHEST = 1.0, 30.0, 10.0, 1e100
"""A temperature is not measurable if its interval is wider than ± τ, unless it lies wholly above the tolerated range
and its ends are within the factor `FARTHEST`, or it lies above `BLAZING`·τ, as that of an unstable chain whose heat
grows without end. `HIGHEST` is the highest end."""


@dataclass(frozen=True)
class Observations:
    """Batch means of a chain's observed quantities, in units of the target's temperature.

    Attributes:
        names: the T tensors' names.
        numels: their sizes.
        values: shape (B, 4, T), means over each batch's observed steps of
            [m·m/(n·σ²), θ·∂Ũ/(n·τ), c·∂Ũ/(n·τ), mini-batch noise variance over the variance removed by friction].
        energies: the mean mini-batch energy Ũ of each batch, shape (B,).
        square_energies: the mean of Ũ², shape (B,).
        counts: observed steps in each batch, shape (B,).
        temperature: τ.
        allowance: the noise (in units of `values`' last row) that the rule corrects for, per tensor; infinite if the
            rule adapts.
        clipped: share of the observed steps whose gradient was clipped, None without clipping.
        log_priors: the mean log p(θ) of each batch, shape (B,); NaN where it was not recorded, None likewise.
        num_chains: C; the tensors have the numbers of all chains, the energies are means over them.
    """

    names: Sequence[str]
    numels: Sequence[int]
    values: Tensor
    energies: Tensor
    square_energies: Tensor
    counts: Tensor
    temperature: float
    allowance: Sequence[float]
    clipped: float | None = None
    log_priors: Tensor | None = None
    num_chains: int = 1

    @property
    def dimension(self) -> float:
        """d, the number of parameters of one chain."""
        return sum(self.numels) / self.num_chains


class Estimates:
    """Means, errors and intervals of the observations: temperatures by tensor and of all, noise shares, drift."""

    def __init__(self, observations: Observations, tolerance: float, false_alarm_rate: float) -> None:
        self.observations, self.tolerance = observations, tolerance
        self.tau, self.counts = observations.temperature, observations.counts
        tests = 3 * len(observations.names) + 2 + 1
        self._probability = false_alarm_rate / (2 * tests)
        self._dof = len(self.counts) - 1
        self._quantile = student_quantile(self._probability, self._dof)
        self._steps = float(self.counts.sum())
        self._numels = torch.tensor(observations.numels, dtype=torch.float64)
        values = observations.values
        self._centred = values[:, PLAIN] - values[:, ANCHORED]
        self._mean, self._error = mean_and_error(values, self.counts)
        self._centred_mean, self._centred_error = mean_and_error(self._centred, self.counts)
        self.tensors = {name: self._of_tensor(i) for i, name in enumerate(observations.names)}
        self.total = self._of_all_tensors()

    # -- temperatures -------------------------------------------------------------------------------------------------

    def _of_tensor(self, index: int) -> Temperatures:
        mean, error = self._mean[:, index].tolist(), self._error[:, index].tolist()
        centred = float(self._centred_mean[index]), float(self._centred_error[index])
        return self._temperatures(int(self._numels[index]), [*mean, centred[0]], [*error, centred[1]])

    def _of_all_tensors(self) -> Temperatures:
        weights = self._numels / self._numels.sum()
        rows = torch.cat([self.observations.values, self._centred[:, None]], 1) @ weights  # (B, 5)
        mean, error = mean_and_error(rows, self.counts)
        return self._temperatures(int(self._numels.sum()), mean.tolist(), error.tolist())

    def _temperatures(self, numel: int, mean: list[float], error: list[float]) -> Temperatures:
        """Return temperatures from the means and errors of the four rows and of PLAIN - ANCHORED."""
        kinetic, kinetic_interval = self._kinetic(mean[KINETIC], error[KINETIC], numel)
        value, interval = self._configurational((mean[PLAIN], error[PLAIN]), (mean[NUM_ROWS], error[NUM_ROWS]))
        return Temperatures(numel, kinetic, kinetic_interval, value, interval)

    def _kinetic(self, mean: float, error: float, numel: int) -> tuple[float, Interval | None]:
        if mean <= 0:
            return 0.0, None
        error = max(error, mean * math.sqrt(2 / (numel * self._steps)))
        low, high = chi_square_interval(mean, error, self._probability, self._dof)
        return self.tau * mean, self._measurable(low, high)

    def _configurational(
        self, plain: tuple[float, float], centred: tuple[float, float]
    ) -> tuple[float, Interval | None]:
        is_narrow = plain[1] * self._quantile < self.tolerance
        mean, error = plain if is_narrow else min(plain, centred, key=lambda estimate: estimate[1])
        width = self._quantile * error
        return self.tau * mean, self._measurable(mean - width, mean + width)

    def _measurable(self, low: float, high: float) -> Interval | None:
        """Return the interval of a temperature over τ in units of τ, None if it says nothing."""
        high = min(high, HIGHEST)
        is_hot = low > BLAZING or (low > 1 + self.tolerance and high < FARTHEST * low)
        return (self.tau * low, self.tau * high) if is_hot or high - low < 2 * WIDEST else None

    # -- mini-batch noise ---------------------------------------------------------------------------------------------

    def noise_share(self, index: int) -> float:
        """Return the share of mini-batch noise in the variance of a step."""
        ratio, allowance = float(self._mean[NOISE, index]), self.observations.allowance[index]
        injected = 1.0 if allowance == math.inf else 1.0 - allowance
        return ratio / (ratio + injected) if ratio + injected > 0 else 0.0

    def noisy(self) -> dict[str, float]:
        """Return the shares of mini-batch noise in tensors where it is certainly above the limit."""
        lower = self._mean[NOISE] - self._quantile * self._error[NOISE]
        return {
            name: self.noise_share(i)
            for i, name in enumerate(self.observations.names)
            if float(lower[i]) - self.observations.allowance[i] > self.tolerance
        }

    # -- energies -----------------------------------------------------------------------------------------------------

    def energy(self) -> EnergySummary:
        """Return the energies' mean and spread, and the range in which the earlier half's mean should lie."""
        seen = self.observations
        mean = float((seen.energies * self.counts).sum() / self._steps)
        square = float((seen.square_energies * self.counts).sum() / self._steps)
        expected = None
        if len(self.counts) >= MIN_BATCHES:
            (_, later), slack = self.energy_halves(), self._drift_slack()
            expected = (later - slack, later + slack)
        return EnergySummary(mean, math.sqrt(max(square - mean**2, 0.0)), expected)

    def mean_nll(self, num_data: int) -> tuple[float, float] | None:
        """Return the training data's mean NLL per example and the half-width of its interval; None if not recorded."""
        log_priors = self._log_priors
        if log_priors is None:
            return None
        mean, error = mean_and_error((self.observations.energies + log_priors) / num_data, self.counts)
        return float(mean), self._quantile * float(error)

    def mean_log_prior(self) -> float | None:
        """Return the mean log p(θ), None if it was not recorded."""
        log_priors = self._log_priors
        return None if log_priors is None else float((log_priors * self.counts).sum() / self._steps)

    @property
    def _log_priors(self) -> Tensor | None:
        log_priors = self.observations.log_priors
        return log_priors if log_priors is not None and bool(log_priors.isfinite().all()) else None

    def energy_halves(self) -> tuple[float, float]:
        """Return the mean energies of the earlier and the later half of the batches."""
        return self._halves(self.observations.energies)

    def drift(self) -> float:
        """Return the sign of the energy's drift, or 0 if it is not certainly beyond the tolerance."""
        first, second = self.energy_halves()
        return 0.0 if abs(second - first) < self._drift_slack() else math.copysign(1.0, second - first)

    def is_cooling(self) -> bool:
        """Return whether the energy or the kinetic temperature certainly falls: heat of a start, not of the steps."""
        kinetic = self.observations.values[:, KINETIC] @ (self._numels / self._numels.sum())
        first, second = self._halves(kinetic)
        return self.drift() < 0 or first - second > self._error_of_halves(kinetic) + self.tolerance

    def _halves(self, values: Tensor) -> tuple[float, float]:
        half, counts = len(self.counts) // 2, self.counts
        parts = slice(None, half), slice(half, None)
        first, second = (float((values[p] * counts[p]).sum() / counts[p].sum()) for p in parts)
        return first, second

    def _drift_slack(self) -> float:
        thermal = self.tolerance * self.tau * self.observations.dimension / 2
        return self._error_of_halves(self.observations.energies) + thermal

    def _error_of_halves(self, values: Tensor) -> float:
        """Return by how much the means of two halves may differ by chance, a straight line apart."""
        half, counts = len(self.counts) // 2, self.counts
        residuals = _without_trend(values, counts)
        errors = [float(mean_and_error(residuals[p], counts[p])[1]) for p in (slice(None, half), slice(half, None))]
        return student_quantile(self._probability, half - 1) * math.hypot(*errors)


def _without_trend(values: Tensor, counts: Tensor) -> Tensor:
    """Return the residuals of a straight line through batch means."""
    middle = counts.cumsum(0) - counts / 2
    columns = torch.stack([torch.ones_like(middle), middle / counts.sum()], 1) * counts.sqrt()[:, None]
    line = torch.linalg.lstsq(columns, (values * counts.sqrt())[:, None]).solution[:, 0]
    return values - line[0] - line[1] * middle / counts.sum()


# -- the observation of steps ------------------------------------------------------------------------------------------


class GroupStep(NamedTuple):
    """A step of one parameter group: its law, τ, κ, N and the momentum of each parameter, None without one."""

    law: StepLaw
    temperature: Control
    gradient_multiplier: Control
    num_data: int
    momenta: Sequence[Tensor | None]


class Clipping(NamedTuple):
    """How gradients are clipped after the observation; a limit of None or 0 disables it."""

    limit: float | None = None
    by: Literal["norm", "value"] = "norm"


NO_CLIPPING = Clipping()


Batches = tuple[Tensor, Tensor]
"""Means (B, length) and lengths (B,) of batches of steps."""
OverProcesses = Callable[[Tensor], Tensor]
"""Reduces or gathers a tensor over processes, or returns this process's part of a gathered one."""

NUM_EXTRAS = 5
ENERGY, SQUARE_ENERGY, TEMPERATURE, CLIPPED, LOG_PRIOR = range(NUM_EXTRAS)


def unreduced(tensor: Tensor) -> Tensor:
    """Return this process's tensor unchanged."""
    return tensor


class StepObserver:
    """Observes the steps of one or several chains in their sampling stages, and stores batch means.

    The order in a step: `begin_stage` before the first step of a stage, `before_update` when the gradients are
    complete, `after_update` with the laws of the step. `add` then completes a pending observation. `end_stage` closes
    a stage. It stores three copies of the parameters.

    Args:
        params: the parameters, with a leading axis for several chains.
        group_sizes: number of parameters in each parameter group, in the order of `params`.
        numels: sampled coordinates of each parameter in one chain; None is all of them.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[Tensor],
        group_sizes: Sequence[int],
        num_chains: int = 1,
        every_n_steps: int = 20,
        warm_up: float = 0.25,
        clipping: Clipping = NO_CLIPPING,
        numels: Sequence[int] | None = None,
    ) -> None:
        self._names, self._params = list(names), [p.detach() for p in params]
        self._slices = [slice(sum(group_sizes[:i]), sum(group_sizes[: i + 1])) for i in range(len(group_sizes))]
        self._chains, self._every, self._warm_up = num_chains, every_n_steps, warm_up
        self._clipping = clipping
        self._numels = [p.numel() // num_chains for p in params] if numels is None else list(numels)
        counts = torch.tensor(self._numels, dtype=torch.float32).to(params[0])
        self._inverse_numels = 1 / (counts[:, None] if num_chains > 1 else counts)
        self._anchors: list[Tensor] = []
        self._previous: list[Tensor] = []  # the gradients of the step before an observed one
        self._previous_step = -1
        self._variances: list[Control | None] = [None] * len(self._slices)
        self._past: Batches | None = None  # of the stages that have ended
        self._stage: BatchMeans | None = None
        self._pending: Tensor | None = None
        self.missing: set[str] = set()
        self.count = 0
        """Number of observations so far."""

    @property
    def in_stage(self) -> bool:
        """Whether a stage has begun."""
        return self._stage is not None

    @property
    def is_pending(self) -> bool:
        """Whether `add` has an observation to complete."""
        return self._pending is not None

    @property
    def length(self) -> int:
        """Number of entries of a batch mean."""
        return NUM_ROWS * len(self._params) + NUM_EXTRAS

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin_stage(self) -> None:
        """Begin a stage at the current parameters."""
        self._allocate()
        torch._foreach_copy_(self._anchors, self._params)
        self._variances = [None] * len(self._slices)
        self._previous_step = -1

    def _allocate(self) -> None:
        if not self._anchors:
            self._anchors = [torch.empty_like(p) for p in self._params]
            self._previous = [torch.empty_like(p) for p in self._params]
        self._stage = BatchMeans(self.length, self._params[0])

    def needs(self, step: int) -> bool:
        """Return whether `before_update` needs the gradients of step k."""
        return step % self._every == 0 or (step + 1) % self._every == 0

    @torch.no_grad()
    def before_update(
        self, step: int, gradients: Sequence[Tensor | None], metric: Callable[[], list[Tensor]] | None = None
    ) -> None:
        """Observe the complete gradients of step 1, 2, … before clipping; a parameter without one is omitted.

        Args:
            metric: returns the preconditioner's tensors, which are overwritten; None or an empty list is the identity.
        """
        if any(gradient is None for gradient in gradients):
            self.missing |= {name for name, g in zip(self._names, gradients, strict=True) if g is None}
        complete = [torch.zeros_like(p) if g is None else g for p, g in zip(self._params, gradients, strict=True)]
        if step % self._every == 0 and self._previous_step == step - 1:
            self._pending = self._forces(complete, metric() if metric is not None else [])
            self._previous_step = -1  # their memory was reused
        if (step + 1) % self._every == 0:
            torch._foreach_copy_(self._previous, complete)
            self._previous_step = step

    def _forces(self, gradients: list[Tensor], scales: list[Tensor]) -> Tensor:
        """Return θ·g, c·g, g·g and (g - previous g)² for each tensor, and whether g will be clipped."""
        changes, clipped = self._previous, self._clipped_share(gradients)
        torch._foreach_sub_(changes, gradients)
        if scales:  # norms in the metric of the preconditioner
            torch._foreach_sqrt_(scales)
            torch._foreach_mul_(changes, scales)
        weighted = torch._foreach_mul(gradients, scales) if scales else gradients
        parts = [
            inner_products(self._params, gradients, self._chains),
            inner_products(self._anchors, gradients, self._chains),
            square_norms(weighted, self._chains),
            square_norms(changes, self._chains),
        ]
        return torch.cat([*(part.flatten() for part in parts), clipped.reshape(1)])

    def _clipped_share(self, gradients: list[Tensor]) -> Tensor:
        limit, by = self._clipping
        clipped = torch.zeros((), dtype=gradients[0].dtype, device=gradients[0].device)
        if not limit:
            return clipped
        if by == "value":
            return (torch.stack(torch._foreach_norm(gradients, math.inf)).amax() > limit).to(clipped)
        return (square_norms(gradients, self._chains).sum(0).sqrt() > limit).to(clipped).mean()

    def discard(self) -> None:
        """Drop the pending observation of a step that was skipped."""
        self._pending = None

    def after_update(self, laws: Sequence[StepLaw], steps: int = 1) -> None:
        """Update the momenta's variance by each group's law, after every step of a stage or several with one law."""
        pairs = zip(laws, self._variances, strict=True)
        self._variances = [law.momentum_variance(before, steps) for law, before in pairs]

    @torch.no_grad()
    def add(self, groups: Sequence[GroupStep], energy: Tensor, log_prior: Tensor) -> None:
        """Complete the pending observation, with Ũ and log p(θ) as means over chains."""
        assert self._stage is not None
        assert self._pending is not None
        self._stage.add(self._row(groups, self._pending, energy, log_prior))
        self.count, self._pending = self.count + 1, None

    def _row(self, groups: Sequence[GroupStep], forces: Tensor, energy: Tensor, log_prior: Tensor) -> Tensor:
        """Return the four numbers of each tensor, and the extras."""
        rows: list[list[Tensor]] = [[] for _ in range(NUM_ROWS)]
        several = self._chains > 1
        shape = (4, -1, self._chains) if several else (4, -1)
        plain, anchored, squares, changes = forces[:-1].reshape(shape)
        for group, part, variance in zip(groups, self._slices, self._variances, strict=True):
            inverse, kappa = self._inverse_numels[part], group.gradient_multiplier
            scale = group.num_data * kappa / group.temperature
            factor = group.law.gradient_noise_factor * kappa**2
            rows[PLAIN].append(plain[part] * inverse * scale)
            rows[ANCHORED].append(anchored[part] * inverse * scale)
            rows[NOISE].append(changes[part] * inverse * (factor / 2))
            if variance is None:
                rows[KINETIC].append(1 + squares[part] * inverse * factor)
            else:
                pairs = zip(group.momenta, self._params[part], strict=True)
                momenta = [torch.zeros_like(p) if m is None else m for m, p in pairs]
                rows[KINETIC].append(square_norms(momenta, self._chains) * inverse / variance)
        temperature = groups[0].temperature
        if not isinstance(temperature, Tensor):
            temperature = energy.new_tensor(temperature) if energy.device.type == "cpu" else energy * 0 + temperature
        extras = torch.stack([energy, energy.square(), temperature.mean(), forces[-1].to(energy), log_prior.to(energy)])
        # Each chain's numbers are in units of its own step size and temperature; the mean over the chains is kept.
        shown = (part.mean(1) if several else part for row in rows for part in row)
        return torch.cat([*shown, extras.to(forces)])

    # -- batches ------------------------------------------------------------------------------------------------------

    def end_stage(self) -> None:
        """Store the stage's batches and close it."""
        self._past, self._stage, self._pending = self.batches(), None, None

    def batches(self) -> Batches | None:
        """Return all batches so far, of this stage and earlier ones; None without any."""
        parts = [self._past] if self._past is not None else []
        if self._stage is not None:
            parts.append(without_warm_up(*self._stage.full(), self._warm_up))
        parts = [part for part in parts if len(part[1])]
        if not parts:
            return None
        return merge_batches(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))

    def observations(
        self,
        allowance: Sequence[float],
        mean_of_chains: OverProcesses = unreduced,
        mean_of_energies: OverProcesses = unreduced,
    ) -> Observations:
        """Return all batches so far, with the mini-batch noise that the rule corrects for in each parameter."""
        count = len(self._params)
        means, counts = self.batches() or (torch.zeros(0, self.length, dtype=torch.float64), torch.zeros(0))
        extras = mean_of_energies(means[:, NUM_ROWS * count :])
        means = mean_of_chains(means)
        kept = [i for i, name in enumerate(self._names) if name not in self.missing]
        weights = counts / counts.sum()
        temperature = float((extras[:, TEMPERATURE] * weights).sum()) if len(counts) else math.nan
        return Observations(
            names=[self._names[i] for i in kept],
            numels=[self._numels[i] * self._chains for i in kept],
            values=means[:, : NUM_ROWS * count].reshape(-1, NUM_ROWS, count)[:, :, kept],
            energies=extras[:, ENERGY],
            square_energies=extras[:, SQUARE_ENERGY],
            counts=counts,
            temperature=round(temperature, 6) if math.isfinite(temperature) else 1.0,
            allowance=[allowance[i] for i in kept],
            clipped=float((extras[:, CLIPPED] * weights).sum()) if self._clipping.limit else None,
            log_priors=extras[:, LOG_PRIOR],
            num_chains=self._chains,
        )

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(
        self, mean_of_chains: OverProcesses = unreduced, gather: OverProcesses = unreduced
    ) -> dict[str, Any]:
        """Return the batches of earlier stages, and the present stage; `gather` takes parameter-like tensors."""
        means, counts = self._past or (None, None)
        stage = None
        if self._stage is not None:
            stage = self._stage.state_dict()
            stage["sums"] = mean_of_chains(stage["sums"]).to("cpu", copy=True)
            stage["anchors"] = [gather(anchor).to("cpu", copy=True) for anchor in self._anchors]
            awaited = self._previous if self._previous_step >= 0 else []
            stage["previous"] = [gather(gradient).to("cpu", copy=True) for gradient in awaited]
            variances = [gather(v) if _is_of_chains(v) else v for v in self._variances]
            stage |= {"previous_step": self._previous_step, "variances": variances}
        return {
            "means": None if means is None else mean_of_chains(means),
            "counts": counts,
            "stage": stage,
            "missing": sorted(self.missing),
            "observations": self.count,
        }

    def load_state_dict(self, state: Mapping[str, Any], own: OverProcesses = unreduced) -> bool:
        """Restore from `state_dict()` if its batches belong to this network; return whether they do."""
        missing: Collection[str] = state["missing"]
        self.missing, self.count = set(missing), state["observations"]
        means, counts, stage = state["means"], state["counts"], state["stage"]
        lengths = {part.shape[1] for part in (means, None if stage is None else stage["sums"]) if part is not None}
        is_own = lengths <= {self.length}
        self._past = (means, counts) if is_own and means is not None else None
        if is_own and stage is not None:
            self._allocate()
            assert self._stage is not None
            self._stage.load_state_dict(stage)
            for target, saved in zip(
                self._anchors + self._previous, stage["anchors"] + stage["previous"], strict=False
            ):
                target.copy_(own(saved))
            self._previous_step = stage["previous_step"]
            device = self._params[0].device
            self._variances = [own(v).to(device) if _is_of_chains(v) else v for v in stage["variances"]]
        return is_own


def _is_of_chains(variance: Any) -> TypeGuard[Tensor]:
    return isinstance(variance, Tensor) and variance.numel() > 1
