"""The recipe of Bayesian networks on MNIST, on small settings; its figures are the recipe's affair."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc.batches.orders import BatchOrder, OrderSpec
from lightning_sgmcmc.datamodules import Split
from lightning_sgmcmc.recipes import mnist_bnn
from lightning_sgmcmc.recipes.mnist_bnn import Case
from lightning_sgmcmc.recipes.shared.error_curves import Curve
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.samplers import SGLD, UnderdampedLangevin, pSGLD

ROOT = Path(os.environ.get("SGMCMC_DATA_ROOT", "no data here"))
needs_data = pytest.mark.skipif(not (ROOT / "mnist").is_dir(), reason="no data files: set SGMCMC_DATA_ROOT")
FULL, QUICK = (read_settings(mnist_bnn.Settings, Options(Path(), Path(), full)) for full in (True, False))
TINY = replace(QUICK, images=1000, epochs=2, epochs_cnn=2, repeats=1, networks=("MLP",), cells=(), samples=5)


def in_turn(function: Any, jobs: Any, options: Options, *shared: Any, **how: Any) -> dict[Any, Any]:
    """Run the jobs in this process, which has imported all that they need."""
    return {job: function(*job, *shared, options) for job in jobs}


@pytest.fixture
def few_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave 300 test images."""
    load = mnist_bnn.FirstImages.load

    def cut(data: Any) -> tuple[Split, Split, Split]:
        train, none, test = load(data)
        return train, none, Split(test.inputs[:300], test.targets[:300])

    monkeypatch.setattr(mnist_bnn.FirstImages, "load", cut)


@needs_data
@pytest.mark.usefixtures("few_tests")
def test_mnist_bnn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method costs as many gradients; they learn; rows and picture are there."""
    monkeypatch.setattr(mnist_bnn, "read_settings", lambda *given: TINY)
    monkeypatch.setattr(mnist_bnn, "run_jobs", in_turn)
    rows = mnist_bnn.run(Options(tmp_path, ROOT))
    values = {(row.method, row.metric): row.value for row in rows}
    for method in mnist_bnn.STEPS:
        assert values[method, "MLP: epochs"] == 2
        assert 5 < values[method, "MLP: test error, %"] < 85
        assert 5 < values[method, "MLP: test error of single samples, %"] < 85
    errors = {row.method: row for row in rows if row.metric == "MLP: test error, %"}
    assert errors["EWSG"].paper == 1.793
    assert errors["EWSG - SGHMC"].paper == -0.04
    assert errors["EWSG - SGHMC"].value == pytest.approx(errors["EWSG"].value - errors["SGHMC"].value)
    assert errors["SGHMC, EWSG's step"].paper is None
    assert (tmp_path / "learning_curves_MLP.png").exists()


@needs_data
@pytest.mark.usefixtures("few_tests")
def test_convolutional_networks_in_two_chains(tmp_path: Path) -> None:
    """As a GPU makes the repeats."""
    setting = replace(TINY, images=200, epochs=2, networks=("CNN",), maps=(4, 8), hidden=20)
    options, clusters = Options(tmp_path, ROOT), torch.arange(200) % 10
    for case in (Case("CNN", "EWSG", 4e-3, candidates=2, samples=1), Case("CNN", "CP-SGHMC", 2e-3, samples=2)):
        found = mnist_bnn.one(case, 0, 2, clusters, setting, options)
        assert len(found) == 2
        assert found[0] != found[1]
        for curve in found:
            assert [place for place, _ in curve.burn_in] == [1]
            assert curve.average[-1][0] == 2
            assert len(curve.average) == len(curve.single) == case.samples


@needs_data
def test_batches_of_the_clustered_method_are_stratified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """... and the others' are plain."""
    seen: list[Any] = []

    def fit(trainer: pl.Trainer, module: Any, datamodule: Any, **_: Any) -> None:
        seen.append(datamodule.train_dataloader().order)

    monkeypatch.setattr(pl.Trainer, "fit", fit)
    clusters = torch.arange(1000) % 10
    for method in ("CP-SGHMC", "SGHMC"):
        mnist_bnn.one(Case("MLP", method, 2e-3, samples=5), 0, 1, clusters, TINY, Options(tmp_path, ROOT))
    batch = seen[0](OrderSpec(1000, 100, seed=0)).indices(3)
    assert clusters[batch].bincount().tolist() == [10] * 10
    assert seen[1] is BatchOrder
    assert mnist_bnn.clusters_of(TINY, Options(tmp_path, ROOT)).shape == (1000,)


def test_full_is_built() -> None:
    cases = mnist_bnn.cases(FULL)
    assert len(set(cases)) == len(cases) == 2 * 6 + 9 + 7  # batches of 1,000 are SGHMC's in three cells
    assert [sum(p.numel() for p in mnist_bnn.network_of(name, FULL).parameters()) for name in ("MLP", "CNN")] == [
        784 * 100 + 100 + 1010,
        32 * 26 + 64 * 801 + 200 * 1025 + 200 * 201 + 2010,
    ]
    assert mnist_bnn.network_of("CNN", FULL)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    for case in cases:
        schedule: Any = mnist_bnn.callbacks_of(case, FULL)[0]
        steps = 200 * math.ceil(60_000 / case.batch / case.candidates)
        assert schedule.burn_in_steps >= steps / 2
        assert schedule.burn_in_steps + case.samples * schedule.every_n_steps == steps
        assert case.batch * case.candidates <= 5000
        assert len(mnist_bnn.callbacks_of(case, FULL)) == (2 if case.method == "EWSG" else 1)
    assert dict.fromkeys(FULL.cells).keys() == mnist_bnn.PAPER_BATCHES.keys()
    assert Case("MLP", "EWSG", 0.01, 500, 2, 10) in cases
    assert Case("MLP", "SGHMC", 0.01, 1000, 1, 10) in cases


@pytest.mark.parametrize("setting", [FULL, TINY])
def test_step_sizes_are_the_papers(setting: mnist_bnn.Settings) -> None:
    """One step of each rule on parameters in a known state, against the paper's equations."""

    def sampler(method: str, step: float, network: str = "MLP") -> Any:
        build, lr = mnist_bnn.sampler_of(Case(network, method, setting.coarser * step), setting)
        parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        made = build([parameter], lr=lr, num_data=setting.images, temperature=0.0)
        return made, parameter

    gradient, number = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64), setting.images  # of the mean potential
    made, parameter = sampler("SGLD", 1e-7)
    parameter.grad = gradient.clone()
    made.step()
    assert isinstance(made, SGLD)
    torch.testing.assert_close(parameter.data, -1e-7 * setting.coarser * 60_000 * gradient)

    made, parameter = sampler("pSGLD", 1e-4)  # V of the sum's gradients, and the sum's drift
    parameter.grad = gradient.clone()
    made.step()
    assert isinstance(made, pSGLD)
    full = number * gradient
    expected = -1e-4 * setting.coarser * full / (1e-5 + (0.01 * full.square()).sqrt())
    torch.testing.assert_close(parameter.data, expected)

    for network, friction in (("MLP", 0.1), ("CNN", 1.0)):
        made, parameter = sampler("SGHMC", 2e-3, network)  # of the mean potential: temperature 1/N
        assert isinstance(made, UnderdampedLangevin)
        step, momentum, place = 2e-3 * setting.coarser, torch.zeros_like(gradient), torch.zeros_like(gradient)
        for _ in range(4):
            slope = gradient + place  # a mean potential that is not flat
            parameter.grad = gradient + parameter.data
            made.step()
            place, momentum = place + step * momentum, momentum - step * (slope + friction * momentum)
        torch.testing.assert_close(parameter.data, place)


def test_full_report(tmp_path: Path) -> None:
    """The table of b×(M+1) finds its runs; means and deviations over repeats."""
    curves, places = {}, {}
    for index, case in enumerate(mnist_bnn.cases(FULL)):
        places[case] = index
        errors = (index + 1.0, index + 3.0)
        curves[case] = [Curve([(1.0, 9.0)], [(2.0, 5.0), (3.0, error)], [error, error + 2]) for error in errors]
    rows = mnist_bnn.report(curves, FULL, Options(tmp_path, ROOT, full=True))
    by_name = {(row.method, row.metric): row for row in rows}
    assert len(by_name) == len(rows)
    first = by_name["SGLD", "MLP: test error, %"]
    assert (first.value, first.error, first.paper) == (2.0, pytest.approx(1.0), 1.976)
    assert by_name["SGLD", "MLP: its standard deviation over runs"].value == pytest.approx(2**0.5)
    assert by_name["SGLD", "CNN: its standard deviation over runs"].paper == 0.060
    assert by_name["EWSG", "CNN: test error, %"].paper == 0.753
    assert by_name["SGLD", "MLP: test error of single samples, %"].value == 3.0
    for batch, candidates in mnist_bnn.PAPER_BATCHES:
        metric = f"MLP: test error, b = {batch}, M+1 = {candidates}, %"
        ours = [by_name[method, metric].value for method in ("EWSG", "SGHMC")]
        assert ours == [places[case] + 2 for case in mnist_bnn.batch_cases(batch, candidates, FULL)]
    assert by_name["SGHMC", "MLP: test error, b = 500, M+1 = 10, %"].paper == 2.37
    assert {path.name for path in tmp_path.glob("*.png")} == {"learning_curves_MLP.png", "learning_curves_CNN.png"}
