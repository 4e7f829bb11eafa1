"""Exponentially weighted gradients on a sum of Gaussians: KL against epochs, x, M, and the error's scaling.

Li et al. 2021 (EWSG), section 5.1 and appendix F: V = Σ½‖θ - c_i‖², 50 centres c_i ~ N(0, I), b = 1, 30 epochs, γ
= 10, the paper's step sizes. The figures depend on the centres, so all are means over draws of the centres (± standard
error); the paper has one draw. The paper's KL(p‖q) "between the target distribution and generated samples" is read as
KL(target‖samples), with a Gaussian fitted to the chains. The table also has the other direction. Chains start from
N(0, I); the paper does not state the start.

Measured (`sgmcmc recipe ewsg_gaussian --full`: 50 draws, 10,000 chains, 2,402 s of CPU time). KL(target‖samples) after
30 passes: SGHMC 1.39±0.02, SGLD 1.22±0.02, pSGLD 1.160±0.008, EWSG 1.06±0.02, SVRG-LD 0.0003; by draw EWSG lies below
SGHMC by 0.328±0.009, below SGLD by 0.157±0.009, below pSGLD by 0.101±0.014. SVRG-LD is the slowest of these, though it
needs 6 passes only. At h = 0.07 x = √hγr/σ is best, as in the paper. M = 1 lies below M = 0 by 0.328±0.009, and M = 9
below M = 1 by 0.232±0.032, but M = 19 not below M = 9 (above by 0.18±0.04): long index chains shift the mean, by an
amount that depends on the centres' skewness.

EWSG-VR cannot run at the paper's h = 0.05: h·Γ has an eigenvalue of 4.1, and Euler's step diverges beyond 2. At h =
0.02 it has 0.11±0.01, EWSG 0.34±0.01, SGHMC 0.61±0.01. But uniform batches with EWSG-VR's friction have 0.0013: EWSG's
choice is, to first order, a friction h·cov/(2T) itself, and EWSG-VR adds it a second time.

Mean squared errors of the variance fall against T with exponents of -0.908±0.003 (EWSG) and -0.887±0.003 (SGHMC; -1 in
the limit). At large h SGHMC's has the power 2.200±0.001, EWSG's 2.86±0.07. The paper's 1 and 2 are upper bounds.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.figures.canvas import panels, save_figure, series
from lightning_sgmcmc.recipes.shared.figures import INTERVAL, draw_band, mean_with_interval
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.samplers import SGLD, Sampler, UnderdampedLangevin, pSGLD
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.simulation import (
    CalibratedFriction,
    ControlVariateGradient,
    ExponentialGradient,
    FullGradient,
    GradientEstimator,
    UniformGradient,
)
from lightning_sgmcmc.simulation.finite_sums import GaussianSum
from lightning_sgmcmc.simulation.subsampled_chains import sample_sum

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Settings:
    """The settings of `ewsg_gaussian.yaml`.

    Attributes:
        draws, chains: of the centres, and of each method on each of them.
        passes, marks: length of a run in epochs, and the points of its curve.
        times, h_of_times: times T of the errors at one small h.
        small_steps, time_of_small, limit_step: steps h at a small T, and the step that stands for h → 0.
        large_steps, time_of_large: steps h at a large T.
        scaling_chains, scaling_factor: chains of the three, multiplied by a factor.
    """

    draws: int
    chains: int
    passes: int
    marks: tuple[float, ...]
    times: tuple[float, ...]
    h_of_times: float
    small_steps: tuple[float, ...]
    time_of_small: float
    limit_step: float
    large_steps: tuple[float, ...]
    time_of_large: float
    scaling_chains: dict[str, int]
    scaling_factor: int

    @property
    def work(self) -> float:
        """The chains of all draws."""
        return float(self.draws * self.chains)

    @property
    def scales(self) -> dict[str, tuple[float, ...]]:
        """The x of each kind of scaling."""
        return {"T": self.times, "small h": self.small_steps, "large h": self.large_steps}


DATA = 50
FRICTION = 10.0
UNDERDAMPED = functools.partial(UnderdampedLangevin, friction=FRICTION)


@dataclass(frozen=True)
class Method:
    """The settings of one curve in a picture."""

    sampler: Callable[..., Sampler]
    gradient: GradientEstimator
    lr: float


H, H_OF_GUESSES, H_OF_FRICTION = 0.05, 0.07, 0.02
COMPARED = {
    "SGLD": Method(SGLD, UniformGradient(), 5e-3),
    # The preconditioner of the gradient of U/N, as in Li et al. 2016, and that of the gradient of U.
    "pSGLD": Method(functools.partial(pSGLD, eps=1e-5 * DATA), UniformGradient(), 5e-3 * DATA),
    "pSGLD, of the gradient of U": Method(pSGLD, UniformGradient(), 5e-3),
    "SGHMC": Method(UNDERDAMPED, UniformGradient(), H),
    "EWSG": Method(UNDERDAMPED, ExponentialGradient(), H),
    "SVRG-LD": Method(SGLD, ControlVariateGradient(), 5e-4),
}
LETTERS = {"unchanged": "√hγr/σ", "zero": "0", "one": "1", "stopped": "(-1+hγ)r/(σ√h)"}
GUESSES = {
    f"x = {LETTERS[guess]}": Method(UNDERDAMPED, ExponentialGradient(guess=guess), H_OF_GUESSES)  # type: ignore[arg-type]
    for guess in LETTERS
}
PROPOSALS = {f"M = {m}": Method(UNDERDAMPED, ExponentialGradient(num_proposals=m), H) for m in (0, 1, 9, 19)}
WITH_FRICTION = {
    "SGHMC, h=0.02": Method(UNDERDAMPED, UniformGradient(), H_OF_FRICTION),
    "EWSG, h=0.02": Method(UNDERDAMPED, ExponentialGradient(), H_OF_FRICTION),
    "EWSG-VR, h=0.02": Method(UNDERDAMPED, CalibratedFriction(ExponentialGradient()), H_OF_FRICTION),
    "SGHMC with EWSG-VR's friction, h=0.02": Method(UNDERDAMPED, CalibratedFriction(UniformGradient()), H_OF_FRICTION),
    "full gradient, h=0.02": Method(UNDERDAMPED, FullGradient(), H_OF_FRICTION),
}
PANELS = {
    "methods": COMPARED,
    "choices of x, h=0.07": GUESSES,
    "index chain's length, h=0.05": PROPOSALS,
    "friction": WITH_FRICTION,
}
METHODS = {name: method for panel in PANELS.values() for name, method in panel.items()}

SCALING = "scaling"
PAIRS = (
    ("EWSG", "SGHMC"),
    ("EWSG", "SGLD"),
    ("EWSG", "pSGLD"),
    ("M = 1", "M = 0"),
    ("M = 9", "M = 1"),
    ("M = 19", "M = 9"),
)
POWERS = {"T": -1, "small h": 1, "large h": 2}  # of the theorem
SCALED = {"EWSG": ExponentialGradient(), "SGHMC": UniformGradient()}


def centres(draw: int, seed: int) -> GaussianSum:
    """Return the target of a draw of the centres c_i from N(0, I)."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "centres", draw))
    return GaussianSum(torch.randn(DATA, 2, generator=generator, dtype=torch.float64))


def divergences(places: Tensor, target: GaussianSum) -> tuple[float, float]:
    """Return KL(target‖q) and KL(q‖target) of the Gaussian q with the places' mean and covariance."""
    places = places.double()
    offset = places.mean(0) - target.mean
    ratio = torch.cov(places.T) * target.num_data
    inverse, log_volume = torch.linalg.inv(ratio), torch.logdet(ratio)
    square = target.num_data * offset
    forward = 0.5 * (inverse.trace() - 2 + log_volume + square @ inverse @ offset)
    backward = 0.5 * (ratio.trace() - 2 - log_volume + square @ offset)
    return float(forward), float(backward)


def divergence_job(name: str, draw: int, settings: Settings, options: Options) -> list[tuple[float, float]]:
    """Return both divergences of a method at the marks, for one draw of the centres."""
    target, method = centres(draw, options.seed), METHODS[name]
    run = sample_sum(
        target,
        method.sampler,
        method.gradient,
        lr=method.lr,
        num_passes=settings.passes,
        at_passes=settings.marks,
        num_chains=settings.chains,
        seed=derive_seed(options.seed, name, draw),
    )
    return [divergences(places, target) for places in run.positions]


def squared_errors(
    target: GaussianSum, gradient: GradientEstimator, h: float, times: Sequence[float], chains: int, seed: int
) -> list[float]:
    """Return E(φ̂ - φ̄)²/φ̄² of time averages of φ = ‖θ - c̄‖² at times T = Kh, from chains that start in the target."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "target"))
    start = torch.randn(chains, 2, generator=generator, dtype=torch.float64) / DATA**0.5 + target.mean
    centre = target.mean.float()
    steps = [round(time / h) for time in times]
    run = sample_sum(
        target,
        UNDERDAMPED,
        gradient,
        lr=h,
        num_steps=steps[-1],
        at_steps=steps,
        num_chains=chains,
        initial=start,
        observe=lambda x: (x - centre).square().sum(1, keepdim=True),
        seed=seed,
    )
    return (run.averages[:, :, 0] / (2 / DATA) - 1).square().mean(1).tolist()


def scaling_job(draw: int, settings: Settings, options: Options) -> dict[str, list[float]]:
    """Return relative mean squared errors of EWSG with M = 1 and of SGHMC against T, small h and large h."""
    target, factor = centres(draw, options.seed), settings.scaling_factor

    def at(name: str, gradient: GradientEstimator, h: float, times: Sequence[float], scale: str) -> list[float]:
        seed = derive_seed(options.seed, "scaling", draw, name, str(h))
        return squared_errors(target, gradient, h, times, factor * settings.scaling_chains[scale], seed)

    limit = at("limit", FullGradient(), settings.limit_step, [settings.time_of_small], "small h")
    found, times = {"h to 0": limit}, {"small h": settings.time_of_small, "large h": settings.time_of_large}
    for name, gradient in SCALED.items():
        found[f"{name}, T"] = at(name, gradient, settings.h_of_times, settings.times, "T")
        for scale, time in times.items():
            found[f"{name}, {scale}"] = [at(name, gradient, h, [time], scale)[0] for h in settings.scales[scale]]
    return found


def job(kind: str, draw: int, settings: Settings, options: Options) -> Any:
    """Run one of the methods, or the scaling of errors, for one draw."""
    torch.set_num_threads(1)
    if kind == SCALING:
        return scaling_job(draw, settings, options)
    return divergence_job(kind, draw, settings, options)


def slope(x: Sequence[float], errors: np.ndarray) -> tuple[float, float] | None:
    """Return the slope of log mean errors against log x, and its standard error by the jackknife over draws.

    None if a mean is not positive.

    Args:
        x: shape (G,).
        errors: shape (draws, G).
    """
    rows = [errors, *(np.delete(errors, row, 0) for row in range(len(errors)))]
    means = [part.mean(0) for part in rows]
    if any((mean <= 0).any() for mean in means):
        return None
    whole, *parts = (float(np.polyfit(np.log(x), np.log(mean), 1)[0]) for mean in means)
    count = len(parts)
    return whole, float(np.sqrt((count - 1) / count * np.square(np.array(parts) - np.mean(parts)).sum()))


def run(options: Options) -> list[Row]:
    """Run all methods on all draws, draw the pictures, return the table."""
    settings = read_settings(Settings, options)
    draws, chosen = options.repeated(settings.draws), options.chosen((SCALING, *METHODS))
    jobs = [(kind, draw) for kind in chosen for draw in draws]
    found = run_jobs(job, jobs, options, settings)
    curves = {name: np.array([found[name, draw] for draw in draws]) for name in chosen if name != SCALING}
    rows = _divergence_rows(curves, settings)
    rows += [_friction_row(h, [centres(draw, options.seed) for draw in draws]) for h in (H_OF_FRICTION, H)]
    save_figure(divergence_figure(curves, settings), options.out / "divergence.png")
    if SCALING in chosen:
        errors = {name: np.array([found[SCALING, draw][name] for draw in draws]) for name in found[SCALING, 0]}
        limit = errors.pop("h to 0")
        for name in SCALED:
            errors[f"{name}, small h"] = errors[f"{name}, small h"] - limit
        rows += _scaling_rows(errors, settings)
        save_figure(scaling_figure(errors, settings), options.out / "scaling.png")
    return rows


def _scaling_rows(errors: dict[str, np.ndarray], settings: Settings) -> list[Row]:
    rows = []
    for name in SCALED:
        for scale, power in POWERS.items():
            values = errors[f"{name}, {scale}"]
            if scale == "small h":
                growth = f"MSE / variance² of the variance at h={settings.small_steps[-1]:g}, less its limit h to 0"
                rows.append(mean_row(name, growth, values[:, -1].tolist()))
            fitted = slope(settings.scales[scale], values)
            if fitted is not None:
                rows.append(Row(name, f"exponent of the MSE of the variance in {scale}", *fitted, paper=power))
    return rows


def _divergence_rows(curves: dict[str, np.ndarray], settings: Settings) -> list[Row]:
    rows = []
    for name, values in curves.items():
        for direction, word in enumerate(("KL(target‖samples)", "KL(samples‖target)")):
            rows.append(mean_row(name, f"{word} at {settings.passes} passes", values[:, -1, direction].tolist()))
    for one, other in (pair for pair in PAIRS if set(pair) <= set(curves)):
        for direction, word in enumerate(("KL(target‖samples)", "KL(samples‖target)")):
            less = curves[one][:, -1, direction] - curves[other][:, -1, direction]
            rows.append(mean_row(f"{one} less {other}", f"{word}, by draw of c", less.tolist()))
    return rows


def _friction_row(h: float, targets: Sequence[GaussianSum]) -> Row:
    largest = [torch.linalg.eigvalsh(torch.cov(t.centres.T, correction=0))[-1] * DATA**2 for t in targets]
    values = [float(h * (FRICTION + h * one / 2)) for one in largest]
    return mean_row(f"EWSG-VR, h={h}", "largest eigenvalue of h·Γ (limit 2)", values)


def divergence_figure(curves: dict[str, np.ndarray], settings: Settings) -> "Figure":
    """Draw KL(target‖samples) against passes, a panel for each question; bands are 95 % intervals over repeats."""
    figure, grid = panels(2, 2, 7.5, 7.4)
    for axes, (title, methods) in zip(grid.flat, PANELS.items(), strict=True):
        for index, name in enumerate(name for name in methods if name in curves):
            draw_band(axes, settings.marks, curves[name][:, :, 0], index, name, is_positive=True)
        axes.set_yscale("log")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("epochs")
        axes.legend(fontsize=7, edgecolor="none", loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    for axes in grid[:, 0]:
        axes.set_ylabel(f"KL(target‖samples)\n{INTERVAL}")
    return figure


def scaling_figure(errors: dict[str, np.ndarray], settings: Settings) -> "Figure":
    """Draw relative mean squared errors against T and h, with lines of the theorem's powers."""
    figure, grid = panels(1, 3, 8.5, 3.2)
    for axes, (scale, x) in zip(grid.flat, settings.scales.items(), strict=True):
        for index, name in enumerate(SCALED):
            values, fitted = errors[f"{name}, {scale}"], slope(x, errors[f"{name}, {scale}"])
            mean, half = mean_with_interval(values)
            label = name if fitted is None else f"{name}, exponent {fitted[0]:.2f} ± {fitted[1]:.2f}"
            style = series(index) | {"linestyle": "none"}
            axes.errorbar(x, mean, half, label=label, capsize=2, **style)
            if fitted is not None:
                line = np.array(x, dtype=float) ** POWERS[scale]
                factor = np.exp(np.mean(np.log(mean / line)))
                axes.plot(x, factor * line, ":", color=style["color"], label=f"power {POWERS[scale]}")
        if scale == "small h":  # may be negative
            axes.axhline(0, color="black", linewidth=0.6)
        else:
            axes.loglog()
        axes.set_xlabel("T" if scale == "T" else "h")
        axes.minorticks_off()
        axes.set_xticks(x, [f"{value:g}" for value in x])
        axes.legend(fontsize=8, frameon=False)
    titles = (
        f"h={settings.h_of_times:g}",
        f"T={settings.time_of_small:g}, less the limit h to 0",
        f"T={settings.time_of_large:g}",
    )
    for axes, title in zip(grid.flat, titles, strict=True):
        axes.set_title(title, fontsize=9)
    grid[0][0].set_ylabel(f"MSE of the variance / variance²\n{INTERVAL}")
    return figure
