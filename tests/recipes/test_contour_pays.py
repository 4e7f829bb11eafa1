"""The recipe `contour_pays` on small settings: its measures, and that every method has the same number of gradients."""

import math
from pathlib import Path

import numpy as np
import pytest

from lightning_sgmcmc.recipes import contour_pays
from lightning_sgmcmc.recipes.contour_pays.settings import Settings
from lightning_sgmcmc.recipes.shared import network_truth as truth
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings


def test_the_distance_of_the_truth_to_itself_is_zero_and_of_a_shift_the_shift() -> None:
    """Weights count as repetitions of a draw do."""
    for name in ("smallest", "classification", "regression"):
        known = truth.truth(name)
        levels, std = known["quantiles"], known["std"]
        equal = np.full(len(levels), 1 / len(levels))
        assert truth.distance(levels, equal, name) < 0.01
        assert truth.distance(levels + 0.7 * std, equal, name) == pytest.approx(0.7, abs=0.01)
    generator = np.random.default_rng(0)
    values, counts = generator.normal(size=(300, 2)), generator.integers(1, 4, 300)
    at = np.linspace(0.1, 0.9, 9)
    repeated = np.quantile(np.repeat(values, counts, 0), at, axis=0)
    assert truth.weighted_quantiles(values, counts / counts.sum(), at) == pytest.approx(repeated, abs=0.05)


@pytest.mark.slow
def test_every_method_gives_its_figures(tmp_path: Path) -> None:
    """All methods on the smallest network and on a short plane, in this process."""
    small = {"networks": "{smallest: {steps: 400, lr: 0.003, warm_start: 40}}", "plane_steps": "4000"}
    settings = read_settings(Settings, Options(tmp_path, tmp_path, changed=small))
    methods = contour_pays.METHODS

    def one(problem: str, method: str, seed: int, repeats: int) -> list[dict[str, float]]:
        return contour_pays.one(problem, method, seed, repeats, settings, Options(tmp_path, tmp_path))

    found = {method: [one("smallest", method, seed, 1)[0] for seed in (0, 1)] for method in methods}
    rows = contour_pays.rows_of("smallest", found)
    rows += contour_pays.rows_of("25 modes", {method: one("25 modes", method, 0, 2) for method in methods})
    names = {row.method for row in rows}
    assert names >= {f"{problem}: {method}" for problem in ("smallest", "25 modes") for method in methods}
    assert "smallest: contour, interacting minus plain" in names
    assert all(math.isfinite(row.value) for row in rows)
