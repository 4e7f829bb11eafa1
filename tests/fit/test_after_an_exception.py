"""An exception, or Ctrl-C, in any hook leaves the trainer and the process as plain Lightning does."""

import multiprocessing
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader
from tqdm import TMonitor

from lightning_sgmcmc import BayesianModule, Categorical
from lightning_sgmcmc.callbacks import BayesianModelAverage, ChainHealth, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import DatasetDataModule
from tests.support.small_run import data
from tests.support.trainers import quiet_trainer

HOOKS = (
    "setup",
    "on_fit_start",
    "on_sanity_check_start",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_posterior_sample",
    "on_save_checkpoint",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
)
QUICK: dict[Any, tuple[str, ...]] = {
    (RuntimeError, 0): ("setup", "on_before_optimizer_step"),
    (KeyboardInterrupt, 0): ("on_train_batch_end",),
    (RuntimeError, 1): ("on_train_batch_end",),
}
SECOND_BATCHES, SECOND_EPOCHS = 6, 4


class Failing(pl.Callback):
    """Raises once, when a hook is called for the second time (for the first, if that is the only one)."""

    def __init__(self, hook: str, kind: type[BaseException]) -> None:
        self.has_raised = False
        self._kind, self._left = kind, 1 if hook in ("setup", "teardown") or "_fit_" in hook else 2
        if hook in ("on_train_start", "on_train_end", "on_sanity_check_start"):
            self._left = 1
        setattr(self, hook, self._fail)

    def _fail(self, *_: Any, **__: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self.has_raised = True
            raise self._kind("here")


class Plain(pl.LightningModule):
    """The same network in plain Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def training_step(self, batch: Any, _: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, _: int) -> None:
        self.net(batch[0])

    def predict_step(self, batch: Any) -> Any:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def bayesian() -> BayesianModule:
    return BayesianModule(nn.Linear(2, 2), Categorical(), lr=0.01, num_chains=2)


def state_of(trainer: Any, before: list[threading.Thread]) -> dict[str, Any]:
    """Return what a fit changes for its time, in the trainer and in the process.

    Args:
        trainer: after a fit.
        before: the threads that were there before the trainer.
    """
    bar, loop = trainer.progress_bar_callback, trainer.fit_loop.epoch_loop
    hidden = [(type(c).__name__, name) for c in trainer.callbacks for name in vars(c) if vars(c)[name] is None]
    return {
        "workers": len(multiprocessing.active_children()),
        "threads": [thread.name for thread in threading.enumerate() if thread not in before and _runs_on(thread)],
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "profile": (sys.getprofile(), sys.gettrace()),
        "bar": [name for name in vars(bar) if name in ("get_metrics", "_get_train_description", "configure_columns")],
        "profiler": type(trainer.profiler).__name__,
        "limits": (loop.max_steps, trainer.max_epochs, trainer.accumulate_grad_batches),
        "loop": "_broadcast_sigterm_tensor" in vars(loop),
        "hooks": [pair for pair in hidden if pair[1].startswith("on_")],
        "torch": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.backends.cudnn.benchmark),
    }


def _runs_on(thread: threading.Thread) -> bool:
    """Return whether a thread is none of tqdm's and does not end soon."""
    if isinstance(thread, TMonitor):
        return False
    thread.join(5)
    return thread.is_alive()


def again(module: Any, callbacks: list[pl.Callback], workers: int, folder: Path, ours: bool) -> dict[str, Any]:
    """Fit, which fails, and fit anew with more data and epochs by the same trainer; return the states after both."""
    saver = pl.callbacks.ModelCheckpoint(folder, save_last=True)
    before = threading.enumerate()
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[*callbacks, saver],
        num_sanity_val_steps=1,
    )

    def fit(batch: int) -> None:
        options: Any = {"batch_size": batch, "num_workers": workers}
        if ours:
            trainer.fit(module(), datamodule=DatasetDataModule(data(), val=data(), **options))
        else:
            trainer.fit(module(), DataLoader(data(), **options), DataLoader(data(), **options))

    with pytest.raises((RuntimeError, SystemExit)):
        fit(8)
    found = {f"after the failure: {name}": value for name, value in state_of(trainer, before).items()}
    found["steps of the failure"] = trainer.global_step
    trainer.fit_loop.max_epochs = SECOND_EPOCHS
    fit(24 // SECOND_BATCHES)
    found |= {f"after the next fit: {name}": value for name, value in state_of(trainer, before).items()}
    return found | {"steps": trainer.global_step, "epochs": trainer.current_epoch}


def as_good(name: str, plain: Any, ours: Any) -> bool:
    """Return whether ours is as plain Lightning's, which may leave more workers and their threads."""
    if name.endswith("workers"):
        return bool(ours <= plain)
    return set(ours) <= set(plain) if name.endswith("threads") else bool(ours == plain)


def parameters() -> list[Any]:
    """Return a quick hook for each part of a fit with each error, and the others as slow tests."""
    return [
        pytest.param(
            hook,
            kind,
            workers,
            id=f"{hook}-{kind.__name__}-{workers}",
            marks=[] if hook in QUICK.get((kind, workers), ()) else pytest.mark.slow,
        )
        for hook in HOOKS
        for kind in (RuntimeError, KeyboardInterrupt)
        for workers in (0, 1)
    ]


@pytest.mark.parametrize(("hook", "kind", "workers"), parameters())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_trainer_fits_again_as_in_plain_lightning(
    tmp_path: Path, hook: str, kind: type[BaseException], workers: int
) -> None:
    """Workers have ended, limits and bar are the trainer's own, and the next fit makes all its steps.

    All hooks: `uv run pytest -m slow -n 0 tests/fit/test_after_an_exception.py`.
    """
    theirs = hook == "on_posterior_sample"  # a hook that plain Lightning does not have: as at a batch's end
    plain = again(
        Plain, [Failing("on_train_batch_end" if theirs else hook, kind)], workers, tmp_path / "plain", ours=False
    )
    sampling = [
        SamplingSchedule(every_n_steps=1),
        SampleCollector(in_memory=True),
        BayesianModelAverage(),
        ChainHealth(),
    ]
    for first in (True, False):
        failing = Failing(hook, kind)
        callbacks: list[Any] = [failing, *sampling] if first else [*sampling, failing]
        ours = again(bayesian, callbacks, workers, tmp_path / f"ours-{first}", ours=True)
        different = {name: (plain[name], ours[name]) for name in plain if not as_good(name, plain[name], ours[name])}
        if theirs:
            different = {name: pair for name, pair in different.items() if "steps" not in name}
        assert not different


class NoData(pl.LightningDataModule):
    """Its loader fails."""

    def train_dataloader(self) -> Any:
        raise FileNotFoundError("no data here")


@pytest.mark.parametrize("attempts", [1, 2])
def test_loaders_after_a_hook_that_fails_are_the_users_own(attempts: int) -> None:
    """Lightning keeps recording the arguments of loaders then, and takes later ones for those of a hook."""
    own = DataLoader.__init__, DataLoader.__setattr__, BatchSampler.__init__
    for _ in range(attempts):
        with pytest.raises(FileNotFoundError):
            quiet_trainer(max_epochs=1).fit(bayesian(), datamodule=NoData())
    assert own == (DataLoader.__init__, DataLoader.__setattr__, BatchSampler.__init__)
    loader = DataLoader(torch.zeros(20, 2), 8)
    assert not [name for name in vars(loader) if name.startswith("__pl")]
    assert len(quiet_trainer().predict(Plain(), loader) or []) == 3
