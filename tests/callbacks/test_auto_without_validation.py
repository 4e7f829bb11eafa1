"""AutoSampling without validation data: all data train, and choose no more than a temperature; the run says so."""

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
from torch.distributions import Normal
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, Posterior
from lightning_sgmcmc.callbacks import AutoSampling, SampleCollector, auto_sampling, recommended
from lightning_sgmcmc.cli import main
from lightning_sgmcmc.diagnostics.decisions import leave_one_out_nll
from lightning_sgmcmc.estimators import BayesianClassifier, BayesianRegressor
from lightning_sgmcmc.posterior.calibration import unexplained
from tests.support.comparisons import assert_same
from tests.support.trainers import StopAt, quiet_trainer


@pytest.fixture(autouse=True)
def short_runs_choose_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 2,000 steps and more do; these networks learn in 300."""
    monkeypatch.setattr(auto_sampling, "LEAST_STEPS", 300)


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
    auto = AutoSampling(num_draws=20, temperature=0.03)
    without, said = fit(auto, num_chains=chains)
    scales = [[[0, 0.853]]] * chains  # 1/√(0.025·55)
    chosen, _ = fit(AutoSampling(num_draws=20, prior_scales=scales), validates=True, num_chains=chains)
    assert auto.as_configuration()["init_args"]["prior_scales"] == scales
    assert without.posterior is not None
    assert chosen.posterior is not None
    assert len(without.posterior) == 20 * chains
    assert_same(list(without.posterior), list(chosen.posterior))
    assert without.posterior.weights.tolist() == pytest.approx([1 / (20 * chains)] * 20 * chains)
    assert said.count("has no validation data, so the samples count alike: pass") == 1


def test_scales_of_an_earlier_run_hold_where_all_data_train() -> None:
    first, again = AutoSampling(num_draws=20), AutoSampling(num_draws=20)
    fit(first, validates=True)
    scales = first.as_configuration()["init_args"]["prior_scales"]
    assert len(scales[0]) > 1
    again = AutoSampling(num_draws=20, prior_scales=scales)
    _, said = fit(again)
    assert again.as_configuration()["init_args"]["prior_scales"] == scales
    assert "samples count alike" in said
    assert "choose the temperature" not in said
    longer = AutoSampling(num_draws=20, prior_scales=scales)
    fit(longer, epochs=50)
    assert [std for _, std in longer.chosen[0]] == [std for _, std in scales[0]]
    draws = (0, *longer.laid_out.draw_steps)
    assert [own for own, _ in longer.chosen[0]] == [min(d for d in draws if d >= step) for step, _ in scales[0]]


def test_a_part_for_novelty_has_its_own_scale() -> None:
    auto = AutoSampling("both", num_draws=20)
    made, _ = fit(auto, epochs=200)
    assert made.posterior is not None
    assert made.posterior.novelty is not None
    assert (len(made.posterior), len(made.posterior.novelty)) == (15, 5)
    undecided, cold, hot = (std for _, std in auto.chosen[0])
    assert (undecided, hot) == (0.791, 0.35)
    assert 0.853 < cold < 1  # labels are clearer than from which the scale grows
    assert {record.temperature for record in made.posterior.novelty.records} == {1.0}


def test_what_chooses_nothing_does_not_warn() -> None:
    made, said = fit(AutoSampling("ood", num_draws=20))
    assert made.posterior is not None
    assert "validation data, so" not in said


def many(kind: str, noise: float, count: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels or numbers, a part of which is noise."""
    generator = torch.Generator().manual_seed(1)
    x, kept = torch.randn(count, 4, generator=generator), torch.rand(count, generator=generator) >= noise
    if kind == "classes":
        return x, torch.where(kept, (x[:, 0] > 0).long(), torch.randint(0, 2, (count,), generator=generator))
    return x, (x[:, :1] + noise * torch.randn(count, 1, generator=generator)) / (1 + noise**2) ** 0.5


def chosen_by(kind: str, noise: float, auto: AutoSampling | None = None, **options: Any) -> Any:
    """Return a module's posterior, and the callback that chose, after a fit to all data."""
    auto = AutoSampling(num_draws=20) if auto is None else auto
    made = module(None if kind == "classes" else Gaussian(0.5, learned=True), **options)
    epochs = 60 if kind == "classes" else 300  # a learned noise falls slowly
    trainer = quiet_trainer(max_epochs=epochs, callbacks=[auto, SampleCollector(in_memory=True)])
    trainer.fit(made, DataLoader(TensorDataset(*many(kind, noise)), 32, shuffle=True))
    return made.posterior, auto


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize(("kind", "cold"), [("classes", 0.03), ("numbers", 0.15)])
def test_data_that_are_predicted_well_make_the_samples_cold(kind: str, cold: float, chains: int) -> None:
    """After 15 % of the draws, which have no weight from then on; the others count alike."""
    posterior, auto = chosen_by(kind, 0.0, num_chains=chains)
    ((step, temperature),) = auto.new_temperatures
    assert step == auto.laid_out.draw_steps[2]
    assert temperature == pytest.approx(cold, rel=0.3)
    records = posterior.records
    assert {r.temperature for r in records if r.step <= step} == {1.0}
    assert [r.temperature for r in records if r.step > step] == pytest.approx([temperature] * 17 * chains)
    expected = [0.0 if r.step <= step else 1 / (17 * chains) for r in records]
    assert posterior.weights.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("kind", "noise"), [("classes", 0.6), ("classes", 1.0), ("numbers", 1.0)])
def test_noise_keeps_the_posterior(kind: str, noise: float) -> None:
    posterior, auto = chosen_by(kind, noise)
    assert auto.new_temperatures == []
    assert {record.temperature for record in posterior.records} == {1.0}
    assert posterior.weights.tolist() == pytest.approx([1 / 20] * 20)


@pytest.mark.parametrize("make", [lambda: AutoSampling(num_draws=20, temperature=0.5), lambda: AutoSampling("ood")])
def test_a_temperature_that_was_given_stays(make: Any) -> None:
    auto = make()
    posterior, _ = chosen_by("classes", 0.0, auto)
    assert {record.temperature for record in posterior.records} == {auto.temperature}
    assert auto.new_temperatures == []


def test_the_choice_repeats_by_its_configuration() -> None:
    posterior, auto = chosen_by("classes", 0.0)
    made = AutoSampling(**yaml.safe_load(yaml.safe_dump(auto.as_configuration()))["init_args"])
    again, other = chosen_by("classes", 0.0, made)
    assert other.new_temperatures == auto.new_temperatures
    assert_same(list(posterior), list(again))
    assert again.weights.tolist() == posterior.weights.tolist()


@pytest.mark.parametrize("strategy", ["ddp_fork", "chains_fork"])
def test_two_ranks_choose_the_same(strategy: str, tmp_path: Path) -> None:
    """Each has half of the data; one alone predicts other data of its own, but chooses alike."""
    auto = AutoSampling(num_draws=20)
    trainer = quiet_trainer(
        max_epochs=60, devices=2, strategy=strategy, callbacks=[auto, SampleCollector(tmp_path), Chosen(tmp_path)]
    )
    trainer.fit(module(), DataLoader(TensorDataset(*many("classes", 0.0, 301)), 32, shuffle=True))
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in (0, 1))
    assert first == second
    ((step, temperature),) = yaml.safe_load(first)
    assert temperature == pytest.approx(0.03, rel=0.3)
    weights = Posterior.load(tmp_path).weights
    assert float(weights[[record.step <= step for record in Posterior.load(tmp_path).records]].sum()) < 1e-6


class Chosen(pl.Callback):
    """Writes what a rank has chosen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (auto,) = (callback for callback in trainer.callbacks if isinstance(callback, AutoSampling))  # type: ignore[attr-defined]
        text = yaml.safe_dump([list(pair) for pair in auto.new_temperatures])
        (self._folder / f"{trainer.global_rank}.txt").write_text(text, encoding="utf-8")


def test_all_data_train_by_the_choices_of_a_run_with_validation_data() -> None:
    """`prior_scales` and `temperatures` of its configuration begin where it began."""
    first = AutoSampling(num_draws=20)
    x, y = many("classes", 0.0)
    known = DataLoader(TensorDataset(x[:100], y[:100]), 50)
    trainer = quiet_trainer(max_epochs=60, callbacks=[first, SampleCollector(in_memory=True)])
    trainer.fit(module(), DataLoader(TensorDataset(x[100:], y[100:]), 32, shuffle=True), known)
    written = first.as_configuration()["init_args"]
    assert written["temperatures"][0] == [0, 1.0]
    again = AutoSampling(num_draws=20, **{name: written[name] for name in ("prior_scales", "temperatures")})
    posterior, _ = chosen_by("classes", 0.0, again)
    assert again.prior_std == first.prior_std
    assert [tau for _, tau in again.new_temperatures] == [tau for _, tau in first.new_temperatures] != []
    assert {record.temperature for record in posterior.records} == {tau for _, tau in written["temperatures"]}


@pytest.mark.parametrize("epochs", [20, 40])  # before and after the choice
def test_a_resumed_run_chooses_the_same(tmp_path: Path, epochs: int) -> None:
    posterior, auto = chosen_by("classes", 0.0)
    data = DataLoader(TensorDataset(*many("classes", 0.0)), 32, shuffle=True)
    found: list[Any] = []
    for last, path in ((epochs, None), (60, tmp_path / "last.ckpt")):
        found = [module(), AutoSampling(num_draws=20)]
        torch.manual_seed(0)
        stop = [StopAt(last)] if last < 60 else []
        trainer = quiet_trainer(max_epochs=60, callbacks=[found[1], SampleCollector(tmp_path / "samples"), *stop])
        trainer.fit(found[0], data, ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert found[1].new_temperatures == auto.new_temperatures
    assert_same(list(found[0].posterior), list(posterior))
    assert found[0].posterior.weights.tolist() == posterior.weights.tolist()


class Stream(IterableDataset[Any]):
    """Data whose rows are not known."""

    def __iter__(self) -> Any:
        return iter(TensorDataset(*many("classes", 0.0)))


def test_data_whose_rows_are_not_known_choose_nothing() -> None:
    auto, made = AutoSampling(num_draws=20), module(num_data=300)
    trainer = quiet_trainer(max_steps=400, callbacks=[auto, SampleCollector(in_memory=True)])
    trainer.fit(made, DataLoader(Stream(), 32))
    assert made.posterior is not None
    assert {record.temperature for record in made.posterior.records} == {1.0}


def test_a_datum_is_predicted_without_itself() -> None:
    """A mean with a flat prior and n numbers of noise 1: N(the others' mean, 1 + 1/(n-1)); 40,000 samples."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(10, generator=generator, dtype=torch.float64)
    draws = y.mean() + torch.randn(40_000, generator=generator, dtype=torch.float64) / 10**0.5
    found = leave_one_out_nll(Normal(draws[:, None], 1.0).log_prob(y))
    exact = -Normal((y.sum() - y) / 9, (1 + 1 / 9) ** 0.5).log_prob(y).mean()
    assert found == pytest.approx(float(exact), abs=0.01)


def test_what_a_guess_leaves_open() -> None:
    """Its whole NLL of labels; of numbers the variance, whatever noise the likelihood fixes."""
    labels, numbers = torch.arange(30) % 3, torch.randn(50, 2, generator=GENERATOR)
    even = torch.full((4, 30), -np.log(3))
    assert unexplained(Categorical(), even, labels) == pytest.approx(1.0)
    assert unexplained(Categorical(), even / 4, labels) == pytest.approx(0.25)
    spread = numbers - numbers.mean(0)
    for likelihood in (Gaussian(learned=True), Gaussian(0.1), Gaussian([0.1, 2.0])):
        for share in (1.0, 0.04):
            scale = (share * spread.square().mean(0)).sqrt()
            density = Normal(0.0, scale).log_prob(share**0.5 * spread).sum(1).expand(3, 50)
            assert unexplained(likelihood, density, numbers) == pytest.approx(share, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperatures": 0.5}, r"temperatures must be a list of \[step, temperature\] pairs"),
        ({"temperatures": [0.5]}, "temperatures must be a list"),
        ({"prior_scales": [[0, 0.3]]}, r"prior_scales must be a list of \[step, std\] pairs"),
        ({"temperatures": [[10, -1.0]]}, r"temperatures must be in \(0, inf\)"),
    ],
)
def test_wrong_choices_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        AutoSampling(**options)


def test_the_usual_five_callbacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = pl.Trainer(
        max_epochs=40, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=recommended("samples")
    )
    trainer.fit(module(), DataLoader(TensorDataset(X, LABELS), 16, shuffle=True))
    assert len(Posterior.load("samples")) == 80
    said = " ".join(capsys.readouterr().out.split())
    assert "Sampled the posterior? No, this is a cold ensemble" in said  # after 160 steps
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
    assert capsys.readouterr().out.count("Sampled the posterior?") == 1


@pytest.mark.parametrize(("kind", "targets"), [(BayesianClassifier, LABELS), (BayesianRegressor, NUMBERS[:, 0])])
def test_estimators_train_on_all_rows(kind: Any, targets: torch.Tensor) -> None:
    made = kind(validation_fraction=0, max_epochs=600, hidden=(8,), random_state=0).fit(X.numpy(), targets.numpy())
    assert made.plan_.num_data == len(X)
    assert made.score(X.numpy(), targets.numpy()) > 0.9
    assert np.isfinite(made.predict(X.numpy()[:1])).all()


@pytest.mark.parametrize("fraction", [0.0, 0.1])
def test_few_noisy_labels_are_not_fitted(fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 labels with 60 % noise: an NLL of 0.82 and 0.79, where cold samples have 1.39 and 1.18, and a guess 0.69."""
    monkeypatch.undo()
    x, labels = many("classes", 0.6, 600)
    more = torch.randn(600, 16, generator=torch.Generator().manual_seed(2))
    rows = torch.cat([x, more], 1).numpy()
    model = BayesianClassifier(validation_fraction=fraction, random_state=0).fit(rows[:100], labels[:100].numpy())
    assert model.plan_.temperature == 1.0
    chances = model.predict_proba(rows[100:])[np.arange(500), labels[100:].numpy()]
    assert -np.log(chances).mean() < 0.95


@pytest.mark.parametrize(("validates", "begins"), [(False, 0.03), (True, 1.0)])
def test_a_time_is_long_for_few_data_alone(validates: bool, begins: float) -> None:
    """How many steps a time has is known only later, and few data with validation data were tried beside."""
    auto, data = AutoSampling(budget="1s", num_draws=5), TensorDataset(*many("classes", 0.0, 300 if validates else 500))
    made = module()
    trainer = quiet_trainer(callbacks=[auto, SampleCollector(in_memory=True)])
    trainer.fit(made, DataLoader(data, 32, shuffle=True), DataLoader(data, 100) if validates else None)
    assert auto.temperature == begins


def test_a_short_run_begins_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    posterior, auto = chosen_by("classes", 1.0)
    assert {record.temperature for record in posterior.records} == {0.03}
    assert auto.new_temperatures == []


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
