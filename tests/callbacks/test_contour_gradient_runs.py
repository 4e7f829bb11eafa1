"""ContourGradient in whole runs: what a checkpoint and a skipped step keep, what it says, and what it refuses."""

import copy
import dataclasses
import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc import (
    SGHMC,
    SGLD,
    BayesianModule,
    Categorical,
    ContourRules,
    NonFiniteEnergyError,
)
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    ContourGradient,
    CyclicalSchedule,
    ExactResume,
    SampleCollector,
    SamplerCallback,
    SamplingSchedule,
)
from tests.support.contour_fits import (
    PROBLEM,
    STEP_SIZE,
    STEPS,
    SaveAt,
    Spy,
    check_against_formulas,
    contour,
    fit,
)
from tests.support.paths import REPOSITORY
from tests.support.trainers import quiet_trainer

# -- what must not be lost --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("learns_range", [True, False])
def test_a_resumed_run_learns_on_bit_for_bit(tmp_path: Path, learns_range: bool) -> None:
    from tests.support.problems import Data, network

    def run(ckpt_path: Path | None = None) -> Any:
        module = BayesianModule(net=network(), likelihood=Categorical(), sampler=SGHMC, lr=0.05, seed=3)
        place: dict[str, Any] = {"warm_up_steps": 9} if learns_range else {"first_edge": 40.0, "width": 4.0}
        callbacks = [
            ContourGradient(ContourRules(0.8), 20, step_size=STEP_SIZE, **place),
            SamplingSchedule(burn_in_steps=10, every_n_steps=3),
            SampleCollector(in_memory=True),
            SaveAt(tmp_path, {4, 9, 10, 17, 24}),
        ]
        trainer = quiet_trainer(max_epochs=4, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(module, datamodule=Data(), ckpt_path=ckpt_path)
        return module

    whole = run()
    for step in (4, 9, 10, 17, 24):
        again = run(tmp_path / f"{step}.ckpt")
        assert torch.equal(again.contour.state.log_vector, whole.contour.state.log_vector)
        assert torch.equal(again.contour.state.visits, whole.contour.state.visits)
        assert again.contour.contour == whole.contour.contour
        assert again.posterior.records == whole.posterior.records
        for name, tensor in whole.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor)


def test_a_contour_can_begin_at_a_checkpoint_without_one(tmp_path: Path) -> None:
    fit(None, SaveAt(tmp_path, {100}), enable_checkpointing=True)
    schedule = SamplingSchedule(burn_in_steps=200, every_n_steps=10)
    later = ContourGradient(ContourRules(0.9), num_bins=30, warm_up_steps=60)
    allow = ExactResume(allow=["schedule.burn_in_steps"])
    module, spy = fit(
        later, allow, schedule=schedule, enable_checkpointing=True, ckpt_path=tmp_path / "100.ckpt", max_steps=250
    )
    assert module.contour is not None
    assert int(module.contour.state.visits.sum()) == 90
    assert len(spy.samples) == 5


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    fit(contour(), SaveAt(tmp_path, {100}), enable_checkpointing=True)
    for change in ({"zeta": 0.5}, {"num_bins": 31}, {"width": 7.0}, {"scheme": "original"}, {"floor": 1e-6}):
        with pytest.raises(ValueError, match=r"other settings \(contour"):
            fit(contour(**change), enable_checkpointing=True, ckpt_path=tmp_path / "100.ckpt")
    # A run that allows other settings still needs the bins of the learned histogram.
    allow = ExactResume(allow=["contour"])
    with pytest.raises(ValueError, match="the checkpoint's contour has"):
        fit(contour(num_bins=31), allow, enable_checkpointing=True, ckpt_path=tmp_path / "100.ckpt")


def test_nothing_of_a_fit_is_left_in_the_next_one() -> None:
    module, _ = fit(contour())
    assert module.contour is not None
    again = copy.deepcopy(module)
    assert pickle.loads(pickle.dumps(module.contour.contour)) == module.contour.contour
    module, spy = fit(None, module=again)
    assert module.contour is None
    assert {step["bin"] for step in spy.steps} == {-1}
    assert {sample.log_weight for sample in spy.samples} == {0.0}
    assert {step["multiplier"] for step in spy.steps} == {1.0}


def test_a_skipped_step_leaves_no_trace() -> None:
    class Poison(SamplerCallback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step % 7 == 3 and pl_module.skipped_steps < 5:
                batch[0].fill_(math.nan)

    module = PROBLEM.module(sampler=SGLD, lr=0.3, seed=1, nonfinite_energy="skip")
    with pytest.warns(UserWarning, match="skipped"):
        module, spy = fit(contour(), Poison(), module=module)
    assert module.skipped_steps == 5
    assert module.contour is not None
    check_against_formulas(spy, module.contour)


def test_a_nan_stops_the_run_in_the_guards_words() -> None:
    class Poison(SamplerCallback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 30:
                batch[0].fill_(math.nan)

    with pytest.raises(NonFiniteEnergyError, match="the run stops before step 31 of chain 0"):
        fit(contour(), Poison())


# -- what it says -----------------------------------------------------------------------------------------------------


class Memory(pl.loggers.logger.DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: int | None = None, **kwargs: Any) -> None:
        self.rows.append(dict(metrics) | {"step": step or 0})


def test_scalars_reach_the_logger() -> None:
    logger = Memory()
    learner = contour(min_multiplier=0.9, max_multiplier=1.1)
    _, spy = fit(learner, logger=[logger], log_every_n_steps=20)
    rows = [row for row in logger.rows if "contour/multiplier" in row]
    assert [row["step"] for row in rows] == list(range(20, STEPS + 1, 20))
    for row in rows:
        step = spy.steps[int(row["step"]) - 1]
        assert (row["contour/multiplier"], row["contour/bin"]) == (step["multiplier"], step["bin"])
        window = spy.steps[int(row["step"]) - 20 : int(row["step"])]
        clamped = sum(s["multiplier"] in (0.9, 1.1) for s in window) / 20
        assert row["contour/clamped"] == pytest.approx(clamped)
    assert any(row["contour/clamped"] > 0 for row in rows)


@pytest.mark.by_default("% of the weight")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"first_edge": 1e4}, "lower first_edge"),
        ({"first_edge": -1e4}, "raise first_edge"),
        ({"zeta": 3e5, "min_multiplier": 0.0, "max_multiplier": 1.0}, "interpolated weights are useless"),
        ({"zeta": 3e5, "weighting": "bin", "min_multiplier": 0.0, "max_multiplier": 1.0}, "% of the weight"),
    ],
)
def test_what_goes_wrong_is_said_once(options: dict[str, Any], said: str) -> None:
    with pytest.warns(UserWarning, match=said) as warnings:
        fit(contour(**options), max_steps=600)
    mine = [str(w.message) for w in warnings if "ContourGradient:" in str(w.message)]
    assert sum(said in message for message in mine) == 1, mine


@pytest.mark.slow
def test_a_sound_run_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    fit(contour(), max_steps=2500)
    assert [str(w.message) for w in recwarn if "Contour" in str(w.message)] == []


def test_trial_runs_work() -> None:
    for learner in (contour(), ContourGradient(ContourRules(0.5), warm_up_steps=100)):
        fit(learner, SampleCollector(in_memory=True), fast_dev_run=True, max_steps=-1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"first_edge": 3.0}, "needs a width"),
        ({}, "energy range is unknown"),
        ({"width": 2.0}, "energy range is unknown"),
        ({"warm_up_steps": -1}, "warm_up_steps"),
        ({"first_edge": 0, "width": -1}, "width"),
        ({"first_edge": 0, "width": 1, "num_bins": 1}, "num_bins"),
        ({"warm_up_steps": 9, "lowest": 0}, "lowest"),
        ({"warm_up_steps": 9, "headroom": -1}, "headroom"),
        ({"warm_up_steps": 9, "sample_energy": "batch"}, "sample_energy"),
        ({"warm_up_steps": 9, "rules": ContourRules(floor=0.02)}, "floor must be below 1/num_bins"),
        ({"warm_up_steps": 9, "exchange_every": 2}, "needs interacting chains: pass interacting=True"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ContourGradient(**({"rules": ContourRules()} | options))


def test_the_command_line_takes_rules_as_a_mapping(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rules: {zeta: …}` in a configuration, with the defaults filled in; a misspelt rule is named."""
    import yaml

    from lightning_sgmcmc.cli import main

    recipe = yaml.safe_load((REPOSITORY / "recipes" / "digits_csghmc_contour.yaml").read_text())
    (learner,) = (part for part in recipe["trainer"]["callbacks"] if part["class_path"].endswith("ContourGradient"))
    given = learner["init_args"]["rules"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(SystemExit):
        main(["fit", f"--config={tmp_path / 'config.yaml'}", "--print_config"])
    parsed = yaml.safe_load(capsys.readouterr().out)
    (learner,) = (part for part in parsed["trainer"]["callbacks"] if part["class_path"].endswith("ContourGradient"))
    assert learner["init_args"]["rules"] == dataclasses.asdict(ContourRules(**given))
    learner["init_args"]["rules"]["zetta"] = 1
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(parsed))
    with pytest.raises(SystemExit):
        main(["fit", f"--config={tmp_path / 'config.yaml'}"])
    assert "zetta" in capsys.readouterr().err


def test_rules_are_an_object() -> None:
    with pytest.raises(TypeError, match="rules must be an object of class ContourRules, got"):
        ContourGradient(0.75, warm_up_steps=9)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="has no argument 'zeta'"):
        ContourGradient(zeta=0.75, warm_up_steps=9)  # type: ignore[call-arg]


def test_combinations_without_meaning_are_refused() -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `ContourGradient`"):
        fit(contour(), contour())
    with pytest.raises(ValueError, match="temperature above 0"):
        fit(contour(), module=PROBLEM.module(temperature=0.0))
    with pytest.raises(ValueError, match="temperature above 0"):
        fit(contour(), schedule=CyclicalSchedule(temperature=0.0))
    with pytest.raises(ValueError, match="shorten warm_up_steps"):
        fit(ContourGradient(ContourRules(0.5), warm_up_steps=STEPS))
    with pytest.raises(ValueError, match="draw its first sample after the 140 steps"):
        fit(ContourGradient(ContourRules(0.5), warm_up_steps=STEPS - 10))


def test_dropout_and_full_energies_do_not_go_together() -> None:
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 3, bias=False))
    module = PROBLEM.module(lr=0.01)
    module.net = net
    with pytest.warns(UserWarning, match="use sample_energy='own'"):
        fit(contour(sample_energy="full"), module=module)


def test_the_average_weighs_by_importance() -> None:
    """The running average of the validation data is that of the samples with their weights."""
    from tests.support.problems import Data

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    module = BayesianModule(net=net, likelihood=Categorical(), sampler=SGLD, lr=0.1, seed=2)
    callbacks = [
        SamplingSchedule(burn_in_steps=50, every_n_steps=7),
        ContourGradient(ContourRules(3.0), 20, first_edge=50.0, width=3.0, step_size=STEP_SIZE),
        SampleCollector(in_memory=True),
        BayesianModelAverage(),
    ]
    data = Data()
    quiet_trainer(max_epochs=15, callbacks=callbacks).fit(module, datamodule=data)
    posterior = module.posterior
    assert posterior is not None
    weights = posterior.weights
    assert float(weights.max() / weights.min()) > 1.5
    x, y = (torch.cat(parts) for parts in zip(*data.val_dataloader(), strict=True))
    probabilities = posterior.predict(x, return_samples=True).sample_probabilities
    assert probabilities is not None
    average = (weights[:, None, None] * probabilities.double()).sum(0)
    nll = -average[torch.arange(len(y)), y].log().mean().item()
    assert module.evaluations["val"].bma["nll"] == pytest.approx(nll, rel=1e-5)


def test_steps_are_counted_by_every_order_of_callbacks() -> None:
    """The numbers do not depend on where in the list the callback stands."""
    ends = []
    for order in itertools.permutations(range(3)):
        spy, learner = Spy(), contour()
        parts = [learner, SamplingSchedule(burn_in_steps=20, every_n_steps=5), spy]
        module = PROBLEM.module(sampler=SGLD, lr=0.3, seed=1)
        quiet_trainer(max_steps=40, callbacks=[parts[i] for i in order]).fit(module, PROBLEM.loader(40))
        ends.append([(s.log_weight, s.bin, s.energy) for s in spy.samples])
    assert all(end == ends[0] for end in ends)
