"""AutoSampling: that its choices have the right direction, are repeated by their YAML, and reach the stored samples."""

import csv
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    BayesianModule,
    Categorical,
    ContourRules,
    Gaussian,
    GaussianPrior,
    HierarchicalPrior,
    Posterior,
)
from lightning_sgmcmc.callbacks import (
    AutoSampling,
    BayesianModelAverage,
    ContourGradient,
    ReplicaExchange,
    SampleCollector,
    recommended,
)
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.chains.schedule import RunBudget, RunLength
from lightning_sgmcmc.health.findings import FindingKind
from lightning_sgmcmc.samplers import pSGHMC
from lightning_sgmcmc.tune.runs import RunForm
from tests.support.comparisons import assert_same
from tests.support.trainers import quiet_trainer


def labels(noise: float, count: int, seed: int) -> TensorDataset:
    """Two classes by the sign of the first of 20 inputs, of which a share is flipped."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 20, generator=generator)
    flipped = torch.rand(count, generator=generator) < noise
    return TensorDataset(x, ((x[:, 0] > 0) ^ flipped).long())


def loaders(noise: float) -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(labels(noise, 80, 1), 20, shuffle=True), DataLoader(labels(noise, 200, 2), 100)


def classifier(**options: Any) -> BayesianModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 2))
    return BayesianModule(net=net, likelihood=Categorical(), seed=3, **options)


def fit(auto: AutoSampling, noise: float = 0.3, folder: Path | None = None, **options: Any) -> BayesianModule:
    pl.seed_everything(0)
    module = classifier(**options)
    collector = SampleCollector(in_memory=folder is None, dirpath=None if folder is None else folder / "samples")
    trainer = quiet_trainer(max_epochs=150, callbacks=[auto, collector], default_root_dir=folder)
    trainer.fit(module, *loaders(noise))
    return module


# -- the choices ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> tuple[BayesianModule, AutoSampling, Path]:
    folder, auto = tmp_path_factory.mktemp("noisy"), AutoSampling(num_draws=40)
    return fit(auto, noise=0.3, folder=folder), auto, folder


@pytest.mark.slow
def test_noisy_labels_tighten_the_prior_and_clean_ones_loosen_it(
    noisy: tuple[BayesianModule, AutoSampling, Path],
) -> None:
    """A network of 692 weights can learn 80 flipped labels by heart, so its predictions are far too sure.

    At the flipped labels the scale falls below its start, 0.3; at clean ones it rises.
    """
    clean = AutoSampling(num_draws=40)
    fit(clean, noise=0.0)
    tight, loose = noisy[1].chosen[0][-1][1], clean.chosen[0][-1][1]
    assert tight < 0.3
    assert loose > 0.35


def test_the_module_gets_prior_and_sampler(noisy: tuple[BayesianModule, AutoSampling, Path]) -> None:
    module, auto, _ = noisy
    assert isinstance(module.sampler, pSGHMC)
    assert isinstance(module.prior, HierarchicalPrior)
    assert module.posterior is not None
    scale = module.posterior[-1].scales["net.0.weight"]
    assert float(scale) == pytest.approx(auto.chosen[0][-1][1], rel=1e-4)


def test_stored_weights_lose_next_to_nothing_to_any_window(noisy: tuple[BayesianModule, AutoSampling, Path]) -> None:
    """They are in the folder, and on the validation data lose at most log M nats in all to the best of M windows."""
    _, _, folder = noisy
    posterior = Posterior.load(folder)
    assert len(posterior) == 40
    assert float(posterior.weights.max()) > 1.5 * float(posterior.weights.min())
    x, y = labels(0.3, 200, 2).tensors

    def nats(chosen: Posterior) -> float:
        return -float(chosen.predict(x).probabilities.double().gather(1, y[:, None]).log().sum())

    even = posterior.reweighted("sample", exponent=0.0)
    windows = [nats(even[-count:]) for count in (1, 2, 4, 8, 16, 32, 40)]
    assert nats(posterior) < min(windows) + math.log(len(windows))
    assert nats(posterior) < max(windows)


def test_the_written_choices_repeat_the_run(noisy: tuple[BayesianModule, AutoSampling, Path]) -> None:
    """Bit for bit."""
    module, _, folder = noisy
    (path,) = folder.rglob("auto.yaml")
    again = fit(AutoSampling(**yaml.safe_load(path.read_text())["init_args"]), noise=0.3)
    assert module.posterior is not None
    assert again.posterior is not None
    assert_same(list(again.posterior), list(module.posterior))


def test_choices_are_in_the_run_s_folder_not_beside_the_samples(tmp_path: Path, monkeypatch: Any) -> None:
    """Two runs whose samples lie side by side keep both files, and the sentence names the place.

    A prior of several scales gives energies several constants, so no drift of them is found in either.
    """
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    monkeypatch.setattr("lightning_sgmcmc.callbacks.auto_sampling.rank_zero_info", said.append)
    for name in ("first", "second"):
        trainer = quiet_trainer(max_epochs=60, logger=CSVLogger("logs", name), callbacks=recommended(name))
        module = classifier()
        trainer.fit(module, *loaders(0.0))
        written = Path("logs", name, "version_0", "auto.yaml")
        assert str(written) in said[-1]
        scales = yaml.safe_load(written.read_text())["init_args"]["prior_scales"][0]
        assert len({std for _, std in scales}) > 1
        assert module.health is not None
        assert module.health.energy is not None
        assert module.health.energy.expected is None
        assert FindingKind.ENERGY not in [finding.kind for finding in module.health.findings]
    assert not Path("auto.yaml").exists()


@pytest.mark.parametrize(
    ("epochs", "advice"),
    [
        (25, "train longer, since the newest 10 of"),
        pytest.param(400, "predict with these", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_ends_while_its_network_learns_is_told_to_be_longer(
    epochs: int, advice: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Its last samples are far better than the others and have nearly all of the weight."""
    monkeypatch.chdir(tmp_path)
    callbacks = [
        AutoSampling(prior_std=0.3, temperature=0.03) if isinstance(c, AutoSampling) else c
        for c in recommended("samples")
    ]
    quiet_trainer(max_epochs=epochs, callbacks=callbacks).fit(classifier(), *loaders(0.0))
    found = json.loads(Path("sgmcmc", "results.json").read_text())
    weights = Posterior.load("samples").weights
    assert (float(weights[-10:].sum()) > 0.95) == (epochs == 25)
    assert found["verdict"]["next"].startswith(advice)


@pytest.mark.slow
def test_chains_have_scales_of_their_own() -> None:
    auto = AutoSampling(num_draws=20)
    module = fit(auto, num_chains=2)
    assert sorted(auto.chosen) == [0, 1]
    assert auto.chosen[0] != auto.chosen[1]
    assert module.posterior is not None
    for chain in (0, 1):
        last = [sample for sample in module.posterior if sample.chain == chain][-1]
        assert float(last.scales["net.0.weight"]) == pytest.approx(auto.chosen[chain][-1][1], rel=1e-4)


def test_what_is_logged_at_the_end_is_of_the_weighted_samples(tmp_path: Path) -> None:
    """A search over settings reads `trainer.callback_metrics`, and a page of runs the loggers: both have its NLL."""
    module, (train, val) = classifier(), loaders(0.3)
    logger = CSVLogger(tmp_path)
    callbacks = [AutoSampling(num_draws=10), SampleCollector(in_memory=True), BayesianModelAverage()]
    trainer = quiet_trainer(max_epochs=10, callbacks=callbacks, logger=logger, log_every_n_steps=1)
    trainer.fit(module, train, val)
    logger.save()
    assert module.posterior is not None
    assert module.posterior.weight_efficiency < 0.99
    found = module.posterior.evaluate(val).bma["nll"]
    assert float(trainer.callback_metrics["val/bma_nll"]) == pytest.approx(found, rel=1e-5)
    with open(tmp_path / "lightning_logs/version_0/metrics.csv") as file:
        logged = [row["val/bma_nll"] for row in csv.DictReader(file) if row["val/bma_nll"]]
    assert float(logged[-1]) == pytest.approx(found, rel=1e-5)


@pytest.mark.slow
def test_objective_ood_keeps_the_prior_and_even_weights() -> None:
    auto = AutoSampling(objective="ood", num_draws=20)
    module = fit(auto)
    assert auto.chosen == {0: [(0, 0.35)]}  # of 80 data
    assert module.posterior is not None
    assert module.posterior.weight_efficiency == pytest.approx(1)
    assert module.sampler.param_groups[0]["temperature"] == 1.0


def test_a_learned_noise_scale_has_a_prior_of_its_own() -> None:
    pl.seed_everything(0)
    x = torch.randn(60, 3)
    y = x[:, :1] + 0.01 * torch.randn(60, 1)
    module = BayesianModule(net=nn.Linear(3, 1), likelihood=Gaussian(std=1.0, learned=True))
    data = DataLoader(TensorDataset(x, y), 20)
    auto = AutoSampling(num_draws=10)
    quiet_trainer(max_epochs=40, callbacks=[auto, SampleCollector(in_memory=True)]).fit(module, data, data)
    assert module.posterior is not None
    scales = module.posterior[-1].scales
    assert float(scales["likelihood.log_std"]) == pytest.approx(3.0)
    assert auto.chosen[0][0][1] == 0.35
    assert float(scales["net.weight"]) == pytest.approx(auto.chosen[0][-1][1])


# -- both objectives --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two chains."""
    folder = tmp_path_factory.mktemp("both")
    fit(AutoSampling("both", num_draws=20), folder=folder, num_chains=2)
    return folder


def entropy(probabilities: Tensor) -> Tensor:
    return torch.special.entr(probabilities.double()).sum(-1)


def test_each_uncertainty_is_of_its_own_samples(both: Path) -> None:
    """From the folder alone, by the members' probabilities: H[mean] - mean H of one part, and mean H of the other."""
    posterior, x = Posterior.load(both), labels(0.3, 50, 4).tensors[0] * 2
    assert posterior.novelty is not None
    assert [len(posterior), len(posterior.novelty)] == [2 * 15, 2 * 5]
    assert posterior[-1].step < posterior.novelty[0].step
    assert posterior.novelty.weight_efficiency == pytest.approx(1)
    assert [float(s.scales["net.0.weight"]) for s in posterior.novelty] == [pytest.approx(0.35)] * 10
    found = posterior.predict(x, return_samples=True)
    each = posterior.novelty.predict(x, return_samples=True).sample_probabilities
    expected = torch.einsum("s,snk->nk", posterior.weights, found.sample_probabilities.double())
    torch.testing.assert_close(found.probabilities.double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.entropy.double(), entropy(expected), atol=1e-5, rtol=0)
    information = entropy(each.double().mean(0)) - entropy(each).mean(0)
    torch.testing.assert_close(found.epistemic.double(), information, atol=1e-5, rtol=0)
    noise = posterior.weights @ entropy(found.sample_probabilities)
    torch.testing.assert_close(found.aleatoric.double(), noise, atol=1e-5, rtol=0)
    told = posterior.detect(x[:20], x[20:]).known["mutual_information"]
    torch.testing.assert_close(told, information[:20], atol=1e-5, rtol=0)
    for first in (posterior.acquire(x, 1, "bald"), posterior.acquire(x, 1)):
        assert first.indices.tolist() == [int(information.argmax())]
        assert float(first.scores) == pytest.approx(float(information.max()), abs=1e-5)


def test_calibrated_predictions_of_many_inputs(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without each sample's distribution they have neither part of the uncertainty, as without samples for novelty."""
    known = labels(0.3, 50, 5).tensors
    posterior = Posterior.load(both).calibrate([known])
    few = posterior.predict(known[0])
    monkeypatch.setattr("lightning_sgmcmc.posterior.predictive.SMALL", 0)
    many = posterior.predict(known[0])
    torch.testing.assert_close(many.probabilities, few.probabilities)
    for part in ("epistemic", "aleatoric"):
        with pytest.raises(AttributeError, match="return_samples=True"):
            getattr(many, part)
    torch.testing.assert_close(posterior.predict(known[0], return_samples=True).epistemic, few.epistemic)


def test_selections_keep_the_samples_for_novelty_and_compression_drops_them(both: Path, tmp_path: Path) -> None:
    posterior, (x, y) = Posterior.load(both), labels(0.3, 100, 4).tensors
    information = posterior.predict(x).epistemic
    calibrated = posterior.calibrate([(x, y)])
    assert calibrated.calibration is not None
    kept = [
        posterior.thin(every=2),
        posterior[-3:],
        posterior.resample(5),
        posterior.reweighted("sample", exponent=0.0),
        posterior.in_memory(),
        posterior.save(tmp_path / "saved"),
        Posterior.load(tmp_path / "saved"),
        calibrated,
    ]
    for chosen in kept:
        assert torch.equal(chosen.predict(iter([x])).epistemic, information)
    with pytest.warns(UserWarning, match="Mutual information is of the samples that predict"):
        few = posterior.compress(4, [(x, y)])
    assert few.novelty is None
    assert not torch.allclose(few.predict(x).epistemic, information)
    other = Posterior.load(tmp_path / "saved").in_memory()
    parts = posterior[:7].merge(posterior[7:])
    assert torch.equal(parts.predict(x).epistemic, information)
    merged = posterior.merge(other)
    assert merged.novelty is not None
    assert len(merged.novelty) == 2 * 10
    torch.testing.assert_close(merged.predict(x).epistemic, information)


@pytest.mark.slow
def test_a_new_process_has_the_same_uncertainty(both: Path) -> None:
    code = (
        "import sys, torch; from lightning_sgmcmc import Posterior\n"
        "print(float(Posterior.load(sys.argv[1]).predict(torch.ones(1, 20)).epistemic))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(both)], capture_output=True, text=True, check=True)
    assert float(done.stdout) == float(Posterior.load(both).predict(torch.ones(1, 20)).epistemic)


@pytest.mark.slow
def test_the_written_choices_repeat_both_parts(both: Path) -> None:
    (path,) = both.rglob("auto.yaml")
    again = fit(AutoSampling(**yaml.safe_load(path.read_text())["init_args"]), num_chains=2).posterior
    posterior = Posterior.load(both)
    assert again is not None
    assert again.novelty is not None
    assert posterior.novelty is not None
    assert_same(list(again), list(posterior))
    assert_same(list(again.novelty), list(posterior.novelty))


@pytest.mark.slow
def test_a_run_stopped_in_the_last_part_ends_with_the_same_samples(tmp_path: Path) -> None:
    """From a checkpoint after step 88 of 100, between the first and the second draw of the last part."""

    def run(folder: Path, ckpt_path: Path | None = None) -> Posterior:
        saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=88, save_top_k=-1)
        callbacks = [AutoSampling("both", num_draws=20), SampleCollector(folder / "samples"), saves]
        trainer = quiet_trainer(max_epochs=25, callbacks=callbacks, enable_checkpointing=True, default_root_dir=folder)
        pl.seed_everything(0)
        trainer.fit(classifier(num_chains=2), *loaders(0.3), ckpt_path=ckpt_path)
        return Posterior.load(folder / "samples")

    whole = run(tmp_path)
    assert whole.novelty is not None
    drawn = [sample.step for sample in whole.novelty]
    assert min(drawn) < 88 < max(drawn)
    expected = [list(whole), list(whole.novelty)]
    (path,) = tmp_path.glob("step=88.ckpt")
    again = run(tmp_path, path)
    assert again.novelty is not None
    assert_same(list(again), expected[0])
    assert_same(list(again.novelty), expected[1])


def test_both_needs_classes() -> None:
    module = BayesianModule(net=nn.Linear(20, 1), likelihood=Gaussian(std=1.0))
    data = DataLoader(TensorDataset(torch.randn(40, 20), torch.randn(40, 1)), 20)
    with pytest.raises(ValueError, match="objective='both' takes the mutual information of classes"):
        quiet_trainer(max_epochs=20, callbacks=[AutoSampling("both", num_draws=5)]).fit(module, data, data)


# -- the schedule -----------------------------------------------------------------------------------------------------


def test_the_stages_of_a_run() -> None:
    auto = AutoSampling(num_draws=10)
    auto.lay_out(RunLength(1000))
    factors = [auto.controls(step).lr_factor for step in range(1, 1001)]
    assert [step for step in range(1, 1001) if auto.draws(step)] == [200 + 80 * j for j in range(1, 11)]
    assert [step for step in (1, 200, 201, 1000) if auto.controls(step).temperature == 0.0] == [1, 200]
    assert max(factors[:200]) > 0.95
    assert factors[199] == pytest.approx(0.02)
    assert factors[240] > 0.99
    assert factors[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.by_default("nll-1", "both-2")
@pytest.mark.parametrize(
    ("objective", "classes", "share"), [("nll", 2, 0.3), ("nll", 1, 0.1), ("ood", 2, 0.1), ("both", 2, 0.1)]
)
def test_where_the_step_size_of_a_fit_ends(objective: Any, classes: int, share: float) -> None:
    """Cold samples of classes end with a larger one; at temperature 1, as in the last part of both, nothing changes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, classes))
    train, val = labels(0.1, 80, 1).tensors, labels(0.1, 40, 2).tensors
    found, auto = [], AutoSampling(objective, num_draws=10)

    class Ends(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
            found.append(trainer.optimizers[0].param_groups[0]["lr"] / auto.lr)

    if classes == 1:
        train, val = ((x, y[:, None].float()) for x, y in (train, val))
    module = BayesianModule(net, Categorical() if classes > 1 else Gaussian(0.3))
    trainer = quiet_trainer(max_steps=400, callbacks=[auto, Ends()])
    trainer.fit(module, *(DataLoader(TensorDataset(*part), 20) for part in (train, val)))
    assert found[-1] == pytest.approx(share, abs=2e-3)
    if objective == "both":
        assert found[319] == pytest.approx(0.3, abs=2e-3)  # the last of the cold part, four fifths of the run


def test_the_last_part_of_both_samples_at_temperature_1() -> None:
    auto = AutoSampling("both", num_draws=16)
    auto.lay_out(RunLength(1000))
    found = {step: auto.controls(step) for step in range(1, 1001)}
    assert [step for step in found if auto.draws(step)] == [200 + 50 * j for j in range(1, 13)]
    assert auto.laid_out.last_draw_steps == (850, 900, 950, 1000)
    assert {controls.temperature for step, controls in found.items() if step > 800} == {1.0}
    assert {controls.temperature for step, controls in found.items() if 200 < step <= 800} == {None}
    assert [found[step].lr_factor < 0.11 for step in (800, 840, 1000)] == [True, False, True]


def test_a_budget_sets_the_number_of_steps() -> None:
    auto = AutoSampling(num_draws=5, budget="1s")
    collector = SampleCollector(in_memory=True)
    trainer, module = quiet_trainer(max_epochs=10_000, callbacks=[auto, collector]), classifier()
    trainer.fit(module, *loaders(0.1))
    assert module.plan is not None
    assert module.plan.steps == trainer.global_step, "planned when the length was known"
    assert module.plan.seconds is not None
    assert module.plan.seconds < 100
    assert collector.posterior is not None
    assert len(collector.posterior) == 5
    assert collector.posterior[-1].step == trainer.global_step < 40_000
    assert module.chains.counters.compiled_steps == 0, "which would take longer than the run"


@pytest.mark.parametrize("objective", ["nll", pytest.param("both", marks=pytest.mark.slow)])
def test_a_run_of_a_budget_is_repeated_bit_for_bit(objective: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sgmcmc.chains.schedule.FOR_A_LOOK", 0.3)

    def run(auto: AutoSampling) -> list[PosteriorSample]:
        pl.seed_everything(0)
        collector, module = SampleCollector(in_memory=True), classifier()
        quiet_trainer(max_epochs=10_000, callbacks=[auto, collector]).fit(module, *loaders(0.1))
        assert collector.posterior is not None
        return list(collector.posterior)

    first = AutoSampling(objective, num_draws=5, budget="2s")
    samples = run(first)
    arguments = yaml.safe_load(yaml.safe_dump(first.as_configuration()))["init_args"]
    assert len(arguments["lengths"]) > 1
    assert_same(samples, run(AutoSampling(**arguments)))


SPEEDS: dict[str, tuple[dict[int, float], float]] = {  # milliseconds of a step from some steps on
    "one by one": ({1: 2.0}, 2.0),
    "blocks": ({1: 2.0, 65: 0.2}, 0.2),
    "compiled": ({1: 2.0, 65: 100.0, 200: 0.03}, 0.03),
    "slow": ({1: 200.0}, 200.0),
}


@pytest.mark.parametrize("case", SPEEDS)
def test_a_budget_goes_by_the_speed_of_later_steps(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds, wanted = SPEEDS[case]
    now, budget = 0.0, RunBudget("60s")
    trainer = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda own: own))
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for step in range(1, 20_000):
        now += next(each for first, each in reversed(speeds.items()) if step >= first) / 1000
        warm_steps = round(0.2 * (budget.expected or 10**6))
        if budget.after_step(trainer, step, warm_steps) and not budget.is_timing:
            break
    assert step <= 0.1 * budget.steps or case == "slow"
    seconds = now + (budget.steps - step) * wanted / 1000
    assert 40 < seconds < 60


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": "ten"}, "budget must be a time such as"),
        ({"budget": "0s"}, "budget must be a time such as"),
        ({"lengths": [[60, 500]]}, "pairs of a run with a budget"),
        ({"budget": "9s", "lengths": [[50, 500]]}, "of the steps 60, 120, 240"),
        ({"warm_up": 1.0}, "warm_up must be in"),
        ({"objective": "accuracy"}, "objective must be"),
        ({"prior_std": -1.0}, "prior_std must be"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AutoSampling(**options)


@pytest.mark.parametrize(
    "other",
    [ReplicaExchange([1.0, 2.0], [1.0, 1.2]), ContourGradient(ContourRules(zeta=0.75), num_bins=30, warm_up_steps=4)],
)
def test_callbacks_that_set_weights_or_draws_themselves_are_refused(other: pl.Callback) -> None:
    trainer = quiet_trainer(max_epochs=30, callbacks=[AutoSampling(num_draws=5), other])
    with pytest.raises(ValueError, match=r"AutoSampling and \w+ cannot be combined"):
        trainer.fit(classifier(num_chains=2), *loaders(0.1))


def test_there_is_nothing_to_tune() -> None:
    with pytest.raises(ValueError, match="AutoSampling brings its own sampler and lr"):
        RunForm(AutoSampling(), RunLength(1000))


def test_given_scales_belong_to_the_chains_of_the_run() -> None:
    trainer = quiet_trainer(max_epochs=20, callbacks=[AutoSampling(num_draws=5, prior_scales=[[[0, 0.3]]])])
    with pytest.raises(ValueError, match="prior_scales has the scales of 1 chains, and the run has 2"):
        trainer.fit(classifier(num_chains=2), *loaders(0.1))


def test_a_run_too_short_for_its_draws_says_so() -> None:
    trainer = quiet_trainer(max_epochs=5, callbacks=[AutoSampling()])
    with pytest.raises(ValueError, match=r"fit into the 16 steps .*: train for 100 steps .*num_draws=16\)"):
        trainer.fit(classifier(), *loaders(0.1))
    quiet_trainer(max_steps=100, callbacks=[AutoSampling()]).fit(classifier(), *loaders(0.1))


@pytest.mark.slow
def test_another_prior_stays(caplog: pytest.LogCaptureFixture) -> None:
    prior = GaussianPrior(std=1.0, center="start")
    module = fit(AutoSampling(num_draws=10), prior=prior)
    assert module.prior is prior


def test_it_combines_with_the_model_average(tmp_path: Path) -> None:
    module = classifier()
    callbacks = [AutoSampling(num_draws=10), SampleCollector(in_memory=True), BayesianModelAverage()]
    trainer = quiet_trainer(max_epochs=20, callbacks=callbacks)
    trainer.fit(module, *loaders(0.2))
    (result,) = trainer.test(module, loaders(0.2)[1], verbose=False)
    x, y = labels(0.2, 200, 2).tensors
    assert module.posterior is not None
    probabilities: Tensor = module.posterior.predict(x).probabilities
    assert result["test/bma_nll"] == pytest.approx(-float(probabilities.gather(1, y[:, None]).log().mean()), rel=1e-4)


class OwnData(BayesianModule):
    """A module that makes its data in `setup`."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.loaders = loaders(0.0)

    def train_dataloader(self) -> Any:
        return self.loaders[0]

    def val_dataloader(self) -> Any:
        return self.loaders[1]


@pytest.mark.parametrize(
    ("count", "options", "std"),
    [
        (24, {}, 1.0),  # in a short run
        (80, {"temperature": 0.03}, 0.707),  # 1/sqrt(0.025·80)
        (200, {"objective": "ood"}, 0.289),  # 1/sqrt(0.06·200)
        (24, {"objective": "ood"}, 0.35),
        (80, {"prior_std": 0.3}, 0.3),
        (500, {}, 0.3),
    ],
)
def test_the_prior_is_wider_for_few_data(count: int, options: dict[str, Any], std: float) -> None:
    """The weight decay 1/(N·σ²) has a limit, with which few data still move the weights away from 0."""
    auto, module = AutoSampling(num_draws=2, **options), classifier()
    data = DataLoader(labels(0.0, count, 1), 20), DataLoader(labels(0.0, 50, 2), 50)
    quiet_trainer(max_steps=10, callbacks=[auto]).fit(module, *data)
    assert auto.prior_std == std
    assert f"std={std}" in repr(module.prior)


def test_few_labels_are_learned() -> None:
    """With the prior of many data the network stays at chance: an accuracy near 0.5."""
    train, known = labels(0.0, 40, 1), labels(0.0, 400, 2)
    for options, learns in (({}, True), ({"prior_std": 0.1}, False)):
        module = classifier()
        callbacks = [AutoSampling(num_draws=10, **options), SampleCollector(in_memory=True)]
        trainer = quiet_trainer(max_steps=300, callbacks=callbacks)
        trainer.fit(module, DataLoader(train, 20, shuffle=True), DataLoader(labels(0.0, 40, 3), 40))
        assert module.posterior is not None
        nll = module.posterior.evaluate([known.tensors]).bma["nll"]
        assert (nll < 0.62) == learns, nll


def test_data_that_a_module_makes_later_are_asked_for() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 2))
    with pytest.warns(UserWarning, match=r"prior std 0\.3 does not suit 80 .*prior_std=0\.707"):
        quiet_trainer(max_steps=10, callbacks=[AutoSampling(num_draws=2)]).fit(OwnData(net, Categorical()))
    auto = AutoSampling(num_draws=2)
    quiet_trainer(max_steps=10, callbacks=[auto]).fit(OwnData(net, Categorical(), num_data=80))
    assert auto.prior_std == 0.707
