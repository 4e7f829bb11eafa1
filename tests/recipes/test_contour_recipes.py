"""The contour recipes' machinery on small settings; their figures are the recipes' affair."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_sgmcmc.cli import commands as cli
from lightning_sgmcmc.recipes import __main__ as runner
from lightning_sgmcmc.recipes import gaussian_mixture, nine_modes, twenty_five_gaussians, uci_regression
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings

ROOT = Path(os.environ.get("SGMCMC_DATA_ROOT", "no data here"))


@pytest.mark.slow
def test_gaussian_mixture(tmp_path: Path) -> None:
    changed = {"steps": 1500, "shared_steps": 500, "sharing": 20}
    rows = gaussian_mixture.run(Options(tmp_path, ROOT, repeats=4, executor="here", changed=changed))
    assert {row.method for row in rows} >= {"SGLD", "CSGLD", "CSGLD, bin weights", "KSGLD", "KSGLD asymmetric"}
    variation = [row.value for row in rows if "TV" in row.metric]
    assert len(variation) == 12
    assert all(0 < value < 1 for value in variation)
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {f"{n}.png" for n in ("energies", "error", "error_asymmetric", "flattened", "multiplier", "path")}


@pytest.mark.slow
def test_nine_modes(tmp_path: Path) -> None:
    rows = nine_modes.run(Options(tmp_path, ROOT, repeats=2, executor="here", changed={"steps": 6000}))
    assert [row.method for row in rows[::3]] == list(nine_modes.METHODS)
    assert all(row.value > 0 for row in rows if "KL" in row.metric)
    assert {path.name for path in tmp_path.glob("*.png")} == {"densities.png", "trajectories.png"}


@pytest.mark.slow
def test_twenty_five_gaussians(tmp_path: Path) -> None:
    options = Options(tmp_path, ROOT, methods=("SGLD", "cSGLD"), repeats=1, executor="here", changed={"steps": 1500})
    rows = twenty_five_gaussians.run(options)
    assert [(row.method, row.paper) for row in rows][2:] == [("4 x SGLD", 18.0), ("4 x cSGLD", 24.4)]
    assert rows[3].value >= rows[1].value
    assert (tmp_path / "densities.png").exists()


@pytest.mark.parametrize("method", ["SGD", "CSGHMC"])
def test_uci_regression_learns_a_synthetic_table(tmp_path: Path, method: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3))
    y = 5 + 8 * x[:, 0] + 0.3 * rng.normal(size=200)
    test = np.stack([rng.permutation(200)[:20] for _ in range(20)]).astype(np.int32)
    (tmp_path / "uci_regression").mkdir()
    np.savez(tmp_path / "uci_regression" / "energy.npz", x=x, y=y, test_indices=test)
    options = Options(tmp_path, tmp_path, changed={"epochs": "60"})
    settings = read_settings(uci_regression.Settings, options)
    rmse, worth = uci_regression.one("Energy", method, 0, False, settings, options)
    assert rmse < 2.5 < y.std()
    assert 1 <= worth <= 50.001


def test_a_step_at_which_networks_diverge_has_a_row(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "uci_regression").mkdir()
    x = rng.normal(size=(100, 3))
    test = np.stack([rng.permutation(100)[:10] for _ in range(20)])
    np.savez(tmp_path / "uci_regression" / "energy.npz", x=x, y=50 * x[:, 0], test_indices=test)
    options = Options(tmp_path, tmp_path, changed={"epochs": "60", "epsilon": "1.0"})
    settings = read_settings(uci_regression.Settings, options)
    rmse, _ = uci_regression.one("Energy", "SGHMC", 0, True, settings, options)
    assert rmse == math.inf
    row = uci_regression.literal_row("SGHMC", "Energy", [rmse, 0.7], settings)
    assert (row.metric, row.value) == ("Energy: splits of 2 that diverged", 1)
    assert uci_regression.literal_row("SGHMC", "Yacht", [0.6, 0.8], settings).paper == 0.66


def test_uci_regression_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        runner.main(["uci_regression", "--data-root", str(tmp_path), "--out", str(tmp_path / "out")])
    assert end.value.code == 2
    assert "energy" in capsys.readouterr().err


@pytest.mark.slow
def test_the_digits_configuration_runs(tmp_path: Path) -> None:
    """The configuration, shortened, from the command line: it learns its range, visits bins and weighs its samples."""
    import yaml

    from lightning_sgmcmc import ContourRules, Posterior

    configuration = yaml.safe_load((runner.FOLDER / "digits_csghmc_contour.yaml").read_text())
    callbacks = {part["class_path"].rpartition(".")[2]: part for part in configuration["trainer"]["callbacks"]}
    callbacks["SamplingSchedule"]["init_args"] = {"burn_in_epochs": 20, "every_n_epochs": 2}
    callbacks["ContourGradient"]["init_args"]["warm_up_steps"] = 100
    configuration["trainer"] |= {"max_epochs": 30, "enable_progress_bar": False}
    configuration["trainer"]["logger"]["init_args"]["save_dir"] = str(tmp_path)
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(configuration))
    cli.main(["fit", f"--config={tmp_path / 'short.yaml'}"])
    (store,) = tmp_path.rglob("samples")
    posterior = Posterior.load(store)
    assert len(posterior) == 5
    assert posterior.contour is not None
    given = ContourRules(zeta=2000, weighting="bin", weight_exponent=0.0025, max_multiplier=5)
    assert posterior.contour.rules == given
    assert int((posterior.contour.state.visits > 0).sum()) > 5
    assert posterior.weight_efficiency * len(posterior) < 5
    assert {"contour.png", "multiplier.png"} <= {path.name for path in store.parent.glob("*.png")}


def test_networks_of_the_recipes() -> None:
    from lightning_sgmcmc.recipes.shared.resnet import resnet, resnet20

    network = resnet20(100)
    assert sum(p.numel() for p in network.parameters()) == 275_572
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 100)
    assert resnet(1, 8, 10)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert math.isfinite(float(network(torch.randn(2, 3, 32, 32)).sum()))
