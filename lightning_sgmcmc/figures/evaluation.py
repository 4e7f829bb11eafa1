"""Figures of model averages and their metrics; plain numbers in, a figure out."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_sgmcmc.diagnostics.scores import share_interval
from lightning_sgmcmc.figures.canvas import (
    AVERAGE_COLOUR,
    METRIC_LABELS,
    PAGE_WIDTH,
    SINGLE_COLOUR,
    canvas,
    integer_ticks,
    legend_above,
    legend_below,
    literal,
    panels,
    series,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST_DATA = 10
"""A bin of a reliability diagram with fewer data is marked."""
FEW_SAMPLES = 40
"""Up to as many samples have a marker each on a line."""


def running_figure(metrics: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> "Figure":
    """Draw each metric of the running model average and of single samples against the number of samples, in one grid.

    Args:
        metrics: by metric, the values of the average over the first 1, 2, … samples, and those of the single samples.
    """
    columns = min(len(metrics), 2 if len(metrics) <= 4 else 3)
    rows = -(-len(metrics) // columns)
    figure, grid = panels(rows, columns, PAGE_WIDTH, 0.6 + 1.6 * rows, shared_x=True)
    places = list(grid.flat)
    for axes, (metric, (running, single)) in zip(places, metrics.items(), strict=False):
        count = np.arange(1, len(running) + 1)
        size = 3.5 if len(running) <= FEW_SAMPLES else 1.5
        axes.plot(count, single, "o", color=SINGLE_COLOUR, markersize=size, markerfacecolor="none", label="one sample")
        mean = float(np.mean(single))
        axes.axhline(mean, color=SINGLE_COLOUR, linestyle="--", linewidth=1, label="mean of the samples")
        marker = "o" if len(running) <= FEW_SAMPLES else ""
        style: dict[str, Any] = {"color": AVERAGE_COLOUR, "markersize": 3, "linewidth": 1.4}
        axes.plot(count, running, "-", marker=marker, label="average so far", **style)
        axes.set_title(METRIC_LABELS.get(metric, literal(metric.replace("_", " "))), fontsize=8, loc="left", pad=3)
        axes.set_xlim(0.5, len(running) + 0.5)
        axes.xaxis.set_major_locator(integer_ticks(4))
        axes.locator_params(axis="y", nbins=5)
    for axes in places[len(metrics) :]:
        axes.set_axis_off()
    for axes in places[max(0, len(metrics) - columns) : len(metrics)]:
        axes.set_xlabel("number of samples")
        axes.tick_params(labelbottom=True)
    legend_below(figure, places[0])
    return figure


def reliability_figure(
    confidence: Sequence[float], accuracy: Sequence[float], count: Sequence[float], ece: float
) -> "Figure":
    """Draw accuracy against confidence per bin with 95 % binomial intervals, and the number of data in each bin.

    Bins are not joined by a line. Those with fewer than ten data are drawn hollow: their accuracy says little.

    Args:
        confidence, accuracy: means over the data of each bin.
        count: number of data in each bin.
        ece: the expected calibration error, for the legend.
    """
    figure, grid = panels(2, 1, PAGE_WIDTH, 4.2, shared_x=True, ratios=(2, 1))
    upper, lower = grid[:, 0]
    number = np.asarray(count, dtype=int)
    bins = len(number)
    upper.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1, label="calibrated")
    for chosen, face, name in (
        (number >= FEWEST_DATA, AVERAGE_COLOUR, f"model average, 95 % interval; ECE {ece:.3f}"),
        ((number > 0) & (number < FEWEST_DATA), "white", f"fewer than {FEWEST_DATA} data"),
    ):
        if not chosen.any():
            continue
        x, y = np.asarray(confidence, dtype=float)[chosen], np.clip(np.asarray(accuracy, dtype=float)[chosen], 0, 1)
        ends = np.array([share_interval(float(share), int(n)) for share, n in zip(y, number[chosen], strict=True)])
        errors = np.clip([y - ends[:, 0], ends[:, 1] - y], 0, None)
        style: dict[str, Any] = {"color": AVERAGE_COLOUR, "markerfacecolor": face, "markersize": 4.5}
        upper.errorbar(x, y, errors, fmt="o", label=literal(name), elinewidth=1, capsize=2, **style)
    upper.set_ylabel("accuracy")
    upper.set_xlim(0, 1.02)
    upper.set_ylim(0, 1.04)
    legend_above(upper, columns=2)
    places = (np.arange(bins) + 0.5) / bins
    lower.bar(places, number, width=0.9 / bins, color=SINGLE_COLOUR)
    for place, n in zip(places, number, strict=True):
        if n > 0:
            lower.annotate(str(n), (place, n), (0, 1.5), textcoords="offset points", ha="center", fontsize=6)
    lower.set_yscale("log")
    lower.set_ylim(0.7, 4 * max(int(number.max(initial=1)), 2))
    lower.set_ylabel("data per bin")
    lower.set_xlabel("confidence")
    return figure


def entropy_figure(entropies: Mapping[str, Sequence[float]], num_classes: int) -> "Figure":
    """Draw the distribution function of the predictive entropy, one curve per data set.

    Args:
        entropies: predictive entropies in nats by data set; the first is the in-distribution set.
        num_classes: K; the largest entropy is log K.
    """
    figure, (axes,) = canvas()
    largest = float(np.log(num_classes))
    for index, (name, values) in enumerate(entropies.items()):
        ordered = np.sort(np.asarray(values, dtype=float))
        share = np.arange(len(ordered) + 1) / max(len(ordered), 1)
        style = {key: value for key, value in series(index).items() if key in ("color", "linestyle", "linewidth")}
        axes.step([0, *ordered, largest], [*share, 1], where="post", label=literal(name), **style)
    axes.axvline(largest, color="0.5", linewidth=0.8, label=f"log {num_classes}, the largest")
    axes.set_xlim(0, 1.03 * largest)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("predictive entropy (nats)")
    axes.set_ylabel("share of data with at most this")
    legend_above(axes)
    return figure


def histogram(values: Sequence[float]) -> tuple[Any, Any]:
    """Return counts and edges of a histogram of the finite values, with about √n bins, between 10 and 50.

    If all values are equal up to rounding, the bins span a tenth of their size around them.
    """
    array = np.asarray(values, dtype=float)
    low, high = float(array.min()), float(array.max())
    size = max(abs(low), abs(high))
    if high - low <= 1e-9 * size:
        low, high = low - 0.1 * (size or 1), high + 0.1 * (size or 1)
    return np.histogram(array, bins=min(50, max(10, round(len(array) ** 0.5))), range=(low, high))


def histogram_figure(values: Sequence[float], label: str) -> "Figure":
    """Draw a histogram of the values."""
    figure, (axes,) = canvas(height=2.8)
    counts, edges = histogram(values)
    axes.stairs(counts, edges, fill=True, color=AVERAGE_COLOUR)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(integer_ticks())
    axes.set_xlabel(label)
    axes.set_ylabel("count")
    return figure


def maps_figure(
    mean: Any, std: Any, epistemic: Any, observed: Any | None = None, labels: Sequence[str] | None = None
) -> "Figure":
    """Draw a field's predictive mean, epistemic and total standard deviation, and with observations these and errors.

    Both standard deviations have one colour scale, so that they compare, and so have the mean and the observed field.
    Errors have a scale around 0.

    Args:
        mean, std, epistemic: shape (C, H, W); one row of maps for each channel.
        observed: likewise; NaN stays blank.
        labels: the channels' names; None numbers them.
    """
    from matplotlib.ticker import MaxNLocator

    centre, total, own = (np.asarray(part, dtype=float) for part in (mean, std, epistemic))
    seen = None if observed is None else np.asarray(observed, dtype=float)
    names = [str(index) for index in range(len(centre))] if labels is None else list(labels)
    titles = ["mean", "epistemic sd", "total sd", *([] if seen is None else ["observed", "observed - mean"])]
    columns = len(titles)
    height = 0.3 + len(centre) * (0.35 + PAGE_WIDTH / columns * centre.shape[1] / centre.shape[2])
    figure, grid = panels(len(centre), columns, PAGE_WIDTH, min(height, 9.0))
    for row, channel in zip(grid, range(len(centre)), strict=True):
        maps = [centre[channel], own[channel], total[channel]]
        levels = [centre[channel]] if seen is None else [centre[channel], seen[channel]]
        level = float(min(np.nanmin(part) for part in levels)), float(max(np.nanmax(part) for part in levels))
        spread = 0.0, float(np.nanmax(total[channel]))
        limits, colours = [level, spread, spread], ["viridis", "magma", "magma"]
        if seen is not None:
            error = seen[channel] - centre[channel]
            largest = float(np.nanmax(np.abs(error)))
            maps, limits = [*maps, seen[channel], error], [*limits, level, (-largest, largest)]
            colours = [*colours, "viridis", "RdBu_r"]
        for axes, values, (low, high), colour in zip(row, maps, limits, colours, strict=True):
            image = axes.imshow(values, vmin=low, vmax=high, cmap=colour, interpolation="nearest")
            bar = figure.colorbar(image, ax=axes, orientation="horizontal", pad=0.04, fraction=0.08)
            bar.ax.tick_params(labelsize=6)
            bar.locator = MaxNLocator(3)
            bar.update_ticks()
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        if len(centre) > 1 or labels is not None:
            row[0].set_ylabel(literal(names[channel]), fontsize=8)
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title, fontsize=8)
    return figure


def predictions_figure(
    place: Sequence[float],
    mean: Sequence[float],
    std: Sequence[float],
    epistemic: Sequence[float],
    observed: Sequence[float] | None,
    label: str,
) -> "Figure":
    """Draw predictive means with two standard deviations to each side, and the observed numbers.

    Args:
        place: the horizontal place of each datum: its input, or its observed number.
        mean, std, epistemic: predictive mean, total and epistemic standard deviation of each datum.
        observed: the observed numbers to draw, or None.
        label: of the horizontal axis; "observed" draws the line of equal numbers instead of bands.
    """
    figure, (axes,) = canvas()
    order = np.argsort(np.asarray(place, dtype=float))
    at, centre, total, own = (np.asarray(part, dtype=float)[order] for part in (place, mean, std, epistemic))
    if label == "observed":
        style: dict[str, Any] = {"color": AVERAGE_COLOUR, "markersize": 3, "linewidth": 0.6}
        axes.errorbar(at, centre, 2 * total, fmt="o", label="predictive mean ± 2 sd", **style)
        ends = [min(at.min(), centre.min()), max(at.max(), centre.max())]
        axes.plot(ends, ends, color="black", linestyle=":", linewidth=1, label="prediction = observation")
    else:
        for width, strength, name in ((total, 0.15, "± 2 sd"), (own, 0.3, "± 2 epistemic sd")):
            band: dict[str, Any] = {"color": AVERAGE_COLOUR, "alpha": strength, "linewidth": 0}
            axes.fill_between(at, centre - 2 * width, centre + 2 * width, label=literal(name), **band)
        axes.plot(at, centre, color=AVERAGE_COLOUR, label="mean")
        if observed is not None:
            seen = np.asarray(observed, dtype=float)[order]
            axes.plot(at, seen, "o", color="black", markersize=3, label="observed")
    axes.set_xlabel(label)
    axes.set_ylabel("prediction")
    legend_above(axes)
    return figure
