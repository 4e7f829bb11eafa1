"""The machinery of the recipes on EWSG's Gaussian and logistic examples; their figures are the recipes' affair."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_sgmcmc.recipes import ewsg_gaussian, ewsg_vr_logistic
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.simulation.finite_sums import GaussianSum


@pytest.mark.slow
def test_ewsg_gaussian(tmp_path: Path) -> None:
    changed = {
        "times": [0.02, 0.04],
        "h_of_times": 0.01,
        "small_steps": [0.01, 0.02],
        "time_of_small": 0.1,
        "large_steps": [0.02, 0.04],
        "time_of_large": 0.2,
        "scaling_chains": {"T": 9, "small h": 9, "large h": 9},
        "passes": 3,
        "marks": [1, 3],
        "chains": 50,
    }
    rows = ewsg_gaussian.run(Options(tmp_path, tmp_path, repeats=2, executor="here", changed=changed))
    values = {(row.method, row.metric): row.value for row in rows}
    for method in ewsg_gaussian.METHODS:
        assert values[method, "KL(target‖samples) at 3 passes"] > 0
    assert {row.method for row in rows} >= {"EWSG less SGHMC", "M = 9 less M = 1", "EWSG-VR, h=0.05"}
    difference = values["EWSG", "KL(samples‖target) at 3 passes"] - values["SGLD", "KL(samples‖target) at 3 passes"]
    assert values["EWSG less SGLD", "KL(samples‖target), by draw of c"] == pytest.approx(difference)
    assert {path.name for path in tmp_path.glob("*.png")} == {"divergence.png", "scaling.png"}


def test_divergences_of_a_gaussian_are_torchs() -> None:
    target = GaussianSum(torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    places = torch.randn(500, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.3 + 0.2
    truth = torch.distributions.MultivariateNormal(target.mean, target.covariance)
    fitted = torch.distributions.MultivariateNormal(places.mean(0), torch.cov(places.T))
    expected = [float(torch.distributions.kl_divergence(*pair)) for pair in ((truth, fitted), (fitted, truth))]
    assert ewsg_gaussian.divergences(places, target) == pytest.approx(expected)


def test_slopes_are_the_powers_of_power_laws() -> None:
    x = (1.0, 2.0, 4.0)
    errors = np.outer([0.5, 1.0, 3.0], np.array(x) ** -1.5)
    assert ewsg_gaussian.slope(x, errors) == pytest.approx((-1.5, 0))
    bent = ewsg_gaussian.slope(x, errors * np.array([[1, 1, 1], [1, 2, 1], [1, 1, 3]]))
    assert bent is not None
    assert bent[1] > 0.1
    assert ewsg_gaussian.slope(x, errors - 5) is None


def write_table(root: Path, name: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3)) * [1, 2, 0.5] + 3
    y = (x[:, 0] - 3 + rng.normal(size=80) > 0).astype(np.int8)
    (root / "uci_classification").mkdir(exist_ok=True)
    np.savez(root / "uci_classification" / f"{name}.npz", x=x, y=y)


@pytest.mark.slow
def test_ewsg_vr_logistic(tmp_path: Path) -> None:
    for table in ("pima", "parkinsons"):
        write_table(tmp_path, table)
    changed = {"passes": {"pima": 4, "parkinsons": 4}, "chains": 5, "full_steps": 20, "limits": [0.5]}
    rows = ewsg_vr_logistic.run(Options(tmp_path, tmp_path, repeats=2, executor="here", changed=changed))
    values = {(row.method, row.metric): row.value for row in rows}
    assert all(math.isfinite(value) for value in values.values())
    assert values["pima, h·Γ=0.5: EWSG", "mean of test log likelihood"] < 0
    distances = [
        values[f"pima, h·Γ=0.5: {name}", "distance of the mean to the reference"] for name in ("EWSG-VR", "EWSG")
    ]
    less = values["pima, h·Γ=0.5: EWSG-VR less EWSG", "distance of the mean to the reference"]
    assert less == pytest.approx(distances[0] - distances[1])
    assert (tmp_path / "log_likelihood_0.5.png").exists()


def test_step_and_laplace_draws_are_what_they_say(tmp_path: Path) -> None:
    """h·Γ has the asked eigenvalue at θ = 0, against all data's gradients; the draws have the mode's mean."""
    write_table(tmp_path, "pima")
    options = Options(tmp_path, tmp_path)
    settings = read_settings(ewsg_vr_logistic.Settings, options)
    problem = ewsg_vr_logistic.Problem.load("pima", 0, settings, options)
    posterior = problem.posterior
    h = problem.step(0.4, 10)
    every = posterior.batch_gradients(
        torch.zeros(1, posterior.dimension).double(), torch.arange(posterior.num_data)[None, :, None]
    )[0]
    friction = 10 * torch.eye(posterior.dimension) + h * torch.cov(every.T, correction=0) / 2
    assert float(torch.linalg.eigvalsh(h * friction)[-1]) == pytest.approx(0.4, rel=1e-6)
    mode = problem.laplace_draws(40_000, 0).mean(0)
    assert float(posterior.gradient(mode[None]).norm()) < 0.05 * float(posterior.gradient(mode[None] + 1).norm())
