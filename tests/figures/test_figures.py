"""What the figures show, read back from matplotlib's objects."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_sgmcmc import figures
from lightning_sgmcmc.figures import samples as figures_samples
from lightning_sgmcmc.figures.canvas import canvas, legend_above, legend_below
from lightning_sgmcmc.recipes.shared.figures import mean_with_interval


def lines(axes: Any) -> dict[str, Any]:
    return {line.get_label(): np.asarray(line.get_xydata()) for line in axes.get_lines()}


def draw(figure: Any) -> None:
    png = io.BytesIO()
    figure.savefig(png, format="png")
    assert png.getvalue().startswith(b"\x89PNG")


def test_energy_marks_the_samples_and_shows_the_later_range_where_the_start_dwarfs_it() -> None:
    steps = list(range(1, 101))
    energy = [1000.0 * (step < 20) + np.sin(step) for step in steps]
    figure = figures.energy_figure(steps, energy, [50, 80], [0.5, -0.5])
    upper, lower = figure.axes
    assert lines(upper)["samples"].tolist() == [[50, 0.5], [80, -0.5]]
    assert lines(upper)["mini-batch"][:, 1].tolist() == energy
    assert upper.get_ylim()[1] > 1000
    assert lower.get_ylim()[0] < -1
    assert 1 < lower.get_ylim()[1] < 2
    assert len(figures.energy_figure(steps, energy, [], []).axes) == 1
    assert len(figures.energy_figure(steps, [float(np.sin(s)) for s in steps], [50], [0.5]).axes) == 1


def test_entropy_curves_are_the_empirical_distribution() -> None:
    figure = figures.entropy_figure({"test data": [0.3, 0.1, 0.2, 0.1], "noise": [2.0]}, 10)
    curves = lines(figure.axes[0])
    assert curves["test data"].tolist() == [[0, 0], [0.1, 0.25], [0.1, 0.5], [0.2, 0.75], [0.3, 1], [np.log(10), 1]]
    assert curves["noise"][1].tolist() == [2, 1]


@pytest.mark.parametrize("values", [[0.25] * 4, [0.0, 0.0], [1.0], [-3.0, 5.0, 5.0], [0.1, 0.1 + 1e-17]])
def test_histograms_count_every_value_in_bins_around_them(values: list[float]) -> None:
    counts, edges = figures.histogram(values)
    assert counts.sum() == len(values)
    size = max(map(abs, values)) or 1
    assert edges[0] >= min(values) - 0.11 * size
    assert edges[-1] <= max(values) + 0.11 * size
    draw(figures.histogram_figure(values, "values"))


def test_reliability_has_wilson_intervals_and_marks_bins_with_few_data() -> None:
    figure = figures.reliability_figure([0.0, 0.55, 0.95], [0.0, 0.5, 0.9], [0, 4, 100], 0.02)
    upper, lower = figure.axes
    many, few = upper.containers
    assert many.get_label().startswith("model average, 95 % interval")
    assert few.get_label() == "fewer than 10 data"
    (span,) = many.lines[2][0].get_segments()
    assert span[:, 1] == pytest.approx([0.826, 0.945], abs=1e-3)
    assert many.lines[0].get_linestyle() == "None", "bins are not joined"
    assert few.lines[0].get_markerfacecolor() == "white"
    assert [text.get_text() for text in lower.texts] == ["4", "100"]


def test_series_differ_in_more_than_colour() -> None:
    styles = [figures.series(index) for index in range(20)]
    assert len({(style["marker"], str(style["linestyle"])) for style in styles}) == 20
    assert len({style["color"] for style in styles[:8]}) == 8


def test_cycles_are_shaded_and_a_trace_has_the_prior_s_line() -> None:
    steps = list(range(1, 101))
    nll = [50.0 if step < 5 else 1 + 0.1 * np.sin(step) for step in steps]
    figure = figures.nll_figure(steps, nll, [0.5] * 100, [20, 40], 0.1, [(1, 25), (26, 50), (51, 75), (76, 100)])
    upper, lower = figure.axes
    assert lines(upper)["samples"][:, 0].tolist() == [20, 40]
    assert upper.get_ylim()[1] < 2, "the start does not dwarf the rest"
    assert {line.get_ydata()[0] for line in lower.get_lines() if len(line.get_ydata()) == 2} >= {1, 0.1}
    for axes in figure.axes:
        spans = [patch.get_patch_transform().transform_path(patch.get_path()) for patch in axes.patches]
        assert [round(span.get_extents().x0) for span in spans] == [26, 76]


def test_nothing_is_drawn_between_logged_steps() -> None:
    """A sample after step 7 has no value in the history of steps 1 and 10: its tick lies on the axis, not on a line."""
    for figure in (
        figures.traces_figure([1, 10], {"w[0]": [0.0, 3.0]}, [7]),
        figures.nll_figure([1, 10], [2.0, 1.0], [1.0, 0.8], [7]),
        figures.energy_figure([1, 10], [2.0, 1.0], [7], [1.7]),
        figures.schedule_figure([1, 10], [0.1, 0.2], [0.0, 1.0], [7], is_joined=False),
    ):
        drawn = [line for axes in figure.axes for line in axes.get_lines() if not line.get_label().startswith("1 ")]
        assert {line.get_linestyle() for line in drawn} == {"None"}
    axes = figures.traces_figure([1, 10], {"w[0]": [5.0, 8.0]}, [7]).axes[0]
    (tick,) = (line for line in axes.get_lines() if line.get_label() == "samples")
    at = axes.transAxes.inverted().transform(tick.get_transform().transform(tick.get_xydata()))
    assert at[0, 1] == pytest.approx(0)
    assert axes.get_ylim()[0] > 4


def test_intervals_over_repeats_cover_the_mean() -> None:
    """4,000 means of three normal draws: the share of 95 % intervals with the mean is within 4 sd of 0.95."""
    draws = np.random.default_rng(0).normal(size=(3, 4000))
    mean, half = mean_with_interval(draws)
    assert abs((np.abs(mean) <= half).mean() - 0.95) < 4 * (0.95 * 0.05 / 4000) ** 0.5


def test_weights_and_their_effective_number() -> None:
    figure = figures_samples.weights_figure([0.25, 0.75], [1, 1.6])
    upper, lower = figure.axes
    assert [segment.tolist() for segment in upper.collections[0].get_segments()] == [
        [[1, 0], [1, 0.25]],
        [[2, 0], [2, 0.75]],
    ]
    assert lines(lower)["these: 1.6"].tolist() == [[1, 1], [2, 1.6]]


@pytest.mark.parametrize(
    ("cycles", "chains", "named"),
    [
        ([0, 0, 1, 1], [0] * 4, ["cycle 0", "cycle 1"]),
        ([0, 0, 0, 0], [0, 1, 0, 1], ["chain 0", "chain 1"]),
        (list(range(20)), [0] * 20, []),
        ([0] * 4, [0] * 4, []),
    ],
)
def test_geometry_is_coloured_by_cycle_or_chain(cycles: list[int], chains: list[int], named: list[str]) -> None:
    points = np.random.default_rng(0).normal(size=(len(cycles), 2))
    figure = figures_samples.geometry_figure(points.tolist(), [0.5, 0.3], cycles, chains)
    axes = figure.axes[0]
    legend = axes.get_legend()
    assert ([text.get_text() for text in legend.get_texts()] if legend else []) == named
    assert len(figure.axes) == (1 if named else 2), "else there is a colour bar"
    assert sum(len(np.asarray(drawn.get_offsets())) for drawn in axes.collections) == len(cycles)
    assert axes.get_xlabel() == "coordinate 1 (50% of the variance)"
    assert len(axes.get_lines()) == len(set(chains)), "each chain's samples are joined"
    draw(figure)


def test_segments_have_one_row_for_each_figure_of_merit_and_name_each_kind_once() -> None:
    values = {"error": [0.1, 0.5, 0.1], "NLL (nats per example)": [1.0, 3.0, 1.0]}
    segments = [("between cycles", "step 1 to step 2", values), ("between cycles", "step 2 to step 3", values)]
    figure = figures_samples.segments_figure([0, 0.5, 1], segments, "test data")
    assert [axes.get_ylabel() for axes in figure.axes] == list(values)
    for axes, expected in zip(figure.axes, values.values(), strict=True):
        assert [np.asarray(line.get_ydata()).tolist() for line in axes.get_lines()] == [expected, expected]
        assert [handle for handle in axes.get_legend_handles_labels()[1]] == ["between cycles"]


def test_temperatures_leave_out_what_there_is_not_and_the_nearest_of_too_many() -> None:
    tensors: dict[str, Any] = {
        f"w{i}": {
            "kinetic": None if i == 0 else 1.0,
            "kinetic_interval": None if i == 0 else [0.9, 1.2],
            "configurational": 1 + i / 10,
            "configurational_interval": [0.5, 2.5],
        }
        for i in range(6)
    }
    axes = figures_samples.temperatures_figure(tensors, 1.0, shown=4).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["w2", "w3", "w4", "w5"]
    assert "4 of 6" in axes.get_xlabel()
    axes = figures_samples.temperatures_figure({"w0": tensors["w0"]}, 1.0).axes[0]
    assert axes.get_legend_handles_labels()[1] == [
        "target ± 20%",
        "target τ = 1",
        "configurational, 95 % interval",
    ]
    low, high = axes.get_xlim()
    assert low < 0.8 < 1.2 < high


@pytest.mark.parametrize(
    "make",
    [
        lambda: figures.schedule_figure([1], [0.1], [1.0], [1]),
        lambda: figures.energy_figure([1], [float("nan")], [1], [float("nan")]),
        lambda: figures.traces_figure([1], {"energy": [1.0], "w[0]": [2.0]}, [1]),
        lambda: figures.running_figure({"nll": ([0.5], [0.5])}),
        lambda: figures.running_figure({"accuracy": ([0.5, float("nan")], [0.5, float("nan")]), "nll": ([1], [1])}),
        lambda: figures.nll_figure([1], [0.5], [], []),
        lambda: figures.nll_figure([1], [float("nan")], [1.0], [1], 0.1, [(1, 1), (1, 1)]),
        lambda: figures.reliability_figure([0.0, 1.0], [0.0, 1.0], [0, 1], 0.0),
        lambda: figures.entropy_figure({"data": [0.0]}, 2),
        lambda: figures_samples.weights_figure([1.0], [1.0]),
        lambda: figures_samples.geometry_figure([[0, 0], [0, 0]], [0, 0], [0, 0], [0, 0]),
    ],
)
@pytest.mark.filterwarnings("error", "ignore:.*(deprecated - use|deprecated, use)")  # of pyparsing to Matplotlib 3.8
def test_the_smallest_runs_are_drawn_without_a_warning(make: Callable[[], Any]) -> None:
    draw(make())


@pytest.mark.by_default("4.0-above", "8.0-below")
@pytest.mark.parametrize("place", ["above", "below"])
@pytest.mark.parametrize("width", [4.0, 8.0])
def test_a_legend_of_long_names_stays_within_the_figure(place: str, width: float) -> None:
    figure, (axes,) = canvas(width=width)
    for index in range(12):
        name = f"sampler {index}" + ", from a start at random" * (index % 2)
        axes.plot([0, 400000], [0, 1], label=name)
    if place == "above":
        legend_above(axes, columns=4)
    else:
        legend_below(figure, axes, columns=4)
    draw(figure)
    legend = axes.get_legend() or figure.legends[0]
    box, whole = legend.get_window_extent(), figure.bbox
    assert whole.x0 <= box.x0
    assert box.x1 <= whole.x1
    columns = len({round(text.get_window_extent().x0) for text in legend.get_texts()})
    assert columns == 1 if width < 5 else columns > 1
    assert axes.get_window_extent().width > 0.7 * whole.width


@pytest.mark.parametrize(("returns", "says"), [(True, False), (False, True)])
def test_the_geometry_says_if_a_chain_does_not_return(returns: bool, says: bool) -> None:
    """Independent draws are as far apart as their first and last third; a path along a line is not."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=(60, 2)) + (0 if returns else np.linspace(0, 20, 60)[:, None])
    figure = figures_samples.geometry_figure(points.tolist(), [0.5, 0.3], [0] * 60, [0] * 60)
    assert ("does not return" in figure.axes[0].get_title()) == says


def test_logged_controls_are_not_joined() -> None:
    figure = figures.schedule_figure([1, 50, 100], [0.1, 0.01, 0.1], [0, 1, 0], [40, 90], is_joined=False)
    assert all(line.get_linestyle() == "None" for axes in figure.axes for line in axes.lines)
