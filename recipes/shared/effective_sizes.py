"""Effective sample sizes of samplers on one table: measures, rows and pictures of `logistic_ess`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lightning_sgmcmc.diagnostics.draws import autocorrelation
from lightning_sgmcmc.figures.canvas import COLOURS, legend_below, panels, series
from lightning_sgmcmc.recipes.shared.figures import INTERVAL, half_width
from lightning_sgmcmc.recipes.shared.logistic import Reference
from lightning_sgmcmc.recipes.shared.results import Row, mean_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SAMPLES = 5_000
"""Samples of a chain of the paper."""
PAPER = {
    "australian": {"SGLD": 1676, "cSGLD": 2138, "SGHMC": 1317, "cSGHMC": 4707},
    "german": {"SGLD": 492, "cSGLD": 978, "SGHMC": 2007, "cSGHMC": 2436},
    "heart": {"SGLD": 2199, "cSGLD": 2541, "SGHMC": 5000, "cSGHMC": 5000},
}
SERIES = {"SGLD": 0, "cSGLD": 5, "SGHMC": 1, "cSGHMC": 4}


@dataclass(frozen=True)
class Measures:
    """The measures of one chain."""

    median_ess: float
    mean_error: float
    variance_ratio: float


def rows_of(label: str, measures: Sequence[Measures], paper: float | None = None) -> list[Row]:
    """Return the rows of a sampler's chains."""
    return [
        mean_row(label, "median ESS", [one.median_ess for one in measures], paper),
        mean_row(label, "error of mean (posterior std)", [one.mean_error for one in measures]),
        mean_row(label, "variance / reference's", [one.variance_ratio for one in measures]),
    ]


@dataclass
class Study:
    """The measures of all samplers on one table.

    Attributes:
        table: its name.
        reference: the full-gradient reference.
        check: importance sampling.
        repeats: by method, the measures of each repeat.
        other_steps: by method, factor on lr and the measures.
        readings: by method and the reading's name.
        draws: by method, the samples of the first repeat.
        typical: the coefficient whose ESS is the median one of the first method's.
        slowest: the one whose ESS is its lowest.
    """

    table: str
    reference: Reference
    check: Reference
    repeats: dict[str, list[Measures]] = field(default_factory=dict)
    other_steps: dict[str, list[tuple[float, Measures]]] = field(default_factory=dict)
    readings: dict[tuple[str, str], list[Measures]] = field(default_factory=dict)
    draws: dict[str, Tensor] = field(default_factory=dict)
    typical: int = 0
    slowest: int = 0

    def ess(self, method: str) -> list[float]:
        """Return the median ESS of each repeat."""
        return [one.median_ess for one in self.repeats[method]]

    def rows(self) -> list[Row]:
        """Return the table's rows."""
        name, rows = self.table.capitalize(), []
        for method, repeats in self.repeats.items():
            rows += rows_of(f"{name} {method}", repeats, PAPER[self.table][method])
        for method, others in self.other_steps.items():
            for factor, one in others:
                rows += rows_of(f"{name} {method}, {factor:g}·lr", [one])
        for (method, reading), own in self.readings.items():
            rows += rows_of(f"{name} {method}, {reading}", own, PAPER[self.table][method])
        label = f"{name} reference against importance sampling"
        rows.append(Row(label, "error of mean (posterior std)", self.check.mean_error(self.reference.mean)))
        rows.append(Row(label, "variance / reference's", self.check.variance_ratio(self.reference.std)))
        rows.append(Row(f"{name} importance sampling", "effective proposals", self.check.effective or 0.0))
        return rows


def ess_figure(studies: Sequence[Study]) -> "Figure":
    """Draw the median ESS of each sampler next to the paper's."""
    figure, grid = panels(1, len(studies), 8.5, 3.0)
    for axes, one in zip(grid[0], studies, strict=True):
        places = np.arange(len(one.repeats))
        ours = [mean_row(method, "", one.ess(method)) for method in one.repeats]
        halves = [half_width(r.error, len(one.repeats[r.method])) if r.error else 0.0 for r in ours]
        style: dict[str, Any] = {"color": COLOURS[0], "capsize": 2, "label": f"ours, {INTERVAL}"}
        bars = axes.bar(places - 0.2, [r.value for r in ours], 0.4, yerr=halves, **style)
        axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
        paper = [PAPER[one.table][method] for method in one.repeats]
        bars = axes.bar(places + 0.2, paper, 0.4, color="lightgray", label="paper")
        axes.bar_label(bars, fontsize=8, padding=1)
        axes.set_xticks(places, list(one.repeats))
        axes.set_title(one.table.capitalize(), fontsize=9)
        axes.set_yscale("log")
        axes.set_ylim(30, 12_000)
    grid[0][0].set_ylabel("median ESS")
    legend_below(figure, grid[0][0])
    return figure


def step_size_figure(studies: Sequence[Study]) -> "Figure":
    """Draw the median ESS against the variances' bias for several step sizes."""
    figure, grid = panels(1, len(studies), 8.5, 3.3)
    for axes, one in zip(grid[0], studies, strict=True):
        for method, repeats in one.repeats.items():
            chains = [*((1.0, measures) for measures in repeats[:1]), *one.other_steps.get(method, [])]
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
        axes.set_xlabel("variance / reference's\n(dots grow with lr)")
        axes.set_title(one.table.capitalize(), fontsize=9)
    grid[0][0].set_ylabel("median ESS (dotted: paper)")
    legend_below(figure, grid[0][0])
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
    legend_below(figure, grid[0][0])
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
    legend_below(figure, grid[0][0])
    return figure


PICTURES = {
    "ess": ess_figure,
    "step_sizes": step_size_figure,
    "autocorrelation": autocorrelation_figure,
    "marginals": marginal_figure,
}
