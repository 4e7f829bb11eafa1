"""Figures of recipes: each function draws one figure from plain numbers and returns it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_sgmcmc.figures.canvas import (
    AVERAGE_COLOUR,
    COLOURS,
    DASHES,
    SAMPLE_COLOUR,
    canvas,
    integer_ticks,
    legend_above,
    literal,
    panels,
    series,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# -- chains on analytic targets ---------------------------------------------------------------------------------------


def densities_figure(x: Sequence[float], truth: Sequence[float], others: Mapping[str, Sequence[float]]) -> "Figure":
    """Draw one-dimensional densities and the true one.

    Args:
        x: positions.
        truth: the target's density at these positions.
        others: other densities there, by name.
    """
    figure, (axes,) = canvas()
    axes.fill_between(x, truth, color="lightgray", label="target")
    for index, (name, values) in enumerate(others.items()):
        axes.plot(x, values, label=name, **series(index, len(values)))
    axes.set_xlabel("x")
    axes.set_ylabel("density")
    axes.set_ylim(bottom=0)
    legend_above(axes, columns=4)
    return figure


def errors_figure(steps: Sequence[float], errors: Mapping[str, Sequence[float]], label: str) -> "Figure":
    """Draw errors against the number of steps, both on log axes.

    Args:
        steps: numbers of steps.
        errors: positive errors, by method.
        label: label of the errors.
    """
    figure, (axes,) = canvas()
    for index, (name, values) in enumerate(errors.items()):
        axes.loglog(steps, values, label=name, **series(index, len(steps)))
    axes.set_xlabel("steps")
    axes.set_ylabel(label)
    legend_above(axes, columns=4)
    return figure


def path_figure(steps: Sequence[float], places: Sequence[float], multipliers: Sequence[float]) -> "Figure":
    """Draw a chain's path in one dimension, and its gradient multipliers below."""
    figure, (upper, lower) = canvas(2, height=4.2)
    upper.plot(steps, places, color="black", linewidth=0.6)
    upper.set_ylabel("x")
    kappa = np.asarray(multipliers, dtype=float)
    lower.plot(steps, kappa, ".", markersize=1.5, color=AVERAGE_COLOUR, label="κ")
    if bool((kappa < 0).any()):
        lower.axhspan(float(kappa.min()), 0, color=SAMPLE_COLOUR, alpha=0.12, linewidth=0, label="bouncy, κ < 0")
    lower.axhline(1, color="black", linestyle=":", linewidth=1)
    low, high = np.percentile(kappa, [0.1, 99.9])  # single outliers would hide the rest
    lower.set_ylim(low - 0.1 * (high - low) - 0.05, high + 0.1 * (high - low) + 0.05)
    lower.set_ylabel("multiplier κ")
    lower.set_xlabel("step")
    legend_above(lower)
    return figure


def plane_figure(
    truth: Any, estimates: Mapping[str, Any], bounds: tuple[float, float], modes: Sequence[Sequence[float]] = ()
) -> "Figure":
    """Draw densities on the plane side by side, the truth first, on one colour scale.

    Args:
        truth: cell masses on a square grid, shape (n, n), the first axis being x.
        estimates: masses of the same cells, by name.
        bounds: lower and upper ends of both axes.
        modes: positions marked by crosses in the truth.
    """
    pictures = {"truth": truth, **estimates}
    figure, (row,) = panels(1, len(pictures), 2.4 * len(pictures), 2.9, shared_x=True, shared_y=True)
    highest = float(np.asarray(truth).max())
    for axes, (name, masses) in zip(row, pictures.items(), strict=True):
        grid = np.asarray(masses, dtype=float).T
        axes.imshow(grid, origin="lower", extent=(*bounds, *bounds), cmap="viridis", vmin=0, vmax=highest)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("x₁")
    row[0].set_ylabel("x₂")
    if len(modes):
        places = np.asarray(modes, dtype=float)
        row[0].plot(places[:, 0], places[:, 1], "+", color="white", markersize=4, alpha=0.7)
    return figure


def trajectories_figure(
    energies: Any, bounds: tuple[float, float], paths: Mapping[str, Sequence[Sequence[float]]]
) -> "Figure":
    """Draw paths in the plane over the energy's contour lines, one panel per method.

    Args:
        energies: U on a square grid, shape (n, n), the first axis being x.
        bounds: lower and upper ends of both axes.
        paths: consecutive positions, shape (steps, 2), by method.
    """
    figure, (row,) = panels(1, len(paths), 2.4 * len(paths), 2.9, shared_x=True, shared_y=True)
    grid = np.asarray(energies, dtype=float)
    axis = np.linspace(*bounds, len(grid))
    levels = np.linspace(grid.min(), min(float(grid.max()), float(grid.min()) + 20), 12)
    for axes, (name, path) in zip(row, paths.items(), strict=True):
        axes.contour(axis, axis, grid.T, levels=levels, colors="lightgray", linewidths=0.5)
        places = np.asarray(path, dtype=float)
        axes.plot(places[:, 0], places[:, 1], ".", color=AVERAGE_COLOUR, markersize=1, alpha=0.4)
        axes.plot(*places[0], "o", color=SAMPLE_COLOUR, markersize=5)
        axes.set_title(name, fontsize=9)
        axes.set_aspect("equal")
        axes.set_xlim(*bounds)
        axes.set_ylim(*bounds)
        axes.set_xlabel("x₁")
    row[0].set_ylabel("x₂")
    return figure


def estimates_figure(centres: Sequence[float], truth: Sequence[float], estimates: Mapping[str, Any]) -> "Figure":
    """Draw bins' masses estimated in repeats: their means with 95 % intervals above, standard deviations below.

    Args:
        centres: centres of the bins.
        truth: true masses of the bins.
        estimates: estimates by method, shape (repeats, bins).
    """
    figure, (upper, lower) = canvas(2, height=4.2)
    width = centres[1] - centres[0]
    upper.bar(centres, truth, width=0.9 * width, color="lightgray", label="truth")
    for index, (name, repeats) in enumerate(estimates.items()):
        mean, half = mean_with_interval(repeats)
        places = np.asarray(centres) + (index - (len(estimates) - 1) / 2) * 0.25 * width
        style = series(index)
        bars = style | {"linestyle": "none", "capsize": 3, "label": f"{name}, {INTERVAL}"}
        upper.errorbar(places, mean, yerr=half, **bars)
        lower.semilogy(centres, np.std(np.asarray(repeats, dtype=float), axis=0, ddof=1), **style)
    upper.set_ylabel("mass of the bin")
    lower.set_ylabel("sd over repeats")
    lower.set_xlabel("energy U (nats)")
    legend_above(upper, columns=2)
    return figure


def progress_figure(
    curves: Mapping[str, tuple[Sequence[float], Any]], x_label: str, y_label: str, log_x: bool = False
) -> "Figure":
    """Draw methods' progress as means over repeats with bands of their 95 % intervals, on a log axis.

    Args:
        curves: by method the x values, and positive values of shape (repeats, points).
        x_label: label of the x-axis.
        y_label: label of the values.
        log_x: whether the x-axis is logarithmic too.
    """
    figure, (axes,) = canvas(height=3 + 0.08 * len(curves))
    for index, (name, (places, repeats)) in enumerate(curves.items()):
        draw_band(axes, places, repeats, index, name, is_positive=True)
    axes.set_yscale("log")
    if log_x:
        axes.set_xscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(f"{y_label}\n{INTERVAL}")
    legend_above(axes, columns=4)
    return figure


# -- chains of networks -----------------------------------------------------------------------------------------------


def energy_walk_figure(walks: Mapping[str, Any], bands: tuple[float, float], label: str) -> "Figure":
    """Draw the energies of each method's chains against the step on a log axis, one row per method.

    Args:
        walks: positive energies of each step, shape (steps, C), by method.
        bands: upper end of the low energies and lower end of the high ones, marked by lines.
        label: label of the energies.
    """
    figure, rows = canvas(len(walks), height=0.8 + 1.5 * len(walks))
    values = {name: np.asarray(walk, dtype=float) for name, walk in walks.items()}
    for axes, (name, energies) in zip(rows, values.items(), strict=True):
        steps = np.arange(1, len(energies) + 1)
        for index, chain in enumerate(energies.T):
            style = {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}
            axes.plot(steps, chain, linewidth=0.7, alpha=0.8, **style)
        for band in bands:
            axes.axhline(band, color="black", linestyle=":", linewidth=1)
        axes.set_yscale("log")
        axes.set_ylim(0.8 * min(v.min() for v in values.values()), 1.25 * max(v.max() for v in values.values()))
        axes.set_ylabel(label)
        axes.set_title(name, fontsize=9, loc="left", pad=3)
    rows[-1].set_xlabel("optimizer step")
    return figure


def weight_paths_figure(
    paths: Mapping[str, Sequence[Sequence[float]]],
    energies: Mapping[str, Sequence[float]],
    share: Sequence[float],
    label: str,
) -> "Figure":
    """Draw paths of the weights on one plane, one panel per method, coloured by the energy on a log scale.

    Args:
        paths: two coordinates per position in the order of the steps, by method; a path's start is marked.
        energies: positive energies at these positions.
        share: each coordinate's share of the variance.
        label: label of the energies.
    """
    from matplotlib.colors import LogNorm

    figure, (row,) = panels(1, len(paths), 2.6 * len(paths) + 0.8, 3.2, shared_x=True, shared_y=True)
    everything = np.concatenate([np.asarray(values, dtype=float) for values in energies.values()])
    scale = LogNorm(float(everything.min()), float(everything.max()))
    for axes, (name, path) in zip(row, paths.items(), strict=True):
        places = np.asarray(path, dtype=float)
        axes.plot(places[:, 0], places[:, 1], color="lightgray", linewidth=0.6, zorder=1)
        drawn = axes.scatter(places[:, 0], places[:, 1], s=9, c=energies[name], cmap="viridis", norm=scale, zorder=2)
        axes.plot(*places[0], "o", color=SAMPLE_COLOUR, markersize=7, zorder=3, label="start")
        axes.plot(*places[-1], "X", color=SAMPLE_COLOUR, markersize=8, zorder=3, label="end")
        axes.set_title(literal(name), fontsize=9)
        axes.set_xlabel(f"coordinate 1 ({share[0]:.0%} of the variance)")
    row[0].set_ylabel(f"coordinate 2 ({share[1]:.0%} of the variance)")
    row[0].legend(loc="best", fontsize=8)
    figure.colorbar(drawn, ax=list(row), label=label)
    return figure


def growth_figure(curves: Mapping[str, Sequence[float]], label: str) -> "Figure":
    """Draw a metric of the average over the first 1, 2, … samples, one line per method.

    Args:
        curves: the values by method.
        label: label of the values.
    """
    figure, (axes,) = canvas(height=3.8)
    for index, (name, values) in enumerate(curves.items()):
        count = np.arange(1, len(values) + 1)
        axes.plot(count, values, label=literal(name), **series(index, len(values)))
    longest = max(map(len, curves.values()))
    axes.set_xlim(0.8, 1.08 * longest)
    if longest > 10 * min(map(len, curves.values())):
        axes.set_xscale("log")
        ticks = [c * 10**p for p in range(4) for c in (1, 2, 5) if c * 10**p <= longest]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
    else:
        axes.xaxis.set_major_locator(integer_ticks())
    axes.set_xlabel("samples averaged, in order of drawing")
    axes.set_ylabel(label)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    return figure


# -- error bars of one kind: 95 % intervals of a mean over repeats -----------------------------------------------------

INTERVAL = "mean, 95 % interval"


def mean_with_interval(repeats: Any) -> tuple[Any, Any]:
    """Return the mean over repeats and the half width of its 95 % interval by Student's t; 0 for one repeat.

    Args:
        repeats: shape (repeats, …).

    >>> mean, half = mean_with_interval([[1.0], [2.0], [3.0]])
    >>> mean.round(3).tolist(), half.round(3).tolist()
    ([2.0], [2.484])
    """
    values = np.asarray(repeats, dtype=float)
    mean, count = values.mean(0), len(values)
    if count < 2:
        return mean, np.zeros_like(mean)
    return mean, half_width(values.std(0, ddof=1) / np.sqrt(count), count)


def half_width(error: Any, count: int) -> Any:
    """Return the half width of the 95 % interval of a mean, from its standard error over a number of repeats.

    Args:
        error: the standard error.
        count: number of repeats, at least 2.
    """
    from scipy.stats import t

    return np.asarray(error, dtype=float) * float(t.ppf(0.975, count - 1))


def draw_band(
    axes: "Axes",
    places: Sequence[float],
    repeats: Any,
    index: int,
    label: str | None,
    is_positive: bool = False,
    **style: Any,
) -> None:
    """Draw a mean over repeats as a line, with a band of its 95 % interval.

    Args:
        axes: where.
        places: x values.
        repeats: values, shape (repeats, points).
        index: number of the series, for its style.
        label: its name, None for none.
        is_positive: whether the band is cut at a tenth of the mean, since a log axis cannot show one below 0.
        style: options of the line that differ from the series's.
    """
    mean, half = mean_with_interval(repeats)
    line = series(index, len(mean)) | style
    axes.plot(places, mean, label=label, **line)
    lower = np.maximum(mean - half, mean / 10) if is_positive else mean - half
    axes.fill_between(places, lower, mean + half, color=line["color"], alpha=0.18, linewidth=0)
