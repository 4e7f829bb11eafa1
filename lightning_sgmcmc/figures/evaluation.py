"""Figures of model averages and their metrics; plain numbers in, a figure out."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_sgmcmc.figures.canvas import (
    AVERAGE_COLOUR,
    METRIC_LABELS,
    SINGLE_COLOUR,
    canvas,
    integer_ticks,
    legend_above,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def running_average_figure(metric: str, running: Sequence[float], single: Sequence[float]) -> "Figure":
    """Draw a metric of the running model average and of single samples against the number of samples."""
    figure, (axes,) = canvas()
    count = np.arange(1, len(running) + 1)
    axes.plot(count, single, "o", color=SINGLE_COLOUR, markersize=4, label="single sample")
    axes.axhline(
        float(np.mean(single)), color=SINGLE_COLOUR, linestyle="--", linewidth=1, label="mean of single samples"
    )
    axes.plot(count, running, "-o", color=AVERAGE_COLOUR, markersize=3, label="model average")
    axes.set_xlabel("number of samples")
    axes.set_ylabel(METRIC_LABELS.get(metric, metric))
    axes.set_xlim(0.5, len(running) + 0.5)
    axes.xaxis.set_major_locator(integer_ticks())
    legend_above(axes)
    return figure


def reliability_figure(
    confidence: Sequence[float], accuracy: Sequence[float], count: Sequence[float], ece: float
) -> "Figure":
    """Draw accuracy against confidence per bin, with the bin's share of the data."""
    figure, (upper, lower) = canvas(2, width=5, height=6)
    share = np.asarray(count, dtype=float)
    bins = len(share)
    filled = share > 0
    share = share / max(share.sum(), 1)
    upper.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1, label="calibrated")
    upper.plot(
        np.asarray(confidence)[filled],
        np.asarray(accuracy)[filled],
        "-o",
        color=AVERAGE_COLOUR,
        label=f"model average, ECE {ece:.3f}",
    )
    upper.set_ylabel("accuracy")
    upper.set_xlim(0, 1.02)
    upper.set_ylim(0, 1.04)
    legend_above(upper)
    lower.bar((np.arange(bins) + 0.5) / bins, share, width=0.9 / bins, color=SINGLE_COLOUR)
    lower.set_ylabel("share of data")
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
        axes.step([0, *ordered, largest], [*share, 1], where="post", color=f"C{index}", label=name)
    axes.axvline(largest, color="black", linestyle=":", linewidth=1, label=f"log {num_classes}")
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
    figure, (axes,) = canvas(height=3.2)
    counts, edges = histogram(values)
    axes.stairs(counts, edges, fill=True, color=AVERAGE_COLOUR)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(integer_ticks())
    axes.set_xlabel(label)
    axes.set_ylabel("count")
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
        axes.errorbar(at, centre, 2 * total, fmt="o", color=AVERAGE_COLOUR, markersize=3, linewidth=0.6, label="±2 sd")
        ends = [min(at.min(), centre.min()), max(at.max(), centre.max())]
        axes.plot(ends, ends, color="black", linestyle=":", linewidth=1, label="equal")
    else:
        for width, strength, name in ((total, 0.15, "±2 sd"), (own, 0.3, "±2 epistemic sd")):
            axes.fill_between(
                at,
                centre - 2 * width,
                centre + 2 * width,
                color=AVERAGE_COLOUR,
                alpha=strength,
                linewidth=0,
                label=name,
            )
        axes.plot(at, centre, color=AVERAGE_COLOUR, label="mean")
        if observed is not None:
            seen = np.asarray(observed, dtype=float)[order]
            axes.plot(at, seen, "o", color="black", markersize=3, label="observed")
    axes.set_xlabel(label)
    axes.set_ylabel("prediction")
    legend_above(axes)
    return figure


MARKERS = "osD^v<>Phd*"


def growth_figure(curves: Mapping[str, Sequence[float]], label: str) -> "Figure":
    """Draw a metric of the average over the first 1, 2, … samples, one line per method.

    Args:
        curves: the values by method.
        label: label of the values.
    """
    figure, (axes,) = canvas(height=4.5)
    for index, (name, values) in enumerate(curves.items()):
        count = np.arange(1, len(values) + 1)
        style = f"C{index % 10}{MARKERS[index % len(MARKERS)]}" + ("--" if index >= 10 else "-")
        axes.plot(count, values, style, markersize=4, linewidth=1, label=name)
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
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
    return figure
