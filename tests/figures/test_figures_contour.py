"""The pictures of contours and targets draw what they are given, whatever the number of bins."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_sgmcmc import SGLD, BayesianModule, Categorical, ContourRules
from lightning_sgmcmc.callbacks import ContourGradient, PosteriorDashboard, SamplingSchedule
from lightning_sgmcmc.figures.run import energy_histogram_figure, multiplier_figure
from lightning_sgmcmc.recipes.shared.figures import (
    densities_figure,
    errors_figure,
    path_figure,
    plane_figure,
    trajectories_figure,
)
from tests.support.problems import Data
from tests.support.trainers import quiet_trainer


@pytest.mark.parametrize("bins", [10, 100_000])
def test_only_visited_bins_are_shown(bins: int) -> None:
    centres = np.arange(bins) * 2.0
    visits = np.zeros(bins)
    visits[3:7] = [1000, 500, 0, 200]
    masses = visits / visits.sum()
    kappa = np.full(bins, -5.0)
    kappa[3:7] = [1.0, -0.5, 9.0, 0.2]
    histogram = energy_histogram_figure(centres.tolist(), visits.tolist(), masses.tolist(), masses.tolist())
    low, high = histogram.axes[0].get_xlim()
    assert 0 < low < 6 < 12 < high < 18
    assert len(histogram.axes[0].lines) == 2
    figure = multiplier_figure(centres.tolist(), kappa.tolist(), visits.tolist())
    line = figure.axes[0].lines[-1]
    assert line.get_xdata().tolist() == [6.0, 8.0, 12.0]
    assert line.get_ydata().tolist() == [1.0, -0.5, 0.2]
    bouncy = figure.axes[0].patches
    assert len(bouncy) == 1
    assert bouncy[0].get_extents().transformed(figure.axes[0].transData.inverted()).x0 == pytest.approx(7.0)


def test_nothing_visited_draws_an_empty_figure() -> None:
    energy_histogram_figure([0.0, 1.0], [0, 0], [0.0, 0.0])
    multiplier_figure([0.0, 1.0], [1.0, 1.0], [0, 0])


def test_pictures_of_targets_can_be_drawn(tmp_path: Path) -> None:
    grid = torch.rand(20, 20)
    path = torch.randn(50, 2).tolist()
    made: dict[str, Any] = {
        "densities": densities_figure([0, 1, 2], [0.1, 0.2, 0.1], {"a": [0, 1, 0]}),
        "errors": errors_figure([1, 10, 100], {"a": [1, 0.1, 0.01], "b": [2, 1, 1]}, "error"),
        "path": path_figure(range(50), np.sin(range(50)).tolist(), np.cos(range(50)).tolist()),
        "plane": plane_figure(grid, {"a": grid, "b": grid}, (-1, 1), [[0, 0]]),
        "trajectories": trajectories_figure(grid, (-1, 1), {"a": path, "b": path}),
    }
    assert [len(figure.axes) for figure in made.values()] == [1, 1, 2, 3, 2]
    for name, figure in made.items():
        figure.savefig(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 3000


def test_the_dashboard_draws_the_contour(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = BayesianModule(net=nn.Linear(5, 3), likelihood=Categorical(), sampler=SGLD, lr=0.1, seed=2)
    callbacks = [
        SamplingSchedule(burn_in_steps=50, every_n_steps=7),
        ContourGradient(ContourRules(0.8), 20, first_edge=45.0, width=3.0),
        PosteriorDashboard(figures=["contour", "weights"]),
    ]
    quiet_trainer(max_epochs=30, callbacks=callbacks, default_root_dir=tmp_path).fit(module, datamodule=Data())
    names = {path.name for path in tmp_path.rglob("*.png")}
    assert {"contour.png", "multiplier.png", "weights.png"} <= names
