"""The pictures of a run: each function draws one figure from plain numbers and returns it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SAMPLE_COLOUR = "tab:red"
AVERAGE_COLOUR = "tab:blue"
SINGLE_COLOUR = "tab:gray"


def _canvas(rows: int = 1, width: float = 7.0, height: float = 4.0) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)
    return figure, list(axes[:, 0])


def schedule_figure(
    steps: Sequence[int], lr: Sequence[float], temperature: Sequence[float], sample_steps: Sequence[int]
) -> "Figure":
    """Draw step size and temperature against the step, with the samples marked."""
    figure, (upper, lower) = _canvas(2, height=4.5)
    upper.plot(steps, lr, color="black", linewidth=1)
    upper.plot(
        sample_steps, np.interp(sample_steps, steps, lr), "o", color=SAMPLE_COLOUR, markersize=4, label="samples"
    )
    upper.set_ylabel("step size lr")
    if len(sample_steps):
        upper.legend(loc="upper right")
    lower.step(steps, temperature, where="post", color="black", linewidth=1)
    lower.set_ylabel("temperature τ")
    lower.set_xlabel("optimizer step")
    return figure


def energy_figure(
    steps: Sequence[int], energy: Sequence[float], sample_steps: Sequence[int], sample_energy: Sequence[float]
) -> "Figure":
    """Draw the mini-batch energies against the step, with the samples marked, on a log axis where the range is wide."""
    figure, (axes,) = _canvas()
    axes.plot(steps, energy, color="black", linewidth=0.8)
    axes.plot(sample_steps, sample_energy, "o", color=SAMPLE_COLOUR, markersize=4, label="samples")
    finite = np.asarray(energy)[np.isfinite(energy)]
    if finite.size and finite.min() > 0 and finite.max() > 20 * finite.min():
        axes.set_yscale("log")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("potential energy Ũ (nats)")
    if len(sample_steps):
        axes.legend(loc="upper right")
    return figure


def running_average_figure(metric: str, running: Sequence[float], single: Sequence[float]) -> "Figure":
    """Draw a metric of the running model average against the number of samples, beside the single samples'."""
    from matplotlib.ticker import MaxNLocator

    figure, (axes,) = _canvas()
    count = np.arange(1, len(running) + 1)
    axes.plot(count, single, "o", color=SINGLE_COLOUR, markersize=4, label="single sample")
    axes.axhline(
        float(np.mean(single)), color=SINGLE_COLOUR, linestyle="--", linewidth=1, label="mean of single samples"
    )
    axes.plot(count, running, "-o", color=AVERAGE_COLOUR, markersize=3, label="model average")
    axes.set_xlabel("number of samples")
    axes.set_ylabel(metric)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return figure


def reliability_figure(
    confidence: Sequence[float], accuracy: Sequence[float], count: Sequence[float], ece: float
) -> "Figure":
    """Draw accuracy against confidence in each bin, with the share of the data in it."""
    figure, (upper, lower) = _canvas(2, width=5, height=6)
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
    upper.set_xlim(0, 1)
    upper.set_ylim(0, 1)
    upper.legend(loc="lower right")
    lower.bar((np.arange(bins) + 0.5) / bins, share, width=0.9 / bins, color=SINGLE_COLOUR)
    lower.set_ylabel("share of data")
    lower.set_xlabel("confidence")
    return figure


def sample_energy_figure(chains: Mapping[int, tuple[Sequence[int], Sequence[float]]]) -> "Figure":
    """Draw the samples' energies against the step, one line for each chain: its steps and its energies."""
    from matplotlib.ticker import MaxNLocator

    figure, (axes,) = _canvas()
    for chain, (steps, energy) in chains.items():
        axes.plot(steps, energy, "-o", linewidth=0.8, markersize=4, label=f"chain {chain}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("potential energy Ũ (nats)")
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if 1 < len(chains) <= 10:
        axes.legend(loc="upper right")
    return figure


def temperature_figure(report: Mapping[str, Any]) -> "Figure":
    """Draw each tensor's kinetic and configurational temperature with its interval against the target.

    Args:
        report: what `lightning_sgmcmc.health.assess` returns: "temperature", "tolerance" and "tensors".
    """
    tensors, target = report["tensors"], report["temperature"]
    figure, (axes,) = _canvas(height=max(2.5, 1.2 + 0.16 * len(tensors)))
    kinds = [("kinetic", AVERAGE_COLOUR, "o", -0.15), ("configurational", SAMPLE_COLOUR, "s", 0.15)]
    tolerance = report.get("tolerance", 0.2)
    limits = (1 - tolerance) * target, (1 + tolerance) * target
    axes.axvspan(*limits, color=SINGLE_COLOUR, alpha=0.2, label=f"target ± {tolerance:.0%}")
    axes.axvline(target, color="black", linestyle=":", linewidth=1)
    values: list[float] = [target]
    for kind, colour, marker, offset in kinds:
        known = [(i, e[kind], e[f"{kind}_interval"]) for i, e in enumerate(tensors.values()) if e[kind] is not None]
        if not known:
            continue
        middle = np.array([value for _, value, _ in known])
        bounds = np.array([interval if interval is not None else (value, value) for _, value, interval in known])
        errors = np.abs(bounds.T - middle)
        rows = np.array([i for i, _, _ in known]) + offset
        axes.errorbar(
            middle,
            rows,
            xerr=errors,
            label=kind,
            color=colour,
            marker=marker,
            markersize=3,
            linestyle="none",
            elinewidth=0.8,
        )
        values += middle.tolist()
    # A tensor of few numbers may have an interval many times the target; it must not hide the others.
    low, high = min(values), max(values)
    margin = 0.5 * target + 0.1 * (high - low)
    axes.set_xlim(low - margin, high + margin)
    axes.set_yticks(range(len(tensors)), list(tensors), fontsize=6 if len(tensors) > 20 else 8)
    axes.set_ylim(len(tensors) - 0.4, -0.6)
    axes.set_xlabel("temperature")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.0 + 0.6 / figure.get_size_inches()[1]), ncols=3)
    return figure
