"""Whatever keeps the steps of a run out of blocks, or from being made together, is reported once, with a remedy."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import DeviceStatsMonitor, GradientAccumulationScheduler
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.profilers import SimpleProfiler
from torch import Tensor, nn

from lightning_sgmcmc import SGLD, BayesianModule, Gaussian, ResumableLoader
from lightning_sgmcmc.callbacks import EWSG, ContourGradient, ControlVariates, SamplerCallback
from lightning_sgmcmc.chains.energies import ChainEnergies
from lightning_sgmcmc.contour import ContourRules
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.fit import blocks
from tests.fit.test_blocks import DATA, Run, network
from tests.support.trainers import quiet_trainer

NONE, SINGLE = "Steps are not made in blocks, since ", "Steps are made one by one, since "


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("Steps ")]


def module(net: nn.Module | None = None, kind: Any = BayesianModule, **options: Any) -> BayesianModule:
    return kind(network() if net is None else net, Gaussian(0.3), lr=1e-3, seed=3, **options)  # type: ignore[no-any-return]


class EveryStep(pl.Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        """Does what a user does."""


class Logs(BayesianModule):
    def on_train_batch_end(self, *args: Any) -> None:
        """Does what a user does."""


class OwnLoss(BayesianModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


class Moved(DatasetDataModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Annealed(BayesianModule):
    def log_likelihood(self, batch: Any) -> Tensor:
        return super().log_likelihood(batch) * min(1.0, (1 + self.trainer.current_epoch) / 5)


class Scheduled(BayesianModule):
    def configure_optimizers(self) -> Any:
        sampler = super().configure_optimizers()
        return [sampler], [torch.optim.lr_scheduler.StepLR(sampler, 5)]


def hooked() -> nn.Module:
    net = network()
    net.register_forward_hook(lambda *args: None)
    return net


def callbacks(*given: pl.Callback, **options: Any) -> dict[str, Any]:
    return {"callbacks": given} | options


CAUSES: dict[str, tuple[Callable[[], dict[str, Any]], list[str]]] = {
    "validation within steps": (
        lambda: callbacks(EWSG(1), data=DatasetDataModule(DATA, val=DATA, batch_size=20), val_check_interval=3),
        ["every 3 batches", "a multiple of 2"],
    ),
    "validation over epochs": (
        lambda: {
            "data": DatasetDataModule(DATA, val=DATA, batch_size=20),
            "accumulate_grad_batches": 2,
            "val_check_interval": 10,
            "check_val_every_n_epoch": None,
        },
        ["every 10 batches", "a multiple of 2", "an epoch of 7"],
    ),
    "later accumulation": (
        lambda: callbacks(GradientAccumulationScheduler({0: 1, 2: 2})),
        ["GradientAccumulationScheduler", "larger batches"],
    ),
    "a callback": (lambda: callbacks(EveryStep()), ["EveryStep has its own on_train_batch_end", "on_posterior_sample"]),
    "Lightning's callback": (
        lambda: callbacks(DeviceStatsMonitor(cpu_stats=False), logger=CSVLogger(".")),
        ["DeviceStatsMonitor has its own on_train_batch_start", "leave it out of long runs"],
    ),
    "a hook of the module": (lambda: {"module": module(kind=Logs)}, ["Logs has its own on_train_batch_end"]),
    "a loss": (lambda: {"module": module(kind=OwnLoss)}, ["OwnLoss has its own training_step", "log_likelihood"]),
    "moved batches": (lambda: {"data": Moved(DATA, batch_size=20)}, ["Moved has its own on_after_batch_transfer"]),
    "dropout": (
        lambda: {"module": module(nn.Sequential(network(), nn.Dropout(0.1)))},
        ["'net.1' (Dropout) draws numbers", "another layer"],
    ),
    "a forward hook": (lambda: {"module": module(hooked())}, ["'net' (Sequential) has a hook", "remove it"]),
    "the epoch": (lambda: {"module": module(kind=Annealed)}, ["Annealed reads 'current_epoch'", "make it a tensor"]),
    "compilation": (lambda: {"module": module(compile=True)}, ["compiled by itself", "'auto'"]),
    "a profiler": (lambda: {"profiler": SimpleProfiler(filename=None)}, ["SimpleProfiler", "leave it out"]),
    "anomalies": (lambda: {"detect_anomaly": True}, ["detect_anomaly=True", "leave it out"]),
    "precision": (lambda: {"precision": "bf16-mixed"}, ["precision='bf16-mixed'", "'32-true'"]),
    "validation by time": (lambda: {"val_check_interval": "00:01:00:00"}, ["val_check_interval", "steps"]),
    "a scheduler": (lambda: {"module": module(kind=Scheduled)}, ["learning-rate scheduler", "CyclicalSchedule"]),
}


def run(monkeypatch: pytest.MonkeyPatch, callbacks: Any = (), form: str | None = "traced", **options: Any) -> Run:
    return Run(form, monkeypatch, *callbacks, **{"chains": 1, "epochs": 4} | options)


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c == "compilation" else c for c in CAUSES])
def test_a_run_without_blocks_says_why(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options, words = CAUSES[case]
    with caplog.at_level("INFO", "pytorch_lightning"):
        assert run(monkeypatch, **options()).hidden == 0
    (message,) = said(caplog)
    assert message.startswith(NONE)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "options",
    [
        {"callbacks": [EveryStep()], "form": None},
        {"module": module(chain_execution="loop"), "callbacks": [EveryStep()]},
        {},
    ],
)
def test_no_run_says_more_than_it_must(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A short run gains nothing from blocks, the second one is told to have none, and the third has some."""
    with caplog.at_level("INFO", "pytorch_lightning"):
        found = run(monkeypatch, **options)
    assert said(caplog) == []
    assert (found.hidden > 0) == (not options)


# -- steps that are made one by one ------------------------------------------------------------------------------------


class Sees(SamplerCallback):
    """A callback of this library's that acts at every step."""

    def on_train_batch_end(self, *args: Any) -> None:
        """Does nothing."""


class OwnRule(SGLD):
    """A rule that does not declare what it is."""

    def update(self, *args: Any) -> None:
        super().update(*args)


def contour() -> ContourGradient:
    return ContourGradient(ContourRules(0.5), 40, first_edge=60.0, width=20.0)


SINGLES: dict[str, tuple[Callable[[], dict[str, Any]], list[str]]] = {
    "clipping": (
        lambda: callbacks(EWSG(1), epochs=60, gradient_clip_val=1.0),
        ["gradient_clip_val=1.0 comes after", "smaller lr"],
    ),
    "a callback": (lambda: callbacks(Sees()), ["Sees acts in each", "remove it"]),
    "a contour": (lambda: callbacks(contour()), ["ContourGradient learns in each", "20,000 steps"]),
    "changed gradients": (
        lambda: callbacks(EWSG(1), ControlVariates(), epochs=60),
        ["ControlVariates changes gradients", "remove one"],
    ),
    "other data": (
        lambda: {"data": torch.utils.data.DataLoader([(x, y) for x, y in DATA], batch_size=20)},
        ["row by row", "TensorDataset"],
    ),
    "a rule": (lambda: {"sampler": OwnRule}, ["OwnRule updates more than rows", "elementwise=True"]),
}


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("log_every", [1, 2])
def test_steps_that_are_all_seen(
    log_every: int, chains: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blocks, "SINGLE", 10)
    with caplog.at_level("INFO", "pytorch_lightning"):
        found = run(monkeypatch, chains=chains, epochs=20, logger=CSVLogger("."), log_every_n_steps=log_every)
    assert (found.hidden == 0) == (log_every == 1)
    assert said(caplog) == [f"{SINGLE}{blocks.EACH_IS_SEEN}."] * (log_every == 1)


@pytest.mark.parametrize("case", SINGLES)
def test_steps_that_are_made_one_by_one_say_why(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blocks, "SINGLE", 10)
    monkeypatch.setattr(Sees, "__module__", f"{blocks.__package__}.tests")  # as a callback of this library's
    options, words = SINGLES[case]
    with caplog.at_level("INFO", "pytorch_lightning"):
        found = run(monkeypatch, **{"epochs": 30} | options())
    assert found.hidden > 0
    (message,) = said(caplog)
    assert message.startswith(SINGLE)
    assert all(word in message for word in words), message


def test_rows_of_tensors_are_taken_out_of_a_resumable_loader(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blocks, "SINGLE", 10)
    with caplog.at_level("INFO", "pytorch_lightning"):
        together, alone = (
            Run(form, monkeypatch, data=ResumableLoader(DATA, batch_size=20, seed=0), epochs=20)
            for form in ("traced", None)
        )
    assert not said(caplog)
    together.check_like(alone)


def test_accumulation_that_begins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(form: str | None) -> Run:
        return Run(form, monkeypatch, GradientAccumulationScheduler({0: 1, 2: 2}), epochs=6)

    with_blocks, without = made("traced"), made(None)
    with_blocks.check_like(without, exactly=True)


class CompilesNow(Exception):
    """Ends a fit in place of compiling."""


@pytest.mark.parametrize(("seconds", "saves"), [(1, None), (45, "13 s"), (None, "180 µs a step")])
def test_a_run_with_little_time_does_not_compile(
    seconds: int | None, saves: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of 6 seconds had half the samples, since compiling took the rest; one without an end saves at each step."""

    def compiled_steps(*args: Any) -> Any:
        raise CompilesNow

    monkeypatch.setattr(ChainEnergies, "compiled_steps", compiled_steps)
    limit = pl.callbacks.Timer(None if seconds is None else {"seconds": seconds})
    with caplog.at_level("INFO", "pytorch_lightning"), nullcontext() if saves is None else pytest.raises(CompilesNow):
        quiet_trainer(max_epochs=-1, callbacks=[limit]).fit(module(), datamodule=DatasetDataModule(DATA, batch_size=20))
    assert [one.rpartition("saves about ")[2] for one in said(caplog)] == ([] if saves is None else [f"{saves}."])
