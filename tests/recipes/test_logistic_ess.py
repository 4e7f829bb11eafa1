"""The recipe `logistic_ess`: its references against each other and a grid, its ESS against closed forms."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc import SGLD, BayesianModule, Bernoulli, GaussianPrior
from lightning_sgmcmc.diagnostics.draws import autocorrelation
from lightning_sgmcmc.recipes import logistic_ess
from lightning_sgmcmc.recipes.__main__ import main
from lightning_sgmcmc.recipes.logistic_ess import coefficient_ess
from lightning_sgmcmc.recipes.shared.effective_sizes import PAPER, PICTURES
from lightning_sgmcmc.recipes.shared.logistic import LogisticPosterior, full_gradient_reference, importance_reference
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings
from tests.support.paths import DATA_ROOT as ROOT


def posterior(num_data: int = 60, features: int = 3, std: float = 2.0) -> LogisticPosterior:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_data, features)) * np.linspace(0.5, 1.5, features)
    y = rng.random(num_data) < 1 / (1 + np.exp(-x.sum(1)))
    return LogisticPosterior(torch.tensor(x), torch.tensor(y).double(), std)


def ar1(rho: float, draws: int, columns: int) -> Tensor:
    rng = np.random.default_rng(1)
    chain = np.empty((draws, columns))
    chain[0] = rng.normal(size=columns)
    for step in range(1, draws):
        chain[step] = rho * chain[step - 1] + np.sqrt(1 - rho**2) * rng.normal(size=columns)
    return torch.tensor(chain)


def test_the_posterior_is_the_module_s() -> None:
    target = posterior()
    theta = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    potential = target.potential(theta)
    (gradient,) = torch.autograd.grad(potential.sum(), theta)
    torch.testing.assert_close(target.gradient(theta.detach()), gradient)
    net = nn.Linear(3, 1, bias=False).double()
    module = BayesianModule(net, Bernoulli(), GaussianPrior(target.std), num_data=60)
    theirs = []
    for point in theta.detach():
        net.weight.data = point[None]
        theirs.append(module.potential_energy((target.x, target.y)).detach()[0])
    difference = torch.stack(theirs) - potential.detach()
    torch.testing.assert_close(difference, difference[:1].expand(4), msg="they differ by more than a constant")


def test_importance_sampling_agrees_with_a_grid() -> None:
    target = posterior(num_data=15, features=1)
    grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    weights = (-target.potential(grid[:, None])).softmax(0)
    mean = weights @ grid
    std = (weights @ (grid - mean).square()).sqrt()
    reference = importance_reference(target, 100_000, seed=0)
    assert reference.effective is not None
    assert 50_000 < reference.effective < 100_000
    assert reference.mean_error(mean[None]) < 4 / reference.effective**0.5
    assert reference.variance_ratio(std[None]) == pytest.approx(1, abs=0.03)


def test_the_two_references_agree() -> None:
    """Some 4,000 effective draws of the chains: 4 standard errors of their mean are 0.06 posterior deviations."""
    target = posterior()
    chains = full_gradient_reference(target, steps=3_000, seed=0, chains=32)
    check = importance_reference(target, 50_000, seed=0)
    assert check.mean_error(chains.mean) < 0.06
    assert check.variance_ratio(chains.std) == pytest.approx(1, abs=0.07)
    mode, _ = target.laplace
    assert check.mean_error(mode) > 0.1, "the mode would pass as the mean: the test could not fail"


def test_ess_of_an_autoregression() -> None:
    """Of ρ = 0.8 it is n/9, and the average of 20 has a standard error of some 3 %; of ρ < 0 it would exceed n."""
    assert float(coefficient_ess(ar1(0.8, 5_000, 20)).mean()) == pytest.approx(5_000 / 9, rel=0.12)
    assert coefficient_ess(ar1(-0.6, 2_000, 4)).tolist() == [2_000] * 4
    lags = autocorrelation(ar1(0.8, 200_000, 1)[:, 0], 6)
    np.testing.assert_allclose(lags, 0.8 ** np.arange(6), atol=0.03)


def test_sgld_s_ess_is_its_bias() -> None:
    """A step a on a standard normal: ESS n·a/(2-a), variance 2/(2-a) = 1 + ESS/n, as the recipe says."""
    step, draws = 0.5, 5_000
    theta = nn.Parameter(torch.zeros(20, 1))
    sampler = SGLD([theta], lr=step, num_data=1, num_chains=20, seed=0)
    chain = []
    for _ in range(draws):
        theta.grad = theta.detach().clone()
        sampler.step()
        chain.append(theta.detach().flatten().double())
    share = float(coefficient_ess(torch.stack(chain)).mean()) / draws
    assert share == pytest.approx(1 / 3, rel=0.08)
    assert float(torch.stack(chain).var()) == pytest.approx(1 + share, rel=0.04)


@pytest.mark.slow
def test_the_recipe_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = posterior(num_data=120)
    (tmp_path / "uci_classification").mkdir()
    np.savez(tmp_path / "uci_classification" / "heart.npz", x=target.x.numpy(), y=target.y.numpy())
    lr = {"heart": {"SGLD": 1.5, "cSGLD": 3.0, "SGHMC": 0.7, "cSGHMC": 0.7}}
    changed = {"samples": 160, "burn_in": 40, "cycles": 4, "lr": lr, "reference_steps": 300, "proposals": 2000}
    chains = []
    sample_chain = logistic_ess.sample_chain

    def watched(*arguments: object) -> Tensor:
        chains.append(sample_chain(*arguments))  # type: ignore[arg-type]
        return chains[-1]

    monkeypatch.setattr(logistic_ess, "sample_chain", watched)
    out = tmp_path / "out"
    given = [f"--set={name}={json.dumps(value)}" for name, value in changed.items()]
    main(["logistic_ess", "--data-root", str(tmp_path), "--out", str(out), "--executor", "here", "--repeats=2", *given])
    rows = json.loads((out / "results.json").read_text())["rows"]
    found = {(row["method"], row["metric"]): row for row in rows}
    for method in ("SGLD", "cSGLD", "SGHMC", "cSGHMC"):
        row = found[f"Heart {method}", "median ESS"]
        assert row["paper"] == PAPER["heart"][method]
        assert 0 < row["value"] <= 160
        assert row["error"] is not None
        assert (f"Heart {method}", "error of mean (posterior std)") in found
        assert (f"Heart {method}", "variance / reference's") in found
        assert (f"Heart {method}, 4·lr", "median ESS") in found
        reading = found.get((f"Heart {method}, all data", "median ESS"))
        assert (reading is None) == method.startswith("c")
        assert reading is None or len(reading["values"]) == 10
    assert found["Heart SGLD, falling", "median ESS"]["value"] < found["Heart SGLD", "median ESS"]["value"]
    assert {path.stem for path in out.glob("*.png")} == set(PICTURES)
    assert {tuple(chain.shape) for chain in chains} == {(160, 4)}, "an intercept and three columns"
    assert len({float(chain.sum()) for chain in chains}) == len(chains), "two repeats drew the same chain"


def test_the_settings_fit_together() -> None:
    settings = read_settings(logistic_ess.Settings, Options(Path(), Path()))
    assert settings.lr.keys() == PAPER.keys()
    assert all(settings.lr[t].keys() == PAPER[t].keys() == logistic_ess.SAMPLERS.keys() for t in PAPER)
    both = settings.burn_in + settings.samples
    assert both % settings.cycles == 0, "cycles of unequal samples"
    assert settings.burn_in * settings.cycles % both == 0


@pytest.mark.skipif(not (ROOT / "uci_classification").is_dir(), reason="no data files: set SGMCMC_DATA_ROOT")
@pytest.mark.parametrize(("table", "shape"), [("australian", (690, 15)), ("german", (1000, 25)), ("heart", (270, 14))])
def test_the_tables_are_the_paper_s(table: str, shape: tuple[int, int]) -> None:
    settings = read_settings(logistic_ess.Settings, Options(Path(), ROOT))
    data, target = logistic_ess.load(table, settings, ROOT)
    assert tuple(target.x.shape) == shape
    assert len(data.train_dataloader()) == -(-shape[0] // settings.batch)
    assert importance_reference(target, 2_000, seed=0).effective > 500  # type: ignore[operator]
