"""The recipes of the switching diffusion on small settings; their figures are the recipes' affair."""

import math
import os
from pathlib import Path

import pytest
import torch

from lightning_sgmcmc.recipes import subsampling_error, switching_diffusion
from lightning_sgmcmc.recipes.shared import switching
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row
from lightning_sgmcmc.recipes.shared.settings import read_settings

ROOT = Path(os.environ.get("SGMCMC_DATA_ROOT", "no data here"))


def values(rows: list[Row], metric: str) -> list[float]:
    return [row.value for row in rows if row.metric == metric]


@pytest.mark.slow
def test_switching_diffusion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switching_diffusion, "SWITCHING_TIMES", (10.0, 0.1, 0.01))
    changed = {"chains": 2000, "path_points": 101}
    rows = switching_diffusion.run(Options(tmp_path, ROOT, executor="here", changed=changed))
    found = values(rows, "W₁ to N(0, 0.1)")
    assert found == sorted(found, reverse=True)
    assert values(rows, "variance, exact") == pytest.approx([10.954, 2.830, 0.4139], rel=1e-3)
    for row, exact in zip((r for r in rows if r.metric == "mean"), values(rows, "mean, exact"), strict=True):
        assert row.error is not None
        assert abs(row.value - exact) < 4 * row.error
    assert {path.name for path in tmp_path.glob("*.png")} == {"figure_1_1.png", "figure_1_2.png"}


def test_distances_and_their_error() -> None:
    """Of N(0.5, 0.1), which is 0.5 from N(0, 0.1): the error is that of the mean, √(0.1/n)."""
    generator = torch.Generator().manual_seed(0)
    draws = 0.5 + 0.1**0.5 * torch.randn(20_000, generator=generator, dtype=torch.float64)
    value, without = switching.distances(draws)
    error = switching.jackknife_error(without)
    assert error == pytest.approx((0.1 / 20_000) ** 0.5, rel=0.5)  # 20 groups know an error to 16 %
    assert abs(value - 0.5) < 4 * error


def test_slopes_and_their_error() -> None:
    """Errors c·η^0.4 of independent groups with a scatter of 10 %: by least squares over four η the slope's standard
    error is 0.1/√(40·Σ(x-x̄)²)."""
    generator = torch.Generator().manual_seed(1)
    etas = (1.0, 0.1, 0.01, 0.001)
    scatter = 1 + 0.1 * torch.randn(4, 40, generator=generator, dtype=torch.float64)
    errors = [3 * eta**0.4 * row for eta, row in zip(etas, scatter, strict=True)]
    slope, error = subsampling_error.curve_of_means(etas, errors, 40).slope()
    spread = math.log(10) ** 2 * 5
    assert error == pytest.approx(0.1 / (40 * spread) ** 0.5, rel=0.5)
    assert abs(slope - 0.4) < 4 * error
    bent = subsampling_error.curve_of_means(etas, [torch.ones(40), *errors[1:]], 40)
    assert bent.slope(0.1)[0] == pytest.approx(0.4, abs=0.02)
    assert abs(bent.slope()[0] - 0.4) > 0.03


@pytest.mark.skipif(not (ROOT / "uci_classification").is_dir(), reason="needs the data files")
def test_subsampling_error(tmp_path: Path) -> None:
    changed = {"chains": 2000, "pairs": 1000, "logistic_chains": 4, "logistic_time": 0.001}
    changed |= {"logistic_etas": [1.0, 0.1, 0.001], "etas": [10.0, 0.1, 0.01]}
    rows = subsampling_error.run(Options(tmp_path, ROOT, executor="here", changed=changed))
    for method in ("stationary law", "common path, t=0.1", "common path, t=1", "logistic regression, t=0.001"):
        slope, low, high = (
            next(
                r.value for r in rows if r.method == method and r.metric.startswith("slope, all η") and end in r.metric
            )
            for end in ("(paper", ", 2.5 %", ", 97.5 %")
        )
        assert low < slope < high
    assert 0.2 < next(r.value for r in rows if r.method == "common path, t=1" and "(paper" in r.metric) < 0.6
    assert (tmp_path / "errors.png").exists()


@pytest.mark.skipif(not (ROOT / "uci_classification").is_dir(), reason="needs the data files")
def test_chains_of_logistic_regression_share_start_and_noise(tmp_path: Path) -> None:
    """All data in one batch that is held for ever is the full gradient, up to the order of the sum."""
    options = Options(tmp_path, ROOT, changed={"logistic_chains": 2, "logistic_time": 0.001})
    settings = read_settings(subsampling_error.Settings, options)
    full = subsampling_error.logistic_places(None, None, settings, options)
    held = subsampling_error.logistic_places(1.0, None, settings, options)
    torch.testing.assert_close(full, held, atol=2e-5, rtol=0)
    other = subsampling_error.logistic_places(None, None, settings, Options(tmp_path, ROOT, seed=1))
    switched = subsampling_error.logistic_places(1.0, 96, settings, options)
    assert (full - other).norm(dim=1).min() > 0.05
    assert (full - switched).norm(dim=1).min() > 1e-3
    assert (full[0] - full[1]).norm() > 0.05
