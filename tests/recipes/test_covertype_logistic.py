"""E2's machinery on a small table; its figures are the recipe's affair."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_sgmcmc.recipes import covertype_logistic as recipe
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.simulation.finite_sums import LogisticRegressionSum


def target(rows: int = 400, seed: int = 0) -> LogisticRegressionSum:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 3, generator=generator)
    labels = (torch.rand(rows, generator=generator) < (inputs @ torch.tensor([1.0, -0.5, 0.2])).sigmoid()).long()
    return LogisticRegressionSum(inputs, labels, recipe.PRIOR_VARIANCE)


def test_the_converged_chains_are_of_the_posterior() -> None:
    """100 chains against the Laplace approximation, which is close for 400 data and three coefficients.

    The mean of 100 draws is known to 0.1 posterior deviations; beyond 4.5 such errors lies a chance of 2e-5 for the
    three. The skewness moves it by less than 0.1.
    """
    of = target()
    mode, factor = recipe.laplace(of)
    assert float(of.to(dtype=torch.float64).gradient(mode[None]).abs().max()) < 1e-8
    draws = recipe.converged(of, 100, 1).double()
    white = torch.linalg.solve(factor, (draws - mode).T).T
    assert float(white.mean(0).abs().max()) < 0.55
    assert 0.5 < float(white.var(0).min()) < float(white.var(0).max()) < 1.8


def test_scores() -> None:
    accuracy, level = recipe.scores(torch.tensor([0.9, 0.2, 0.4]).double(), torch.tensor([1, 0, 1]))
    assert accuracy == pytest.approx(200 / 3)
    assert level == pytest.approx(np.log([0.9, 0.8, 0.4]).mean())


def test_the_recipe(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "covertype").mkdir()
    numeric = rng.integers(0, 300, (500, 10)).astype(np.int16)
    kinds = np.where(numeric[:, 0] > 150, 2, 1).astype(np.uint8)
    binary = rng.integers(0, 256, (500, 6)).astype(np.uint8)
    np.savez(tmp_path / "covertype" / "covertype_subset.npz", numeric=numeric, binary=binary, y=kinds)
    changed = {"firefly_chains": 1, "chains": 4}
    rows = recipe.run(Options(tmp_path, tmp_path, repeats=2, executor="here", changed=changed))
    found = {(row.method, row.metric): row for row in rows}
    for label in ("columns × 0.6: ", "columns × 1: "):
        assert found[f"{label}EWSG", "accuracy %"].paper == 75.306
        assert found[f"{label}converged, full gradient", "accuracy %"].value > 85
        assert found[f"{label}FlyMC", "epochs"].value >= 1
        levels = [found[f"{label}{name}", "log likelihood"].value for name in ("EWSG", "SGHMC", "EWSG - SGHMC")]
        assert levels[2] == pytest.approx(levels[0] - levels[1])
    assert {path.stem for path in tmp_path.glob("*.png")} == {"log_likelihood", "log_likelihood_1"}
