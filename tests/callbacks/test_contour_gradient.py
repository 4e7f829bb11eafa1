"""ContourGradient under a trainer: its numbers are those of the formulas, whatever else the trainer does."""

import copy
import dataclasses
import functools
import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import nn

from lightning_sgmcmc import (
    SGHMC,
    SGLD,
    SGNHT,
    Annealing,
    BayesianModule,
    Categorical,
    ContourRules,
    DecayingStepSize,
    NonFiniteEnergyError,
    UnderdampedLangevin,
    pSGLD,
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
from lightning_sgmcmc.contour import LearnedContour
from tests.support import contour_reference as reference
from tests.support.paths import REPOSITORY
from tests.support.problems import ConjugateRegression, RankData
from tests.support.trainers import quiet_trainer

PROBLEM = ConjugateRegression(num_data=120, features=2, outputs=3)
PARTITION = {"first_edge": 390.0, "width": 6.0, "num_bins": 30}
STEP_SIZE = DecayingStepSize(5, 0.7, 20)
RULES = {field.name for field in dataclasses.fields(ContourRules)}


class Spy(SamplerCallback):
    """Writes down what every step was made with."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.samples: list[Any] = []
        self._count = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._count = pl_module.sampler.step_count

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if pl_module.sampler.step_count == self._count:
            return
        self._count = pl_module.sampler.step_count
        group, chains = pl_module.sampler.param_groups[0], pl_module.chains
        self.steps.append(
            {
                "energy": chains.observed.mean_potential.double().item() * chains.observed.num_data,
                "log_prior": chains.observed.log_prior.item(),
                "multiplier": float(group["gradient_multiplier"]),
                "temperature": float(group["temperature"]),
                "log_weight": chains.tags.log_weight.item(),
                "bin": -1 if chains.tags.bin is None else int(chains.tags.bin),
            }
        )

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: Any, sample: Any) -> None:
        self.samples.append(sample)


def check_against_formulas(spy: Spy, contour: LearnedContour, step_size: DecayingStepSize = STEP_SIZE) -> None:
    """Go through the steps by the formulas in plain Python; every multiplier, weight and the final π must agree."""
    rules = contour.rules
    options = vars(contour.partition) | vars(rules)
    m = contour.partition.num_bins
    pi, visits, updates = [1 / m] * m, [0] * m, 0
    for step in spy.steps:
        if step["temperature"] == 0:
            assert step["multiplier"] == 1
            continue
        j, multiplier, density = reference.locate(pi, visits, step["energy"], step["temperature"], options)
        assert step["multiplier"] == pytest.approx(multiplier, rel=1e-9, abs=1e-9)
        assert step["log_weight"] == pytest.approx(rules.weight_exponent * rules.zeta * density, rel=1e-9)
        assert step["bin"] == j
        updates += 1
        pi = reference.learn(pi, [j], [density], step_size.at(updates), options)
        visits[j] += 1
    assert contour.state.visits.tolist() == visits
    torch.testing.assert_close(contour.state.log_vector.exp(), torch.tensor(pi).double(), rtol=1e-6, atol=1e-9)


def fit(
    contour: ContourGradient | None,
    *more: pl.Callback,
    schedule: pl.Callback | None = None,
    batch: int = 40,
    module: Any = None,
    **trainer_options: Any,
) -> tuple[BayesianModule, Spy]:
    options = {"max_steps": 300} | trainer_options
    ckpt_path = options.pop("ckpt_path", None)
    spy = Spy()
    first = [] if contour is None else [contour]
    callbacks = [*first, schedule or SamplingSchedule(burn_in_steps=200, every_n_steps=10), *more, spy]
    module = module or PROBLEM.module(sampler=SGLD, lr=0.3, seed=1)
    quiet_trainer(callbacks=callbacks, **options).fit(module, PROBLEM.loader(batch), ckpt_path=ckpt_path)
    return module, spy


def contour(zeta: float = 0.9, **options: Any) -> ContourGradient:
    """Return a contour with a given range; options are the rules' and the callback's."""
    rules = ContourRules(zeta, **{name: options.pop(name) for name in RULES & set(options)})
    return ContourGradient(rules, **({"step_size": STEP_SIZE, "sample_energy": "step"} | PARTITION | options))


# -- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.by_default("interpolated-scalable", "bin-high-order")
@pytest.mark.parametrize("scheme", ["scalable", "original", "high-order"])
@pytest.mark.parametrize("weighting", ["interpolated", "bin"])
def test_every_step_follows_the_formulas(scheme: str, weighting: str) -> None:
    module, spy = fit(contour(scheme=scheme, weighting=weighting))
    assert len(spy.steps) == 300
    assert len({step["bin"] for step in spy.steps}) > 4
    assert max(abs(step["multiplier"] - 1) for step in spy.steps) > 0.1
    assert module.contour is not None
    check_against_formulas(spy, module.contour)
    assert [s.bin for s in spy.samples] == [step["bin"] for step in spy.steps[209::10]]
    for sample, step in zip(spy.samples, spy.steps[209::10], strict=True):
        assert (sample.log_weight, sample.energy) == pytest.approx((step["log_weight"], step["energy"]))


@pytest.mark.by_default("accumulation", "bf16")
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 4},
        {"precision": "bf16-mixed"},
        {"gradient_clip_val": 0.01},
        {"plugins": lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**40))},
    ],
    ids=["accumulation", "bf16", "clipping", "loss scaler that skips"],
)
def test_every_step_follows_the_formulas_with_what_a_trainer_offers(options: dict[str, Any]) -> None:
    options = {name: value() if callable(value) else value for name, value in options.items()}
    learner = contour(difference="forward", min_multiplier=-1.0, max_multiplier=2.0)
    module, spy = fit(learner, batch=10, **options)
    assert module.contour is not None
    check_against_formulas(spy, module.contour)
    assert int(module.contour.state.visits.sum()) == module.sampler.step_count == len(spy.steps)
    if "plugins" in options:
        assert len(spy.steps) < 300, "no step was skipped, so the test shows nothing"


def test_accumulated_energies_are_those_of_the_joint_batch() -> None:
    _, spy = fit(contour(), batch=40)
    _, parts_spy = fit(contour(), batch=10, accumulate_grad_batches=4)
    assert spy.steps[0]["energy"] == pytest.approx(parts_spy.steps[0]["energy"], rel=1e-5)


def test_the_prior_can_be_left_out_of_the_energy() -> None:
    module, spy = fit(contour(include_prior=False))
    for step in spy.steps:
        step["energy"] += step["log_prior"]
    assert module.contour is not None
    check_against_formulas(spy, module.contour)
    assert spy.samples[0].energy == pytest.approx(spy.steps[209]["energy"])


def test_without_zeta_the_chain_is_the_plain_one_bit_for_bit() -> None:
    plain, _ = fit(None)
    flat, _ = fit(contour(zeta=0.0))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, flat.state_dict()[name])


@pytest.mark.by_default("pSGLD", "SGNHT")
@pytest.mark.parametrize(
    "sampler", [SGLD, pSGLD, functools.partial(SGHMC, friction=0.3), SGNHT, functools.partial(UnderdampedLangevin)]
)
def test_every_sampler_is_multiplied(sampler: Any) -> None:
    """The multiplier reaches the gradient: the paths with and without a contour part, and the formulas hold."""
    lr = 0.02 if sampler is not SGLD else 0.3
    ends = []
    for learner in (None, contour()):
        torch.manual_seed(0)
        module, spy = fit(learner, module=PROBLEM.module(sampler=sampler, lr=lr, seed=1), max_steps=210)
        ends.append(module.net.weight.detach().clone())
        if learner is not None:
            assert module.contour is not None
            check_against_formulas(spy, module.contour)
    assert not torch.equal(*ends)
    assert ends[1].isfinite().all()


def test_the_contour_rests_while_a_cyclical_schedule_explores() -> None:
    module, spy = fit(contour(), schedule=CyclicalSchedule(3, 0.5, 4))
    assert module.contour is not None
    assert sum(step["temperature"] == 0 for step in spy.steps) == 150
    check_against_formulas(spy, module.contour)
    assert int(module.contour.state.visits.sum()) == 150


def test_annealed_step_size_and_temperature() -> None:
    annealing = Annealing(start_epoch=2, divisor=1.05)
    schedule = SamplingSchedule(
        burn_in_steps=200, every_n_steps=10, lr_annealing=annealing, temperature_annealing=annealing
    )
    module, spy = fit(contour(), schedule=schedule)
    assert spy.steps[-1]["temperature"] < 0.1
    assert module.contour is not None
    check_against_formulas(spy, module.contour)


def test_a_learned_range_holds_the_warm_ups_energies() -> None:
    module, spy = fit(ContourGradient(ContourRules(0.9), num_bins=40, warm_up_steps=150, lowest=0.1))
    assert module.contour is not None
    warm = sorted(step["energy"] for step in spy.steps[75:150])
    partition = module.contour.partition
    assert partition.first_edge == pytest.approx(warm[round(0.1 * 74)])
    assert partition.last_edge == pytest.approx(2 * warm[-1] - partition.first_edge)
    assert all(step["multiplier"] == 1 for step in spy.steps[:150])
    assert int(module.contour.state.visits.sum()) == 150
    spy.steps = spy.steps[150:]
    check_against_formulas(spy, module.contour, DecayingStepSize())


def test_full_energies_are_those_of_the_sample_itself() -> None:
    module, spy = fit(contour(sample_energy="full"))
    assert module.contour is not None
    x, y = (torch.tensor(a, dtype=torch.float64) for a in (PROBLEM.x, PROBLEM.y))
    for sample in spy.samples:
        weights = sample.parameters["net.weight"].double()
        residuals = y - x @ weights.T
        constants = y.numel() + weights.numel()
        energy = 0.5 * (residuals.square().sum() + weights.square().sum() + constants * math.log(2 * math.pi))
        assert sample.energy == pytest.approx(energy.item(), rel=1e-5)
    latest = module.contour.log_weights(torch.tensor([spy.samples[-1].energy]).double())
    assert spy.samples[-1].log_weight == pytest.approx(latest.item(), rel=1e-6)


def test_two_ranks_share_one_energy(tmp_path: Path) -> None:
    """Both ranks have the same π, learned from the mean of their energies, and the same parameters."""

    class Dump(Spy):
        def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            state = {"vector": pl_module.contour.state.log_vector, "visits": pl_module.contour.state.visits}
            own = {
                "steps": self.steps,
                "weight": pl_module.net.weight.detach(),
                "own": pl_module.chains.observed.energy,
            }
            torch.save(state | own, tmp_path / f"{trainer.global_rank}.pt")

    problem = ConjugateRegression()
    module = problem.module(sampler=SGHMC, lr=0.05, seed=1)
    learner = ContourGradient(ContourRules(0.9), num_bins=30, warm_up_steps=40, step_size=STEP_SIZE)
    callbacks = [learner, SamplingSchedule(burn_in_steps=100, every_n_steps=10), Dump()]
    trainer = quiet_trainer(
        max_steps=200, strategy="ddp_fork", devices=2, use_distributed_sampler=False, callbacks=callbacks
    )
    trainer.fit(module, datamodule=RankData(25))
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert torch.equal(first["vector"], second["vector"])
    assert torch.equal(first["visits"], second["visits"])
    assert torch.equal(first["weight"], second["weight"])
    assert not torch.equal(first["own"], second["own"]), "the ranks had the same batch, so the test shows nothing"
    for a, b in zip(first["steps"][40:], second["steps"][40:], strict=True):
        assert (a["multiplier"], a["bin"], a["log_weight"]) == (b["multiplier"], b["bin"], b["log_weight"])
    assert len({step["bin"] for step in first["steps"][40:]}) > 3


# -- what must not be lost --------------------------------------------------------------------------------------------


class SaveAt(pl.callbacks.Checkpoint):
    def __init__(self, folder: Path, steps: set[int]) -> None:
        self.folder = folder
        self.steps = steps

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


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
    fit(None, SaveAt(tmp_path, {250}), enable_checkpointing=True)
    schedule = SamplingSchedule(burn_in_steps=400, every_n_steps=10)
    later = ContourGradient(ContourRules(0.9), num_bins=30, warm_up_steps=100)
    allow = ExactResume(allow=["schedule.burn_in_steps"])
    module, spy = fit(
        later, allow, schedule=schedule, enable_checkpointing=True, ckpt_path=tmp_path / "250.ckpt", max_steps=500
    )
    assert module.contour is not None
    assert int(module.contour.state.visits.sum()) == 150
    assert len(spy.samples) == 10


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    fit(contour(), SaveAt(tmp_path, {250}), enable_checkpointing=True)
    for change in ({"zeta": 0.5}, {"num_bins": 31}, {"width": 7.0}, {"scheme": "original"}, {"floor": 1e-6}):
        with pytest.raises(ValueError, match="the checkpoint's contour has"):
            fit(contour(**change), enable_checkpointing=True, ckpt_path=tmp_path / "250.ckpt")


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
                batch[1].fill_(math.nan)

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
    assert [row["step"] for row in rows] == list(range(20, 301, 20))
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
        fit(contour(**options), max_steps=1200)
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
    with pytest.raises(TypeError, match="unexpected keyword argument 'zeta'"):
        ContourGradient(zeta=0.75, warm_up_steps=9)  # type: ignore[call-arg]


def test_combinations_without_meaning_are_refused() -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `ContourGradient`"):
        fit(contour(), contour())
    with pytest.raises(ValueError, match="temperature above 0"):
        fit(contour(), module=PROBLEM.module(temperature=0.0))
    with pytest.raises(ValueError, match="temperature above 0"):
        fit(contour(), schedule=CyclicalSchedule(temperature=0.0))
    with pytest.raises(ValueError, match="shorten warm_up_steps"):
        fit(ContourGradient(ContourRules(0.5), warm_up_steps=300))
    with pytest.raises(ValueError, match="draw its first sample after the 290 steps"):
        fit(ContourGradient(ContourRules(0.5), warm_up_steps=290))


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
    quiet_trainer(max_epochs=30, callbacks=callbacks).fit(module, datamodule=data)
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
        parts = [learner, SamplingSchedule(burn_in_steps=40, every_n_steps=5), spy]
        module = PROBLEM.module(sampler=SGLD, lr=0.3, seed=1)
        quiet_trainer(max_steps=80, callbacks=[parts[i] for i in order]).fit(module, PROBLEM.loader(40))
        ends.append([(s.log_weight, s.bin, s.energy) for s in spy.samples])
    assert all(end == ends[0] for end in ends)
