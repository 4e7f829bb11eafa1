"""Figures of a run: each function draws one figure from plain numbers and returns it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_sgmcmc.figures.canvas import (
    AVERAGE_COLOUR,
    SAMPLE_COLOUR,
    SHADE,
    SINGLE_COLOUR,
    canvas,
    finite_values,
    integer_ticks,
    legend_above,
    literal,
    point_marker,
    series,
    shade_cycles,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Cycles = Sequence[tuple[float, float]]
WIDE_RANGE = 20
"""Ratio of the largest to the smallest value above which a positive trace has a log axis."""
MARKED_POINTS = 100
"""More points than this are drawn smaller."""


def schedule_figure(
    steps: Sequence[float],
    lr: Sequence[float],
    temperature: Sequence[float],
    sample_steps: Sequence[float],
    warm_steps: int = 0,
    cycles: Cycles = (),
    is_joined: bool = True,
) -> "Figure":
    """Draw step size and temperature against the step, with the samples and a warm start's steps marked.

    Args:
        steps: steps close enough for lines between them, or with `is_joined=False` a few logged ones.
        lr, temperature: step size and temperature at these steps.
        sample_steps: the steps of the samples.
        warm_steps: steps of a warm start.
        cycles: first and last step of each cycle, of which every second is shaded.
        is_joined: whether lines join the steps; otherwise they are points, and the samples are ticks on the axis.
    """
    figure, (upper, lower) = canvas(2, height=3.6)
    for axes in (upper, lower):
        shade_cycles(axes, cycles)
        if warm_steps:
            axes.axvspan(0, warm_steps, facecolor=SHADE, edgecolor="0.6", hatch="//", linewidth=0, label="warm start")
    if is_joined:
        upper.plot(steps, lr, color="black", linewidth=1, marker=point_marker(steps))
        if len(sample_steps):
            size = 4 if len(sample_steps) <= MARKED_POINTS else 2
            heights = np.interp(sample_steps, steps, lr)
            upper.plot(sample_steps, heights, "o", color=SAMPLE_COLOUR, markersize=size, label="samples")
        lower.step(steps, temperature, where="mid", color="black", linewidth=1, marker=point_marker(steps))
    else:
        for axes, values in ((upper, lr), (lower, temperature)):
            _trace(axes, steps, values, sample_steps)
    upper.set_ylabel("step size lr")
    legend_above(upper)
    lower.set_ylabel("temperature τ")
    lower.set_xlabel("optimizer step")
    return figure


def energy_figure(
    steps: Sequence[float],
    energy: Sequence[float],
    sample_steps: Sequence[float],
    sample_energy: Sequence[float],
    cycles: Cycles = (),
) -> "Figure":
    """Draw the mini-batch energies against the step, with the samples marked, on a log axis if the range is wide.

    If the run's start dwarfs later energies, a second row shows the range since the first sample.

    Args:
        steps, energy: the logged steps and their energies.
        sample_steps, sample_energy: the samples' steps and energies.
        cycles: first and last step of each cycle, of which every second is shaded.
    """
    since = np.asarray(steps) >= (sample_steps[0] if len(sample_steps) else np.inf)
    later = finite_values([*np.asarray(energy, dtype=float)[since], *sample_energy])
    everything = finite_values(energy)
    closer = everything.size > 0 and later.size > 1 and 0 < np.ptp(later) < np.ptp(everything) / 3
    figure, rows = canvas(2 if closer else 1, height=4.8 if closer else 3.2)
    for axes in rows:
        shade_cycles(axes, cycles)
        _points(axes, steps, energy, "mini-batch")
        if len(sample_steps):
            axes.plot(sample_steps, sample_energy, "o", color=SAMPLE_COLOUR, markersize=4, label="samples")
        axes.set_ylabel("potential energy Ũ (nats)")
    if everything.size and everything.min() > 0 and everything.max() > 20 * everything.min():
        rows[0].set_yscale("log")
    if closer:
        margin = 0.06 * np.ptp(later)
        rows[1].set_ylim(later.min() - margin, later.max() + margin)
        rows[1].set_title("range since the first sample", fontsize=8, loc="right", pad=2)
    rows[-1].set_xlabel("optimizer step")
    legend_above(rows[0])
    return figure


def nll_figure(
    steps: Sequence[float],
    nll: Sequence[float],
    prior_norm: Sequence[float],
    sample_steps: Sequence[float],
    temperature: float = 1.0,
    cycles: Cycles = (),
) -> "Figure":
    """Draw the mini-batches' NLL per example and, for a Gaussian prior, ‖θ‖²/(d·σ²), which is 1 under the prior.

    Both are free of the prior's constant, which hides the energy's changes.

    Args:
        steps: the logged steps.
        nll: mean NLL of the mini-batch at these steps, in nats per example.
        prior_norm: ‖θ‖²/(d·σ²) at these steps; empty if it is not known.
        sample_steps: the steps of the samples.
        temperature: the target's τ, at which directions that the prior decides have ‖θ‖²/(d·σ²) = τ.
        cycles: first and last step of each cycle, of which every second is shaded.
    """
    known = finite_values(prior_norm).size > 0
    figure, rows = canvas(2 if known else 1, height=3.8 if known else 3.0)
    for axes in rows:
        shade_cycles(axes, cycles)
    _trace(rows[0], steps, nll, sample_steps)
    _fit_range(rows[0], nll)
    rows[0].set_ylabel("NLL (nats per example)")
    if known:
        _trace(rows[1], steps, prior_norm, sample_steps)
        rows[1].axhline(1, color="black", linestyle=":", linewidth=1, label="1 under the prior")
        if 0 < temperature != 1:
            rows[1].axhline(
                temperature, color="black", linestyle="--", linewidth=1, label=f"τ = {temperature:g}, where it decides"
            )
        rows[1].set_ylabel("‖θ‖²/(d·σ²)")
        legend_above(rows[1], columns=4)
    legend_above(rows[0], columns=4)
    rows[-1].set_xlabel("optimizer step")
    return figure


def _points(axes: "Axes", steps: Sequence[float], values: Sequence[float], label: str) -> None:
    """Draw the values of the logged steps as points: a line would invent the steps between them."""
    axes.plot(steps, values, ".", color="black", markersize=4 if len(steps) <= MARKED_POINTS else 2, label=label)


def _trace(axes: "Axes", steps: Sequence[float], values: Sequence[float], sample_steps: Sequence[float]) -> None:
    """Draw the values of the logged steps, and the samples' steps as ticks below: their own values are not logged."""
    _points(axes, steps, values, "logged steps")
    if len(sample_steps):
        style: dict[str, Any] = {"color": SAMPLE_COLOUR, "transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(sample_steps, [0] * len(sample_steps), "|", label="samples", **style)


def _fit_range(axes: "Axes", values: Sequence[float]) -> None:
    """Use a log axis for positive values of a wide range, and else cut a start that dwarfs the last nine tenths."""
    found, later = finite_values(values), finite_values(values[len(values) // 10 :])
    if later.size < 2:
        return
    low, high = np.quantile(later, (0.01, 0.99))
    if low > 0 and high > WIDE_RANGE * low:
        axes.set_yscale("log")
        axes.set_ylim(bottom=low / 3)
    elif 0 < np.ptp(later) < np.ptp(found) / 3:
        margin = 0.08 * np.ptp(later)
        axes.set_ylim(later.min() - margin, later.max() + margin)
        axes.set_title(f"cut: from {found.min():.3g} to {found.max():.3g}", fontsize=7, loc="right", pad=2)


def traces_figure(
    steps: Sequence[float], traces: Mapping[str, Sequence[float]], sample_steps: Sequence[float], cycles: Cycles = ()
) -> "Figure":
    """Draw traces of a few quantities, such as single weights, one below another, with the samples marked.

    Args:
        steps: the steps.
        traces: values at these steps, by name.
        sample_steps: the steps of the samples.
        cycles: first and last step of each cycle, of which every second is shaded.
    """
    figure, rows = canvas(len(traces), height=0.8 + 1.0 * len(traces))
    for axes, (name, values) in zip(rows, traces.items(), strict=True):
        shade_cycles(axes, cycles)
        _trace(axes, steps, values, sample_steps)
        axes.set_title(literal(name), fontsize=8, loc="right", pad=2)
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
    figure, rows = canvas(len(traces), height=3.2 if len(traces) == 1 else 0.8 + 1.4 * len(traces))
    for axes, (label, chains) in zip(rows, traces.items(), strict=True):
        for index, (chain, (steps, values)) in enumerate(chains.items()):
            axes.plot(steps, values, label=f"chain {chain}", **series(index, len(steps)))
        axes.set_ylabel(literal(label), fontsize=9 if len(traces) == 1 else 8)
        axes.ticklabel_format(axis="y", useOffset=False)
    rows[-1].set_xlabel("optimizer step")
    rows[-1].xaxis.set_major_locator(integer_ticks())
    if 1 < len(next(iter(traces.values()))) <= 10:
        legend_above(rows[0], columns=5)
    return figure


def learning_coefficient_figure(
    chains: Mapping[int, tuple[Sequence[float], Sequence[float]]], value: float, error: float
) -> "Figure":
    """Draw n·β·(L - L(w*)) of each chain against the step, and its running means with the estimate and two errors.

    Args:
        chains: of each chain, by its index: steps and values.
        value: the estimate of the local learning coefficient.
        error: its standard error.
    """
    figure, (upper, lower) = canvas(2, height=4.2)
    for index, (chain, (steps, values)) in enumerate(chains.items()):
        running = np.cumsum(values) / np.arange(1, len(values) + 1)
        style = series(index, len(steps))
        upper.plot(steps, values, **(style | {"linewidth": 0.6, "marker": point_marker(steps)}))
        lower.plot(steps, running, label=f"chain {chain}", **style)
    if np.isfinite(error):
        lower.axhspan(value - 2 * error, value + 2 * error, color=SHADE, zorder=0, label="two standard errors")
    lower.axhline(value, color="black", linewidth=1, linestyle=":")
    upper.set_ylabel("n·β·(L - L(w*))")
    lower.set_ylabel("running mean")
    lower.set_xlabel("optimizer step")
    if len(chains) <= 10:
        legend_above(lower, columns=5)
    return figure


# -- contour -----------------------------------------------------------------------------------------------------------


RARE = 1e-4


def _bins(centres: Sequence[float], visits: Any) -> tuple[slice, Any, float]:
    """Return the range of visited bins with one more bin on each side, their centres, and their width."""
    places = np.flatnonzero(visits > 0)
    shown = slice(0, len(visits)) if len(places) == 0 else slice(max(places[0] - 1, 0), places[-1] + 2)
    x = np.asarray(centres, dtype=float)[shown]
    return shown, x, float(np.diff(x).mean()) if len(x) > 1 else 1.0


def energy_histogram_figure(
    centres: Sequence[float], visits: Sequence[float], masses: Sequence[float], truth: Sequence[float] | None = None
) -> "Figure":
    """Draw the share of steps in each energy bin of equal width, and the target's mass in it, as estimated from π."""
    visited = np.asarray(visits, dtype=float)
    shown, x, width = _bins(centres, visited)
    figure, (axes,) = canvas()
    share = visited / max(visited.sum(), 1)
    axes.bar(x, share[shown], width=width, color=SINGLE_COLOUR, alpha=0.5, label="share of the steps")
    axes.plot(x, np.asarray(masses, dtype=float)[shown], "-o", markersize=3, color=AVERAGE_COLOUR, label="mass by π")
    if truth is not None:
        axes.plot(x, np.asarray(truth, dtype=float)[shown], color="black", linestyle=":", label="true mass")
    axes.set_xlabel("potential energy (nats)")
    axes.set_ylabel("share of a bin")
    axes.set_ylim(bottom=0)
    legend_above(axes)
    return figure


def multiplier_figure(centres: Sequence[float], multipliers: Sequence[float], visits: Sequence[float]) -> "Figure":
    """Draw the multiplier κ against the energy, with the bouncy zone, where it is negative, marked.

    It is omitted in bins with less than one step in 10,000.
    """
    visited = np.asarray(visits, dtype=float)
    shown, x, width = _bins(centres, visited)
    kappa = np.asarray(multipliers, dtype=float)[shown]
    known = visited[shown] > RARE * visited.sum()
    figure, (upper, lower) = canvas(2, height=4.2)
    label: str | None = "bouncy zone, κ < 0"
    for start, stop in _runs((kappa < 0) & known):
        style: dict[str, Any] = {"facecolor": SAMPLE_COLOUR, "alpha": 0.2, "hatch": "//", "linewidth": 0}
        upper.axvspan(x[start] - width / 2, x[stop] + width / 2, label=label, **style)
        label = None
    upper.axhline(1, color="black", linestyle=":", linewidth=1)
    upper.axhline(0, color="black", linewidth=0.5)
    upper.step(x[known], kappa[known], where="mid", color=AVERAGE_COLOUR, label="κ")
    upper.set_ylabel("gradient multiplier κ")
    legend_above(upper)
    lower.bar(x, visited[shown], width=width, color=SINGLE_COLOUR)
    lower.set_ylabel("steps in the bin")
    lower.set_xlabel("potential energy (nats)")
    return figure


def _runs(flags: Any) -> list[tuple[int, int]]:
    """Return the first and last index of each run of true flags."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(flags, dtype=int), [0]])))
    return [(int(start), int(stop) - 1) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
