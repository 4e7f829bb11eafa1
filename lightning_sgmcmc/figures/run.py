"""Figures of a run: each function draws one figure from plain numbers and returns it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from lightning_sgmcmc.figures.canvas import (
    SAMPLE_COLOUR,
    canvas,
    finite_values,
    integer_ticks,
    legend_above,
    point_marker,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def schedule_figure(
    steps: Sequence[float],
    lr: Sequence[float],
    temperature: Sequence[float],
    sample_steps: Sequence[float],
    warm_steps: int = 0,
) -> "Figure":
    """Draw step size and temperature against the step, with the samples and a warm start's steps marked."""
    figure, (upper, lower) = canvas(2, height=4.5)
    if warm_steps:
        for axes in (upper, lower):
            axes.axvspan(0, warm_steps, color="0.9", label="warm start" if axes is upper else None)
    upper.plot(steps, lr, color="black", linewidth=1, marker=point_marker(steps))
    if len(sample_steps):
        heights = np.interp(sample_steps, steps, lr)
        upper.plot(sample_steps, heights, "o", color=SAMPLE_COLOUR, markersize=4, label="samples")
    upper.set_ylabel("step size lr")
    legend_above(upper)
    lower.step(steps, temperature, where="post", color="black", linewidth=1, marker=point_marker(steps))
    lower.set_ylabel("temperature τ")
    lower.set_xlabel("optimizer step")
    return figure


def energy_figure(
    steps: Sequence[float], energy: Sequence[float], sample_steps: Sequence[float], sample_energy: Sequence[float]
) -> "Figure":
    """Draw the mini-batch energies against the step, with the samples marked, on a log axis if the range is wide.

    If the run's start dwarfs later energies, a second row shows the range since the first sample.
    """
    since = np.asarray(steps) >= (sample_steps[0] if len(sample_steps) else np.inf)
    later = finite_values([*np.asarray(energy, dtype=float)[since], *sample_energy])
    everything = finite_values(energy)
    closer = everything.size > 0 and later.size > 1 and 0 < np.ptp(later) < np.ptp(everything) / 3
    figure, rows = canvas(2 if closer else 1, height=6 if closer else 4)
    for axes in rows:
        axes.plot(steps, energy, color="black", linewidth=0.8, marker=point_marker(steps), label="mini-batch")
        if len(sample_steps):
            axes.plot(sample_steps, sample_energy, "o", color=SAMPLE_COLOUR, markersize=4, label="samples")
        axes.set_ylabel("potential energy Ũ (nats)")
    if everything.size and everything.min() > 0 and everything.max() > 20 * everything.min():
        rows[0].set_yscale("log")
    if closer:
        margin = 0.06 * np.ptp(later)
        rows[1].set_ylim(later.min() - margin, later.max() + margin)
        rows[1].set_title("range since the first sample", fontsize="small", loc="right", pad=2)
    rows[-1].set_xlabel("optimizer step")
    legend_above(rows[0])
    return figure


def traces_figure(
    steps: Sequence[float],
    traces: Mapping[str, Sequence[float]],
    sample_steps: Sequence[float],
    lines: Mapping[str, float] = MappingProxyType({}),
) -> "Figure":
    """Draw traces of a few quantities (energy, single weights) one below another, with the samples marked.

    Args:
        steps: the steps.
        traces: values at these steps, by name.
        sample_steps: the steps of the samples.
        lines: equilibrium values, by the trace's name.
    """
    figure, rows = canvas(len(traces), height=0.8 + 1.25 * len(traces))
    for axes, (name, values) in zip(rows, traces.items(), strict=True):
        axes.plot(steps, values, color="black", linewidth=0.8, marker=point_marker(steps))
        if len(sample_steps):
            heights = np.interp(sample_steps, steps, values)
            axes.plot(sample_steps, heights, "o", color=SAMPLE_COLOUR, markersize=3, label="samples")
        if name in lines:
            axes.axhline(lines[name], color="black", linestyle=":", linewidth=1)
            axes.text(1, lines[name], f" τ = {lines[name]:g}", transform=axes.get_yaxis_transform(), va="center")
        axes.set_title(name, fontsize="small", loc="right", pad=2)
    legend_above(rows[0])
    rows[-1].set_xlabel("optimizer step")
    return figure


def sample_energy_figure(chains: Mapping[int, tuple[Sequence[int], Sequence[float]]]) -> "Figure":
    """Draw the samples' energies against the step, one line per chain: its steps and its energies."""
    return sample_trace_figure({"potential energy Ũ (nats)": chains})


def sample_trace_figure(traces: Mapping[str, Mapping[int, tuple[Sequence[int], Sequence[float]]]]) -> "Figure":
    """Draw quantities of the samples against the step, one panel for each, one line per chain.

    Args:
        traces: by label, each chain's steps and values.
    """
    figure, rows = canvas(len(traces), height=4 if len(traces) == 1 else 0.8 + 1.6 * len(traces))
    for axes, (label, chains) in zip(rows, traces.items(), strict=True):
        for chain, (steps, values) in chains.items():
            axes.plot(steps, values, "-o", linewidth=0.8, markersize=4, label=f"chain {chain}")
        axes.set_ylabel(label, fontsize=None if len(traces) == 1 else "small")
        axes.ticklabel_format(axis="y", useOffset=False)
    rows[-1].set_xlabel("optimizer step")
    rows[-1].xaxis.set_major_locator(integer_ticks())
    if 1 < len(next(iter(traces.values()))) <= 10:
        rows[0].legend(loc="upper right")
    return figure
