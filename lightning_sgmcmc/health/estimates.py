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
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.draws import chi_square_interval, mean_and_error, student_quantile
from lightning_sgmcmc.health.report import EnergySummary, Interval, Temperatures

NUM_ROWS = 4
KINETIC, PLAIN, ANCHORED, NOISE = range(NUM_ROWS)
"""Rows of `Observations.values`."""
MIN_BATCHES = 8
"""With fewer batches there are no findings."""
WIDEST, FARTHEST = 1.0, 30.0
"""A temperature is not measurable if its interval is wider than ± τ, unless it lies wholly above the tolerated range
and its ends are within this factor."""


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
        is_hot = low > 1 + self.tolerance and high < FARTHEST * low
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
        half = len(self.counts) // 2
        energies, counts = self.observations.energies, self.counts
        parts = slice(None, half), slice(half, None)
        first, second = (float((energies[p] * counts[p]).sum() / counts[p].sum()) for p in parts)
        return first, second

    def drift(self) -> float:
        """Return the sign of the energy's drift, or 0 if it is not certainly beyond the tolerance."""
        first, second = self.energy_halves()
        return 0.0 if abs(second - first) < self._drift_slack() else math.copysign(1.0, second - first)

    def _drift_slack(self) -> float:
        counts = self.counts
        half = len(counts) // 2
        residuals = _without_trend(self.observations.energies, counts)
        errors = [float(mean_and_error(residuals[p], counts[p])[1]) for p in (slice(None, half), slice(half, None))]
        thermal = self.tolerance * self.tau * self.observations.dimension / 2
        return student_quantile(self._probability, half - 1) * math.hypot(*errors) + thermal


def _without_trend(values: Tensor, counts: Tensor) -> Tensor:
    """Return the residuals of a straight line through batch means."""
    middle = counts.cumsum(0) - counts / 2
    columns = torch.stack([torch.ones_like(middle), middle / counts.sum()], 1) * counts.sqrt()[:, None]
    line = torch.linalg.lstsq(columns, (values * counts.sqrt())[:, None]).solution[:, 0]
    return values - line[0] - line[1] * middle / counts.sum()
