"""Figures of contour sampling: each function draws one figure from plain numbers and returns it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_sgmcmc.figures.canvas import (
    AVERAGE_COLOUR,
    SAMPLE_COLOUR,
    SINGLE_COLOUR,
    canvas,
    legend_above,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


RARE = 1e-4


def _shown(visits: Any) -> slice:
    """Return the range of visited bins with one more bin on each side."""
    places = np.flatnonzero(visits > 0)
    if len(places) == 0:
        return slice(0, len(visits))
    return slice(max(places[0] - 1, 0), places[-1] + 2)


def energy_histogram_figure(
    centres: Sequence[float], visits: Sequence[float], masses: Sequence[float], truth: Sequence[float] | None = None
) -> "Figure":
    """Draw the share of steps in each energy bin, and the target's mass in it, as estimated from π.

    Args:
        centres: centre of each bin, in nats; bins have equal width.
        masses: the estimated masses, summing to 1.
        truth: the true masses; None if unknown.
    """
    visited = np.asarray(visits, dtype=float)
    shown = _shown(visited)
    x = np.asarray(centres, dtype=float)[shown]
    width = float(np.diff(x).mean()) if len(x) > 1 else 1.0
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
    """Draw the gradient multiplier against the energy, with the bouncy zone, where it is negative, marked.

    Args:
        centres: centre of each bin, in nats.
        multipliers: κ in each bin.
        visits: number of visits to each bin; κ is omitted in bins with less than one step in 10,000.
    """
    visited = np.asarray(visits, dtype=float)
    shown = _shown(visited)
    x, kappa = (np.asarray(values, dtype=float)[shown] for values in (centres, multipliers))
    width = float(np.diff(x).mean()) if len(x) > 1 else 1.0
    known = visited[shown] > RARE * visited.sum()
    figure, (upper, lower) = canvas(2, height=4.2)
    label: str | None = "bouncy zone, κ < 0"
    for start, stop in _runs((kappa < 0) & known):
        upper.axvspan(
            x[start] - width / 2,
            x[stop] + width / 2,
            facecolor=SAMPLE_COLOUR,
            alpha=0.2,
            hatch="//",
            linewidth=0,
            label=label,
        )
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
