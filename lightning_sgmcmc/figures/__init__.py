"""Figures of a run: each function draws one figure from plain numbers and returns it."""

from lightning_sgmcmc.figures.canvas import (
    AVERAGE_COLOUR,
    METRIC_LABELS,
    SAMPLE_COLOUR,
    SINGLE_COLOUR,
    canvas,
    integer_ticks,
    legend_above,
)
from lightning_sgmcmc.figures.evaluation import (
    entropy_figure,
    histogram,
    histogram_figure,
    predictions_figure,
    reliability_figure,
    running_average_figure,
)
from lightning_sgmcmc.figures.run import (
    energy_figure,
    sample_energy_figure,
    sample_trace_figure,
    schedule_figure,
    traces_figure,
)

__all__ = [
    "AVERAGE_COLOUR",
    "METRIC_LABELS",
    "SAMPLE_COLOUR",
    "SINGLE_COLOUR",
    "canvas",
    "energy_figure",
    "entropy_figure",
    "histogram",
    "histogram_figure",
    "integer_ticks",
    "legend_above",
    "predictions_figure",
    "reliability_figure",
    "running_average_figure",
    "sample_energy_figure",
    "sample_trace_figure",
    "schedule_figure",
    "traces_figure",
]
