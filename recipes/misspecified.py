"""A normal model of log-normal data by EWSG, FlyMC and random-walk Metropolis (EWSG, appendix G.1).

100,000 values exp(N(0, 1)), the model N(μ, σ²) with a flat prior on (μ, log σ); its posterior is known in closed form.
EWSG: b = 10,900, M = 1, h = 1e-4, γ = 300, 1,090 passes, which are 5,000 steps of two batches (with uniform batches
10,000 steps). FlyMC: a tenth of the data resampled a step, 10,000 iterations, a step learned in the first 1,000.
Random-walk Metropolis: all data, the same. The first 1,000 draws of every method are discarded. Each repeat has its own
data set. All start at the log-normal's own mean and log standard deviation, as in the program that the paper points at
for FlyMC (Bardenet et al. 2017): 3 to 9 posterior standard deviations away in log σ, because the model's posterior
ignores how much heavy tails scatter log σ.

That program's bound uses the farthest datum's error constant M for all data, although each datum can have its own; both
variants are here. Its M also changes with the proposal, so it leaves no joint density invariant. Ours holds in a fixed
region, and the lights are drawn from their law at the start, whereas the program switches on a tenth of them.

Measured (full, 20 data sets; ± one standard error):

- FlyMC with one M behaves as in the paper: 11.1 ± 0.8 % of the data used (10.9), an autocorrelation of μ of 0.53 ±
  0.04 at lag 500, a time of 1,500 ± 140 iterations, its mean 1.2 ± 0.3 sds from the truth. With one M for each datum,
  hardly a light is on (0.07 in an iteration). The times are 36 ± 2 (μ) and 5.6 ± 0.1 (log σ), like random-walk
  Metropolis' 18 and 7, and mean and variance are right: the loose bound is slow, not FlyMC on a wrong model.
- EWSG's autocorrelation is gone at lag 500, as in the paper; its times (236 ± 14 and 43 ± 1) are those of its step and
  friction and are about the same with full gradients; FlyMC with one M for each datum is seven to eight times faster
  per iteration, with half the data. Its stationary law is wrong: log σ spreads 3.5 ± 0.3 times as wide as the
  posterior, and its mean is 1.5 ± 0.4 sds too high. Uniform batches of the same passes spread 4.2 ± 0.3 times, without
  a shift (0.09 ± 0.07); with full gradients the ratio is 1.03 ± 0.01, so the cause is the batches' noise and not h.
  EWSG removes a part of it at the price of a shift: it prefers the larger of two gradients, and heavy tails make
  gradients of log σ skewed. The paper shows a scatter around the mode without the posterior's scale.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.draws import autocorrelation, autocorrelation_time
from lightning_sgmcmc.figures.canvas import COLOURS, canvas, integer_ticks, legend_above, panels, save_figure, series
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.samplers import UnderdampedLangevin
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.simulation import (
    ExponentialGradient,
    FullGradient,
    GradientEstimator,
    TaylorBound,
    UniformGradient,
)
from lightning_sgmcmc.simulation.finite_sums import NormalModelSum
from lightning_sgmcmc.simulation.firefly import firefly
from lightning_sgmcmc.simulation.random_walk import random_walk_metropolis
from lightning_sgmcmc.simulation.subsampled_chains import sample_sum

if TYPE_CHECKING:
    from matplotlib.figure import Figure


RADIUS = (0.1, 0.1)
COORDINATES = ("μ", "log σ")
PAPER_SHARE = 10.9


@dataclass(frozen=True)
class Settings:
    """The settings of `misspecified.yaml`.

    Attributes:
        repeats: data sets.
        data: values of a data set; FlyMC resamples a tenth of their lights in an iteration.
        iterations, burn_in: of FlyMC, of random-walk Metropolis and of the full gradient; draws that are discarded.
        acceptance: that FlyMC's step is tuned to in the burn-in, from 1/√N, as in the program that the paper cites.
        batch, step, friction, passes: of EWSG and of uniform batches.
        lag: of the autocorrelation in the table.
    """

    repeats: int
    data: int
    iterations: int
    burn_in: int
    acceptance: float
    batch: int
    step: float
    friction: float
    passes: int
    lag: int

    @property
    def work(self) -> float:
        """The iterations of all methods over the data."""
        return float(self.repeats * self.data * (3 * self.iterations + 3 * self.passes))


FLYMC = {"FlyMC, one M": True, "FlyMC, own M": False}
GRADIENTS: dict[str, Callable[[int], GradientEstimator]] = {
    "EWSG": ExponentialGradient,
    "uniform batches": UniformGradient,
    "full gradient": lambda _: FullGradient(),
}
SERIES = {
    "EWSG": 1,
    "uniform batches": 4,
    "full gradient": 2,
    "FlyMC, one M": 0,
    "FlyMC, own M": 5,
    "random walk": 6,
}


@dataclass(frozen=True)
class Chain:
    """One chain.

    Attributes:
        draws: after the burn-in, in posterior standard deviations from the posterior mean, shape (S, 2).
        shares: data that each iteration used, in % of all, shape (K,).
    """

    draws: Tensor
    shares: Tensor


def posterior(repeat: int, data: int, seed: int) -> tuple[Tensor, NormalModelSum]:
    """Return a repeat's data and its posterior."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "data", repeat))
    values = torch.randn(data, generator=generator, dtype=torch.float64).exp()
    return values, NormalModelSum(values)


def start() -> Tensor:
    """Return the log-normal law's own mean and log standard deviation, where the chains start."""
    return torch.tensor([math.exp(0.5), math.log((math.e - 1) * math.e) / 2], dtype=torch.float64)


def one(method: str, repeat: int, settings: Settings, options: Options) -> Chain:
    """Run one chain of a method on a repeat's data."""
    values, target = posterior(repeat, settings.data, options.seed)
    seed = derive_seed(options.seed, method, repeat)
    if method in GRADIENTS:
        draws, share = langevin(target, GRADIENTS[method](settings.batch), settings, seed)
    elif method in FLYMC:
        draws, share = fireflies(values, FLYMC[method], settings, seed)
    else:
        draws, share = walk(target, settings, seed)
    return Chain((draws - target.mean) / target.covariance.diagonal().sqrt(), share)


def langevin(
    target: NormalModelSum, gradient: GradientEstimator, settings: Settings, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the draws and the share of data of underdamped Langevin dynamics."""
    per_step = settings.batch * (2 if isinstance(gradient, ExponentialGradient) else 1)
    passes = settings.passes * settings.data
    steps = settings.iterations if isinstance(gradient, FullGradient) else passes // per_step
    run = sample_sum(
        target,
        functools.partial(UnderdampedLangevin, friction=settings.friction),
        gradient,
        lr=settings.step,
        num_steps=steps,
        initial=start(),
        at_steps=range(settings.burn_in + 1, steps + 1),
        seed=seed,
        dtype=torch.float64,
    )
    return run.positions[:, 0], torch.full((steps,), 100 * run.evaluations / settings.data / steps)


def fireflies(values: Tensor, shared: bool, settings: Settings, seed: int) -> tuple[Tensor, Tensor]:
    """Return the draws and the share of data of FlyMC."""
    run = firefly(
        TaylorBound(values, RADIUS, shared),
        start(),
        settings.iterations,
        resampled=settings.data // 10,
        step_size=1 / math.sqrt(settings.data),
        burn_in=settings.burn_in,
        target_acceptance=settings.acceptance,
        seed=seed,
    )
    return run.draws, 100 * run.evaluations / settings.data


def walk(target: NormalModelSum, settings: Settings, seed: int) -> tuple[Tensor, Tensor]:
    """Return the draws and the share of data of random-walk Metropolis."""
    run = random_walk_metropolis(
        lambda x: -target.energy(x),
        start()[None],
        settings.iterations,
        scale=1 / math.sqrt(settings.data),
        burn_in=settings.burn_in,
        seed=seed,
    )
    return run.draws[:, 0], torch.full((settings.iterations,), 100.0)


def run(options: Options) -> list[Row]:
    """Run all methods on all repeats, draw the pictures, return the table."""
    torch.set_num_threads(1)
    settings = read_settings(Settings, options)
    repeats = options.repeated(settings.repeats)
    methods = options.chosen((*FLYMC, *GRADIENTS, "random walk"))  # longest first
    jobs = [(method, repeat) for method in methods for repeat in repeats]
    found = run_jobs(one, jobs, options, settings)
    chains = {method: [found[method, repeat] for repeat in repeats] for method in SERIES if method in methods}
    for name, draw in PICTURES.items():
        save_figure(draw(chains, settings), options.out / f"{name}.png")
    rows = [row for method, of_method in chains.items() for row in rows_of(method, of_method, settings)]
    outside = [outside_mass(*posterior(repeat, settings.data, options.seed)) for repeat in repeats]
    return [*rows, Row("FlyMC", "largest posterior mass beyond the bound's region", max(outside))]


def rows_of(method: str, chains: Sequence[Chain], settings: Settings) -> list[Row]:
    """Return a method's figures, with their errors over repeats."""
    paper = PAPER_SHARE if method == "FlyMC, one M" else None
    rows = [mean_row(method, "data of an iteration, %", [float(c.shares.mean()) for c in chains], paper)]
    figures: dict[str, Callable[[Tensor], Tensor]] = {
        "mean, in sds from the truth": lambda draws: draws.mean(0),
        "sd / true sd": lambda draws: draws.std(0),
        "autocorrelation time": autocorrelation_time,
        f"autocorrelation at lag {settings.lag}": lambda draws: autocorrelation(draws, settings.lag + 1)[-1],
    }
    for name, figure in figures.items():
        values = torch.stack([figure(chain.draws) for chain in chains])
        rows += [mean_row(method, f"{c}: {name}", values[:, i].tolist()) for i, c in enumerate(COORDINATES)]
    distances = [float(chain.draws.mean(0).norm()) for chain in chains]
    return [*rows, mean_row(method, "distance of the mean, in sds", distances)]


def outside_mass(values: Tensor, target: NormalModelSum) -> float:
    """Return a bound of the posterior mass where the Taylor bound does not hold, from both marginals."""
    from scipy.stats import chi2, t

    mode, data = TaylorBound(values).mode, len(values)
    freedom = data - 1
    low, high = (float(target.squares * (-2 * (mode[1] + side * RADIUS[1])).exp()) for side in (1, -1))
    scale = math.sqrt(float(target.squares) / freedom / data)
    return float(chi2.cdf(low, freedom) + chi2.sf(high, freedom) + 2 * t.sf(RADIUS[0] / scale, freedom))


# -- pictures ---------------------------------------------------------------------------------------------------------


def autocorrelation_figure(chains: dict[str, list[Chain]], settings: Settings) -> "Figure":
    """Draw the mean autocorrelation of both coordinates."""
    figure, grid = canvas(2, height=5)
    for i, (axes, name) in enumerate(zip(grid, COORDINATES, strict=True)):
        axes.axhline(0, color="black", linewidth=0.6)
        for method, of_method in chains.items():
            curves = torch.stack([autocorrelation(chain.draws[:, i], 2 * settings.lag + 1) for chain in of_method])
            axes.plot(curves.mean(0), label=method, **series(SERIES[method], curves.shape[1]))
        axes.axvline(settings.lag, color="black", linestyle=":", linewidth=0.8)
        axes.set_ylabel(f"autocorrelation of {name}")
    grid[1].set_xlabel("lag (iterations)")
    legend_above(grid[0])
    return figure


def samples_figure(chains: dict[str, list[Chain]], settings: Settings) -> "Figure":
    """Draw the first repeat's draws over the posterior's contours of 50, 90 and 99 % (normal up to 1/N)."""
    shown = [method for method in SERIES if method in chains and method not in ("full gradient", "random walk")]
    figure, (row,) = panels(1, max(1, len(shown)), 8.5, 2.8, shared_x=True, shared_y=True)
    angles = torch.linspace(0, 2 * math.pi, 200)
    for axes, method in zip(row, shown, strict=True):
        draws = chains[method][0].draws
        axes.plot(draws[:, 0], draws[:, 1], ".", color=COLOURS[SERIES[method]], markersize=1.5, alpha=0.3)
        for mass in (0.5, 0.9, 0.99):
            radius = math.sqrt(-2 * math.log(1 - mass))
            axes.plot(radius * angles.cos(), radius * angles.sin(), color="black", linewidth=0.9)
        axes.set_title(method, fontsize=9)
        axes.set_xlabel("μ, in posterior sds")
    row[0].set_ylabel("log σ, in posterior sds")
    return figure


def bright_figure(chains: dict[str, list[Chain]], settings: Settings) -> "Figure":
    """Draw histograms of how many data were bright in an iteration of FlyMC."""
    figure, grid = canvas(2, height=4.4, shared=False)
    for axes, method in zip(grid, (method for method in FLYMC if method in chains), strict=False):
        counts = torch.cat([chain.shares[settings.burn_in :] for chain in chains[method]]) * (settings.data / 100)
        counts = counts - settings.data // 10
        mean, most = float(counts.mean()), int(counts.max().round())
        width = max(1, most // 60)
        axes.hist(
            counts.numpy(), bins=[k - 0.5 for k in range(0, most + width + 1, width)], color=COLOURS[SERIES[method]]
        )
        axes.axvline(mean, color="black", linewidth=1, label=f"mean {mean:.3g}, {mean / settings.data:.2g} of all")
        axes.set_ylabel("iterations")
        axes.set_xlabel(f"bright data, {method}")
        axes.xaxis.set_major_locator(integer_ticks())
        legend_above(axes)
    return figure


PICTURES = {"autocorrelation": autocorrelation_figure, "samples": samples_figure, "bright": bright_figure}
