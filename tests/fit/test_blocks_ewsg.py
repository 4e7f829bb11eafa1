"""Steps of several batches that are made at once, which EWSG chooses among or gradients are accumulated of: the run is
the one with Lightning's loop, up to rounding."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGHMC, SGLD, BayesianModule, Gaussian, NonFiniteEnergyError, UnderdampedLangevin
from lightning_sgmcmc.callbacks import (
    EWSG,
    ChainHealth,
    ControlVariates,
    CovarianceFriction,
    CyclicalSchedule,
    ReplicaExchange,
    SamplingSchedule,
    WarmStart,
)
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.priors import FlatPrior, HierarchicalPrior
from tests.fit.test_blocks import BOTH, FORMS, STEPS, Run, counted, network, x, y
from tests.fit.test_blocks_limits import Averaged, Noisy, Rows
from tests.fit.test_blocks_variates import contour, parameters
from tests.support.recorders import SaveEverywhere

X, Y = x.double(), y.double()  # a rounding error could change a choice


def data(count: int = 130, validates: bool = False, **options: Any) -> DatasetDataModule:
    """Chains with batches of their own, by default six and a short one in an epoch."""
    train = TensorDataset(X[:count], Y[:count])
    return DatasetDataModule(train, batch_size=20, **({"val": train} if validates else {}), **options)


def loader() -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(X[:110], Y[:110]), batch_size=20, shuffle=True)


def module(chains: int = 1, net: nn.Module | None = None, **options: Any) -> BayesianModule:
    given: dict[str, Any] = {"sampler": SGHMC, "lr": 1e-3, "num_chains": chains, "seed": 3} | options
    return BayesianModule((network() if net is None else net).double(), Gaussian(0.3), **given)


def fit(form: str | None, monkeypatch: pytest.MonkeyPatch, chains: int, case: dict[str, Any]) -> Run:
    """Return a run of a case: callbacks, options of the module under "with", and others."""
    own = {"data": data(), "epochs": 40, "log_every_n_steps": 10_000} | case
    made = module(chains, **own.pop("with", {}))
    return Run(form, monkeypatch, *own.pop("callbacks", ()), module=made, **own)


def tally(run: Run) -> tuple[int, int] | None:
    """Return accepted and proposed batches since the last log."""
    found = [callback.state_dict() for callback in run.trainer.callbacks if isinstance(callback, EWSG)]
    return (found[0]["accepted"], found[0]["proposed"]) if found else None


def compare(run: Run, other: Run) -> None:
    """Raise unless two runs are the same up to rounding, in what Lightning and this library count too."""
    run.check_like(other)
    if run.compiled == 0:  # a compiler's functions of float64 have errors of float32
        torch.testing.assert_close(parameters(run), parameters(other), rtol=1e-9, atol=1e-11)
    assert tally(run) == tally(other)
    loop, theirs = (each.trainer.fit_loop.state_dict() for each in (run, other))
    assert loop == theirs


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "one proposal": lambda: {"callbacks": [EWSG(1)]},
    "SGLD": lambda: {"callbacks": [EWSG(1)], "with": {"sampler": SGLD}},
    "three proposals": lambda: {"callbacks": [EWSG(3)], "epochs": 80},
    "a short candidate": lambda: {"callbacks": [EWSG(1)], "data": data(110)},
    "plain loader": lambda: {"callbacks": [EWSG(1)], "data": loader()},
    "another guess": lambda: {
        "callbacks": [EWSG(2, "one")],
        "with": {"sampler": UnderdampedLangevin, "lr": 0.002},
        "epochs": 60,
    },
    "two step sizes": lambda: {"callbacks": [EWSG(1, "stopped")], "with": {"lr": {"net.0.*": 1e-3, "*": 5e-4}}},
    "drawn scales": lambda: {"callbacks": [EWSG(1)], "with": {"prior": HierarchicalPrior()}},
    "temperature 0": lambda: {"callbacks": [EWSG(1)], "with": {"temperature": 0.0}, "data": data(110)},
    "cold stages": lambda: {"callbacks": [EWSG(1), CyclicalSchedule(num_cycles=2, exploration=0.5)]},
    "after a warm start": lambda: {"callbacks": [EWSG(1), WarmStart(lr=1e-2, steps=80)]},
    "candidates of two batches": lambda: {"callbacks": [EWSG(1)], "accumulate_grad_batches": 2, "epochs": 80},
    "accumulation": lambda: {"accumulate_grad_batches": 2, "data": data(110)},
    "accumulation of a plain loader": lambda: {"accumulate_grad_batches": 4, "data": loader(), "epochs": 80},
    "accumulation in a warm start": lambda: {
        "accumulate_grad_batches": 2,
        "callbacks": [WarmStart(lr=1e-2, steps=100)],
    },
    "accumulation of control variates": lambda: {
        "accumulate_grad_batches": 3,
        "callbacks": [ControlVariates(every_n_epochs=2, energy=True)],
        "epochs": 60,
    },
    "accumulation and replicas": lambda: {
        "accumulate_grad_batches": 2,
        "callbacks": [ReplicaExchange([1.0, 1.1], every_n_steps=7, correction=100.0)],
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chains", [1, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.by_default(
    "a short candidate-4-traced",
    "cold stages-1-traced",
    "candidates of two batches-1-traced",
    "loader-4-traced",
    "accumulation-4-traced",
    "variates-1-traced",
)
def test_a_run_is_that_without_blocks(form: str, chains: int, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "accumulation and replicas" and chains == 1:
        chains = 2
    lengths = counted(STEPS[form], monkeypatch)
    with_blocks = fit(form, monkeypatch, chains, CASES[case]())
    assert sum(lengths) > with_blocks.trainer.global_step / 4
    lengths.clear()
    without = fit(None, monkeypatch, chains, CASES[case]())
    assert without.hidden == sum(lengths) == 0
    compare(with_blocks, without)
    if found := tally(with_blocks):
        assert 0 < found[0] < found[1] or case == "temperature 0"


def test_the_callback_changes_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the comparisons of this file would hold without one."""
    cases: list[dict[str, Any]] = [{"callbacks": [EWSG(1)]}, {"accumulate_grad_batches": 2}, {}]
    first, second, third = (parameters(fit("traced", monkeypatch, 1, case)) for case in cases)
    assert min((first - second).abs().max(), (first - third).abs().max(), (second - third).abs().max()) > 1e-3


class Linear(BayesianModule):
    """Each datum's gradient is the same everywhere."""

    def log_likelihood(self, batch: Any) -> Tensor:
        each: Tensor = self.net(batch[0])[:, 0]
        return each


@pytest.mark.by_default("captured")
@pytest.mark.parametrize("form", BOTH)
def test_the_drift_is_that_of_the_index_chain(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLD on log p(x|θ) = x·θ moves by lr·E[x] of the chosen datum in the mean: by the two candidates' law, not by
    the data's mean. A false alarm has a chance below 1e-4."""
    rows = torch.tensor([[0.4], [-0.3], [1.0], [0.1], [-1.2], [1.6]])
    chains, epochs, lr = 32, 300, 0.5
    lengths = counted(STEPS[form], monkeypatch)
    made = Linear(nn.Linear(1, 1, bias=False), prior=FlatPrior(), sampler=SGLD, lr=lr, num_chains=chains, seed=1)
    with torch.no_grad():
        made.net.weight.zero_()
    batches = DatasetDataModule(TensorDataset(rows, torch.zeros(6, 1)), batch_size=1)
    run = Run(form, monkeypatch, EWSG(1), module=made, data=batches, epochs=epochs)
    assert sum(lengths) > 0.9 * run.trainer.global_step == 0.9 * 3 * epochs
    log_weights = lr * 6 / 4 * rows[:, 0] ** 2  # ½‖b·g/s‖² with b = lr and s² = 2·lr/N
    taken = (log_weights - log_weights[:, None]).exp().clamp(max=1)  # of the second candidate
    pairs = taken * rows[:, 0] + (1 - taken) * rows
    expected = (pairs.sum() - pairs.trace()) / 30
    drift = parameters(run) / (lr * 3 * epochs)
    error = drift.std() / chains**0.5
    assert (drift.mean() - expected).abs() < 4.5 * error < (expected - rows.mean()).abs() / 3


# -- around the steps --------------------------------------------------------------------------------------------------


class Enough(pl.Callback):
    """Ends a run after some samples."""

    def on_posterior_samples(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_step > 130


STOPS: dict[str, Callable[[], dict[str, Any]]] = {
    "in mid-epoch": lambda: {"max_steps": 101},
    "by a callback": lambda: {"callbacks": [Enough()]},
    "few batches": lambda: {"limit_train_batches": 5, "epochs": 50},
    "validation in epochs": lambda: {"data": data(validates=True), "val_check_interval": 4},
    "validation over epochs": lambda: {
        "data": data(120, validates=True),
        "val_check_interval": 10,
        "check_val_every_n_epoch": None,
    },
    "health": lambda: {"callbacks": [ChainHealth(every_n_steps=6)]},
}


@pytest.mark.parametrize("case", STOPS)
@pytest.mark.by_default("in mid-epoch", "validation in epochs")
def test_what_lightning_sees_comes_at_its_step(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(form: str | None) -> tuple[Run, list[int]]:
        seen: list[int] = []

        class Validates(pl.Callback):
            def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
                seen.append(trainer.global_step)

        own = STOPS[case]()
        callbacks = [EWSG(1), Validates(), *own.pop("callbacks", [])]
        return fit(form, monkeypatch, 2, own | {"callbacks": callbacks, "num_sanity_val_steps": 0}), seen

    (with_blocks, seen), (without, expected) = run("traced"), run(None)
    assert with_blocks.hidden > with_blocks.trainer.global_step / 3
    compare(with_blocks, without)
    assert seen == expected
    assert (len(seen) > 3) == case.startswith("validation")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.by_default("1-2-traced", "2-1-traced")
def test_a_resumed_run_is_the_whole_one(
    form: str, chains: int, accumulated: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bit for bit, wherever it is continued."""
    case: dict[str, Any] = {"epochs": 60, "accumulate_grad_batches": accumulated}
    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=23, save_top_k=-1)
    whole = fit(
        form, monkeypatch, chains, case | {"callbacks": [EWSG(1), keeper], "data": data(), "enable_checkpointing": True}
    )
    files = sorted(tmp_path.glob("*.ckpt"), key=lambda p: int(p.stem.split("step=")[1]))
    for file in files[2:5:2]:
        resumed = fit(form, monkeypatch, chains, case | {"callbacks": [EWSG(1)], "ckpt_path": file})
        resumed.check_like(whole, exactly=True)
        assert tally(resumed) == tally(whole)


def test_a_run_continues_between_candidates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From checkpoints of Lightning's loop in the middle of a step."""
    case: dict[str, Any] = {"epochs": 20, "accumulate_grad_batches": 2}
    save = SaveEverywhere(tmp_path)
    options = {"callbacks": [EWSG(1), save], "data": data(), "enable_checkpointing": True}
    whole = fit(None, monkeypatch, 2, case | options)
    monkeypatch.setattr("lightning_sgmcmc.fit.blocks.LAST", 1)
    for place in (30, 31, 32, 33):
        (file,) = tmp_path.glob(f"{place:03d}-batch.ckpt")
        resumed = fit("traced", monkeypatch, 2, case | {"callbacks": [EWSG(1)], "ckpt_path": file})
        assert resumed.hidden > 15
        compare(resumed, whole)


@pytest.mark.parametrize("form", FORMS)
def test_logs_are_those_without_blocks(form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(form: str | None) -> list[list[str]]:
        logger = CSVLogger(tmp_path, name=str(form))
        fit(form, monkeypatch, 2, {"callbacks": [EWSG(2)], "logger": logger, "log_every_n_steps": 9})
        rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
        return [row.split(",") for row in rows]

    rows, others = run(form), run(None)
    assert {"sampler/gradient_evaluations", "ewsg/acceptance"} <= {*rows[0]}
    assert rows[0] == others[0]
    assert len(rows) == len(others) > 10
    for row, wanted in zip(rows[1:], others[1:], strict=True):
        for mine, theirs in zip(row, wanted, strict=True):
            assert mine == theirs or float(mine) == pytest.approx(float(theirs), rel=1e-6)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.by_default("1")
def test_a_run_that_diverges_stops_at_its_step(accumulated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its last epochs have been waiting."""

    def failure(form: str | None) -> NonFiniteEnergyError:
        torch.manual_seed(0)
        case: dict[str, Any] = {"with": {"net": nn.Linear(3, 1), "sampler": SGLD, "lr": 0.3}, "data": loader()}
        callbacks = [SamplingSchedule(burn_in_steps=0, every_n_steps=1000), *([EWSG(1)] if accumulated == 1 else [])]
        with pytest.raises(NonFiniteEnergyError) as caught:
            fit(
                form,
                monkeypatch,
                1,
                case | {"callbacks": callbacks, "epochs": 800, "accumulate_grad_batches": accumulated},
            )
        return caught.value

    found, wanted = failure("traced"), failure(None)
    assert found.step == wanted.step > 100
    assert str(found) == str(wanted)


# -- one by one --------------------------------------------------------------------------------------------------------


SINGLES: dict[str, Callable[[], dict[str, Any]]] = {
    "a network that draws numbers": lambda: {"callbacks": [EWSG(1)], "with": {"net": Noisy()}},
    "clipping": lambda: {"callbacks": [EWSG(1)], "gradient_clip_val": 1.0},
    "control variates": lambda: {"callbacks": [EWSG(1), ControlVariates(every_n_epochs=2)]},
    "covariance": lambda: {
        "callbacks": [EWSG(1), CovarianceFriction()],
        "with": {"sampler": UnderdampedLangevin, "lr": 0.002},
    },
}


@pytest.mark.parametrize("case", SINGLES)
@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.by_default("1-a network", "1-clipping", "2-control")
def test_steps_that_are_made_one_by_one(case: str, chains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = counted(STEPS["traced"], monkeypatch)
    with_blocks, without = (fit(form, monkeypatch, chains, SINGLES[case]()) for form in ("traced", None))
    assert len(lengths) == (case == "a network that draws numbers" and chains == 1)  # which its first trace finds
    assert with_blocks.hidden > with_blocks.trainer.global_step / 2
    compare(with_blocks, without)


@pytest.mark.parametrize("accumulated", [2, 3])
def test_a_step_that_cannot_be_traced_to_its_end(accumulated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ninth form of a batch is the first or the last one of its step."""

    def run(form: str | None) -> Run:
        made = BayesianModule(Averaged(), Gaussian(0.3), lr=1e-3, num_chains=2, seed=3)
        batches = DataLoader(Rows(False), batch_size=5)
        return Run(form, monkeypatch, module=made, data=batches, accumulate_grad_batches=accumulated)

    run("traced").check_like(run(None))


@pytest.mark.slow
@pytest.mark.parametrize("form", BOTH)
def test_a_contour_learns_from_accumulated_batches(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = partial(dict, accumulate_grad_batches=2, epochs=60)
    with_blocks, without = (fit(each, monkeypatch, 2, case(callbacks=[contour()])) for each in (form, None))
    assert form == "traced" or with_blocks.compiled > 100
    compare(with_blocks, without)
    assert torch.equal(with_blocks.module.contour.state.visits, without.module.contour.state.visits)
