"""AutoSampling without validation data: nothing is chosen, all data train, and the run says so."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import pytorch_lightning as pl
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, Posterior
from lightning_sgmcmc.callbacks import AutoSampling, SampleCollector, recommended
from lightning_sgmcmc.cli import main
from lightning_sgmcmc.estimators import BayesianClassifier, BayesianRegressor
from tests.support.comparisons import assert_same
from tests.support.trainers import quiet_trainer

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(55, 4, generator=GENERATOR)
LABELS, NUMBERS = (X[:, 0] > 0).long(), X[:, :1].sin()
OTHER = TensorDataset(torch.randn(30, 4, generator=GENERATOR), torch.arange(30) % 2)


def module(likelihood: Any = None, **options: Any) -> BayesianModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2 if likelihood is None else 1))
    return BayesianModule(net, likelihood or Categorical(), seed=3, **options)


def fit(auto: AutoSampling, validates: bool = False, epochs: int = 40, **options: Any) -> tuple[BayesianModule, str]:
    """Return the module after a fit with an odd last batch, and what the fit warned of."""
    made, targets = module(**options), NUMBERS if "likelihood" in options else LABELS
    trainer = quiet_trainer(max_epochs=epochs, callbacks=[auto, SampleCollector(in_memory=True)])
    batches = DataLoader(TensorDataset(X, targets), 16, shuffle=True, generator=torch.Generator().manual_seed(5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(made, batches, DataLoader(OTHER, 8) if validates else None)
    return made, "\n".join(str(one.message) for one in caught)


@pytest.mark.parametrize("chains", [1, 2])
def test_the_draws_are_those_of_a_run_whose_validation_data_choose_nothing(chains: int) -> None:
    auto = AutoSampling(num_draws=20)
    without, said = fit(auto, num_chains=chains)
    scales = [[[0, 0.853]]] * chains  # 1/√(0.025·55)
    chosen, _ = fit(AutoSampling(num_draws=20, prior_scales=scales), validates=True, num_chains=chains)
    assert auto.as_configuration()["init_args"]["prior_scales"] == scales
    assert without.posterior is not None
    assert chosen.posterior is not None
    assert len(without.posterior) == 20 * chains
    assert_same(list(without.posterior), list(chosen.posterior))
    assert without.posterior.weights.tolist() == pytest.approx([1 / (20 * chains)] * 20 * chains)
    assert said.count("has no validation data, so the prior's standard deviation stays 0.853") == 1


def test_scales_of_an_earlier_run_hold_where_all_data_train() -> None:
    first, again = AutoSampling(num_draws=20), AutoSampling(num_draws=20)
    fit(first, validates=True)
    scales = first.as_configuration()["init_args"]["prior_scales"]
    assert len(scales[0]) > 1
    again = AutoSampling(num_draws=20, prior_scales=scales)
    _, said = fit(again)
    assert again.as_configuration()["init_args"]["prior_scales"] == scales
    assert "samples count alike" in said
    assert "standard deviation stays" not in said
    longer = AutoSampling(num_draws=20, prior_scales=scales)
    fit(longer, epochs=50)
    assert [std for _, std in longer.chosen[0]] == [std for _, std in scales[0]]
    draws = (0, *longer.laid_out.draw_steps)
    assert [own for own, _ in longer.chosen[0]] == [min(d for d in draws if d >= step) for step, _ in scales[0]]


def test_a_part_for_novelty_has_its_own_scale() -> None:
    auto = AutoSampling("both", num_draws=20)
    made, _ = fit(auto)
    assert made.posterior is not None
    assert made.posterior.novelty is not None
    assert (len(made.posterior), len(made.posterior.novelty)) == (15, 5)
    assert [std for _, std in auto.chosen[0]] == [0.853, 0.35]  # at temperature 1


def test_what_chooses_nothing_does_not_warn() -> None:
    made, said = fit(AutoSampling("ood", num_draws=20))
    assert made.posterior is not None
    assert "validation data, so" not in said


def test_numbers_too() -> None:
    """Where nothing chooses the temperature it is the posterior's, at which noise is no danger."""
    made, said = fit(AutoSampling(num_draws=20), likelihood=Gaussian(0.2))
    assert made.posterior is not None
    assert "stays 0.35, the temperature 1," in said
    assert {record.temperature for record in made.posterior.records} == {1.0}
    error = made.posterior.predict(X).mean - NUMBERS
    assert error.square().mean() < 0.1 * NUMBERS.var()


def test_the_usual_five_callbacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = pl.Trainer(
        max_epochs=40, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=recommended("samples")
    )
    trainer.fit(module(), DataLoader(TensorDataset(X, LABELS), 16, shuffle=True))
    assert len(Posterior.load("samples")) == 80
    said = " ".join(capsys.readouterr().out.split())
    assert "Sampled the posterior? No, this is a cold ensemble" in said
    assert "posterior.evaluate(data)" in said
    (choices,) = tmp_path.rglob("auto.yaml")
    assert yaml.safe_load(choices.read_text())["init_args"]["prior_scales"] == [[[0, 0.853]]]


CONFIGURATION = """\
model:
  class_path: lightning_sgmcmc.BayesianModule
  init_args:
    net: {class_path: torch.nn.Linear, init_args: {in_features: 4, out_features: 2}}
    likelihood: lightning_sgmcmc.Categorical
data:
  class_path: lightning_sgmcmc.datamodules.TableDataModule
  init_args: {x: table.csv, target: label, task: classes, val_fraction: 0, test_fraction: 0}
trainer: {accelerator: cpu, max_epochs: 100, enable_progress_bar: false, enable_model_summary: false}
"""


@pytest.mark.parametrize("options", [[], ["--verbose"]])
def test_the_command_says_what_was_sampled(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    frame = pd.DataFrame(X.numpy(), columns=list("abcd"))
    frame.assign(label=LABELS.numpy()).to_csv("table.csv", index=False)
    Path("run.yaml").write_text(CONFIGURATION)
    main(["fit", "--config", "run.yaml", "--auto", *options])
    assert capsys.readouterr().out.count("Sampled the posterior? No, this is a cold ensemble") == 1


@pytest.mark.parametrize(("kind", "targets"), [(BayesianClassifier, LABELS), (BayesianRegressor, NUMBERS[:, 0])])
def test_estimators_train_on_all_rows(kind: Any, targets: torch.Tensor) -> None:
    made = kind(validation_fraction=0, max_epochs=600, hidden=(8,), random_state=0).fit(X.numpy(), targets.numpy())
    assert made.plan_.num_data == len(X)
    assert made.score(X.numpy(), targets.numpy()) > 0.9
    assert np.isfinite(made.predict(X.numpy()[:1])).all()


@pytest.mark.parametrize(
    ("count", "objective", "expected"),
    [
        (20, "nll", (1.0, 0.5)),  # 1/√(0.2·20)
        (90, "nll", (0.5, 0.35)),
        (180, "nll", (0.25, 0.35)),
        (450, "nll", (0.1, 0.35)),
        (60, "ood", (1.0, 0.289)),
        (450, "ood", (1.0, 0.2)),
    ],
)
def test_a_regression_begins_by_the_number_of_its_data(
    count: int, objective: Any, expected: tuple[float, float]
) -> None:
    """Few noisy numbers are fitted exactly under a wide prior and a low temperature."""
    auto, made = AutoSampling(objective, num_draws=1), module(Gaussian(0.5, learned=True))
    data = DataLoader(TensorDataset(torch.randn(count, 4), torch.randn(count, 1)), 16)
    quiet_trainer(max_steps=10, callbacks=[auto]).fit(made, data, data)
    assert (auto.temperature, auto.prior_std) == expected
    assert made.sampler.param_groups[0]["temperature"] == expected[0]
