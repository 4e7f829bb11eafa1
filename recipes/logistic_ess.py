"""Effective sample sizes in Bayesian logistic regression: SGLD, SGHMC and their cyclical forms on three UCI tables.

Zhang et al. 2020 (cSG-MCMC), section 5.2 and Table 1: 5,000 samples after 1,000 of burn-in, median effective sample
size (ESS) over the coefficients. The paper gives neither prior, batch size, step sizes, friction, cycles nor estimator;
ours are in the settings below. The table also has what the ESS hides: the error of the chain's mean and covariance
against a long full-gradient run, which importance sampling checks.

Ours are 4 to 34 times below the paper's figures, and the cyclical samplers lie below the plain ones, not above. Both
depend on the step size. With a sample a step and exact gradients, SGLD's ESS is E·n only where variances are 1+E times
too large (of a Gaussian; batches add more), so the paper's 2,199 of 5,000 means 44 % or more, unless its samples are
several steps apart; ours are limited to about 10 %. At four times the step (`step_sizes.png`) the figures rise towards
the paper's, and the variances about double. At equal bias a falling step is no gain on one mode: most of a cycle's
samples come from its small steps. The cyclical ones lead where the plain samplers' steps fall as k^-0.55, as in its
mixture experiment, from the cyclical ones' own first step ("falling" in the table): but then a hundredfold smaller step
is compared, not a schedule.

The estimator is Geyer's initial monotone sequence in ArviZ (`method="mean"`, two halves of the chain). It stops at the
first negative lobe of the autocorrelation, so for SGHMC's oscillating chains the ESS is too low.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc import SGHMC, SGLD, BayesianModule, Bernoulli, GaussianPrior, PolynomialDecay, PosteriorSample
from lightning_sgmcmc.callbacks import CyclicalSchedule, SamplerCallback, SamplingSchedule
from lightning_sgmcmc.datamodules import UCIClassificationDataModule
from lightning_sgmcmc.diagnostics.chains import import_arviz
from lightning_sgmcmc.diagnostics.samples import autocorrelation
from lightning_sgmcmc.figures.canvas import COLOURS, save_figure, series
from lightning_sgmcmc.figures.errors import INTERVAL, half_width
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.logistic import (
    LogisticPosterior,
    Reference,
    full_gradient_reference,
    importance_reference,
)
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.pictures import outside_legend, panels
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.trainers import quiet_trainer, resumed_fit, silence_lightning

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SAMPLES, BURN_IN = 5_000, 1_000
BATCH_SIZE = 100
PRIOR_STD = 10.0  # the variance 100 of Girolami & Calderhead 2011, who introduced these tables to MCMC
CYCLES, EXPLORATION, DECAY = 30, 0.25, 0.55  # the paper's for its mixture of Gaussians
SAMPLERS = {"SGLD": SGLD, "cSGLD": SGLD, "SGHMC": SGHMC, "cSGHMC": SGHMC}  # SGHMC's friction is 0.1
# The rule: of 1, 1.5, 2, 3, 5, 7 times powers of ten, the largest lr with variances at most 10 % too large, averaged
# over the coefficients (against importance sampling, 16 chains). For the cyclical samplers it is lr_0.
LR = {
    "australian": {"SGLD": 1.0, "cSGLD": 3.0, "SGHMC": 0.3, "cSGHMC": 0.5},
    "german": {"SGLD": 0.5, "cSGLD": 1.5, "SGHMC": 0.1, "cSGHMC": 0.2},
    "heart": {"SGLD": 1.5, "cSGLD": 3.0, "SGHMC": 0.7, "cSGHMC": 0.7},
}
PAPER = {
    "australian": {"SGLD": 1676, "cSGLD": 2138, "SGHMC": 1317, "cSGHMC": 4707},
    "german": {"SGLD": 492, "cSGLD": 978, "SGHMC": 2007, "cSGHMC": 2436},
    "heart": {"SGLD": 2199, "cSGLD": 2541, "SGHMC": 5000, "cSGHMC": 5000},
}
REPEATS = {"quick": 3, "full": 10}
OTHER_STEPS = {"quick": (4.0,), "full": (0.5, 2.0, 4.0, 8.0)}  # times the lr above, one chain each
REFERENCE_STEPS = {"quick": 4_000, "full": 20_000}
REFERENCE_CHAINS = 64
PROPOSALS = 100_000
SERIES = {"SGLD": 0, "cSGLD": 5, "SGHMC": 1, "cSGHMC": 4}


def run(options: Options) -> list[Row]:
    """Run all samplers on all tables."""
    torch.set_num_threads(1)
    silence_lightning()
    require(*(UCIClassificationDataModule(table, options.data_root) for table in LR))
    found = run_jobs(study, [(table,) for table in LR], options)
    studies = list(found.values())
    rows = [row for one in studies for row in one.rows()]
    for name, draw in PICTURES.items():
        save_figure(draw(studies), options.out / f"{name}.png")
    return rows


# -- one chain --------------------------------------------------------------------------------------------------------


class WeightCollector(SamplerCallback):
    """Keeps the samples' weight vectors in memory."""

    def __init__(self) -> None:
        self.draws: list[Tensor] = []

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: BayesianModule, sample: PosteriorSample) -> None:
        self.draws.append(sample.parameters["net.weight"].flatten())


def sample_chain(
    data: pl.LightningDataModule, features: int, method: str, lr: float, seed: int, falling: bool = False
) -> Tensor:
    """Return the samples of a fit after burn-in, shape (SAMPLES, d), in float64.

    The plain samplers draw a sample at every step. A cycle draws one at every step of its sampling stage, so a cyclical
    run is longer by 1/(1-β): the number of samples is equal, as in the paper, and the cost is not. Its burn-in is a
    number of whole cycles. With
    `falling` a plain sampler's step size is lr·k^-0.55.
    """
    torch.manual_seed(seed)
    module = BayesianModule(
        net=nn.Linear(features, 1, bias=False),
        likelihood=Bernoulli(),
        prior=GaussianPrior(PRIOR_STD),
        sampler=SAMPLERS[method],
        lr=lr,
        seed=seed,
    )
    if method.startswith("c"):
        per_cycle = (BURN_IN + SAMPLES) // CYCLES
        steps = CYCLES * round(per_cycle / (1 - EXPLORATION))
        schedule: SamplerCallback = CyclicalSchedule(CYCLES, EXPLORATION, per_cycle)
    else:
        decay = PolynomialDecay(lr, gamma=DECAY) if falling else None
        steps, schedule = BURN_IN + SAMPLES, SamplingSchedule(BURN_IN, every_n_steps=1, lr_decay=decay)
    collector = WeightCollector()
    trainer = quiet_trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        callbacks=[schedule, collector],
    )
    resumed_fit(trainer, module, data)
    return torch.stack(collector.draws[-SAMPLES:]).double()


def coefficient_ess(draws: Tensor) -> Tensor:
    """Return the ESS of each coefficient of a chain (n, d), shape (d,), at most n."""
    arviz = import_arviz()
    ess = [float(arviz.ess(column.numpy()[None], method="mean")) for column in draws.T]
    return torch.tensor(ess).clamp_max(len(draws))


# -- a table ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measures:
    """The measures of one chain."""

    median_ess: float
    mean_error: float
    variance_ratio: float

    def rows(self, label: str) -> list[Row]:
        """Return the rows of a setting with one chain."""
        return [
            Row(label, "median ESS", self.median_ess),
            Row(label, "error of mean (posterior std)", self.mean_error),
            Row(label, "variance / reference's", self.variance_ratio),
        ]


@dataclass(frozen=True)
class Study:
    """The measures of all samplers on one table.

    Attributes:
        table: its name.
        repeats: by method, the measures of each repeat.
        other_steps: by method, factor on lr and the measures.
        falling: by plain method, the measures with a falling step size.
        draws: by method, the samples of the first repeat.
        typical: the coefficient whose ESS is the median one of SGLD's.
        slowest: the one whose ESS is SGLD's lowest.
        reference: the full-gradient reference.
        check: importance sampling.
    """

    table: str
    repeats: dict[str, list[Measures]]
    other_steps: dict[str, list[tuple[float, Measures]]]
    falling: dict[str, Measures]
    draws: dict[str, Tensor]
    typical: int
    slowest: int
    reference: Reference
    check: Reference

    def ess(self, method: str) -> list[float]:
        """Return the median ESS of each repeat."""
        return [one.median_ess for one in self.repeats[method]]

    def rows(self) -> list[Row]:
        """Return the table's rows."""
        name, rows = self.table.capitalize(), []
        for method in SAMPLERS:
            repeats, label = self.repeats[method], f"{name} {method}"
            rows.append(mean_row(label, "median ESS", self.ess(method), PAPER[self.table][method]))
            rows.append(mean_row(label, "error of mean (posterior std)", [one.mean_error for one in repeats]))
            rows.append(mean_row(label, "variance / reference's", [one.variance_ratio for one in repeats]))
        for method in SAMPLERS:
            for factor, one in self.other_steps[method]:
                rows += one.rows(f"{name} {method}, {factor:g}·lr")
        for method, one in self.falling.items():
            rows += one.rows(f"{name} {method}, falling")
        label = f"{name} reference against importance sampling"
        rows.append(Row(label, "error of mean (posterior std)", self.check.mean_error(self.reference.mean)))
        rows.append(Row(label, "variance / reference's", self.check.variance_ratio(self.reference.std)))
        rows.append(Row(f"{name} importance sampling", "effective proposals", self.check.effective or 0.0))
        return rows


def load(table: str, data_root: Path) -> tuple[pl.LightningDataModule, LogisticPosterior]:
    """Return a table with all its rows for training, and the posterior."""
    data = UCIClassificationDataModule(table, data_root, BATCH_SIZE, test_fraction=0.0, intercept=True)
    data.setup("fit")
    return data, LogisticPosterior(data.splits[0].inputs.double(), data.splits[0].targets.double(), PRIOR_STD)


def study(table: str, options: Options) -> Study:
    """Run all samplers on one table."""
    data, posterior = load(table, options.data_root)
    features = posterior.x.shape[1]
    reference = full_gradient_reference(posterior, REFERENCE_STEPS[options.scale], options.seed, REFERENCE_CHAINS)
    lr, seeds = LR[table], options.seeds(REPEATS[options.scale])

    def chain(method: str, lr: float, seed: int = options.seed, falling: bool = False) -> Tensor:
        return sample_chain(data, features, method, lr, seed, falling)

    def measure(draws: Tensor) -> Measures:
        median = float(coefficient_ess(draws).quantile(0.5))
        return Measures(median, reference.mean_error(draws.mean(0)), reference.variance_ratio(draws.std(0)))

    chains = {method: [chain(method, lr[method], seed) for seed in seeds] for method in SAMPLERS}
    order = coefficient_ess(chains["SGLD"][0]).argsort().tolist()
    factors = OTHER_STEPS[options.scale]
    return Study(
        table=table,
        repeats={method: [measure(draws) for draws in chains[method]] for method in SAMPLERS},
        other_steps={m: [(factor, measure(chain(m, factor * lr[m]))) for factor in factors] for m in SAMPLERS},
        falling={m: measure(chain(m, lr[f"c{m}"], falling=True)) for m in ("SGLD", "SGHMC")},
        draws={method: chains[method][0] for method in SAMPLERS},
        typical=order[len(order) // 2],
        slowest=order[0],
        reference=reference,
        check=importance_reference(posterior, PROPOSALS, options.seed),
    )


# -- pictures ---------------------------------------------------------------------------------------------------------


def ess_figure(studies: Sequence[Study]) -> "Figure":
    """Draw the median ESS of each sampler next to the paper's."""
    figure, grid = panels(1, len(studies), 8.5, 3.0)
    places = np.arange(len(SAMPLERS))
    for axes, one in zip(grid[0], studies, strict=True):
        ours = [mean_row(method, "", one.ess(method)) for method in SAMPLERS]
        halves = [half_width(r.error, len(one.repeats[r.method])) if r.error else 0.0 for r in ours]
        style: dict[str, Any] = {"color": COLOURS[0], "capsize": 2, "label": f"ours, {INTERVAL}"}
        bars = axes.bar(places - 0.2, [r.value for r in ours], 0.4, yerr=halves, **style)
        axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
        paper = [PAPER[one.table][method] for method in SAMPLERS]
        bars = axes.bar(places + 0.2, paper, 0.4, color="lightgray", label="paper")
        axes.bar_label(bars, fontsize=8, padding=1)
        axes.set_xticks(places, list(SAMPLERS))
        axes.set_title(one.table.capitalize(), fontsize=9)
        axes.set_yscale("log")
        axes.set_ylim(30, 12_000)
    grid[0][0].set_ylabel(f"median ESS of {SAMPLES:,} samples")
    outside_legend(figure, grid[0][0])
    return figure


def step_size_figure(studies: Sequence[Study]) -> "Figure":
    """Draw the median ESS against the variances' bias for several step sizes."""
    figure, grid = panels(1, len(studies), 8.5, 3.3)
    for axes, one in zip(grid[0], studies, strict=True):
        for method in SAMPLERS:
            chains = [*((1.0, measures) for measures in one.repeats[method][:1]), *one.other_steps[method]]
            chains.sort(key=lambda pair: pair[0])
            ratios, ess = [m.variance_ratio for _, m in chains], [m.median_ess for _, m in chains]
            style = series(SERIES[method])
            axes.plot(ratios, ess, label=method, **(style | {"markersize": 2}))
            sizes = [18 * factor**0.5 for factor, _ in chains]
            axes.scatter(ratios, ess, sizes, color=style["color"], marker=style["marker"])
            axes.axhline(PAPER[one.table][method], color=style["color"], linestyle=":", linewidth=1)
        share = np.linspace(0.002, 1, 200)
        axes.plot(1 + share, share * SAMPLES, color="black", linewidth=1, label="SGLD, exact gradients of a Gaussian")
        axes.set_yscale("log")
        axes.set_ylim(50, 7_000)
        axes.set_xlabel("variance / reference's (dots grow with lr)")
        axes.set_title(one.table.capitalize(), fontsize=9)
    grid[0][0].set_ylabel("median ESS (dotted: paper)")
    outside_legend(figure, grid[0][0])
    return figure


def autocorrelation_figure(studies: Sequence[Study], lags: int = 150) -> "Figure":
    """Draw the autocorrelation of the coefficient with the median ESS."""
    figure, grid = panels(1, len(studies), 8.5, 3.0)
    for axes, one in zip(grid[0], studies, strict=True):
        axes.axhline(0, color="black", linewidth=0.6)
        for method, draws in one.draws.items():
            axes.plot(autocorrelation(draws[:, one.typical], lags), label=method, **series(SERIES[method], lags))
        axes.set_title(f"{one.table.capitalize()}, coefficient {one.typical}", fontsize=9)
        axes.set_xlabel("lag (samples)")
    grid[0][0].set_ylabel("autocorrelation")
    outside_legend(figure, grid[0][0])
    return figure


def marginal_figure(studies: Sequence[Study]) -> "Figure":
    """Draw the marginal densities of two coefficients, the typical and the slowest, against the reference."""
    from scipy.stats import gaussian_kde

    figure, grid = panels(2, len(studies), 8.5, 4.8)
    for column, one in enumerate(studies):
        for row, (index, word) in enumerate(((one.typical, "typical"), (one.slowest, "slowest"))):
            axes = grid[row][column]
            centre, spread = float(one.reference.mean[index]), float(one.reference.std[index])
            place = np.linspace(centre - 4 * spread, centre + 4 * spread, 200)
            known = gaussian_kde(one.reference.draws[::10, index].numpy())(place)
            axes.fill_between(place, known, color="lightgray", label="reference")
            for method, draws in one.draws.items():
                density = gaussian_kde(draws[:, index].numpy())(place)
                axes.plot(place, density, label=method, **series(SERIES[method], len(place)))
            axes.set_title(f"{one.table.capitalize()}, {word} coefficient ({index})", fontsize=9)
            axes.set_yticks([])
            axes.set_ylim(0)
    for row in range(2):
        grid[row][0].set_ylabel("density")
    outside_legend(figure, grid[0][0])
    return figure


PICTURES = {
    "ess": ess_figure,
    "step_sizes": step_size_figure,
    "autocorrelation": autocorrelation_figure,
    "marginals": marginal_figure,
}
