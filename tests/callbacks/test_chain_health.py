"""ChainHealth under the trainer: what it collects, when it reports, where the report goes."""

import csv
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc import (
    SGHMC,
    SGLD,
    SGNHT,
    BayesianModule,
    Categorical,
    Gaussian,
    NonFiniteEnergyError,
    ResumableLoader,
    UnderdampedLangevin,
    pSGLD,
)
from lightning_sgmcmc.callbacks import ChainHealth, CyclicalSchedule, SamplerCallback, SamplingSchedule
from lightning_sgmcmc.figures.samples import temperatures_figure
from lightning_sgmcmc.health.findings import FindingKind
from lightning_sgmcmc.health.report import HealthReport, TemperatureKind
from tests.support.problems import ConjugateRegression, classifier, loaders
from tests.support.trainers import quiet_trainer

PROBLEM = ConjugateRegression()


def run(
    module: BayesianModule | None = None,
    steps: int = 200,
    health: ChainHealth | None = None,
    schedule: pl.Callback | None = None,
    extra: tuple[pl.Callback, ...] = (),
    **trainer: Any,
) -> tuple[ChainHealth, BayesianModule]:
    module = PROBLEM.module(sampler=SGHMC, lr=0.004, seed=0) if module is None else module
    health = ChainHealth(every_n_steps=2) if health is None else health
    schedule = SamplingSchedule(burn_in_steps=20, every_n_steps=10) if schedule is None else schedule
    quiet_trainer(max_steps=steps, callbacks=[schedule, health, *extra], **trainer).fit(module, PROBLEM.loader(50))
    return health, module


@pytest.mark.by_default("pSGLD", "SGNHT")
@pytest.mark.parametrize("sampler", [SGLD, pSGLD, SGHMC, UnderdampedLangevin, SGNHT])
def test_every_sampler_on_a_network(sampler: Any) -> None:
    """BatchNorm, a frozen parameter, one that only the prior knows, one of a single element, one without gradient."""

    class Dropped(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            pl_module.net.body[3].bias.grad = None

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
            self.scale = nn.Parameter(torch.ones(()))
            self.unused = nn.Parameter(torch.ones(3))
            self.body[0].bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) * self.scale

    module = BayesianModule(net=Network(), likelihood=Categorical(), sampler=sampler, lr=0.001, seed=0)
    callbacks = [Dropped(), CyclicalSchedule(3, 0.5, 2), ChainHealth(every_n_steps=1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet_trainer(max_epochs=60, callbacks=callbacks).fit(module, *loaders())
    report = module.health
    assert report is not None
    names = {name for name, p in module.named_parameters() if p.requires_grad} - {"net.body.3.bias"}
    assert set(report.tensors) == names == set(report.gradient_noise_share)
    assert report.tensors["net.scale"].numel == 1
    kinds: tuple[TemperatureKind, ...] = ("kinetic", "configurational")
    for entry in report.tensors.values():
        for kind in kinds:
            value, interval = entry.measured(kind)
            assert value is not None
            assert interval is None or interval[0] <= value <= interval[1] < 1e3
    assert all(0 <= share <= 1 for share in report.gradient_noise_share.values())
    assert HealthReport.from_json(json.loads(Path("sgmcmc/health.json").read_text())) == report
    shown = {name: vars(entry) for name, entry in report.tensors.items()}
    temperatures_figure(shown, report.temperature).savefig("figure.png")


def test_only_hot_steps_of_the_sampling_stage_count() -> None:
    _, module = run(schedule=CyclicalSchedule(2, 0.5, 1), health=ChainHealth(every_n_steps=2, warm_up=0.0))
    assert module.health is not None
    # 2 stages of 50 steps, 25 observations each (in batches of one); the first step of a stage has no step before it.
    assert module.health.observations in (48, 50)
    _, module = run(module=PROBLEM.module(sampler=SGHMC, lr=0.004, temperature=0.0, seed=0))
    assert module.health is not None
    assert (module.health.observations, module.health.verdict) == (0, "unknown")


def test_it_does_not_touch_the_chain() -> None:
    _, watched = run()
    plain = PROBLEM.module(sampler=SGHMC, lr=0.004, seed=0)
    schedule = SamplingSchedule(burn_in_steps=20, every_n_steps=10)
    quiet_trainer(max_steps=200, callbacks=[schedule]).fit(plain, PROBLEM.loader(50))
    assert torch.equal(watched.net.weight, plain.net.weight)


def test_controls_on_the_device_count_as_numbers_do() -> None:
    class Tensors(SamplerCallback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            for group in pl_module.sampler.param_groups:
                group.update(lr=torch.tensor([0.004]), temperature=torch.tensor(1.0), gradient_multiplier=torch.ones(1))

    _, a = run()
    _, b = run(extra=(Tensors(),))
    assert a.health is not None
    assert b.health is not None
    assert a.health.total is not None
    assert b.health.total is not None
    assert a.health.total.kinetic == pytest.approx(b.health.total.kinetic, rel=1e-3)
    assert a.health.total.configurational == pytest.approx(b.health.total.configurational, rel=1e-3)


@pytest.mark.slow
def test_a_gradient_multiplier_is_part_of_the_force() -> None:
    """A constant multiplier 2 samples exp(-2U): in terms of its own force that chain is healthy."""

    class Doubled(SamplerCallback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            pl_module.sampler.set_control("gradient_multiplier", 2.0)

    module = PROBLEM.module(sampler=SGLD, lr=0.01, seed=0)
    _, module = run(module, 1500, extra=(Doubled(),))
    assert module.health is not None
    assert module.health.verdict == "ok"
    assert module.health.total is not None
    assert module.health.total.configurational_interval is not None
    low, _ = module.health.total.configurational_interval
    assert low > 0.55, "without the multiplier it would be 0.5"


def test_accumulation_counts_optimizer_steps() -> None:
    _, module = run(steps=200, accumulate_grad_batches=2, health=ChainHealth(every_n_steps=2, warm_up=0.0))
    assert module.health is not None
    assert 80 <= module.health.observations <= 90


def test_resume_keeps_the_record(tmp_path: Path) -> None:
    schedule = SamplingSchedule(burn_in_steps=20, every_n_steps=10)
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=90, save_top_k=-1)
    first = ChainHealth(every_n_steps=2, warm_up=0.0)
    trainer = quiet_trainer(max_steps=90, callbacks=[schedule, first, checkpoint], enable_checkpointing=True)
    trainer.fit(PROBLEM.module(sampler=SGHMC, lr=0.004, seed=0), PROBLEM.loader(50))
    (path,) = tmp_path.glob("*.ckpt")
    torch.load(path, weights_only=True)

    module, second = PROBLEM.module(sampler=SGHMC, lr=0.004, seed=0), ChainHealth(every_n_steps=2, warm_up=0.0)
    schedule = SamplingSchedule(burn_in_steps=20, every_n_steps=10)
    trainer = quiet_trainer(max_steps=150, callbacks=[schedule, second])
    trainer.fit(module, PROBLEM.loader(50), ckpt_path=path)
    _, whole = run(steps=150, health=ChainHealth(every_n_steps=2, warm_up=0.0))
    assert module.health is not None
    assert whole.health is not None
    assert abs(module.health.observations - whole.health.observations) <= 8
    assert module.health.total is not None
    assert whole.health.total is not None
    assert module.health.total.kinetic == pytest.approx(whole.health.total.kinetic, rel=0.05)


@pytest.mark.parametrize("chains", [1, 2])
def test_a_resumed_run_reports_what_the_whole_run_does(tmp_path: Path, chains: int) -> None:
    """Weights of several rows, a single number among the parameters, and a stage that the checkpoint interrupts."""

    def fit(steps: int, *extra: pl.Callback, **options: Any) -> BayesianModule:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        module = BayesianModule(net, Gaussian(learned=True), sampler=SGHMC, lr=0.01, num_chains=chains, seed=0)
        schedule = SamplingSchedule(burn_in_steps=20, every_n_steps=10)
        callbacks = [schedule, ChainHealth(every_n_steps=2, warm_up=0.0), *extra]
        trainer = quiet_trainer(max_steps=steps, callbacks=callbacks, enable_checkpointing=bool(extra))
        trainer.fit(module, rows, **options)
        return module

    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    rows = ResumableLoader(torch.utils.data.TensorDataset(x, x[:, :1]), batch_size=20, seed=0)
    whole = fit(200).health
    fit(101, pl.callbacks.ModelCheckpoint(tmp_path, "half", every_n_train_steps=101))
    resumed = fit(200, ckpt_path=tmp_path / "half.ckpt").health
    assert whole is not None
    assert resumed is not None
    assert resumed.observations == whole.observations
    assert whole.total is not None
    assert resumed.total == whole.total


def test_warns_once_with_advice_and_writes_its_scalars(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    module = PROBLEM.module(sampler=SGHMC, lr=0.15, seed=0)
    with pytest.warns(UserWarning, match="ChainHealth: kinetic temperature.*smaller lr") as caught:
        run(module, 600, schedule=CyclicalSchedule(4, 0.1, 1), logger=logger, log_every_n_steps=50)
    kinds = [str(w.message).split(":")[1] for w in caught if "ChainHealth" in str(w.message)]
    assert len(kinds) == len(set(kinds))
    assert module.health is not None
    assert module.health.total is not None
    assert json.loads((Path(logger.log_dir) / "health.json").read_text()) == module.health.as_json()
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["health/kinetic_temperature"]]
    assert len(rows) >= 4
    assert float(rows[-1]["health/kinetic_temperature"]) == pytest.approx(module.health.total.kinetic, rel=1e-6)
    assert float(rows[-1]["health/warnings"]) == len(module.health.findings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "is_hot"), [(CyclicalSchedule(1, 0.0, 4), False), (SamplingSchedule(every_n_steps=200), True)]
)
def test_heat_of_a_stage_is_judged_at_its_end(schedule: pl.Callback, is_hot: bool) -> None:
    """Steps of one size that are too hot are warned of at once; steps that fall to 0 only if the whole stage is.

    The law of a step with lr·λ near 0.5 is 1/(1 - lr·λ/2) times the target's; over a cosine it averages to less than
    the tolerance. A stage within the tolerance is warned of with probability 0.01 at most, once; the seed is fixed.
    """
    module = PROBLEM.module(sampler=SGLD, lr=0.4, seed=0)
    kinds: list[set[FindingKind]] = []

    class Reports(SamplerCallback):
        def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if not trainer.sanity_checking and module.health is not None:
                kinds.append({finding.kind for finding in module.health.findings})

    callbacks = [schedule, ChainHealth(every_n_steps=2), Reports()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(max_steps=400, callbacks=callbacks, check_val_every_n_epoch=100)
        trainer.fit(module, PROBLEM.loader(len(PROBLEM.x)), PROBLEM.loader(len(PROBLEM.x)))
    assert FindingKind.KINETIC in kinds[0], "the first steps are hot in both runs"
    assert any("ChainHealth: kinetic" in str(warning.message) for warning in caught) == is_hot
    assert module.health is not None
    assert (FindingKind.KINETIC in {finding.kind for finding in module.health.findings}) == is_hot


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_steps_that_see_all_data_have_no_noise_of_batches() -> None:
    """Near the stability limit the measured noise, of successive gradients, is the chain's own motion."""
    for batch_size, is_noisy in ((len(PROBLEM.x), False), (len(PROBLEM.x) // 5, True)):
        module = PROBLEM.module(sampler=SGHMC, lr=0.4, seed=0)
        schedule = SamplingSchedule(burn_in_steps=20, every_n_steps=10)
        callbacks = [schedule, ChainHealth(every_n_steps=2)]
        quiet_trainer(max_steps=600, callbacks=callbacks).fit(module, PROBLEM.loader(batch_size))
        assert module.health is not None
        assert (FindingKind.GRADIENT_NOISE in {finding.kind for finding in module.health.findings}) == is_noisy
        assert (max(module.health.gradient_noise_share.values()) > 0) == is_noisy


def test_divergence_is_said_and_still_json() -> None:
    module = PROBLEM.module(sampler=SGLD, lr=20.0, seed=0)
    with pytest.warns(UserWarning, match="divergence: .* smaller lr"), pytest.raises(NonFiniteEnergyError):
        run(module)
    report = json.loads(Path("sgmcmc/health.json").read_text())
    assert report["verdict"] == "warning"
    assert report["warnings"][0].startswith("divergence: ")
    assert report["findings"][0]["kind"] == "divergence"
    assert report["step"] < 200


def test_clipping_that_bites_is_said() -> None:
    with pytest.warns(UserWarning, match="clipping: 100% of the gradients"):
        run(gradient_clip_val=1e-3)
    _, module = run(gradient_clip_val=1e3)
    assert module.health is not None
    assert FindingKind.CLIPPING not in {finding.kind for finding in module.health.findings}


def test_a_trial_run_and_a_second_fit() -> None:
    module = classifier()
    callbacks = [CyclicalSchedule(2, 0.5, 1), ChainHealth()]
    quiet_trainer(max_epochs=2, fast_dev_run=True, callbacks=callbacks).fit(module, *loaders())
    assert not list(Path.cwd().rglob("health.json"))
    health = ChainHealth(every_n_steps=2)
    _, first = run(health=health)
    assert first.health is not None
    _, second = run(health=health)
    assert second.health == first.health, "nothing of the first fit is left"


@pytest.mark.parametrize(
    "options", [{"every_n_steps": 0}, {"tolerance": 0.0}, {"false_alarm_rate": 1.0}, {"warm_up": 1.0}]
)
def test_bad_arguments(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be .*, got"):
        ChainHealth(**options)
