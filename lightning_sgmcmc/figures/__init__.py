"""Figures of a run: each function draws one figure from plain numbers and returns it."""

from lightning_sgmcmc.figures.canvas import (
    AVERAGE_COLOUR,
    METRIC_LABELS,
    PRINT_DPI,
    SAMPLE_COLOUR,
    SINGLE_COLOUR,
    canvas,
    integer_ticks,
    legend_above,
    panels,
    save_figure,
    series,
    styled,
)
from lightning_sgmcmc.figures.errors import INTERVAL, draw_band, half_width, mean_with_interval
from lightning_sgmcmc.figures.evaluation import (
    entropy_figure,
    histogram,
    histogram_figure,
    predictions_figure,
    reliability_figure,
    running_figure,
)
from lightning_sgmcmc.figures.run import (
    energy_figure,
    nll_figure,
    sample_energy_figure,
    sample_trace_figure,
    schedule_figure,
    traces_figure,
)

__all__ = [
    "AVERAGE_COLOUR",
    "INTERVAL",
    "METRIC_LABELS",
    "PRINT_DPI",
    "SAMPLE_COLOUR",
    "SINGLE_COLOUR",
    "canvas",
    "draw_band",
    "energy_figure",
    "entropy_figure",
    "half_width",
    "histogram",
    "histogram_figure",
    "integer_ticks",
    "legend_above",
    "mean_with_interval",
    "nll_figure",
    "panels",
    "predictions_figure",
    "reliability_figure",
    "running_figure",
    "sample_energy_figure",
    "sample_trace_figure",
    "save_figure",
    "schedule_figure",
    "series",
    "styled",
    "traces_figure",
]
