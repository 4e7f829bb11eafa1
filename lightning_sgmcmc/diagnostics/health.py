"""Is the step size right? Temperatures, mini-batch noise and energies of a chain against what its target implies.

Under the target exp(-U/τ) every tensor of n parameters has

    E[(θ - c)·∂U/∂θ]/n = τ  for any constant c        (configurational temperature, integration by parts)
    E[m·m]/(n·σ²) = 1,  σ² the variance of a momentum coordinate at τ        (kinetic temperature over τ)

For rules without momentum m is the step itself, with σ² = 2·lr·τ/N and E[Δθ·Δθ] = lr²·E[g·g] + n·σ². In equilibrium
E‖θ - c‖² stays what it is, and then this is the configurational temperature too, known far more precisely:
E[(θ - c)·∂U]/n = τ·(1 + lr·N·E[g·g]/(2·n·τ)).

A step that is too large, and the noise of mini-batch gradients, heat the chain: temperatures above τ. A chain that has
not yet spread from where it was optimized to has a configurational temperature below τ.

Source: Wenzel et al. 2020, "How Good is the Bayes Posterior in Deep Neural Networks Really?", section 4 and appendix I.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.batch_means import chi_square_interval, mean_and_error, student_quantile

ROWS = 4
KINETIC, PLAIN, ANCHOR, NOISE = range(ROWS)
MIN_BATCHES = 8
DIVERGENCE = (
    "divergence: energies or gradients are infinite or NaN: take a smaller step (lr), and see that the burn-in ends in "
    "a finite energy"
)
HEAT_WARNINGS = ("divergence", "kinetic temperature", "configurational temperature", "gradient noise")
"""How the warnings begin that a smaller step cures, temperatures below the target aside."""


# -- what a step shows ------------------------------------------------------------------------------------------------


def inner_products(a: Sequence[Tensor], b: Sequence[Tensor], chains: int = 1) -> Tensor:
    """Return the inner product of each pair of tensors, shape (T,), without a wait for the device.

    With several chains, whose tensors have a leading axis for them, of each pair and chain, shape (T, C).
    """
    if chains > 1:
        return torch.stack([(x * y).flatten(1).sum(1) for x, y in zip(a, b, strict=True)])
    return torch.stack([torch.dot(x.reshape(-1), y.reshape(-1)) for x, y in zip(a, b, strict=True)])


def square_norms(tensors: Sequence[Tensor], chains: int = 1) -> Tensor:
    """Return the squared norm of each tensor, shape (T,), or of each tensor and chain, (T, C)."""
    if chains > 1:
        return torch.stack([tensor.square().flatten(1).sum(1) for tensor in tensors])
    return torch.stack(torch._foreach_norm(list(tensors))).square_()


# -- the assessment ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """What was seen of a chain: batch means, in the units of the target's temperature.

    Attributes:
        names: the T tensors' names.
        numels: their sizes.
        values: shape (B, 4, T), means over each batch's observed steps of
            [m·m/(n·σ²), θ·∂Ũ/(n·τ), c·∂Ũ/(n·τ), variance by mini-batch noise over that which friction takes out].
        energies: the mean mini-batch energy Ũ of each batch, shape (B,).
        square_energies: the mean of Ũ², shape (B,).
        counts: observed steps in each batch, shape (B,).
        temperature: τ.
        allowance: the noise (in units of `values`' last row) that the rule reckons with, for each tensor; infinite
            where it adapts.
        clipped: share of the observed steps whose gradient was clipped, None without clipping.
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


def assess(record: Record, step: int, tolerance: float = 0.2, false_alarm_rate: float = 0.01) -> dict[str, Any]:
    """Return what is known of a chain's health, as plain Python numbers.

    A number is found wrong only if its whole interval is: the temperatures outside τ·(1 ± tolerance), the mini-batch
    noise above tolerance times the injected noise (that is the share of the temperature that it adds), the energy's
    drift beyond tolerance·τ·d/2 (d/2·τ is the mean energy of d harmonic coordinates). The intervals hold jointly
    (Bonferroni over all tensors and both temperatures, noise and drift), so the probability of a false alarm in one
    assessment of a chain that is within the tolerance is at most `false_alarm_rate`.

    Of the two configurational estimates the plain one (c = 0, Wenzel's) is taken where its interval is narrower than
    the tolerance. Elsewhere it is swamped by θ·(noise of the gradient), and c is the state at the beginning of the
    sampling stage. That one starts at 0 and takes the time in which the chain forgets its beginning to reach τ.

    Args:
        record: what was seen.
        step: the optimizer step, for the report.
        tolerance: accepted relative deviation.
        false_alarm_rate: of one assessment.

    Returns:
        the report: "step", "verdict" ("ok", "warning" or "unknown"), "warnings", "temperature", "tolerance", "total",
        "tensors", "gradient_noise_share", "energy", "observations".
    """
    finite = bool(torch.isfinite(record.values).all() and torch.isfinite(record.energies).all())
    report: dict[str, Any] = {
        "step": step,
        "verdict": "unknown",
        "warnings": [],
        "temperature": record.temperature,
        "tolerance": tolerance,
        "tensors": {},
        "total": None,
        "gradient_noise_share": {},
        "energy": {"mean": None, "std": None, "expected": None},
        "observations": int(record.counts.sum()),
    }
    if not finite:
        report["verdict"] = "warning"
        report["warnings"] = [DIVERGENCE]
        return report
    if len(record.counts) < 2 or not record.names:
        return report
    judge = _Judge(record, tolerance, false_alarm_rate)
    report["tensors"] = {name: judge.tensor(i) for i, name in enumerate(record.names)}
    report["total"] = judge.total()
    report["gradient_noise_share"] = {name: judge.noise_share(i) for i, name in enumerate(record.names)}
    report["energy"] = judge.energy()
    known = len(record.counts) >= MIN_BATCHES
    if known:
        report["warnings"] = judge.warnings(report)
    widths = [
        (interval[1] - interval[0]) / 2 / record.temperature
        for interval in (report["total"]["kinetic_interval"], report["total"]["configurational_interval"])
        if interval is not None
    ]
    if report["warnings"]:
        report["verdict"] = "warning"
    elif known and max(widths) < 2 * tolerance:
        report["verdict"] = "ok"
    return report


class _Judge:
    """Means, errors and intervals of a record."""

    def __init__(self, record: Record, tolerance: float, false_alarm_rate: float) -> None:
        self.record, self.tolerance = record, tolerance
        self.tau = record.temperature
        tests = 3 * len(record.names) + 2 + 1
        self.probability = false_alarm_rate / (2 * tests)
        self.dof = len(record.counts) - 1
        self.quantile = student_quantile(self.probability, self.dof)
        self.steps = float(record.counts.sum())
        self.numels = torch.tensor(record.numels, dtype=torch.float64)
        values = record.values
        self.centred = values[:, PLAIN] - values[:, ANCHOR]
        self.mean, self.error = mean_and_error(values, record.counts)
        self.centred_mean, self.centred_error = mean_and_error(self.centred, record.counts)

    def tensor(self, index: int) -> dict[str, Any]:
        mean, error = float(self.mean[KINETIC, index]), float(self.error[KINETIC, index])
        kinetic, kinetic_interval = self._kinetic(mean, error, int(self.numels[index]))
        plain = float(self.mean[PLAIN, index]), float(self.error[PLAIN, index])
        centred = float(self.centred_mean[index]), float(self.centred_error[index])
        value, interval = self._configurational(plain, centred)
        return {
            "numel": int(self.numels[index]),
            "kinetic": kinetic,
            "kinetic_interval": kinetic_interval,
            "configurational": value,
            "configurational_interval": interval,
        }

    def total(self) -> dict[str, Any]:
        """Return the temperatures of all tensors together."""
        weights = self.numels / self.numels.sum()
        counts = self.record.counts
        rows = torch.cat([self.record.values, self.centred[:, None]], 1) @ weights  # (B, 5)
        mean, error = (t.tolist() for t in mean_and_error(rows, counts))
        kinetic, kinetic_interval = self._kinetic(mean[KINETIC], error[KINETIC], int(self.numels.sum()))
        value, interval = self._configurational((mean[PLAIN], error[PLAIN]), (mean[ROWS], error[ROWS]))
        return {
            "numel": int(self.numels.sum()),
            "kinetic": kinetic,
            "kinetic_interval": kinetic_interval,
            "configurational": value,
            "configurational_interval": interval,
        }

    def _kinetic(self, mean: float, error: float, numel: int) -> tuple[float, list[float] | None]:
        if mean <= 0:
            return 0.0, None
        error = max(error, mean * math.sqrt(2 / (numel * self.steps)))
        low, high = chi_square_interval(mean, error, self.probability, self.dof)
        return self.tau * mean, [self.tau * low, self.tau * high]

    def _configurational(self, plain: tuple[float, float], centred: tuple[float, float]) -> tuple[float, list[float]]:
        mean, error = plain if plain[1] * self.quantile < self.tolerance else min(plain, centred, key=lambda e: e[1])
        width = self.quantile * error
        return self.tau * mean, [self.tau * (mean - width), self.tau * (mean + width)]

    def noise_share(self, index: int) -> float:
        """Return the share of mini-batch noise in the variance of a step."""
        ratio, allowance = float(self.mean[NOISE, index]), self.record.allowance[index]
        injected = 1.0 if allowance == math.inf else 1.0 - allowance
        return ratio / (ratio + injected) if ratio + injected > 0 else 0.0

    def energy(self) -> dict[str, Any]:
        """Return the energies' mean and spread, and the range in which the earlier half's mean should lie."""
        record = self.record
        mean = float((record.energies * record.counts).sum() / self.steps)
        square = float((record.square_energies * record.counts).sum() / self.steps)
        expected = None
        if len(record.counts) >= MIN_BATCHES:
            (_, later), slack = self._halves(), self._drift_slack()
            expected = [later - slack, later + slack]
        return {"mean": mean, "std": math.sqrt(max(square - mean**2, 0.0)), "expected": expected}

    def _halves(self) -> tuple[float, float]:
        half = len(self.record.counts) // 2
        parts = slice(None, half), slice(half, None)
        first, second = (
            float((self.record.energies[p] * self.record.counts[p]).sum() / self.record.counts[p].sum()) for p in parts
        )
        return first, second

    def _drift_slack(self) -> float:
        counts = self.record.counts
        half = len(counts) // 2
        residuals = _without_trend(self.record.energies, counts)
        errors = [float(mean_and_error(residuals[p], counts[p])[1]) for p in (slice(None, half), slice(half, None))]
        thermal = self.tolerance * self.tau * float(self.numels.sum()) / 2
        return student_quantile(self.probability, half - 1) * math.hypot(*errors) + thermal

    # -- what is wrong ------------------------------------------------------------------------------------------------

    def warnings(self, report: Mapping[str, Any]) -> list[str]:
        """Return a sentence with advice for each kind of trouble."""
        tensors: Mapping[str, Mapping[str, Any]] = report["tensors"]
        noisy = self._noisy()
        hot_noise = {name for name, _ in noisy}
        found = []
        for kind in ("kinetic", "configurational"):
            for side in ("above", "below"):
                off = self._off(tensors, kind, side)
                if off:
                    found.append(self._temperature_sentence(kind, side, off, tensors, hot_noise))
        if noisy:
            name, share = max(noisy, key=lambda pair: pair[1])
            found.append(
                f"gradient noise: mini-batch noise makes up {share:.0%} of the step's variance in {name} "
                f"({_count(len(noisy), len(tensors))} over the limit) and heats the chain: take more data per batch or "
                "a smaller lr"
            )
        found += self._drift_sentence()
        if self.record.clipped is not None and self.record.clipped > 0.05:
            found.append(
                f"clipping: {self.record.clipped:.0%} of the gradients were clipped, so what is sampled is not the "
                "posterior: raise gradient_clip_val, or take a smaller lr in place of clipping"
            )
        return found

    def _off(self, tensors: Mapping[str, Mapping[str, Any]], kind: str, side: str) -> list[str]:
        """Return the tensors (else "all tensors") whose interval lies on a side of the tolerated range."""
        low, high = self.tau * (1 - self.tolerance), self.tau * (1 + self.tolerance)
        candidates = {"all tensors together": self.total(), **tensors}
        off = []
        for name, entry in candidates.items():
            interval = entry[f"{kind}_interval"]
            if interval is not None and (interval[0] > high if side == "above" else interval[1] < low):
                off.append(name)
        return off

    def _temperature_sentence(
        self, kind: str, side: str, off: list[str], tensors: Mapping[str, Mapping[str, Any]], noisy: set[str]
    ) -> str:
        named = [name for name in off if name in tensors]
        if named:
            name = max(named, key=lambda n: abs(tensors[n][f"{kind}_interval"][0 if side == "above" else 1] - self.tau))
            entry, where = tensors[name], f"{name} ({_count(len(named), len(tensors))} off)"
        else:
            entry, where = self.total(), off[0]
        low, high = entry[f"{kind}_interval"]
        if side == "above" and noisy & set(named):
            advice = "mini-batch noise heats the chain: take more data per batch or a smaller lr"
        elif side == "above" and kind == "configurational" and self._drift() < 0:
            advice = "the chain still falls: take a longer burn-in, and a smaller lr if that does not help"
        elif side == "above":
            advice = "the step is too large: take a smaller lr"
        elif kind == "kinetic":
            advice = "the momentum has not come to the temperature: take a longer burn-in or more friction"
        else:
            advice = (
                "the chain has not yet spread over the posterior: take a longer burn-in and longer sampling (a larger "
                "lr spreads faster, where the other figures allow it)"
            )
        return (
            f"{kind} temperature: {entry[kind]:.3g} in {where} is {side} the target {self.tau:.3g} (interval "
            f"{low:.3g} to {high:.3g}): {advice}"
        )

    def _noisy(self) -> list[tuple[str, float]]:
        lower = self.mean[NOISE] - self.quantile * self.error[NOISE]
        return [
            (name, self.noise_share(i))
            for i, name in enumerate(self.record.names)
            if float(lower[i]) - self.record.allowance[i] > self.tolerance
        ]

    def _drift(self) -> float:
        """Return the sign of the energy's drift, 0 if it is not certain to be beyond the tolerance."""
        first, second = self._halves()
        return 0.0 if abs(second - first) < self._drift_slack() else math.copysign(1.0, second - first)

    def _drift_sentence(self) -> list[str]:
        direction = self._drift()
        if direction == 0:
            return []
        first, second = self._halves()
        if direction < 0:
            word, advice = "fallen", "the chain has not arrived: take a longer burn-in"
        else:
            word, advice = "risen", "the chain is still warming up, or diverges: take a longer burn-in or a smaller lr"
        return [
            f"energy: it has {word} from {first:.6g} to {second:.6g} nats between the halves of the sampling stage: "
            f"{advice}"
        ]


def _without_trend(values: Tensor, counts: Tensor) -> Tensor:
    """Return the residuals of a straight line through batch means."""
    middle = counts.cumsum(0) - counts / 2
    columns = torch.stack([torch.ones_like(middle), middle / counts.sum()], 1) * counts.sqrt()[:, None]
    line = torch.linalg.lstsq(columns, (values * counts.sqrt())[:, None]).solution[:, 0]
    return values - line[0] - line[1] * middle / counts.sum()


def _count(part: int, whole: int) -> str:
    return f"{part} of {whole} tensors"
