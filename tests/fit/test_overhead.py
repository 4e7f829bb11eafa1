"""Idle profilers and hooks are left out during a fit only; what a user defines is used."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock, create_autospec

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.profilers import PassThroughProfiler, SimpleProfiler
from torch import nn

from lightning_sgmcmc import BayesianModule, Gaussian
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.callbacks import SamplingSchedule, recommended
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.fit import safeguards as overhead
from lightning_sgmcmc.fit.block_runs import OF_A_STEP
from lightning_sgmcmc.fit.safeguards import QuietProfiler
from lightning_sgmcmc.fit.safeguards import idle as idle_hook
from tests.support.problems import Data, Net
from tests.support.trainers import quiet_trainer


class Fails(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == 2:
            raise RuntimeError("a user's error")


def trainer_of(*callbacks: pl.Callback, profiler: SimpleProfiler | None = None) -> pl.Trainer:
    return pl.Trainer(
        max_steps=3,
        callbacks=[SamplingSchedule(every_n_steps=3), *callbacks],
        profiler=profiler,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(trainer: pl.Trainer) -> None:
    data = TensorBatches(torch.randn(8, 2), torch.randn(8, 1))
    trainer.fit(BayesianModule(net=nn.Linear(2, 1), likelihood=Gaussian(), lr=1e-3, seed=0), ResumableLoader(data, 4))


class Sees(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self.kind = type(trainer.profiler)


def test_the_idle_profiler_is_replaced_during_a_fit() -> None:
    sees = Sees()
    trainer = trainer_of(sees)
    fit(trainer)
    assert sees.kind is QuietProfiler
    assert type(trainer.profiler) is PassThroughProfiler
    trainer = trainer_of(Fails())
    with pytest.raises(RuntimeError, match="a user's error"):
        fit(trainer)
    assert type(trainer.profiler) is PassThroughProfiler


def test_a_chosen_profiler_measures() -> None:
    profiler = SimpleProfiler()
    trainer = trainer_of(profiler=profiler)
    fit(trainer)
    assert trainer.profiler is profiler
    assert any("optimizer_step" in action for action in profiler.recorded_durations)


class Defines(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_after_backward(self, *_: object) -> None:
        self.seen.append("of the class")


class Inherits(Defines):
    pass


def test_idle_hooks_are_hidden_during_a_fit() -> None:
    """Hooks of the class, of a base class and of the object itself are called; the idle ones are there afterwards."""
    defines, inherits, idle, sees = Defines(), Inherits(), pl.Callback(), Sees()
    inherits.on_before_zero_grad = lambda *_: inherits.seen.append("of the object")  # type: ignore[method-assign]
    hidden: list[object] = []
    sees.on_before_backward = lambda *_: hidden.append([vars(idle).get(hook, hook) for hook in OF_A_STEP])  # type: ignore[method-assign]
    fit(trainer_of(defines, inherits, idle, sees))
    assert defines.seen == ["of the class"] * 3
    assert sorted(inherits.seen) == ["of the class"] * 3 + ["of the object"] * 3
    assert hidden == [[idle_hook] * len(OF_A_STEP)] * 3
    assert not set(OF_A_STEP) & set(vars(idle))
    assert callable(idle.on_train_batch_end)
    assert callable(defines.on_train_batch_end)


def test_lightning_does_not_call_a_hidden_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else hiding it would cost time instead of saving it."""
    calls: list[object] = []
    monkeypatch.setattr(overhead, "idle", lambda *arguments: calls.append(arguments))
    fit(trainer_of(pl.Callback()))
    assert calls == []


class Relay(pl.Callback):
    """Calls hooks of another of the trainer's callbacks."""

    def __init__(self, other: pl.Callback) -> None:
        self.other = other

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.other.on_train_batch_start(*arguments)
        self.other.on_before_zero_grad(*arguments[:2], optimizer=None)  # type: ignore[arg-type]

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.other.on_train_batch_end(*arguments)


@pytest.mark.parametrize("make", [pl.Callback, Defines, Inherits, MagicMock, pl.callbacks.ModelSummary])
def test_a_callback_may_call_hooks_of_another(make: Any) -> None:
    other = make()
    fit(trainer_of(other, Relay(other)))


MOCKS: dict[str, Any] = {
    "MagicMock": MagicMock,
    "Mock": Mock,
    "MagicMock of a callback": lambda: MagicMock(spec=pl.Callback),
    "Mock of a callback": lambda: Mock(spec=pl.Callback),
    "autospec of a callback": lambda: create_autospec(pl.Callback, instance=True),
    "autospec of its class": lambda: create_autospec(Sees, instance=True),
    "wrapping a callback": lambda: MagicMock(wraps=Defines()),
    "Mock of EarlyStopping": lambda: Mock(spec=pl.callbacks.EarlyStopping),
    "Mock of ModelCheckpoint": lambda: Mock(spec=pl.callbacks.ModelCheckpoint),
    "MagicMock of Timer": lambda: MagicMock(spec=pl.callbacks.Timer),
    "Mock of a callback of the library": lambda: Mock(spec=recommended()[-1]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", MOCKS.values(), ids=MOCKS.keys())
def test_a_mock_is_a_callback_like_any_other(make: Any, tmp_path: Path) -> None:
    """With the usual callbacks, a checkpoint and a test: it is called, and says nothing of the run."""
    mock = make()
    mock.state_key, mock.state_dict.return_value = "mock", {}  # Lightning writes them to the checkpoint
    trainer = quiet_trainer(
        max_epochs=2,
        callbacks=[mock, *recommended(sampling=SamplingSchedule(every_n_steps=3))],
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    module = Net()
    trainer.fit(module, datamodule=Data())
    trainer.test(module, datamodule=Data(), verbose=False)
    assert mock.on_train_batch_end.call_count == trainer.global_step
    assert module.posterior is not None
    assert len(module.posterior) > 3
