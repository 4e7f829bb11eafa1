"""The recipe of MNIST's modes on small settings; its figures are the recipe's affair."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_sgmcmc.recipes import mnist_modes
from lightning_sgmcmc.recipes.shared.figures import energy_walk_figure, weight_paths_figure
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings

ROOT = Path(os.environ.get("SGMCMC_DATA_ROOT", "no data here"))


@pytest.mark.parametrize(
    ("losses", "trips"),
    [
        ([], 0),
        ([0.01, 0.2, 0.01], 0),
        ([0.01, 0.2, 0.5, 0.2, 0.9, 0.1], 0),
        ([0.01, 0.5, 0.02], 1),
        ([0.5, 0.01, 0.1, 0.5, 0.1, 0.5, 0.01, 0.01, 0.4, 0.0], 2),
        ([0.5, 0.01], 0),
    ],
)
def test_round_trips_begin_and_end_low(losses: list[float], trips: int) -> None:
    assert mnist_modes.round_trips(losses, 0.05, 0.25) == trips


def test_settings_are_the_papers() -> None:
    """The full setting to the letter; the quick one has the same energies, temperature and prior for each datum."""
    full, quick = (read_settings(mnist_modes.Settings, Options(Path(), Path(), full)) for full in (True, False))
    assert (full.batch, full.epochs, full.pixels, full.share) == (2500, 500, 28, 1)
    assert full.lr == pytest.approx(1e-6 * 30_596)
    for setting in (full, quick):
        contour = mnist_modes.contour("ICSGLD", setting)
        assert contour.interacting
        assert contour.range.width == pytest.approx(10 * setting.images / 30_596)
        assert (contour.rules.zeta, contour.range.num_bins, contour.include_prior) == (3e4, 100_000, False)
        assert contour.step_size.at(1) == pytest.approx(1 / 101)
        assert contour.step_size.at(6000) == pytest.approx(1 / (6000**0.6 + 100))
        wide = mnist_modes.contour(mnist_modes.WIDE, setting)
        slopes = [c.rules.zeta / (c.range.width or 0) for c in (contour, wide)]
        assert slopes[0] == pytest.approx(slopes[1]), "ζ/Δu is the same"
    shapes = [tuple(p.shape) for p in mnist_modes.network(28).parameters() if p.dim() > 1]
    assert shapes == [(32, 1, 5, 5), (64, 32, 5, 5), (50, 1024), (50, 50), (5, 50)]
    assert mnist_modes.network(28)(torch.zeros(2, 1, 28, 28)).shape == (2, 5)
    assert mnist_modes.network(14)(torch.zeros(2, 1, 14, 14)).shape == (2, 5)


def test_walks_show_every_chain_and_the_bands() -> None:
    rng = np.random.default_rng(0)
    walks = {name: rng.uniform(0.1, 2, (30, 3)) for name in ("SGD", "ICSGLD")}
    figure = energy_walk_figure(walks, (0.2, 1.0), "loss")
    for axes, (name, walk) in zip(figure.axes, walks.items(), strict=True):
        drawn = [np.asarray(line.get_ydata()) for line in axes.get_lines()]
        assert [values.tolist() for values in drawn[:3]] == walk.T.tolist()
        assert [values[0] for values in drawn[3:]] == [0.2, 1.0]
        assert axes.get_title(loc="left") == name


def test_paths_are_coloured_by_one_scale_of_energies() -> None:
    paths = {"SGD": [[0.0, 0.0], [1.0, 0.0]], "SGLD": [[0.0, 0.0], [0.0, 2.0], [0.0, 3.0]]}
    figure = weight_paths_figure(paths, {"SGD": [1.0, 0.1], "SGLD": [1.0, 5.0, 0.5]}, [0.7, 0.2], "loss")
    pictures = figure.axes[:2]
    assert [np.asarray(axes.collections[0].get_offsets()).tolist() for axes in pictures] == list(paths.values())
    assert {axes.collections[0].get_clim() for axes in pictures} == {(0.1, 5.0)}
    assert pictures[1].get_lines()[2].get_xydata().tolist() == [[0.0, 3.0]]


@pytest.mark.skipif(not (ROOT / "mnist").is_dir(), reason="needs the data files")
def test_all_methods_run_from_one_start(tmp_path: Path) -> None:
    setting = mnist_modes.Settings(200, 14, 100, epochs=4, chains=2, lr=0.1, snapshots=2)
    options = Options(tmp_path, ROOT)
    walks = {method: mnist_modes.one(method, setting, options) for method in mnist_modes.METHODS}
    for walk in walks.values():
        assert walk.losses.shape == walk.multipliers.shape == (8, 2)
        assert walk.sketches.shape[:2] == (3, 2)
        assert torch.equal(walk.sketches[0], walks["SGD"].sketches[0])
        assert torch.equal(walk.losses[0], walks["SGD"].losses[0])
    assert not torch.equal(walks["SGLD"].sketches[-1], walks["SGD"].sketches[-1])
    rows = mnist_modes.report(walks, options)
    assert {row.method for row in rows} == set(mnist_modes.METHODS)
    assert all(0 <= row.value <= 100 for row in rows if "accuracy" in row.metric)
    assert {path.name for path in tmp_path.glob("*.png")} == {"losses.png", "paths.png"}
