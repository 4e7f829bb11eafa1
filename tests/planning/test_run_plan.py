"""The plan of a fit: its numbers, words and kind, through `Trainer.fit` and the command line."""

import json
import logging
import math
import os
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import pytorch_lightning as pl
import torch
import yaml
from torch import nn

from lightning_sgmcmc import (
    SGHMC,
    SGLD,
    BayesianModule,
    Categorical,
    GaussianPrior,
    HierarchicalPrior,
    LaplacePrior,
    Prior,
    UnderdampedLangevin,
    pSGLD,
)
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    ChainHealth,
    CyclicalSchedule,
    ReplicaExchange,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
)
from lightning_sgmcmc.cli import main
from lightning_sgmcmc.health.estimates import ANCHORED, PLAIN
from lightning_sgmcmc.planning import WANTED, RunKind, RunPlan
from lightning_sgmcmc.report import write_report
from lightning_sgmcmc.samplers import Sampler, StepLaw
from tests.support.paths import RECIPE
from tests.support.problems import ConjugateRegression
from tests.support.small_run import COUNT, loader, module
from tests.support.trainers import quiet_trainer, seeded


def planned(run: BayesianModule, *callbacks: pl.Callback, steps: int = 40, **options: Any) -> RunPlan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet_trainer(max_steps=steps, callbacks=list(callbacks), **options).fit(run, loader())
    assert run.plan is not None
    return run.plan


def test_the_readme_example_is_a_cold_ensemble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: Σ lr/(0.1·N) over a cycle's last 195 of 650 steps is 0.0223; no training, no folder, exit code 0."""
    monkeypatch.chdir(tmp_path)
    main(["plan", "--config", RECIPE, "--trainer.enable_progress_bar=false"])
    said = capsys.readouterr().out
    rows = [line.strip("│ \n").split("│") for line in said.splitlines() if line.startswith("│")]
    table = {name.strip(): value.strip() for name, value in rows}
    by_hand = sum(0.2 * (math.cos(math.pi * r / 650) + 1) / 2 for r in range(455, 650)) / (0.1 * 1259)
    assert float(table["Relaxation times (3 required)"]) == pytest.approx(by_hand, rel=0.03)
    assert 0.03 < float(table["Expected configurational temperature"]) < 0.08
    assert table["This run is called"] == "cold ensemble"
    assert table["Thermal energy τ·d/2, nats"] == f"{17610 / 2:,.0f}"
    assert table["Energy of guessing, nats"] == f"{1259 * math.log(10):,.0f}"
    assert table["Epochs"] == "400"
    assert "130 times" in said
    assert os.listdir(tmp_path) == []


def test_the_plan_of_a_time_has_the_steps_that_fit_into_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not Lightning's default of a thousand epochs; nothing is written."""
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load(Path(RECIPE).with_name("digits_auto.yaml").read_text())
    config["trainer"]["callbacks"][0]["init_args"] = {"budget": "10s"}
    del config["trainer"]["max_epochs"]
    Path("timed.yaml").write_text(yaml.safe_dump(config))
    with caplog.at_level(logging.INFO, "pytorch_lightning"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of max_epochs
        main(["plan", "--config", "timed.yaml", "--trainer.enable_progress_bar=false"])
    planned = re.search(r"Optimizer steps +│ +([\d,]+)", capsys.readouterr().out)
    assert planned is not None
    assert [text for text in caplog.messages if f"AutoSampling: {planned[1]} steps of" in text]
    assert "_Plan" not in caplog.text, "what makes the plan is nothing of the user's"
    assert 240 <= int(planned[1].replace(",", "")) < 100_000
    assert os.listdir(tmp_path) == ["timed.yaml"]


def test_a_configuration_without_a_schedule_has_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load(Path(RECIPE).read_text())
    config["trainer"]["callbacks"] = []
    Path("plain.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit) as end:
        main(["plan", "--config", "plain.yaml"])
    assert end.value.code == 2
    assert "there is nothing to plan: add a CyclicalSchedule" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["plain.yaml"]


def test_a_fit_reports_its_plan(tmp_path: Path) -> None:
    """The plan is in results.json with its kind, and on the report's page; its cost is what the fit counted."""
    run = module(sampler=SGHMC, lr=0.01)
    callbacks = [SamplingSchedule(burn_in_steps=10, every_n_steps=10), RunSummary(), BayesianModelAverage()]
    trainer = quiet_trainer(
        max_steps=40, callbacks=[*callbacks, SampleCollector()], default_root_dir=tmp_path, num_sanity_val_steps=0
    )
    with pytest.warns(UserWarning, match="of 3 required relaxation times"):
        trainer.fit(run, loader(), loader())
    plan = run.plan
    assert plan is not None
    assert plan.gradient_evaluations == run.gradient_evaluations
    assert plan.data_passes == run.gradient_evaluations / COUNT
    results = json.loads((tmp_path / "sgmcmc" / "results.json").read_text())
    assert results["kind"] == "cold ensemble" == str(plan.kind)
    assert results["plan"]["relaxation_times"] == plan.relaxation_times
    assert results["plan"]["samples"] == plan.samples == 3
    page = write_report(tmp_path / "sgmcmc").read_text()
    assert "this run is a cold ensemble" in page
    assert "of 3 required relaxation times" in page


def test_the_configurational_temperature_is_that_of_chain_health() -> None:
    """Conjugate regressions with 6,000 weights, where the data say little, so the prior's law is the posterior's.

    Compared is the estimate about the state at the stage's start, whose standard error is below 2 % of it; the plan's
    other estimate, about 0, differs by what the first stage left.
    """
    problem = ConjugateRegression(num_data=10, outputs=2000, noise_std=100.0)
    for schedule, is_cold in (
        (CyclicalSchedule(num_cycles=2, exploration=0.4, samples_per_cycle=1), True),
        (SamplingSchedule(burn_in_steps=50, every_n_steps=50), False),
    ):
        run = problem.module(sampler=SGHMC, lr=0.01, seed=0)
        torch.nn.init.zeros_(next(run.parameters()))
        health = ChainHealth(every_n_steps=2, warn=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quiet_trainer(max_steps=200, callbacks=[schedule, health]).fit(run, problem.loader(10))
        assert run.plan is not None
        assert health._observer is not None
        seen = health._observer.observations([0.0])
        rows = (seen.values[:, PLAIN] - seen.values[:, ANCHORED])[:, 0]
        measured = float((rows * seen.counts).sum() / seen.counts.sum())
        assert run.plan.configurational_temperature == pytest.approx(measured, rel=0.08)
        assert (run.plan.kind is RunKind.COLD_ENSEMBLE) == is_cold


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_chains_with_controls_of_their_own(execution: Any) -> None:
    """Two chains of which one has four times the step covers the mean of the two, with the range of temperatures."""
    schedule = SamplingSchedule(burn_in_steps=0, every_n_steps=20)
    alone = [planned(module(lr=lr), schedule) for lr in (0.01, 0.04)]
    run = module(lr=[0.01, 0.04], num_chains=2, chain_start="same", chain_execution=execution, seed=0)
    both = planned(run, schedule)
    each = [plan.relaxation_times for plan in alone]
    assert None not in each
    assert both.relaxation_times == pytest.approx(sum(each) / 2, rel=1e-5)  # type: ignore[arg-type]
    assert (both.chains, both.samples) == (2, 4)
    assert both.configurational_range is not None
    low, high = both.configurational_range
    assert low < high
    assert both.parameters == alone[0].parameters == 6


def test_accumulation_changes_steps_and_not_data_passes() -> None:
    plans = [
        planned(module(), SamplingSchedule(every_n_steps=1), max_epochs=3, steps=-1, accumulate_grad_batches=n)
        for n in (1, 3)
    ]
    assert [plan.steps for plan in plans] == [9, 3]
    assert [plan.data_passes for plan in plans] == [3, 3]


def test_what_is_unknown_is_none_and_said() -> None:
    class Own(Prior):
        def log_prob(self, parameters: Any) -> torch.Tensor:
            return sum((-p.square().sum() / 2 for p in parameters.values()), torch.zeros(()))

    plan = planned(module(prior=Own()), SamplingSchedule(every_n_steps=10))
    assert plan.relaxation_times is None
    assert plan.kind is None
    assert any("prior's scale is unknown" in note for note in plan.notes)
    assert not any("relaxation" in line or "unknown of" in line for line in plan.sentences())
    assert planned(module(sampler=pSGLD), SamplingSchedule(every_n_steps=10)).relaxation_times is None
    laplace = planned(module(prior=LaplacePrior(0.5)), SamplingSchedule(every_n_steps=10))
    gauss = planned(module(prior=GaussianPrior(0.5 * math.sqrt(2))), SamplingSchedule(every_n_steps=10))
    assert laplace.relaxation_times == gauss.relaxation_times
    assert "approximate" in laplace.notes[0]
    assert not any("approximate" in note for note in gauss.notes)


def test_a_start_at_its_centre_is_no_heat() -> None:
    """θ begins at the prior's mean, at distance 0, for the parameters with a centre, whatever their values."""

    def reached(prior: Prior, weight: float) -> float | None:
        run = module(prior=prior)
        for parameter in run.parameters():
            nn.init.constant_(parameter, weight)
        return planned(run, SamplingSchedule(every_n_steps=10)).configurational_temperature

    gauss = reached(GaussianPrior(0.5, center="start"), 5.0)
    assert reached(HierarchicalPrior(std=0.5, center="start"), 5.0) == gauss
    assert reached(GaussianPrior(0.5), 0.0) == gauss
    partly = reached(HierarchicalPrior(std=0.5, center="start", centered=["net.bias"]), 5.0)
    assert partly == pytest.approx(reached(GaussianPrior(0.5, center="start", centered=["net.bias"]), 5.0))
    assert partly != pytest.approx(gauss), "the weights begin far from 0"


def test_a_ladder_is_planned_for_its_coldest_slot() -> None:
    ladder = ReplicaExchange(temperatures=[1.0, 4.0], lrs=[1.0, 2.0], noise_variance=0.0)
    run = module(lr=0.01, num_chains=2, seed=0)
    plan = planned(run, SamplingSchedule(every_n_steps=10), ladder)
    alone = planned(module(lr=0.01), SamplingSchedule(every_n_steps=10))
    assert plan.samples == 4, "one of two chains is sampled"
    assert plan.relaxation_times == pytest.approx(alone.relaxation_times, rel=1e-5)
    assert any("coldest slot" in note for note in plan.notes)


def test_a_trial_and_a_fit_without_a_schedule_have_no_plan() -> None:
    for callbacks, options in (([SamplingSchedule(every_n_steps=1)], {"fast_dev_run": True}), ([], {"max_steps": 2})):
        run = module()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quiet_trainer(callbacks=callbacks, **options).fit(run, loader())
        assert run.plan is None


def facts(**options: Any) -> RunPlan:
    known = {"steps": 100, "samples": 4, "chains": 1, "num_data": 10, "parameters": 5, "temperature": 1.0}
    return RunPlan(**(known | options))


@pytest.mark.parametrize(
    ("options", "measured", "kind"),
    [
        ({"temperature": 0.0}, None, RunKind.SNAPSHOT_ENSEMBLE),
        ({"temperature": 0.0, "chains": 4}, None, RunKind.DEEP_ENSEMBLE),
        ({"relaxation_times": 0.5, "configurational_temperature": 0.9}, None, RunKind.COLD_ENSEMBLE),
        ({"relaxation_times": 0.5, "configurational_temperature": 0.4}, 1.0, RunKind.POSTERIOR_SAMPLE),
        ({"relaxation_times": 5.0, "configurational_temperature": 0.98}, None, RunKind.POSTERIOR_SAMPLE),
        ({"relaxation_times": 5.0, "configurational_temperature": 0.98}, 0.3, RunKind.COLD_ENSEMBLE),
        (
            {"temperature": 0.1, "relaxation_times": 5.0, "configurational_temperature": 0.09},
            None,
            RunKind.COLD_ENSEMBLE,
        ),
        ({"temperature": 0.03}, None, RunKind.COLD_ENSEMBLE),
        ({}, None, None),
        ({}, 1.0, RunKind.POSTERIOR_SAMPLE),
        ({}, 0.2, RunKind.COLD_ENSEMBLE),
    ],
)
def test_kinds(options: dict[str, Any], measured: float | None, kind: Any) -> None:
    assert RunKind.of(facts(**options), measured) == kind


@pytest.mark.slow
def test_the_numbers_to_change_are_the_right_ones() -> None:
    """What the warning proposes covers the wanted relaxation times: they are proportional to steps·lr/std²."""
    std, lr, steps = 0.25, 0.02, 100
    first = planned(module(prior=GaussianPrior(std), lr=lr), SamplingSchedule(every_n_steps=50), steps=steps)
    assert first.relaxation_times is not None
    times = WANTED / first.relaxation_times
    assert 1 < times < 10
    (sentence,) = first.warnings
    words = sentence.replace(",", "").split()
    assert float(words[words.index("times", 6) - 1]) == pytest.approx(times, rel=0.1)
    proposed = float(words[words.index("std") + 1])
    second = planned(module(prior=GaussianPrior(proposed), lr=lr), SamplingSchedule(every_n_steps=50), steps=steps)
    assert second.relaxation_times == pytest.approx(WANTED, rel=0.1)
    proposed = float(words[words.index("lr") + 1])
    third = planned(module(prior=GaussianPrior(std), lr=proposed), SamplingSchedule(every_n_steps=50), steps=steps)
    assert third.relaxation_times == pytest.approx(WANTED, rel=0.15)


def test_sentences_are_short_and_a_cold_run_gets_no_warning() -> None:
    large = facts(
        steps=10**4,
        samples=100,
        chains=10,
        parameters=10**9,
        relaxation_times=34.5,
        configurational_temperature=0.00123,
        independent_draws=123456.0,
        heat=5e8,
        chance=1e9,
        data_passes=100.0,
        disk_bytes=10**12,
        memory_bytes=10**12,
    )
    for plan in (large, facts(), facts(temperature=0.0)):
        assert len(plan.sentences()) == 2
        assert all(len(line) < 80 for line in plan.sentences()), plan.sentences()
        assert len(plan.warnings) <= 1
    said = facts(relaxation_times=4.0, configurational_temperature=1.0, independent_draws=16.0).sentences()
    assert said == [
        "Plan: posterior sample; 4 samples of 1 chain; temperature 1 (target 1).",
        "Length: 100 steps, 4 relaxation times (3 needed).",
    ]
    for share, words in ((1.0, "accept it"), (1.3, "WarmStart")):
        known = {"relaxation_times": 0.8, "configurational_temperature": share, "is_exact": True}
        (warning,) = facts(**known).warnings
        assert words in warning, "above 1.2 of the target's temperature nothing is to be accepted"
        assert ("accept it" in warning) == (share == 1.0)
    assert facts(temperature=0.0, relaxation_times=0.0).warnings == []
    hot = facts(relaxation_times=10.0, configurational_temperature=1.0, heat=900.0, chance=1000.0)
    assert hot.warnings[0].endswith("temperature 0.1")
    assert facts(relaxation_times=10.0, configurational_temperature=1.0, heat=400.0, chance=1000.0).warnings == []


def test_a_module_with_a_plan_can_be_copied_and_the_duration_is_measured() -> None:
    import copy

    plan = planned(module(), SamplingSchedule(every_n_steps=50), steps=150)
    assert plan.seconds is not None
    assert plan.seconds_per_step is not None
    assert plan.seconds == pytest.approx(150 * plan.seconds_per_step)
    assert copy.deepcopy(plan) == plan
    json.dumps(plan.as_json())


def test_an_unwatched_network_of_one_scalar() -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x.sum(1) * self.slope, -x.sum(1) * self.slope], 1)

    for chains in (1, 2):
        run = BayesianModule(net=Scalar(), likelihood=Categorical(), sampler=SGLD, lr=0.01, num_chains=chains, seed=0)
        assert planned(run, SamplingSchedule(every_n_steps=10)).parameters == 1


class Leapfrog(Sampler):
    """A momentum rule of a user's own: the position moves by the old momentum, times a time step."""

    momentum_buffer = "momentum"
    says: ClassVar[dict[str, Any]] = {}

    def update(self, group: Any, params: Any, grads: Any, noise: Any) -> None:
        momenta, h = self._buffers(params, "momentum"), group["lr"]
        self._add(params, momenta, h)
        self._scale(momenta, 0.9)
        self._add(momenta, grads, -h * self.num_data)
        if noise is not None:
            self._add(momenta, noise, (0.2 * group["temperature"]) ** 0.5)

    def law(self, group: Any) -> StepLaw:
        tau = group["temperature"]
        return StepLaw(0.1, group["lr"] * self.num_data, 0.2 * tau, tau, **self.says)


class Said(Leapfrog):
    @property
    def says(self) -> dict[str, Any]:  # type: ignore[override]
        return {"move": "before", "time_step": self.param_groups[0]["lr"]}


def test_a_momentum_rule_of_a_users_own_is_planned_by_its_law_or_not_at_all() -> None:
    """The same steps as those of `UnderdampedLangevin` have the same plan; without a `move` the plan has none."""
    schedule = SamplingSchedule(every_n_steps=10)
    unsaid = planned(module(sampler=Leapfrog, lr=0.02), schedule)
    assert unsaid.relaxation_times is None
    assert any("Leapfrog's law does not say how its position moves" in note for note in unsaid.notes)
    rules = (Said, partial(UnderdampedLangevin, friction=5.0))
    own, known = (planned(seeded(partial(module, sampler=rule, lr=0.02)), schedule) for rule in rules)
    assert own.relaxation_times == pytest.approx(known.relaxation_times)
    assert own.configurational_temperature == pytest.approx(known.configurational_temperature)
