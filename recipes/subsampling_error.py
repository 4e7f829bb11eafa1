"""How the error of subsampling falls with the switching time η (SGLDiff, Theorems 1.1 and 1.3).

The two quadratic potentials of `switching_diffusion`, exact in time: W₁ of the stationary law to the target N(0, 0.1),
and E|θ_t - ζ_t| to the diffusion ζ of the mean potential from the same point 0, on one Brownian path. Also Bayesian
logistic regression (pima, 768 data in 8 batches of 96, prior N(0, 100), 12 chains, each with its own split, `full` 48):
`Trainer.fit` with SGLD of the fixed step ε = 2e-5 (`full` 2e-6) and `SwitchingOrder`, against the same chains with the
full gradient; a chain's injected noise is the same in all runs, and t = 0.02. Slopes are of log error over log η, by
least squares; errors are by a jackknife over groups of chains, the same groups for all η, because they share noise. The
slopes' intervals contain this error only and not the curves' bend, which is why there are two fits.

The paper gives no numbers except the bounds η^{1/4} at fixed t and η^c for W₁, where c is 0.0094 at most here (K = 5, L
= 15). Such a bound means that the slope is at least the exponent as η → 0.

Measured (full), slopes with 95 % intervals:

                               all η                 η ≤ 0.1
    W₁ of the stationary law   0.480 (0.478, 0.482)  0.742 (0.737, 0.747)
    E|θ_t - ζ_t|, t = 0.1      0.277 (0.277, 0.277)  0.464 (0.463, 0.465)
    E|θ_t - ζ_t|, t = 1        0.353 (0.352, 0.353)  0.496 (0.494, 0.497)
    logistic regression        0.367 (0.357, 0.377)  0.441 (0.424, 0.458)

All errors fall at each step of η, and faster than the bounds. Above η = 1 they saturate, because nothing switches
within t. Below 0.1 those at fixed t go like √η, as a central limit theorem of the switching predicts, with twice the
proven exponent; W₁ steepens towards its last decade (0.84 from 0.01 to 0.001), as the exact variance does, whose excess
is 0.314 and 0.0315. In logistic regression t/η is smaller, so √η comes late: 0.54 from 0.003 to 0.001. Below, where a
batch is held for ever fewer steps, it bends towards its limit: with an independent batch at every step, at this ε, the
error is 0.0071 ± 0.0004; with the library's own epochs, whose batches cancel within eight steps, 0.000029 ± 0.000001
(the chains moved by 1.43 ± 0.02).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import nn

from lightning_sgmcmc import SGLD, BayesianModule, Bernoulli, GaussianPrior, PosteriorSample, SwitchingOrder
from lightning_sgmcmc.callbacks import SamplerCallback, SamplingSchedule
from lightning_sgmcmc.datamodules import UCIClassificationDataModule
from lightning_sgmcmc.figures.canvas import panels, save_figure, series
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.records import Recording
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.switching import (
    GROUPS,
    POTENTIALS,
    distances,
    jackknife_error,
    stationary_draws,
)
from lightning_sgmcmc.recipes.shared.trainers import prepare_run, quiet_trainer, resumed_fit
from lightning_sgmcmc.simulation.switching_diffusion import coupled_ornstein_uhlenbeck, switching_paths

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


STATIONARY_BOUND, STRONG_BOUND = 5 / (32 * 16 + 4 * 5), 0.25
"""The exponents of Theorem 1.3, with L = 15, K = 5 and R → 0, so c = K, and of Theorem 1.1."""
FRESH = 1e-9
"""A switching time at which every step has an independent batch: the remaining error is the step's, not η's."""
SMALL = 0.1
"""Switching times up to this value have a fit of their own: above it the errors no longer grow with η."""


@dataclass(frozen=True)
class Settings:
    """The settings of `subsampling_error.yaml`.

    Attributes:
        chains, pairs: draws of a stationary law, and pairs of paths on one Brownian path.
        logistic_chains, time_step, logistic_etas: of logistic regression: chains, ε, and switching times.
        etas, times: switching times of the two quadratic potentials, and times t of their paths.
        table, batch, prior_std: of logistic regression.
        logistic_time: its t.
    """

    chains: int
    pairs: int
    logistic_chains: int
    time_step: float
    logistic_etas: tuple[float, ...]
    etas: tuple[float, ...]
    times: tuple[float, ...]
    table: str
    batch: int
    prior_std: float
    logistic_time: float

    @property
    def work(self) -> float:
        """The steps of the chains of logistic regression, which take nearly all the time."""
        return self.logistic_time / self.time_step * self.logistic_chains * (len(self.logistic_etas) + 3)


class Curve(NamedTuple):
    """An error over η: the estimates, shape (E,), and the estimates without each group, shape (E, G)."""

    etas: Sequence[float]
    values: torch.Tensor
    without: torch.Tensor

    def slope(self, largest: float = float("inf")) -> tuple[float, float]:
        """Return the slope of log error over log η for η up to a largest, by least squares, and its standard error."""
        chosen = torch.tensor([eta <= largest for eta in self.etas])
        x = torch.tensor(self.etas, dtype=torch.float64).log()[chosen]
        weights = (x - x.mean()) / (x - x.mean()).square().sum()
        return float(weights @ self.values[chosen].log()), jackknife_error(weights @ self.without[chosen].log())

    def rows(self, method: str, metric: str, bound: float) -> list[Row]:
        """Return a row for each η, and the slopes of two fits with their 95 % intervals.

        Args:
            method: the method's name.
            metric: the error's name.
            bound: the paper's lower bound of the slope.
        """
        rows = []
        for eta, value, without in zip(self.etas, self.values, self.without, strict=True):
            rows.append(Row(f"{method}, η={eta:g}", metric, float(value), jackknife_error(without)))
        for name, largest in (("all η", float("inf")), (f"η ≤ {SMALL:g}", SMALL)):
            slope, error = self.slope(largest)
            rows.append(Row(method, f"slope, {name} (paper: at least)", slope, error, bound))
            rows.append(Row(method, f"slope, {name}, 2.5 %", slope - 1.96 * error))
            rows.append(Row(method, f"slope, {name}, 97.5 %", slope + 1.96 * error))
        return rows


def curve_of_means(etas: Sequence[float], errors: Sequence[torch.Tensor], groups: int) -> Curve:
    """Return the curve of the means of errors of shape (n,), with the estimates without each group."""
    parts = torch.stack([one.double().view(groups, -1).mean(1) for one in errors])
    return Curve(etas, parts.mean(1), (parts.sum(1, keepdim=True) - parts) / (groups - 1))


# -- the paper's example ----------------------------------------------------------------------------------------------


def stationary_errors(settings: Settings, options: Options) -> Curve:
    """Return W₁ of the stationary law to N(0, 0.1)."""
    found = [distances(stationary_draws(eta, settings.chains, options.seed)) for eta in settings.etas]
    values = torch.tensor([value for value, _ in found], dtype=torch.float64)
    return Curve(settings.etas, values, torch.stack([without for _, without in found]))


def strong_errors(settings: Settings, options: Options) -> dict[float, Curve]:
    """Return E|θ_t - ζ_t| at several times t; both start at 0 and share one Brownian path."""
    by_time: dict[float, list[torch.Tensor]] = {time: [] for time in settings.times}
    process = coupled_ornstein_uhlenbeck(POTENTIALS)
    for eta in settings.etas:
        pairs = switching_paths(process, eta, settings.times, settings.pairs, options.seed)
        for time, place in zip(settings.times, pairs.places, strict=True):
            by_time[time].append((place[:, 0] - place[:, 1]).abs())
    return {time: curve_of_means(settings.etas, errors, GROUPS) for time, errors in by_time.items()}


# -- logistic regression by the library's batches and sampler ---------------------------------------------------------


class Places(Recording, SamplerCallback):
    """Keeps the position of each chain at each sample."""

    recorded = ("places",)

    def __init__(self) -> None:
        self.places: dict[int, list[torch.Tensor]] = {}

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: BayesianModule, sample: PosteriorSample) -> None:
        self.places.setdefault(sample.chain, []).append(sample.parameters["net.weight"].flatten().double())

    def last(self) -> torch.Tensor:
        """Return the last position of each chain, shape (C, d)."""
        return torch.stack([self.places[chain][-1] for chain in sorted(self.places)])


class FromZero(nn.Linear):
    """A layer whose weights start at 0 in every chain."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def logistic_places(eta: float | None, batch_size: int | None, settings: Settings, options: Options) -> torch.Tensor:
    """Return θ_t of chains of SGLD from θ_0 = 0; the noise of a chain is the same in every run of a seed.

    Args:
        eta: the switching time; None means the library's default order, without repetition in an epoch.
        batch_size: None means all data.
        settings: the recipe's.
        options: the recipe's options.
    """
    prepare_run(options)
    step = settings.time_step
    data = UCIClassificationDataModule(settings.table, options.data_root, 1, test_fraction=0.0, intercept=True)
    data.setup("fit")
    data.batch_size = batch_size or data.num_data
    if eta is not None:
        data.order = partial(SwitchingOrder, switching_time=eta, time_step=step)
    module = BayesianModule(
        net=FromZero(data.input_shape[0], 1, bias=False),
        likelihood=Bernoulli(),
        prior=GaussianPrior(settings.prior_std),
        sampler=SGLD,
        lr=step * data.num_data,
        seed=options.seed,
        num_chains=settings.logistic_chains,
    )
    steps = round(settings.logistic_time / step)
    places = Places()
    trainer = quiet_trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        callbacks=[SamplingSchedule(every_n_steps=steps), places],
    )
    resumed_fit(trainer, module, data)
    return places.last()


class LogisticErrors(NamedTuple):
    """Logistic regression: ‖θ_t - ζ_t‖ over η, for independent batches and for epochs; ‖ζ_t - ζ_0‖, shape (C,)."""

    switching: Curve
    fresh: torch.Tensor
    epochs: torch.Tensor
    travelled: torch.Tensor


def logistic_errors(settings: Settings, options: Options) -> LogisticErrors:
    """Run the chains with the full gradient and with batches, with the same noise."""
    etas = settings.logistic_etas
    jobs = [(None, None), (None, settings.batch), *((eta, settings.batch) for eta in (FRESH, *etas))]
    found = run_jobs(logistic_places, jobs, options, settings)
    full = found[None, None]
    errors = {eta: (place - full).norm(dim=1) for (eta, size), place in found.items() if size is not None}
    curve = curve_of_means(etas, [errors[eta] for eta in etas], settings.logistic_chains)
    return LogisticErrors(curve, errors[FRESH], errors[None], full.norm(dim=1))


# -- the table and the picture ----------------------------------------------------------------------------------------


def run(options: Options) -> list[Row]:
    """Measure the three errors over η, draw them, return the table."""
    torch.set_num_threads(1)
    settings = read_settings(Settings, options)
    require(UCIClassificationDataModule(settings.table, options.data_root))
    logistic = logistic_errors(settings, options)
    stationary = run_jobs(stationary_errors, [()], options, settings)[()]
    strong = run_jobs(strong_errors, [()], options, settings)[()]
    rows = stationary.rows("stationary law", "W₁ to N(0, 0.1)", STATIONARY_BOUND)
    for time, curve in strong.items():
        rows += curve.rows(f"common path, t={time:g}", "E|θ_t - ζ_t|", STRONG_BOUND)
    method, metric = f"logistic regression, t={settings.logistic_time:g}", "E‖θ_t - ζ_t‖"
    rows += logistic.switching.rows(method, metric, STRONG_BOUND)
    rows.append(mean_row(f"{method}, independent batches", metric, logistic.fresh.tolist()))
    rows.append(mean_row(f"{method}, batches of epochs", metric, logistic.epochs.tolist()))
    rows.append(mean_row(f"{method}, full gradient", "E‖ζ_t - ζ_0‖", logistic.travelled.tolist()))
    curves = {"W₁ of the stationary law": stationary}
    curves |= {f"E|θ_t - ζ_t|, t = {time:g}": curve for time, curve in strong.items()}
    save_figure(error_figure(curves, logistic, settings), options.out / "errors.png")
    return rows


def error_figure(example: Mapping[str, Curve], logistic: LogisticErrors, settings: Settings) -> "Figure":
    """Draw errors over η with their 95 % intervals, and lines of the slopes 1/4 (the bound) and 1/2."""
    figure, (row,) = panels(1, 2, 7.5, 3.6)
    _draw_curves(row[0], example, "two quadratic potentials, exact")
    own = {f"E‖θ_t - ζ_t‖, t = {settings.logistic_time:g}": logistic.switching}
    _draw_curves(row[1], own, f"logistic regression ({settings.table}), SGLD")
    limits = {"an independent batch at each step": logistic.fresh, "batches of epochs": logistic.epochs}
    for index, (name, errors) in enumerate(limits.items(), 1):
        style = {key: value for key, value in series(index).items() if key in ("color", "linestyle")}
        row[1].axhline(float(errors.mean()), linewidth=1, label=name, **style)
    row[0].set_ylabel("error, 95 % jackknife interval")
    row[0].legend(frameon=False, fontsize=8)
    row[1].legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.1))
    return figure


def _draw_curves(axes: "Axes", curves: Mapping[str, Curve], title: str) -> None:
    for index, (name, curve) in enumerate(curves.items()):
        bars = [1.96 * jackknife_error(without) for without in curve.without]
        axes.errorbar(curve.etas, curve.values, bars, label=name, capsize=2, **series(index))
    etas = [eta for curve in curves.values() for eta in curve.etas]
    x = np.array([min(etas), max(etas)])
    top = max(float(curve.values.max()) for curve in curves.values())
    for power, style in ((0.25, ":"), (0.5, "--")):
        axes.plot(x, 1.3 * top * (x / x[1]) ** power, style, color="gray", linewidth=1, label=f"slope {power:g}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("switching time η")
    axes.set_title(title, fontsize=9)
