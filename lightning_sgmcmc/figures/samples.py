"""Figures of weighted samples and their geometry in weight space; plain numbers in, a figure out."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_sgmcmc.figures.canvas import (
    AVERAGE_COLOUR,
    COLOURS,
    MARKERS,
    SAMPLE_COLOUR,
    canvas,
    integer_ticks,
    legend_above,
    literal,
    series,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_sgmcmc.evaluation.comparison import ChainRow


KINDS = ("within a cycle", "between cycles", "between chains", "within a chain")
GROUPS_WITH_NAMES = 12
"""With more cycles or chains than this, a colour bar replaces the legend."""
TENSORS_SHOWN = 40
FAR_APART = 2.0
"""A chain does not return if its first and last thirds are this many times as far apart as samples within them."""


def weights_figure(weights: Sequence[float], effective: Sequence[float]) -> "Figure":
    """Draw the samples' normalised weights, and the effective sample size (Σw)²/Σw² of the first 1, 2, …."""
    figure, (upper, lower) = canvas(2, height=4.2)
    count = np.arange(1, len(weights) + 1)
    upper.vlines(count, 0, weights, color=AVERAGE_COLOUR, linewidth=max(0.5, min(6.0, 200 / len(weights))))
    upper.axhline(1 / len(weights), color="black", linestyle=":", linewidth=1, label=f"equal weights, 1/{len(weights)}")
    upper.set_ylabel("normalised weight")
    upper.set_ylim(0, 1.08 * max(weights))
    legend_above(upper)
    lower.plot(count, count, color="black", linestyle=":", linewidth=1, label="equal weights")
    lower.plot(count, effective, "-o", color=AVERAGE_COLOUR, markersize=3, label=f"these: {effective[-1]:.1f}")
    lower.set_ylabel("worth of the weights")
    lower.set_xlabel("number of samples")
    lower.set_ylim(bottom=0)
    lower.set_xlim(0.5, len(weights) + 0.5)
    lower.xaxis.set_major_locator(integer_ticks())
    legend_above(lower)
    return figure


def geometry_figure(
    coordinates: Sequence[Sequence[float]], share: Sequence[float], groups: Sequence[int], chains: Sequence[int]
) -> "Figure":
    """Draw the samples in the plane that best preserves their distances, each chain's joined in order of drawing."""
    figure, (axes,) = canvas(width=5.2, height=4.2)
    points, of_chain = np.asarray(coordinates, dtype=float), np.asarray(chains)
    for chain in np.unique(of_chain):
        path = points[of_chain == chain]
        axes.plot(path[:, 0], path[:, 1], color="lightgray", linewidth=0.8, zorder=1)
    kind, colours = ("chain", of_chain) if len(np.unique(of_chain)) > 1 else ("cycle", np.asarray(groups))
    _coloured_points(figure, axes, points, colours, kind)
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.08)
    first, second = (f"coordinate {name} ({part:.0%} of the variance)" for name, part in zip("12", share, strict=True))
    axes.set_xlabel(first)
    axes.set_ylabel(second)
    apart = max((_drift(points[of_chain == chain]) for chain in np.unique(of_chain)), default=0.0)
    if apart > FAR_APART:
        says = "The first and the last third are" if len(np.unique(of_chain)) == 1 else "Thirds of a chain are"
        axes.set_title(f"{says} far apart: the chain moves on and does not return.", fontsize=8, pad=22)
    return figure


def _drift(path: Any) -> float:
    """Return the mean distance between the first and last third of a path over that within these thirds."""
    third = len(path) // 3
    if third < 3:
        return 0.0
    first, last = path[:third], path[-third:]
    within = [np.linalg.norm(part[:, None] - part[None], axis=-1)[np.triu_indices(third, 1)] for part in (first, last)]
    between = np.linalg.norm(first[:, None] - last[None], axis=-1)
    return float(between.mean() / max(np.concatenate(within).mean(), 1e-30))


def _coloured_points(figure: "Figure", axes: "Axes", points: Any, colours: Any, kind: str) -> None:
    names = np.unique(colours)
    if 1 < len(names) <= GROUPS_WITH_NAMES:
        for index, name in enumerate(names):
            own = points[colours == name]
            style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index]}
            axes.scatter(own[:, 0], own[:, 1], s=22, label=f"{kind} {name}", zorder=2, **style)
        legend_above(axes, columns=6 if len(names) > 4 else 4)
        return
    label, shown = (kind, colours) if len(names) > 1 else ("sample", np.arange(len(points)))
    drawn = axes.scatter(points[:, 0], points[:, 1], s=22, c=shown, cmap="viridis", zorder=2)
    figure.colorbar(drawn, ax=axes, label=label, ticks=integer_ticks())


def segments_figure(
    positions: Sequence[float], segments: Sequence[tuple[str, str, Mapping[str, Sequence[float]]]], data: str
) -> "Figure":
    """Draw metrics along the straight lines between pairs of samples, one row per metric.

    Positions are t of the points, from 0 (the first sample) to 1 (the second). Segments have a kind (one of `KINDS`), a
    name and values by metric. Source: Zhang et al. 2020 (cSG-MCMC), figure 4.
    """
    metrics = list(segments[0][2])
    figure, rows = canvas(len(metrics), height=0.8 + 1.6 * len(metrics))
    for axes, metric in zip(rows, metrics, strict=True):
        named: set[str] = set()
        for kind, _, values in segments:
            label = kind if kind not in named else None
            named.add(kind)
            style = series(KINDS.index(kind) if kind in KINDS else len(KINDS)) | {"markersize": 3, "linewidth": 1}
            axes.plot(positions, values[metric], alpha=0.8, label=label, **style)
        axes.set_ylabel(literal(metric))
    legend_above(rows[0])
    rows[-1].set_xlabel(f"position on the segment between two samples, t (on the {data})")
    rows[-1].set_xlim(-0.02, 1.02)
    return figure


def temperatures_figure(
    tensors: Mapping[str, Mapping[str, Any]], temperature: float, tolerance: float = 0.2, shown: int = TENSORS_SHOWN
) -> "Figure":
    """Draw each tensor's kinetic and configurational temperatures with 95 % intervals, and the target's τ.

    Args:
        tensors: the attributes of a `Temperatures` by tensor; of many, those farthest from the target are drawn.
    """

    def distance(name: str) -> float:
        values = [tensors[name].get(kind) for kind in ("kinetic", "configurational")]
        return max((abs(value - temperature) for value in values if value is not None), default=0.0)

    far = set(sorted(tensors, key=distance, reverse=True)[:shown])
    names = [name for name in tensors if name in far]
    figure, (axes,) = canvas(height=1.3 + 0.26 * len(names))
    band = (1 - tolerance) * temperature, (1 + tolerance) * temperature
    axes.axvspan(*band, color="lightgray", alpha=0.6, linewidth=0, label=f"target ± {tolerance:.0%}")
    axes.axvline(temperature, color="black", linestyle=":", linewidth=1, label=f"target τ = {temperature:g}")
    drawn = [temperature]
    for index, (kind, offset) in enumerate((("kinetic", -0.14), ("configurational", 0.14))):
        known = {n: value for n in names if (value := tensors[n].get(kind)) is not None and np.isfinite(value)}
        places = [(i, tensors[n]) for i, n in enumerate(names) if n in known]
        if not places:
            continue
        values = np.array([record[kind] for _, record in places], dtype=float)
        spans = [record.get(f"{kind}_interval") or (record[kind], record[kind]) for _, record in places]
        low, high = np.asarray(spans, dtype=float).T
        below, above = np.clip(values - low, 0, None), np.clip(high - values, 0, None)
        height = [i + offset for i, _ in places]
        drawn += values.tolist()
        style: dict[str, Any] = {"fmt": MARKERS[index], "color": COLOURS[index], "markersize": 4}
        label = f"{kind}, 95 % interval"
        axes.errorbar(values, height, xerr=[below, above], label=label, capsize=2, elinewidth=1, **style)
    # A small tensor's interval may be many times the target; it must not hide the others.
    margin = 0.5 * temperature + 0.1 * (max(drawn) - min(drawn))
    axes.set_xlim(min(drawn) - margin, max(drawn) + margin)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_ylim(len(names) - 0.5, -0.5)
    chosen = f" (the {len(names)} of {len(tensors)} tensors farthest from the target)"
    axes.set_xlabel("temperature" + chosen * (len(names) < len(tensors)))
    legend_above(axes, columns=2)
    return figure


def chains_figure(
    chains: Mapping[int, tuple[Sequence[int], Sequence[float]]], rows: "Sequence[ChainRow]", disagreement: float
) -> "Figure":
    """Draw the samples' energies by chain, and the NLL of each chain's average and of the overall one."""
    evaluated = [row for row in rows if math.isfinite(row.nll)]
    figure, rows_drawn = canvas(rows=2 if evaluated else 1, height=4.8 if evaluated else 3.2, shared=False)
    upper = rows_drawn[0]
    for index, (chain, (steps, energy)) in enumerate(chains.items()):
        upper.plot(steps, energy, label=f"chain {chain}", **series(index, len(steps)) | {"linewidth": 0.8})
    upper.set_xlabel("optimizer step")
    upper.set_ylabel("potential energy Ũ (nats)")
    upper.ticklabel_format(axis="y", useOffset=False)
    upper.xaxis.set_major_locator(integer_ticks())
    rhat = rows[-1].diagnostics.rhat
    if len(chains) <= 10:
        legend_above(upper, columns=5)
    if math.isfinite(rhat):
        upper.annotate(f"split R-hat {rhat:.3f}", (0.99, 0.97), xycoords="axes fraction", ha="right", va="top")
    if evaluated:
        lower = rows_drawn[1]
        names = ["all" if row.chain is None else str(row.chain) for row in evaluated]
        lower.plot(names[:-1], [row.nll for row in evaluated[:-1]], "o", color=SAMPLE_COLOUR)
        lower.plot(names[-1:], [evaluated[-1].nll], "D", color=AVERAGE_COLOUR)
        lower.set_xlabel("chain")
        lower.set_ylabel("NLL of the average (nats)")
        lower.margins(x=0.1, y=0.25)
        if math.isfinite(disagreement):
            lower.annotate(
                f"disagreement {disagreement:.3g}", (0.99, 0.97), xycoords="axes fraction", ha="right", va="top"
            )
    return figure
