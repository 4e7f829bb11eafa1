"""Colours, labels and empty axes that all figures share."""

from collections.abc import Sequence
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
    """Return an empty figure without a window, and its axes from top to bottom; with `shared` they share the x-axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=shared, squeeze=False)
    return figure, list(axes[:, 0])


def legend_above(axes: "Axes", columns: int = 3) -> None:
    """Put the legend, if any, above the axes, where it covers no data."""
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
    """Return a locator that places ticks at integers only."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True, min_n_ticks=1)


def point_marker(steps: Sequence[float]) -> str:
    """Return a marker for a one-point line, which would be invisible otherwise; none for longer lines."""
    return "." if len(steps) == 1 else ""


def finite_values(values: Sequence[float]) -> Any:
    """Return the finite values, as an array."""
    array = np.asarray(values, dtype=float)
    return array[np.isfinite(array)]
