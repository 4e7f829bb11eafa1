"""Error bars of one kind: 95 % intervals of a mean over repeats."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_sgmcmc.figures.canvas import series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INTERVAL = "mean, 95 % interval"


def mean_with_interval(repeats: Any) -> tuple[Any, Any]:
    """Return the mean over repeats and the half width of its 95 % interval by Student's t; 0 for one repeat.

    Args:
        repeats: shape (repeats, …).

    >>> mean, half = mean_with_interval([[1.0], [2.0], [3.0]])
    >>> mean.round(3).tolist(), half.round(3).tolist()
    ([2.0], [2.484])
    """
    values = np.asarray(repeats, dtype=float)
    mean, count = values.mean(0), len(values)
    if count < 2:
        return mean, np.zeros_like(mean)
    return mean, half_width(values.std(0, ddof=1) / np.sqrt(count), count)


def half_width(error: Any, count: int) -> Any:
    """Return the half width of the 95 % interval of a mean, from its standard error over a number of repeats.

    Args:
        error: the standard error.
        count: number of repeats, at least 2.
    """
    from scipy.stats import t

    return np.asarray(error, dtype=float) * float(t.ppf(0.975, count - 1))


def draw_band(
    axes: "Axes",
    places: Sequence[float],
    repeats: Any,
    index: int,
    label: str | None,
    is_positive: bool = False,
    **style: Any,
) -> None:
    """Draw a mean over repeats as a line, with a band of its 95 % interval.

    Args:
        axes: where.
        places: x values.
        repeats: values, shape (repeats, points).
        index: number of the series, for its style.
        label: its name, None for none.
        is_positive: whether the band is cut at a tenth of the mean, since a log axis cannot show one below 0.
        style: options of the line that differ from the series's.
    """
    mean, half = mean_with_interval(repeats)
    line = series(index, len(mean)) | style
    axes.plot(places, mean, label=label, **line)
    lower = np.maximum(mean - half, mean / 10) if is_positive else mean - half
    axes.fill_between(places, lower, mean + half, color=line["color"], alpha=0.18, linewidth=0)
