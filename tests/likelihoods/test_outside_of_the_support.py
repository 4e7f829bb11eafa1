"""Targets that a likelihood has no density for: each door says so, with the value and what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Posterior
from lightning_sgmcmc.callbacks import AutoSampling, SampleCollector, recommended
from lightning_sgmcmc.likelihoods import (
    Bernoulli,
    Categorical,
    Censored,
    Gaussian,
    LogNormal,
    MultiLabelBernoulli,
    Ordinal,
    Poisson,
    TokenCategorical,
    Weibull,
    right_censored,
)
from tests.support.trainers import quiet_trainer

GENERATOR = torch.Generator().manual_seed(0)
COUNT, BATCH, PLACE = 120, 10, 25
"""The bad target is in the third batch, which a fit does not look at."""
X = torch.randn(COUNT, 3, generator=GENERATOR)


def labels(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, (COUNT, *shape), generator=GENERATOR)


class Tokens(nn.Linear):
    """Logits of three classes for each of four tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(1, (4, 3))


POSITIVE = torch.rand(COUNT, generator=GENERATOR) + 0.1
CASES: dict[str, tuple[Callable[[], Any], int, Tensor, float, str]] = {
    "Categorical": (Categorical, 3, labels(3), 5, "labels from 0 to 5 for 3 logits"),
    "negative": (Categorical, 3, labels(3), -1, "labels from -1 to 2 for 3 logits"),
    "Ordinal": (lambda: Ordinal(4), 1, labels(4), 7, "to 7 for num_classes=4"),
    "Bernoulli": (Bernoulli, 1, labels(2), 2, "targets must be 0 or 1, got 2"),
    "MultiLabelBernoulli": (MultiLabelBernoulli, 2, labels(2, 2), 3, "targets must be 0 or 1, got 3"),
    "TokenCategorical": (TokenCategorical, 12, labels(3, 4), 9, "labels from 0 to 9 for 3 classes"),
    "Poisson": (Poisson, 1, labels(4).float(), -2, "must be counts .* got -2"),
    "Weibull": (Weibull, 1, POSITIVE, 0, "support, .* got 0"),
    "LogNormal": (LogNormal, 1, POSITIVE, -1, "support, .* got -1"),
    "Censored": (lambda: Censored(Weibull()), 1, right_censored(POSITIVE, torch.ones(COUNT)), -1, "support"),
    "Gaussian": (Gaussian, 1, X[:, 0], float("inf"), "infinite"),
}


def with_fault(name: str) -> Tensor:
    target, bad = CASES[name][2].clone(), CASES[name][3]
    target[PLACE] = bad
    return target


def loader(target: Tensor) -> Any:
    return DataLoader(TensorDataset(X, target), BATCH)


def fit(name: str, train: Tensor, val: Tensor, callbacks: list[pl.Callback] | None = None) -> BayesianModule:
    make, outputs, *_ = CASES[name]
    torch.manual_seed(0)
    net = Tokens(3, outputs) if name == "TokenCategorical" else nn.Sequential(nn.Linear(3, outputs))
    module = BayesianModule(net, make(), seed=0)
    used = callbacks or [AutoSampling(num_draws=8), SampleCollector(in_memory=True)]
    trainer = quiet_trainer(max_epochs=4, callbacks=used, num_sanity_val_steps=0)
    trainer.fit(module, loader(train), loader(val))
    return module


@pytest.mark.parametrize("name", CASES)
def test_data_for_training(name: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=rf"{CASES[name][4]}|NaN or infinite numbers"):
        fit(name, with_fault(name), CASES[name][2])


@pytest.mark.parametrize("name", CASES)
def test_data_for_validation(name: str) -> None:
    with pytest.raises(ValueError, match=CASES[name][4]):
        fit(name, CASES[name][2], with_fault(name))


def test_data_for_validation_of_the_usual_callbacks(tmp_path: Any) -> None:
    used = recommended(tmp_path, AutoSampling(num_draws=8))
    with pytest.raises(ValueError, match="labels from 0 to 5"):
        fit("Categorical", CASES["Categorical"][2], with_fault("Categorical"), used)


@pytest.mark.parametrize("name", CASES)
def test_data_that_samples_are_evaluated_on(name: str) -> None:
    """Before, labels ended in torch's IndexError, and numbers in an infinite NLL, or a calibration by it."""
    good, found = CASES[name][2], fit(name, CASES[name][2], CASES[name][2]).posterior
    assert isinstance(found, Posterior)
    posterior: Any = found
    posterior.evaluate(loader(good))
    doors: dict[str, Callable[[Any], Any]] = {
        "evaluate": posterior.evaluate,
        "log_likelihood": posterior.log_likelihood,
        "joint_nll": posterior.joint_nll,
        "compress": lambda data: posterior.compress(3, data),
    }
    has_bounds = name == "Censored"
    if not has_bounds:
        doors["calibrate"] = posterior.calibrate if name != "Poisson" else posterior.conformal
    if not has_bounds and name not in ("MultiLabelBernoulli", "TokenCategorical"):
        doors["conformal"] = posterior.conformal
    for call in doors.values():
        with pytest.raises(ValueError, match=rf"batch 2 of the data to evaluate: .*{CASES[name][4]}"):
            call(loader(with_fault(name)))


def test_a_fit_in_compiled_or_listed_steps_says_which_label() -> None:
    """Steps that are made many at once come after the first ones; the 60th batch is seen in such a step alone."""
    x, target = torch.randn(2000, 3, generator=GENERATOR), torch.randint(0, 3, (2000,), generator=GENERATOR)
    target[1190] = 3
    module = BayesianModule(nn.Linear(3, 3), Categorical(), lr=1e-3, seed=0)
    with pytest.raises(ValueError, match="labels from 0 to 3 for 3 logits"):
        quiet_trainer(max_epochs=2).fit(module, DataLoader(TensorDataset(x, target), 20))
