"""The style that all figures share: colours, marks, sizes for print, empty axes, and files."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C7A00")
"""Okabe and Ito's colours, without black's neighbours; the last is a darker yellow, for white paper."""
MARKERS = "osD^vP<>Xhd*"
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 3)))
SAMPLE_COLOUR, AVERAGE_COLOUR, SINGLE_COLOUR, SHADE = COLOURS[1], COLOURS[0], "#7F7F7F", "0.92"
PAGE_WIDTH = 5.5
"""Width of a figure in inches: the text of a page in one column."""
AXIS_LABELS = 0.7
"""Inches left of a figure's axes, for ticks and label."""
LEGEND_SIZE = 8
PRINT_DPI = 300
STYLE: Mapping[str, Any] = MappingProxyType(
    {
        "font.size": 9,
        "axes.labelsize": 9,
        "axes.titlesize": 9,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.fontsize": LEGEND_SIZE,
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "pdf.fonttype": 42,
        "savefig.dpi": PRINT_DPI,
    }
)
METRIC_LABELS = {
    "accuracy": "accuracy",
    "nll": "NLL (nats per example)",
    "ece": "ECE",
    "brier": "Brier score",
    "rmse": "RMSE",
    "entropy": "predictive entropy (nats)",
}


def literal(name: str) -> str:
    """Return a name that the user has given, of a metric or a run, as a label: matplotlib reads $…$ as a formula."""
    return name.replace("$", r"\$")


@contextmanager
def styled() -> Iterator[None]:
    """Draw in the library's style within this context, whatever the user's own settings are."""
    from cycler import cycler
    from matplotlib import rc_context

    settings: Any = {**STYLE, "axes.prop_cycle": cycler(color=COLOURS)}
    with rc_context(settings):
        yield


def series(index: int, points: int = 0) -> dict[str, Any]:
    """Return colour, marker and line style of the index-th series, which differ in all three.

    Args:
        index: number of the series.
        points: number of points of its line; of more than 25, about eight have a marker.
    """
    style: dict[str, Any] = {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
        "linewidth": 1.2,
        "markersize": 4,
    }
    if points > 25:
        every = points // 8
        style["markevery"] = (index * every // 5 % every, every)
    return style


def panels(
    rows: int,
    columns: int,
    width: float,
    height: float,
    shared_x: bool = False,
    shared_y: bool = False,
    ratios: Sequence[float] | None = None,
    widths: Sequence[float] | None = None,
) -> "tuple[Figure, Any]":
    """Return an empty figure without a window, and its axes, shape (rows, columns).

    Args:
        rows, columns: numbers of panels.
        width, height: inches.
        shared_x, shared_y: whether the panels share these axes.
        ratios, widths: heights of the rows and widths of the columns relative to one another; None is equal ones.
    """
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(width, height), layout="constrained")
        options: dict[str, Any] = {"sharex": shared_x, "sharey": shared_y, "squeeze": False}
        grid = figure.subplots(rows, columns, **options, height_ratios=ratios, width_ratios=widths)
    return figure, grid


def canvas(
    rows: int = 1, width: float = PAGE_WIDTH, height: float = 3.4, shared: bool = True
) -> "tuple[Figure, list[Axes]]":
    """Return an empty figure without a window, and its axes from top to bottom; with `shared` they share the x-axis."""
    figure, grid = panels(rows, 1, width, height, shared_x=shared)
    return figure, list(grid[:, 0])


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure for print: a PNG of 300 dots per inch, and a PDF beside it.

    Args:
        figure: the figure.
        path: the PNG's path; the PDF has the suffix `.pdf`.
    """
    with styled():
        figure.savefig(path.with_suffix(".png"), dpi=PRINT_DPI)
        figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})


def legend_above(axes: "Axes", columns: int = 3) -> None:
    """Put the legend, if any, above the axes, where it covers no data, in as many columns as fit, `columns` at most."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        width = axes.figure.bbox.width / axes.figure.dpi - AXIS_LABELS
        style: dict[str, Any] = {"frameon": False, "borderaxespad": 0.2, "fontsize": LEGEND_SIZE}
        fitting = _fitting_columns(width, labels, columns)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=fitting, **style)


def legend_below(figure: "Figure", axes: "Axes", columns: int = 4) -> None:
    """Put one axes' legend, if any, below all panels, in as many columns as fit, `columns` at most."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        fitting = _fitting_columns(figure.get_figwidth(), labels, columns)
        figure.legend(handles, labels, loc="outside lower center", ncols=fitting, frameon=False, fontsize=LEGEND_SIZE)


def _fitting_columns(width: float, labels: Sequence[str], most: int) -> int:
    """Return how many columns of a legend fit in a width in inches, one at least."""
    from matplotlib.textpath import TextPath

    widths = [TextPath((0, 0), label, size=LEGEND_SIZE).get_extents().width / 72 for label in labels]
    handle, gap = 2.8 * LEGEND_SIZE / 72, 2 * LEGEND_SIZE / 72  # matplotlib's defaults, in font sizes
    for columns in range(min(most, len(labels)), 1, -1):
        widest = [part.max() for part in np.array_split(widths, columns)]
        if sum(widest) + columns * (handle + gap) - gap <= width:
            return columns
    return 1


def shade_cycles(axes: "Axes", cycles: Sequence[tuple[float, float]]) -> None:
    """Shade every second cycle, from its first to its last step."""
    label: str | None = "every second cycle"
    for first, last in cycles[1::2]:
        axes.axvspan(first, last, color=SHADE, linewidth=0, zorder=0, label=label)
        label = None


def integer_ticks(most: int = 9) -> "MaxNLocator":
    """Return a locator that places ticks at integers only, `most` + 1 at most."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(most, integer=True, min_n_ticks=1)


def point_marker(steps: Sequence[float]) -> str:
    """Return a marker for a one-point line, which would be invisible otherwise; none for longer lines."""
    return "." if len(steps) == 1 else ""


def finite_values(values: Sequence[float]) -> Any:
    """Return the finite values, as an array."""
    array = np.asarray(values, dtype=float)
    return array[np.isfinite(array)]
