"""The pictures that compare model averages of several methods; plain numbers in, a figure out."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lightning_sgmcmc.figures import canvas, integer_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osD^v<>Phd*"


def growth_figure(curves: Mapping[str, Sequence[float]], label: str) -> "Figure":
    """Draw a figure of merit of the average of the first 1, 2, … samples, one line for each method.

    Args:
        curves: the values by method.
        label: what they are.
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
