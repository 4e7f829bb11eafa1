"""A learned noise is not pinned by the scale of the weights' prior."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    BayesianModule,
    Gaussian,
    GaussianPrior,
    HierarchicalPrior,
    NegativeBinomial,
    Ordinal,
    StudentT,
    bayesianize,
)
from lightning_sgmcmc.callbacks import SamplingSchedule
from tests.support.trainers import quiet_trainer


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


LEARNED: dict[str, Any] = {
    "Gaussian": lambda: Gaussian(0.1, learned=True),
    "StudentT": lambda: StudentT(4.0, 0.1, learned=True),
    "NegativeBinomial": lambda: NegativeBinomial(50.0, learned=True),
    "Ordinal": lambda: Ordinal(3),
}


@pytest.mark.parametrize("what", ["last_layer", "all", ["*.weight"]])
@pytest.mark.parametrize("prior", [None, 0.05])
@pytest.mark.parametrize("name", LEARNED)
def test_bayesianize_gives_them_a_scale_of_their_own(name: str, prior: float | None, what: Any) -> None:
    """log p falls by (1/3)²/2 where such a parameter is one unit from where it starts."""
    module = bayesianize(net(), what, LEARNED[name](), prior=prior, lr=1e-12)
    targets = torch.randint(0, 3, (8,)) if name in ("Ordinal", "NegativeBinomial") else torch.zeros(8)
    loader = DataLoader(TensorDataset(torch.randn(8, 2), targets if name == "Ordinal" else targets[:, None]), 8)
    quiet_trainer(max_epochs=1, callbacks=[SamplingSchedule(every_n_epochs=1)]).fit(module, loader)
    with torch.no_grad():
        before = module.log_prior()
        for parameter in module.likelihood.parameters():  # type: ignore[union-attr]
            parameter += 1.0
        moved = sum(p.numel() for p in module.likelihood.parameters())  # type: ignore[union-attr]
        assert float(before - module.log_prior()) == pytest.approx(moved / 18, rel=2e-3)


def said(module: BayesianModule) -> list[str]:
    loader = DataLoader(TensorDataset(torch.randn(8, 2), torch.randn(8, 1)), 8)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        quiet_trainer(max_epochs=1, callbacks=[SamplingSchedule(every_n_epochs=1)]).fit(module, loader)
    return [str(w.message) for w in found if "standard deviations of its prior" in str(w.message)]


@pytest.mark.parametrize(
    ("prior", "std", "warns"),
    [
        (GaussianPrior(0.05), 0.1, True),
        (GaussianPrior(0.05), 1.0, False),
        (GaussianPrior(), 0.1, False),
        (GaussianPrior(), 0.01, True),
        (GaussianPrior({"likelihood.*": 3.0, "*": 0.05}), 0.1, False),
        (GaussianPrior(0.05, center="start"), 0.1, False),
        (GaussianPrior(0.05, center="start", centered=["net.*"]), 0.1, True),
        (HierarchicalPrior(), 0.1, False),
    ],
)
@pytest.mark.parametrize("chains", [1, 2])
def test_a_noise_far_from_its_prior_is_said(prior: Any, std: float, warns: bool, chains: int) -> None:
    module = BayesianModule(net(), Gaussian(std, learned=True), prior, lr=1e-9, num_chains=chains)
    found = said(module)
    assert len(found) == warns
    if warns:
        assert f"'likelihood.log_std' starts at {abs(math.log(std)):.3g} in size" in found[0]
        assert "GaussianPrior({'likelihood.*': 3.0, '*': …})" in found[0]
