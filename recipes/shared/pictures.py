"""Pictures of a recipe: several panels, one legend, files for print."""

from typing import TYPE_CHECKING

from lightning_sgmcmc.figures.canvas import legend_below, panels, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["outside_legend", "panels", "save_figure"]


def outside_legend(figure: "Figure", axes: "Axes") -> None:
    """Put one axes' legend below all panels."""
    legend_below(figure, axes, columns=4)
