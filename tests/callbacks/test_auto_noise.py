"""AutoSampling of noisy targets of every kind: the average predicts better than a guess, and repeats."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Posterior
from lightning_sgmcmc.callbacks import AutoSampling, RunSummary, SampleCollector, recommended
from lightning_sgmcmc.likelihoods import (
    Categorical,
    Censored,
    Gaussian,
    Likelihood,
    LogNormal,
    MultiLabelBernoulli,
    Poisson,
    StudentT,
    Weibull,
    right_censored,
)
from tests.support.comparisons import assert_same
from tests.support.trainers import quiet_trainer

COUNT, TRAIN, COLUMNS = 3_000, 400, 20
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(COUNT, COLUMNS, generator=GENERATOR)
SIGNAL = X[:, 0].abs() + 0.6 * X[:, 1] + 0.4 * X[:, 4] - 0.8
NOISE = torch.randn(COUNT, generator=GENERATOR)
UNIFORM = torch.rand(COUNT, generator=GENERATOR)
TIMES = (1 + 0.5 * SIGNAL).exp() * UNIFORM.log().neg().pow(1 / 1.5)
CHANCES = torch.stack([SIGNAL, SIGNAL, -SIGNAL], 1).sigmoid()
VOTES = torch.distributions.Multinomial(3, logits=2 * CHANCES)
EVENTS = (torch.arange(COUNT) % 3 > 0).float()

torch.manual_seed(0)
CASES: dict[str, tuple[Callable[[], Likelihood], int, Tensor]] = {
    "Gaussian": (lambda: Gaussian(0.5, learned=True), 1, SIGNAL + NOISE),
    "StudentT": (lambda: StudentT(learned=True), 1, SIGNAL + 0.7 * torch.distributions.StudentT(4.0).sample((COUNT,))),
    "Poisson": (Poisson, 1, torch.poisson((0.5 + 0.5 * SIGNAL).exp())),
    "Weibull": (lambda: Weibull(learned=True), 1, TIMES),
    "Censored": (lambda: Censored(Gaussian(learned=True)), 1, torch.stack([SIGNAL + NOISE, SIGNAL + NOISE + 1], 1)),
    "survival": (lambda: Censored(Weibull(learned=True)), 1, right_censored(TIMES, EVENTS)),
    "MultiLabelBernoulli": (MultiLabelBernoulli, 3, torch.bernoulli(CHANCES)),
    "soft labels": (Categorical, 3, VOTES.sample() / 3),
}


def module(name: str) -> BayesianModule:
    make, outputs, _ = CASES[name]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(COLUMNS, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, outputs))
    return BayesianModule(net, make(), seed=0)


def loaders(target: Tensor) -> list[Any]:
    ends = [0, TRAIN, TRAIN + 50, COUNT]
    parts = [slice(*pair) for pair in itertools.pairwise(ends)]
    return [
        DataLoader(TensorDataset(X[part], target[part]), 50, generator=torch.Generator().manual_seed(1), shuffle=i == 0)
        for i, part in enumerate(parts)
    ]


def fit(name: str, *callbacks: Any, epochs: int = 150) -> BayesianModule:
    made, (train, val, _) = module(name), loaders(CASES[name][2])
    quiet_trainer(max_epochs=epochs, callbacks=list(callbacks), check_val_every_n_epoch=epochs).fit(made, train, val)
    return made


@pytest.mark.parametrize("name", CASES)
def test_the_average_predicts_better_than_a_guess(name: str) -> None:
    """Before, numbers, bounds and several labels lost to it, by up to 1.5 nats, and soft labels ended in an error."""
    auto = AutoSampling(num_draws=40)
    posterior: Any = fit(name, auto, SampleCollector(in_memory=True)).posterior
    found = posterior.evaluate(loaders(CASES[name][2])[2])
    assert found.bma["nll"] < found.guessing["nll"], (auto.new_temperatures, auto.chosen)
    if name not in ("MultiLabelBernoulli", "soft labels"):
        assert auto.new_temperatures


def test_the_choice_of_the_temperature_repeats(tmp_path: Path) -> None:
    first, auto = recommended(tmp_path / "first"), AutoSampling(num_draws=10)
    first[0] = auto
    fit("Gaussian", *first, epochs=30)
    written = yaml.safe_load(next(tmp_path.rglob("auto.yaml")).read_text())["init_args"]
    assert written["temperature"] == pytest.approx(45 / 400, abs=1e-3)
    assert written["temperatures"] == [[0, auto.temperature], *map(list, auto.new_temperatures)]
    assert auto.new_temperatures
    again = AutoSampling(**written)
    fit("Gaussian", again, SampleCollector(tmp_path / "again"), epochs=30)
    before, after = Posterior.load(tmp_path / "first"), Posterior.load(tmp_path / "again")
    assert_same(list(before), list(after))
    assert [record.temperature for record in before.records][-1] == auto.new_temperatures[-1][1]
    assert again.new_temperatures == auto.new_temperatures


@pytest.mark.parametrize("name", ["Gaussian", "StudentT", "Poisson", "Weibull", "survival"])
def test_a_summary_says_that_an_average_is_no_better_than_a_guess(name: str, tmp_path: Path) -> None:
    """Targets that the inputs say nothing of, and too few data."""
    mixed = CASES[name][2][torch.randperm(COUNT, generator=torch.Generator().manual_seed(2))]
    made, callbacks = module(name), recommended(tmp_path, AutoSampling(num_draws=8, temperature=0.01, prior_std=1.0))
    ends = [slice(0, 60), slice(60, 2000)]
    train, val = (DataLoader(TensorDataset(X[part], mixed[part]), 60) for part in ends)
    trainer = quiet_trainer(max_epochs=150, callbacks=callbacks, check_val_every_n_epoch=150, default_root_dir=tmp_path)
    trainer.fit(made, train, val)
    summary = next(callback for callback in callbacks if isinstance(callback, RunSummary))
    assert "no better than guessing" in " ".join(summary._sentences) + str(made.health)


def test_the_guess_of_heavy_tails_and_of_durations_is_their_own_law() -> None:
    """A normal distribution would be an easy guess to beat."""
    tails = torch.distributions.StudentT(3.0).sample((4_000,))
    assert StudentT(3.0, learned=True).chance_nll(tails) == pytest.approx(1.773, abs=0.1)  # the entropy
    normal = Gaussian(learned=True).chance_nll(tails)
    assert normal is not None
    assert StudentT(3.0, learned=True).chance_nll(tails) < normal
    for likelihood in (Weibull(learned=True), LogNormal(learned=True), Weibull(1.0), LogNormal(0.5)):
        chance = likelihood.chance_nll(TIMES)
        grid = [-float(likelihood.log_prob(torch.full((COUNT,), o), TIMES).mean()) for o in torch.linspace(-1, 4, 200)]
        assert chance is not None
        assert math.isfinite(chance)
        assert chance <= min(grid) + 1e-4
        if not likelihood.learned:
            assert chance == pytest.approx(min(grid), abs=1e-3)
