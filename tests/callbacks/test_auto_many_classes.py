"""AutoSampling of many clear classes with few examples: a looser prior, and then a lower temperature."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, Posterior
from lightning_sgmcmc.callbacks import AutoSampling, SampleCollector
from tests.support.comparisons import assert_same
from tests.support.trainers import StopAt, quiet_trainer

CLASSES, WIDTH, TRAIN, VALIDATION, COUNT = 50, 32, 500, 60, 2_000
GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.randint(0, CLASSES, (COUNT,), generator=GENERATOR)
CENTERS = torch.randn(CLASSES, WIDTH, generator=GENERATOR)
X = CENTERS[LABELS] + 0.8 * torch.randn(COUNT, WIDTH, generator=GENERATOR)
ENDS = [slice(0, TRAIN), slice(TRAIN, TRAIN + VALIDATION), slice(TRAIN + VALIDATION, COUNT)]


def fit(auto: AutoSampling, epochs: int = 150, chains: int = 1, **options: Any) -> BayesianModule:
    """Return the module after a fit with an odd last batch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 50), nn.ReLU(), nn.Linear(50, CLASSES))
    module = BayesianModule(net, Categorical(), num_chains=chains, seed=0)
    train, val, _ = (DataLoader(TensorDataset(X[part], LABELS[part]), 48, i == 0) for i, part in enumerate(ENDS))
    callbacks = [auto, *options.pop("callbacks", [SampleCollector(in_memory=True)])]
    trainer = quiet_trainer(max_epochs=epochs, callbacks=callbacks, check_val_every_n_epoch=epochs)
    trainer.fit(module, train, val, **options)
    return module


def nll(module: BayesianModule) -> float:
    assert module.posterior is not None
    return module.posterior.evaluate([(X[ENDS[2]], LABELS[ENDS[2]])]).bma["nll"]


def test_predictions_are_surer_than_at_a_temperature_that_stays() -> None:
    """Before, a prior at its limit was all that could be done."""
    auto, fixed = AutoSampling(num_draws=40), AutoSampling(num_draws=40, temperature=0.03)
    assert nll(fit(auto, 300)) < 0.9 * nll(fit(fixed, 300))
    assert not fixed.new_temperatures
    assert max(std for _, std in fixed.chosen[0]) > 0.6


@pytest.mark.parametrize("chains", [1, 3])
def test_the_temperature_falls_where_the_prior_is_at_its_limit(chains: int) -> None:
    auto = AutoSampling(num_draws=20)
    module = fit(auto, 60, chains)
    assert auto.new_temperatures
    for step, _ in auto.new_temperatures:
        assert max(max(std for own, std in chain if own <= step) for chain in auto.chosen.values()) == 1.5
    temperatures = [0.03, *(tau for _, tau in auto.new_temperatures)]
    assert temperatures == sorted(set(temperatures), reverse=True)
    assert 0.003 <= temperatures[-1] < 0.02
    assert module.posterior is not None
    for record in module.posterior.records:
        assert record.temperature == temperatures[sum(step < record.step for step, _ in auto.new_temperatures)]


def test_a_resume_and_the_written_choices_repeat_the_run(tmp_path: Path) -> None:
    whole = AutoSampling(num_draws=20)
    posterior: Any = fit(whole, 40, 2, callbacks=[SampleCollector(tmp_path / "whole")]).posterior
    for last, path in ((25, None), (40, tmp_path / "last.ckpt")):
        stop = [StopAt(last)] if last < 40 else []
        resumed = AutoSampling(num_draws=20)
        module = fit(resumed, 40, 2, callbacks=[SampleCollector(tmp_path / "resumed"), *stop], ckpt_path=path)
        module.trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert resumed.new_temperatures == whole.new_temperatures != []
    assert_same(list(Posterior.load(tmp_path / "resumed")), list(posterior))
    written = yaml.safe_load(yaml.safe_dump(whole.as_configuration()))["init_args"]
    again: Any = fit(AutoSampling(**written), 40, 2).posterior
    assert_same(list(again), list(posterior))


def test_clear_labels_have_a_looser_prior_without_validation_data() -> None:
    """Before, it kept the scale with which it began."""
    data, found = DataLoader(TensorDataset(X[ENDS[0]], LABELS[ENDS[0]]), 48, shuffle=True), []
    for options in ({}, {"prior_scales": [[(0, 0.3)]], "temperature": 0.03}):
        auto = AutoSampling(num_draws=20, **options)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, 50), nn.ReLU(), nn.Linear(50, CLASSES))
        module = BayesianModule(net, Categorical(), seed=0)
        quiet_trainer(max_steps=2_000, callbacks=[auto, SampleCollector(in_memory=True)]).fit(module, data)
        found.append((auto.chosen[0][-1][1], nll(module)))
    (std, looser), (_, kept) = found
    assert 0.5 < std <= 1
    assert looser < 0.6 * kept
