"""The pictures of a run: each function draws one figure from plain numbers and returns it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

SAMPLE_COLOUR = "tab:red"
AVERAGE_COLOUR = "tab:blue"
SINGLE_COLOUR = "tab:gray"
METRIC_LABELS = {
    "nll": "NLL (nats per datum)",
    "ece": "ECE",
    "brier": "Brier score",
    "rmse": "RMSE",
    "entropy": "predictive entropy (nats)",
}


def canvas(rows: int = 1, width: float = 7.0, height: float = 4.0, shared: bool = True) -> "tuple[Figure, list[Axes]]":
    """Return an empty figure without a window, and its axes from top to bottom, which share the x-axis or do not."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=shared, squeeze=False)
    return figure, list(axes[:, 0])


def legend_above(axes: "Axes", columns: int = 3) -> None:
    """Put the legend, if there is anything to explain, above the axes, where it covers no data."""
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=min(columns, len(handles)),
            frameon=False,
            borderaxespad=0.2,
            fontsize="small",
        )


def integer_ticks() -> "MaxNLocator":
    """Return what places ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True, min_n_ticks=1)


def _marker(steps: Sequence[float]) -> str:
    return "." if len(steps) == 1 else ""  # a line of one point is invisible


def _finite(values: Sequence[float]) -> Any:
    array = np.asarray(values, dtype=float)
    return array[np.isfinite(array)]


def schedule_figure(
    steps: Sequence[float], lr: Sequence[float], temperature: Sequence[float], sample_steps: Sequence[float]
) -> "Figure":
    """Draw step size and temperature against the step, with the samples marked."""
    figure, (upper, lower) = canvas(2, height=4.5)
    upper.plot(steps, lr, color="black", linewidth=1, marker=_marker(steps))
    if len(sample_steps):
        heights = np.interp(sample_steps, steps, lr)
        upper.plot(sample_steps, heights, "o", color=SAMPLE_COLOUR, markersize=4, label="samples")
    upper.set_ylabel("step size lr")
    legend_above(upper)
    lower.step(steps, temperature, where="post", color="black", linewidth=1, marker=_marker(steps))
    lower.set_ylabel("temperature τ")
    lower.set_xlabel("optimizer step")
    return figure


def energy_figure(
    steps: Sequence[float], energy: Sequence[float], sample_steps: Sequence[float], sample_energy: Sequence[float]
) -> "Figure":
    """Draw the mini-batch energies against the step, with the samples marked, on a log axis where the range is wide.

    Where the start of the run dwarfs what comes later, a second row shows the range since the first sample.
    """
    since = np.asarray(steps) >= (sample_steps[0] if len(sample_steps) else np.inf)
    later = _finite([*np.asarray(energy, dtype=float)[since], *sample_energy])
    everything = _finite(energy)
    closer = everything.size > 0 and later.size > 1 and 0 < np.ptp(later) < np.ptp(everything) / 3
    figure, rows = canvas(2 if closer else 1, height=6 if closer else 4)
    for axes in rows:
        axes.plot(steps, energy, color="black", linewidth=0.8, marker=_marker(steps), label="mini-batch")
        if len(sample_steps):
            axes.plot(sample_steps, sample_energy, "o", color=SAMPLE_COLOUR, markersize=4, label="samples")
        axes.set_ylabel("potential energy Ũ (nats)")
    if everything.size and everything.min() > 0 and everything.max() > 20 * everything.min():
        rows[0].set_yscale("log")
    if closer:
        margin = 0.06 * np.ptp(later)
        rows[1].set_ylim(later.min() - margin, later.max() + margin)
        rows[1].set_title("the range since the first sample", fontsize="small", loc="right", pad=2)
    rows[-1].set_xlabel("optimizer step")
    legend_above(rows[0])
    return figure


def traces_figure(
    steps: Sequence[float], traces: Mapping[str, Sequence[float]], sample_steps: Sequence[float]
) -> "Figure":
    """Draw the paths of a few quantities (energy, single weights) one below the other, with the samples marked."""
    figure, rows = canvas(len(traces), height=0.8 + 1.25 * len(traces))
    for axes, (name, values) in zip(rows, traces.items(), strict=True):
        axes.plot(steps, values, color="black", linewidth=0.8, marker=_marker(steps))
        if len(sample_steps):
            heights = np.interp(sample_steps, steps, values)
            axes.plot(sample_steps, heights, "o", color=SAMPLE_COLOUR, markersize=3, label="samples")
        axes.set_title(name, fontsize="small", loc="right", pad=2)
    legend_above(rows[0])
    rows[-1].set_xlabel("optimizer step")
    return figure


def running_average_figure(metric: str, running: Sequence[float], single: Sequence[float]) -> "Figure":
    """Draw a metric of the running model average against the number of samples, beside the single samples'."""
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
    """Draw accuracy against confidence in each bin, with the share of the data in it."""
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


def sample_energy_figure(chains: Mapping[int, tuple[Sequence[int], Sequence[float]]]) -> "Figure":
    """Draw the samples' energies against the step, one line for each chain: its steps and its energies."""
    figure, (axes,) = canvas()
    for chain, (steps, energy) in chains.items():
        axes.plot(steps, energy, "-o", linewidth=0.8, markersize=4, label=f"chain {chain}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("potential energy Ũ (nats)")
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.xaxis.set_major_locator(integer_ticks())
    if 1 < len(chains) <= 10:
        axes.legend(loc="upper right")
    return figure


def entropy_figure(entropies: Mapping[str, Sequence[float]], num_classes: int) -> "Figure":
    """Draw the share of the data with at most so much predictive entropy, a curve for each data set.

    Args:
        entropies: predictive entropies in nats by data set; the first is the one that the model was made for.
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
    """Return counts and edges of a histogram of finite values, about √n bins, at least 10 and at most 50.

    Values that are all the same, but for rounding, get bins around them of a tenth of their size.
    """
    array = np.asarray(values, dtype=float)
    low, high = float(array.min()), float(array.max())
    size = max(abs(low), abs(high))
    if high - low <= 1e-9 * size:
        low, high = low - 0.1 * (size or 1), high + 0.1 * (size or 1)
    return np.histogram(array, bins=min(50, max(10, round(len(array) ** 0.5))), range=(low, high))


def histogram_figure(values: Sequence[float], label: str) -> "Figure":
    """Draw how often the values occur."""
    figure, (axes,) = canvas(height=3.2)
    counts, edges = histogram(values)
    axes.stairs(counts, edges, fill=True, color=AVERAGE_COLOUR)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(integer_ticks())
    axes.set_xlabel(label)
    axes.set_ylabel("count")
    return figure
