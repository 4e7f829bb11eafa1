"""Blocks of steps: the run is the one without them, up to rounding, and whoever must see a step does."""

import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.ops import MLP

from lightning_sgmcmc import (
    SGHMC,
    SGLD,
    AdamSGLD,
    BayesianModule,
    Categorical,
    ContourRules,
    Gaussian,
    HierarchicalPrior,
    ScaleAdaptedSGHMC,
    pSGHMC,
    pSGLD,
)
from lightning_sgmcmc.callbacks import (
    ChainHealth,
    ContourGradient,
    CyclicalSchedule,
    PosteriorDashboard,
    ReplicaExchange,
    SampleCollector,
    SamplerCallback,
    SamplingSchedule,
    WarmStart,
)
from lightning_sgmcmc.chains import compiled_step
from lightning_sgmcmc.chains.compiled_step import CompiledSteps
from lightning_sgmcmc.chains.listed_steps import ListedSteps
from lightning_sgmcmc.chains.schedule import Schedule
from lightning_sgmcmc.compiling import has_compiler
from lightning_sgmcmc.datamodules import DatasetDataModule, DigitsDataModule
from lightning_sgmcmc.fit import block_runs, blocks, passes
from lightning_sgmcmc.fit.passes import HiddenEpochs

N = 130
generator = torch.Generator().manual_seed(0)
x = torch.randn(N, 3, generator=generator)
y = x[:, :1].sin() + 0.1 * torch.randn(N, 1, generator=generator)
DATA = TensorDataset(x, y)

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs a compiler")
SLOW = [needs_compiler, pytest.mark.slow]
FORMS = ["traced", pytest.param("compiled", marks=SLOW), pytest.param("captured", marks=pytest.mark.slow)]
ALL, LISTED = ["apart", pytest.param("compiled apart", marks=SLOW), *FORMS], ["traced", "apart"]
BOTH = ["traced", pytest.param("compiled", marks=needs_compiler), "captured"]
"""The forms of tests that compile by default; "traced" steps of one chain are listed, "captured" ones are those of a
GPU, called in the place of a replay, and "apart" and "compiled apart" those of one chain after another."""
STEPS = {"traced": ListedSteps, "compiled": CompiledSteps, "captured": CompiledSteps}
"""What makes the steps of one chain in a form."""


def network(width: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))


def loader() -> DataLoader[Any]:
    """A plain shuffled loader with an odd last batch."""
    torch.manual_seed(1)
    return DataLoader(DATA, batch_size=20, shuffle=True)


def called(run: Callable[[], None], generators: Any) -> Callable[[], None]:
    """Take the place of a capture."""
    run()
    return run


class Run:
    """A fit with the blocks of a form, None for none; what is compared of it."""

    def __init__(
        self,
        form: str | None,
        monkeypatch: pytest.MonkeyPatch,
        *callbacks: pl.Callback,
        data: Any = None,
        module: Any = None,
        ckpt_path: Any = None,
        sampler: Any = SGHMC,
        chains: int = 2,
        epochs: int = 12,
        **options: Any,
    ) -> None:
        monkeypatch.setattr(block_runs, "FEWEST", 0 if form else math.inf)
        monkeypatch.setattr(block_runs, "WORTH_COMPILING", 0 if form and "compiled" in form else math.inf)
        for name in (compiled_step, blocks, block_runs):
            monkeypatch.setattr(name, "captures", lambda device: form == "captured")
        monkeypatch.setattr(block_runs, "CACHED", 0 if form and "apart" in form else math.inf)
        monkeypatch.setattr(compiled_step, "captured", called)
        self.collector = SampleCollector(in_memory=True)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False} | options
        schedule = [c for c in callbacks if isinstance(c, Schedule)]
        own = [] if schedule else [SamplingSchedule(burn_in_epochs=2, every_n_steps=5)]
        self.module = module or BayesianModule(
            network(), Gaussian(0.3), sampler=sampler, lr=1e-3, num_chains=chains, seed=3
        )
        self.trainer = pl.Trainer(
            max_epochs=epochs, enable_model_summary=False, callbacks=[*own, *callbacks, self.collector], **quiet
        )
        given = loader() if data is None else data
        if isinstance(given, pl.LightningDataModule):
            self.trainer.fit(self.module, datamodule=given, ckpt_path=ckpt_path)
        else:
            self.trainer.fit(self.module, given, ckpt_path=ckpt_path)

    @property
    def hidden(self) -> int:
        """Steps that Lightning has not seen."""
        return self.module.chains.counters.hidden_steps  # type: ignore[no-any-return]

    @property
    def compiled(self) -> int:
        """Steps that were compiled."""
        return self.module.chains.counters.compiled_steps  # type: ignore[no-any-return]

    @property
    def samples(self) -> list[tuple[int, int, float, Tensor]]:
        found = self.module.posterior
        return [(s.step, s.chain, s.energy, torch.cat([p.flatten() for p in s.parameters.values()])) for s in found]

    def check_like(self, other: "Run", exactly: bool = False) -> None:
        """Raise unless two runs have the same samples, up to rounding or exactly."""
        assert self.trainer.global_step == other.trainer.global_step
        assert self.module.gradient_evaluations == other.module.gradient_evaluations
        own, others = self.samples, other.samples
        assert len(own) == len(others) > 0
        for mine, theirs in zip(own, others, strict=True):
            assert mine[:2] == theirs[:2]
            close = dict(rtol=0.0, atol=0.0) if exactly else dict(rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mine[3], theirs[3], **close)
            assert mine[2] == theirs[2] if exactly else mine[2] == pytest.approx(theirs[2], rel=1e-4, abs=1e-4)


# -- the same run ------------------------------------------------------------------------------------------------------


def of_torchvision() -> BayesianModule:
    torch.manual_seed(0)
    return BayesianModule(MLP(3, [5, 1], inplace=False), Gaussian(0.3), lr=1e-3, num_chains=2, seed=3)


def of_digits() -> BayesianModule:
    torch.manual_seed(0)
    return BayesianModule(MLP(64, [8, 10], inplace=False), Categorical(), lr=1e-3, num_chains=2, seed=3)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "two chains": dict,
    "one chain": lambda: {"chains": 1},
    "three chains of one batch": lambda: {"chains": 3, "sampler": SGLD},
    "own batches": lambda: {"chains": 3, "data": DatasetDataModule(DATA, batch_size=20)},
    "short batches left out": lambda: {"data": DatasetDataModule(DATA, batch_size=20, drop_last=True)},
    "preconditioned": lambda: {"chains": 2, "sampler": partial(pSGHMC, adapt="burn-in")},
    "two step sizes": lambda: {
        "module": BayesianModule(network(), Gaussian(0.3), lr={"net.0.*": 1e-3, "*": 5e-4}, num_chains=2, seed=3)
    },
    "two step sizes of one chain": lambda: {
        "module": BayesianModule(network(), Gaussian(0.3), lr={"net.0.*": 1e-3, "*": 5e-4}, seed=3)
    },
    "a temperature for each chain": lambda: {
        "module": BayesianModule(network(), Gaussian(0.3), lr=1e-3, temperature=(1.0, 0.5), num_chains=2, seed=3)
    },
    "torchvision's network": lambda: {"module": of_torchvision()},
    "this library's datamodule": lambda: {
        "module": of_digits(),
        "data": DigitsDataModule(batch_size=200),
        "epochs": 14,
    },
}


def check_blocks(form: str, options: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise unless a run with the blocks of a form is that without them."""
    with_blocks, without = Run(form, monkeypatch, **options()), Run(None, monkeypatch, **options())
    assert without.hidden == 0
    assert with_blocks.hidden > with_blocks.trainer.global_step / 2
    if form == "captured" or "compiled" in form:
        assert with_blocks.compiled > 0  # the first 64 steps are not
    with_blocks.check_like(without)


@pytest.mark.by_default("-traced", "two chains-apart", "own batches-apart", "preconditioned-apart")
@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_that_without_blocks(form: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_blocks(form, CASES[case], monkeypatch)


RULES: dict[str, Any] = {
    "SGLD": SGLD,
    "SGHMC": SGHMC,
    "pSGHMC": pSGHMC,
    "pSGLD": pSGLD,
    "AdamSGLD": AdamSGLD,
    "AdamSGLD for 70 steps": partial(AdamSGLD, adapt=70),
    "scale adapted": ScaleAdaptedSGHMC,
}


@pytest.mark.by_default("pSGHMC-", "pSGLD-", "AdamSGLD for", "adapted-", "SGHMC-traced", "SGLD-apart")
@pytest.mark.parametrize("form", LISTED)
@pytest.mark.parametrize("rule", RULES)
def test_listed_steps_are_those_of_a_rule(rule: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also across the change of temperature and adaptation at a burn-in's end."""
    lengths, chains = counted(ListedSteps, monkeypatch), 1 if form == "traced" else 3
    schedule = partial(SamplingSchedule, burn_in_steps=80, every_n_steps=5)

    def run(form: str | None) -> Run:
        return Run(form, monkeypatch, schedule(), sampler=RULES[rule], chains=chains, epochs=15)

    listed, without = run(form), run(None)
    assert sum(lengths) > 30  # of 105, and none of the first 64
    listed.check_like(without)
    own, others = (dict(each.trainer.optimizers[0].param_groups[0]) for each in (listed, without))
    assert own | {"params": []} == others | {"params": []}


def counted(kind: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that fills with the numbers of steps that are made at once."""
    lengths: list[int] = []
    run = kind.run

    def counting(self: Any, batches: Any, *rest: Any) -> Any:
        lengths.append(len(batches.weights))
        return run(self, batches, *rest)

    monkeypatch.setattr(kind, "run", counting)
    return lengths


@pytest.mark.parametrize("form", ALL)
def test_steps_in_double_precision(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data in single precision are converted, as in Lightning's loop."""
    made, without = (Run(own, monkeypatch, precision="64-true", epochs=20) for own in (form, None))
    assert made.hidden > 100
    for mine, theirs in zip(made.samples, without.samples, strict=True):
        assert mine[3].dtype == torch.float64
        torch.testing.assert_close(mine[3], theirs[3], rtol=0.0, atol=1e-12)
        assert mine[2] == pytest.approx(theirs[2], rel=1e-11)


@needs_compiler
@pytest.mark.parametrize("rule", [name for name in RULES if name not in ("SGLD", "SGHMC")])
@pytest.mark.slow
def test_preconditioners_adapt_in_compiled_steps(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(form: str | None) -> Run:
        schedule = SamplingSchedule(burn_in_steps=100, every_n_steps=5)
        return Run(form, monkeypatch, schedule, sampler=RULES[rule], chains=1 + (rule == "pSGHMC"), epochs=20)

    compiled, without = run("compiled"), run(None)
    assert compiled.compiled > 60  # of 140, and not of the first 64
    compiled.check_like(without)
    groups = [each.trainer.optimizers[0].param_groups[0] for each in (compiled, without)]
    for name in ("averaged", "updates"):
        assert groups[0].get(name) == groups[1].get(name) != 0


@pytest.mark.parametrize(
    ("form", "chains"),
    [("traced", 2), ("traced", 1), pytest.param("compiled", 1, marks=[needs_compiler, pytest.mark.slow])],
)
def test_scales_of_the_prior_are_drawn_between_steps(form: str, chains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(form: str | None) -> Run:
        prior = HierarchicalPrior(every_n_steps=9)
        module = BayesianModule(network(), Gaussian(0.3), prior, lr=1e-3, num_chains=chains, seed=3)
        return Run(form, monkeypatch, module=module, epochs=20)

    with_blocks, without = run(form), run(None)
    steps = with_blocks.trainer.global_step
    assert (with_blocks.compiled if form != "traced" else with_blocks.hidden) > steps / 2
    with_blocks.check_like(without)
    scales = [[sample.scales for sample in each.module.posterior] for each in (with_blocks, without)]
    assert scales[0][0] != scales[0][-1]
    for mine, theirs in zip(*scales, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


CALLBACKS: dict[str, Callable[[], list[pl.Callback]]] = {
    "cycles": lambda: [CyclicalSchedule(num_cycles=3, samples_per_cycle=2)],
    "a warm start": lambda: [WarmStart(lr=1e-2, steps=20)],
    "replica exchange": lambda: [ReplicaExchange(temperatures=[1.0, 2.0], lrs=[1.0, 1.2])],
    "a contour": lambda: [ContourGradient(ContourRules(0.5), 40, first_edge=100.0, width=20.0)],
    "a contour with limits": lambda: [
        ContourGradient(ContourRules(0.5, min_multiplier=0.9), 40, 100.0, 20.0, include_prior=False)
    ],
    "interacting contours": lambda: [
        ContourGradient(ContourRules(0.5), 40, first_edge=100.0, width=20.0, interacting=True)
    ],
    "a contour after a warm-up": lambda: [
        SamplingSchedule(burn_in_steps=150, every_n_steps=5),
        ContourGradient(ContourRules(0.5), 40, warm_up_steps=140),
    ],
    "cycles with a contour": lambda: [
        CyclicalSchedule(num_cycles=3, samples_per_cycle=2),
        ContourGradient(ContourRules(0.5), 40, first_edge=100.0, width=20.0),
    ],
}


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("case", CALLBACKS)
@pytest.mark.by_default("-traced", "warm start-apart", "replica exchange-apart")
def test_callbacks_see_what_they_need(form: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = 40 if "contour" in case else 12
    runs = [Run(each, monkeypatch, *CALLBACKS[case](), chains=2, epochs=epochs) for each in (form, None)]
    runs[0].check_like(runs[1])
    assert runs[0].hidden > 0
    if "contour" in case:
        assert form in LISTED or runs[0].compiled > 150
        mine, theirs = (run.module.contour.state for run in runs)
        assert torch.equal(mine.visits, theirs.visits)
        torch.testing.assert_close(mine.log_vector, theirs.log_vector, rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.slow
def test_one_chain_with_a_contour(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(form: str | None) -> tuple[Run, list[list[str]]]:
        contour = ContourGradient(ContourRules(0.5), 40, first_edge=60.0, width=20.0)
        logger = CSVLogger(tmp_path, name=str(form))
        made = Run(form, monkeypatch, contour, chains=1, epochs=40, logger=logger, log_every_n_steps=25)
        rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
        return made, [row.split(",") for row in rows]

    (compiled, rows), (other, others) = run("compiled"), run(None)
    assert compiled.compiled > 150
    compiled.check_like(other)
    assert rows[0] == others[0]
    assert "contour/multiplier" in rows[0]
    assert len(rows) == len(others)
    for row, wanted in zip(rows[1:], others[1:], strict=True):
        for mine, theirs in zip(row, wanted, strict=True):
            assert mine == theirs or float(mine) == pytest.approx(float(theirs), rel=1e-3)


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("every", [7, 3])
@pytest.mark.by_default("7-traced")
def test_replicas_are_exchanged_between_steps(
    form: str, every: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def exchange() -> ReplicaExchange:
        return ReplicaExchange([1.0, 1.1], lrs=[1.0, 1.2], every_n_steps=every, correction=100.0)

    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=100, save_top_k=-1)
    data = {"data": DatasetDataModule(DATA, batch_size=20), "epochs": 40}
    whole = Run(form, monkeypatch, exchange(), keeper, enable_checkpointing=True, **data)
    without = Run(None, monkeypatch, exchange(), **data)
    whole.check_like(without)
    steps = whole.trainer.global_step
    assert whole.hidden > steps / 2
    assert whole.compiled == 0 if form in LISTED or every < 4 else whole.compiled > steps / 3
    mine, theirs = (
        next(c for c in run.trainer.callbacks if isinstance(c, ReplicaExchange)).state_dict()
        for run in (whole, without)
    )
    assert mine["attempts"] == theirs["attempts"] == steps // every
    assert torch.equal(mine["tally"], theirs["tally"])
    assert 0 < mine["tally"][1, 0] < mine["tally"][0, 0]
    resumed = Run(
        form,
        monkeypatch,
        exchange(),
        ckpt_path=next(tmp_path.glob("*step=100.ckpt")),
        enable_checkpointing=False,
        **data,
    )
    resumed.check_like(whole, exactly=True)


def test_a_batch_of_all_data_is_not_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch size above N is all data, and costs no more than that."""
    sizes = []
    weights = passes.Taken.weights

    def counted(self: Any, *given: Any) -> Any:
        found = weights(self, *given)
        sizes.append(found.shape[1])
        return found

    monkeypatch.setattr(passes.Taken, "weights", counted)
    data = {"data": DatasetDataModule(DATA, batch_size=2000), "epochs": 150}
    mine, theirs = (Run(form, monkeypatch, **data) for form in ("traced", None))
    assert set(sizes) == {N}
    mine.check_like(theirs)


@pytest.mark.parametrize("form", FORMS)
def test_health_and_logs_are_those_without_blocks(form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(form: str | None) -> tuple[Any, list[list[str]]]:
        logger = CSVLogger(tmp_path, name=str(form))
        watched = [ChainHealth(every_n_steps=6), PosteriorDashboard(figures=())]
        made = Run(form, monkeypatch, *watched, chains=2, epochs=20, logger=logger, log_every_n_steps=7)
        rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
        return made.module.health, [row.split(",") for row in rows]

    (health, rows), (other, others) = run(form), run(None)
    assert health.observations == other.observations > 10
    assert rows[0] == others[0]
    assert len(rows) == len(others)
    for row, wanted in zip(rows[1:], others[1:], strict=True):
        for mine, theirs in zip(row, wanted, strict=True):
            assert mine == theirs or float(mine) == pytest.approx(float(theirs), rel=1e-3)


@pytest.mark.parametrize(
    ("form", "chains"),
    [
        ("traced", 1),
        ("traced", 2),
        *(pytest.param("compiled", n, marks=[needs_compiler, pytest.mark.slow]) for n in (1, 2)),
    ],
)
def test_a_resumed_run_is_the_whole_one(
    form: str, chains: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def data() -> DatasetDataModule:
        return DatasetDataModule(DATA, batch_size=20)

    def module() -> BayesianModule:
        return BayesianModule(network(), Gaussian(0.3), sampler=SGHMC, lr=1e-3, num_chains=chains, seed=3)

    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=11, save_top_k=-1)
    whole = Run(form, monkeypatch, keeper, data=data(), module=module(), enable_checkpointing=True)
    files = sorted(tmp_path.glob("*.ckpt"), key=lambda p: int(p.stem.split("step=")[1]))
    assert [int(p.stem.split("step=")[1]) for p in files] == list(range(11, 85, 11))
    for file in (files[3], files[6]):
        resumed = Run(form, monkeypatch, data=data(), module=module(), ckpt_path=file)
        resumed.check_like(whole, exactly=True)


@pytest.mark.parametrize("chains", [1, 2])
def test_a_run_is_resumed_at_a_short_batch(chains: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first batch that is looked at has fewer rows than those that follow."""
    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=69, save_top_k=-1)
    data = {"data": DatasetDataModule(DATA, batch_size=20), "chains": chains}
    whole = Run("traced", monkeypatch, keeper, enable_checkpointing=True, **data)
    (file,) = tmp_path.glob("*.ckpt")
    Run("traced", monkeypatch, ckpt_path=file, **data).check_like(whole, exactly=True)


def test_two_fits_of_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(form: str | None) -> Run:
        made = Run(form, monkeypatch, epochs=6)
        made.trainer.fit_loop.max_epochs = 12
        made.trainer.fit(made.module, loader())
        return made

    run("traced").check_like(run(None))


# -- what Lightning and users see --------------------------------------------------------------------------------------


class Counts(pl.Callback):
    """Notes the steps that end, as users do."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.epochs: list[int] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epochs.append(trainer.global_step)


class EveryStep(Counts):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize("form", FORMS)
def test_a_users_callback_sees_every_step(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, epochs = EveryStep(), Counts()
    assert Run(form, monkeypatch, seen).hidden == 0
    assert seen.steps == list(range(1, 85))
    assert Run(form, monkeypatch, epochs).hidden > 0
    assert epochs.epochs == list(range(7, 85, 7))


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epochs whose end Lightning does not see."""
    epochs: list[int] = []
    plain = HiddenEpochs.turn

    def turn(self: HiddenEpochs, fetcher: Any) -> None:
        epochs.append(self._trainer.current_epoch)
        plain(self, fetcher)

    monkeypatch.setattr(HiddenEpochs, "turn", turn)
    return epochs


@pytest.mark.parametrize("form", FORMS)
def test_epochs_end_as_in_lightnings_loop(
    form: str, turned: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(form: str | None) -> tuple[Run, dict[str, Any], list[Any]]:
        keeper = ModelCheckpoint(tmp_path / str(form), every_n_epochs=5, save_top_k=-1)
        made = Run(form, monkeypatch, keeper, epochs=18, enable_checkpointing=True)
        files = sorted((tmp_path / str(form)).glob("*.ckpt"))
        return made, made.trainer.fit_loop.state_dict(), [torch.load(f, weights_only=True)["loops"] for f in files]

    (with_blocks, loops, kept), (without, others, other_kept) = run(form), run(None)
    with_blocks.check_like(without)
    assert loops == others
    assert len(kept) == 3
    assert kept == other_kept
    assert len(turned) > 8
    assert not {4, 9, 14, 17} & set(turned)


@pytest.mark.parametrize(
    "sees",
    [
        lambda: {"callbacks": [Counts()]},
        lambda: {"module": Validated(network(), Gaussian(0.3), lr=1e-3, num_chains=2, seed=3), "has_val": True},
        lambda: {"callbacks": [EarlyStopping("a", strict=False)]},
    ],
)
def test_an_epoch_ends_for_whom_it_concerns(
    sees: Callable[[], dict[str, Any]], turned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = sees()
    val = {"val": DATA} if options.pop("has_val", False) else {}
    data = DatasetDataModule(DATA, batch_size=20, **val)
    run = Run("traced", monkeypatch, *options.pop("callbacks", ()), data=data, **options)
    assert run.hidden > 0
    assert turned == []


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_by_time_are_written(form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    often = ModelCheckpoint(tmp_path, "{step}", train_time_interval=timedelta(microseconds=1), save_top_k=-1)
    seldom = ModelCheckpoint(tmp_path, "seldom", train_time_interval=timedelta(hours=1))
    assert Run(form, monkeypatch, seldom, enable_checkpointing=True).hidden > 0
    run = Run(form, monkeypatch, often, enable_checkpointing=True)
    assert run.hidden == 0
    assert sorted(int(path.stem.split("=")[1]) for path in tmp_path.glob("step=*")) == list(range(1, 85))


class Validated(BayesianModule):
    at: list[int]

    def on_validation_start(self) -> None:
        self.at = [*getattr(self, "at", []), self.trainer.global_step]


@pytest.mark.parametrize("form", FORMS)
def test_validation_and_limits_come_when_they_are_due(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Data(DatasetDataModule):
        pass

    module = Validated(network(), Gaussian(0.3), lr=1e-3, num_chains=2, seed=3)
    data = Data(DATA, val=DATA, batch_size=20)
    run = Run(form, monkeypatch, module=module, data=data, val_check_interval=3, max_steps=50, num_sanity_val_steps=0)
    assert run.trainer.global_step == 50
    assert module.at == [step for step in range(50) if step % 7 in (3, 6) and step > 0]
    assert run.hidden > 0


class Stops(SamplerCallback):
    """Ends the run after a step, as budgets do."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.run.sampler.step_count == 17:
            trainer.should_stop = True


def test_a_run_ends_with_the_step_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stops, "__module__", f"{passes.OWN}tests")  # as a callback of this library's
    run = Run("traced", monkeypatch, Stops())
    assert run.hidden > 0
    assert run.trainer.global_step == 17
