"""ContourGradient(auto=True) under a trainer: what it chooses, writes down, restores, and what averages it gives."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml

from lightning_sgmcmc import SGHMC, SGLD, BayesianModule, Categorical, ContourRules, UnderdampedLangevin
from lightning_sgmcmc.batches import ResumableLoader
from lightning_sgmcmc.callbacks import (
    AutoSampling,
    BayesianModelAverage,
    ChainHealth,
    ContourGradient,
    CyclicalSchedule,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
    WarmStart,
)
from lightning_sgmcmc.contour import ContourGoals, choose_contour
from lightning_sgmcmc.contour import callback as contour_gradient
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.health.findings import FindingKind
from lightning_sgmcmc.recipes.shared.small_networks import NETWORKS
from tests.support.contour_fits import SaveAt, fit
from tests.support.problems import ConjugateRegression, Data, network
from tests.support.trainers import quiet_trainer

SAVED = (90, 105, 150)
"""In the first half of the warm-up (steps 0 to 100), in the half that is recorded, and twice after it."""


def run(
    folder: Path, ckpt_path: Path | None = None, execution: str = "vmap", goals: Any = True, max_steps: int = 220
) -> tuple[BayesianModule, ContourGradient]:
    """Fit two interacting chains whose settings are chosen; the first sample is due after step 210."""
    torch.manual_seed(0)
    module = BayesianModule(
        net=network(), likelihood=Categorical(), sampler=SGHMC, lr=0.05, seed=3, num_chains=2, chain_execution=execution
    )
    contour = ContourGradient(auto=goals, interacting=True)
    callbacks = [
        contour,  # before the schedule, which knows the first sample
        SamplingSchedule(burn_in_steps=205, every_n_steps=5),
        SampleCollector(in_memory=True),
        BayesianModelAverage(),
        ChainHealth(every_n_steps=5, warn=False),
        RunSummary(),
        SaveAt(folder, set(SAVED)),
    ]
    trainer = quiet_trainer(
        max_steps=max_steps,
        callbacks=callbacks,
        enable_checkpointing=True,
        default_root_dir=folder,
        check_val_every_n_epoch=1000,
        logger=pl.loggers.CSVLogger(folder, name="log", version=""),
    )
    trainer.fit(module, datamodule=Data(), ckpt_path=ckpt_path)
    return module, contour


def same(one: BayesianModule, other: BayesianModule) -> bool:
    assert one.contour is not None
    assert other.contour is not None
    states = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return (
        all(torch.equal(a, b) for a, b in states)
        and torch.equal(one.contour.state.log_vector, other.contour.state.log_vector)
        and torch.equal(one.contour.state.visits, other.contour.state.visits)
        and one.contour.contour == other.contour.contour
        and one.contour.choice == other.contour.choice
        and one.posterior.records == other.posterior.records  # type: ignore[union-attr]
    )


def test_a_run_resumes_bit_for_bit_with_the_same_choice_and_writes_it_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the warm-up and after it; with `vmap`, and once with the loop."""
    said: list[str] = []
    monkeypatch.setattr(contour_gradient, "rank_zero_info", said.append)
    whole, _ = run(tmp_path)
    assert whole.contour is not None
    choice = whole.contour.choice
    assert choice is not None
    assert choice.count == 2 * 53
    assert whole.contour.contour == choice.contour
    assert said == [f"ContourGradient {choice.sentence}"]
    results = json.loads((tmp_path / "log" / "results.json").read_text())
    assert results["contour"]["choice"] == json.loads(json.dumps(choice.as_json()))
    assert results["contour"]["use"]["steps"] == int(whole.contour.state.visits.sum())
    logged = yaml.safe_load((tmp_path / "log" / "hparams.yaml").read_text())
    assert logged["contour.zeta"] == choice.contour.rules.zeta
    assert logged["contour.num_bins"] == choice.contour.partition.num_bins
    for step in SAVED:
        again, _ = run(tmp_path / f"from {step}", tmp_path / f"{step}.ckpt")
        assert same(again, whole), step
    with pytest.raises(ValueError, match=r"contour\.auto"):
        run(tmp_path / "other", tmp_path / "150.ckpt", goals=ContourGoals(spread=0.1))


@pytest.mark.slow
def test_the_loop_over_chains_resumes_too_and_chooses_the_same_up_to_rounding(tmp_path: Path) -> None:
    whole, _ = run(tmp_path, execution="loop")
    vmapped, _ = run(tmp_path / "vmap")
    again, _ = run(tmp_path / "again", tmp_path / "90.ckpt", execution="loop")
    assert same(again, whole)
    zetas = [one.contour.contour.rules.zeta for one in (whole, vmapped)]  # type: ignore[union-attr]
    # An effective sample size ends at a lag, which rounding can move.
    assert zetas[0] == pytest.approx(zetas[1], rel=0.1)


def test_the_choice_is_that_of_the_warm_ups_energies() -> None:
    module, spy = fit(
        ContourGradient(auto=True, warm_up_steps=200),
        schedule=SamplingSchedule(burn_in_steps=220, every_n_steps=10),
        max_steps=260,
    )
    energies, priors = (torch.tensor([step[name] for step in spy.steps[100:200]]) for name in ("energy", "log_prior"))
    expected = choose_contour(energies, log_prior=priors)
    assert module.contour is not None
    assert module.contour.choice is not None
    assert module.contour.contour.rules.zeta == pytest.approx(expected.contour.rules.zeta, rel=0.01)
    assert vars(module.contour.partition) == pytest.approx(vars(expected.contour.partition), rel=0.01)
    assert {step["multiplier"] for step in spy.steps[:200]} == {1.0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rules": ContourRules(0.5)}, "auto chooses rules from the warm-up's energies: omit it"),
        ({"width": 2.0}, "auto chooses width"),
        ({"num_bins": 30}, "auto chooses num_bins"),
        ({"include_prior": False}, "auto chooses include_prior"),
        ({"auto": "yes"}, "auto must be"),
        ({"auto": False, "warm_up_steps": 10}, "pass ContourRules"),
    ],
)
def test_what_it_chooses_is_refused_beside_it(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        ContourGradient(**({"auto": True} | options))


def test_runs_without_a_warm_up_are_refused() -> None:
    with pytest.raises(ValueError, match="there is none that is long enough: the first sample is due after step 60"):
        fit(ContourGradient(auto=True), schedule=SamplingSchedule(burn_in_steps=50, every_n_steps=10))
    with pytest.raises(ValueError, match="fewer than 100: lengthen the burn-in or warm_up_steps"):
        fit(ContourGradient(auto=True, warm_up_steps=50))
    with pytest.raises(ValueError, match="cannot be combined: both set what samples carry"):
        fit(ContourGradient(auto=True), schedule=AutoSampling())


@pytest.mark.slow
def test_a_cyclical_run_chooses_in_its_first_sampling_stage() -> None:
    """The exploration, 112 steps at temperature 0, has no part in it."""
    module, spy = fit(ContourGradient(auto=True), schedule=CyclicalSchedule(1, 0.2, 1), max_steps=560)
    assert module.contour is not None
    assert module.contour.choice is not None
    assert sum(step["temperature"] == 0 for step in spy.steps) == 112
    assert module.contour.choice.count == 112
    assert {step["multiplier"] for step in spy.steps[:336]} == {1.0}
    assert len({step["multiplier"] for step in spy.steps[340:]}) > 10


@pytest.mark.slow
def test_a_contour_without_effect_is_a_note_of_the_run() -> None:
    goals = ContourGoals(spread=0.02)
    schedule = SamplingSchedule(burn_in_steps=500, every_n_steps=10)
    module, _ = fit(ContourGradient(auto=goals), ChainHealth(warn=False), schedule=schedule, max_steps=1200)
    assert module.health is not None
    notes = [one for one in module.health.findings if one.kind is FindingKind.CONTOUR]
    assert [(one.severity, one.side) for one in notes] == [("note", "below")]
    assert "the run is one without a contour" in notes[0].sentence


SLOW = pytest.mark.slow
CASES = [
    ("classification", 1, 0.05, 600),
    pytest.param("classification", 2, 0.05, 600, marks=SLOW),
    pytest.param("smallest", 0, 0.003, 1500, marks=SLOW),
    pytest.param("regression", 1, 0.001, 1500, marks=SLOW),
    pytest.param("regression", 2, 0.001, 1500, marks=SLOW),
]


@pytest.mark.parametrize(("name", "seed", "lr", "steps"), CASES)
def test_the_weights_are_as_efficient_as_promised_after_a_short_warm_up(
    name: str, seed: int, lr: float, steps: int
) -> None:
    """Networks of recipe `contour_pays`, whose weights had 0.01 to 0.04 where 0.5 had been promised (0.93 on the
    smallest): a warm-up of few independent energies does not know their law."""
    network = NETWORKS[name]
    torch.manual_seed(seed)
    baoab = functools.partial(UnderdampedLangevin, friction=2.0, integrator="baoab")
    module = network.module(sampler=baoab, lr=lr, num_chains=4, chain_execution="vmap", seed=seed)
    schedule = SamplingSchedule(burn_in_steps=steps // 4, every_n_steps=max(1, 3 * steps // 4 // 200))
    contour = ContourGradient(auto=True, interacting=True)
    tensors = [torch.tensor(part) for part in (network.x, network.y)]
    data = TensorBatches(*(part if part.dtype == torch.int64 else part.float() for part in tensors))
    loader = ResumableLoader(data, batch_size=len(network.x), seed=seed)
    callbacks = [WarmStart(lr=0.01, steps=200), schedule, contour, SampleCollector(in_memory=True)]
    quiet_trainer(max_steps=steps + 200, callbacks=callbacks).fit(module, loader)
    assert module.contour is not None
    use, choice = module.contour.use(), module.contour.choice
    assert choice is not None
    assert use.promised == choice.efficiency
    assert use.efficiency == pytest.approx(use.promised, abs=0.1)
    assert f"effective sample size of {choice.independent:.0f} leaves their law uncertain" in choice.sentence


@pytest.mark.slow
def test_weighted_averages_have_the_posterior() -> None:
    """Conjugate regression, all data in a step, 16 interacting chains, two outputs.

    The mean and the variance of each weight, of weighted draws, lie within four standard errors over the chains (and
    2 % for the step); with six weights a false alarm has a rate of 1e-3. The contour acts: κ spreads by more than 0.2,
    and unweighted draws are wider.
    """
    problem, chains = ConjugateRegression(num_data=60, features=3, outputs=2), 16
    module = problem.module(
        sampler=SGLD, lr=0.05, seed=1, num_chains=chains, chain_start="same", chain_execution="vmap", num_data=60
    )
    collector = SampleCollector(in_memory=True)
    contour = ContourGradient(auto=ContourGoals(spread=0.6), interacting=True, sample_energy="step")
    callbacks = [contour, SamplingSchedule(burn_in_steps=600, every_n_steps=10), collector]
    loader = torch.utils.data.DataLoader(problem.dataset(), batch_size=60)
    quiet_trainer(max_steps=6000, callbacks=callbacks).fit(module, loader)
    assert module.contour is not None
    assert module.contour.use().spread > 0.2
    posterior = collector.posterior
    assert posterior is not None
    values = torch.stack([sample.parameters["net.weight"].double().flatten() for sample in posterior])
    weights = posterior.weights
    of_chain = torch.tensor([sample.chain for sample in posterior])
    mean, variance = torch.tensor(problem.mean).flatten(), torch.tensor(problem.covariance.diagonal().copy()).repeat(2)
    standard = (values - mean) / variance.sqrt()
    for power, truth, slack in ((1, 0.0, 0.0), (2, 1.0, 0.02)):
        moment = standard**power
        estimate = (weights[:, None] * moment).sum(0)
        each = [
            (weights[own, None] * (moment[own] - estimate)).sum(0) for own in (of_chain == c for c in range(chains))
        ]
        error = torch.stack(each).square().sum(0).sqrt()
        assert bool(((estimate - truth).abs() < 4 * error + slack).all())
    assert float(standard.square().mean()) > 1.1


def test_a_configuration_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`auto: true` and `auto: {spread: …}` in a configuration."""
    from lightning_sgmcmc.cli import main

    for given, read in ((True, True), ({"spread": 0.3}, {"spread": 0.3, "efficiency": 0.5, "exact": True})):
        contour = {"class_path": "lightning_sgmcmc.callbacks.ContourGradient", "init_args": {"auto": given}}
        config = {
            "model": {
                "class_path": "lightning_sgmcmc.BayesianModule",
                "init_args": {
                    "net": {"class_path": "torch.nn.Linear", "init_args": {"in_features": 64, "out_features": 10}},
                    "likelihood": "lightning_sgmcmc.Categorical",
                },
            },
            "data": {"class_path": "lightning_sgmcmc.datamodules.DigitsDataModule"},
            "trainer": {"callbacks": [contour]},
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        with pytest.raises(SystemExit):
            main(["fit", f"--config={tmp_path / 'config.yaml'}", "--print_config"])
        parsed = yaml.safe_load(capsys.readouterr().out)
        (learner,) = (one for one in parsed["trainer"]["callbacks"] if one["class_path"].endswith("ContourGradient"))
        assert learner["init_args"]["auto"] == read
