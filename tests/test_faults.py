"""Signals, full disks, damaged stores: real processes and real files; what is kept, and what the user reads."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.interruption import FILE_NAME
from tests.conjugate import quiet_trainer

STEPS, PER_EPOCH = 24, 6


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PER_EPOCH * 4, 2, generator=generator)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 4)


def module(width: int = 8) -> BayesianModule:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))
    return BayesianModule(net=net, likelihood=Categorical(), sampler=SGHMC, lr=0.05, seed=1)


def fit(folder: Path, *callbacks: pl.Callback, width: int = 8, keep: bool = True, **fit_options: Any) -> BayesianModule:
    """Run, or go on with, the run that the others are interruptions of."""
    model = module(width)
    own: list[pl.Callback] = [SamplingSchedule(every_n_steps=2), SampleCollector(folder / "samples"), *callbacks]
    if keep:
        own.append(pl.callbacks.ModelCheckpoint(folder, save_last=True, every_n_train_steps=4))
    trainer = quiet_trainer(max_steps=STEPS, callbacks=own, enable_checkpointing=keep)
    trainer.fit(model, loader(), **fit_options)
    return model


def steps_of(folder: Path) -> list[int]:
    return [record.step for record in Posterior.load(folder / "samples").records]


# -- signals ----------------------------------------------------------------------------------------------------------


class SignalAt(pl.Callback):
    """Sends this process a signal in the middle of a step: the gradient is known, the update not made."""

    def __init__(self, step: int, *signals: int) -> None:
        self.step, self.signals = step, signals

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.step - 1:
            for number in self.signals:
                os.kill(os.getpid(), number)


def in_a_process(target: Callable[[], Any], said: Path | None = None, timeout: float = 60) -> int:
    """Run in a process of its own; return its exit code (-9 for one killed by signal 9)."""

    def child() -> None:
        torch.set_num_threads(1)
        if said is not None:
            descriptor = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        target()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        pytest.fail("the run does not end")
    return process.exitcode


@pytest.mark.parametrize(
    ("number", "code", "step"),
    # In mid-epoch the loader (a plain one) would begin its epoch anew on resume, so the steps end one.
    [(signal.SIGTERM, 143, 12), (signal.SIGINT, 1, 12), (signal.SIGTERM, 143, 9), (signal.SIGINT, 1, 9)],
)
def test_an_interrupted_run_leaves_its_state_and_goes_on_exactly(
    number: int, code: int, step: int, tmp_path: Path
) -> None:
    whole = fit(tmp_path / "whole")
    stopped = tmp_path / "stopped"
    assert in_a_process(lambda: fit(stopped, SignalAt(step, number)), tmp_path / "said") == code
    assert steps_of(stopped) == list(range(2, step + 1, 2)), "the step in hand is finished, and its sample drawn"
    checkpoint = stopped / FILE_NAME
    state = torch.load(checkpoint, weights_only=True)
    assert state["optimizer_states"][0]["sampler"]["step_count"] == step
    resumed = fit(stopped, ckpt_path="last")
    assert steps_of(stopped) == steps_of(tmp_path / "whole") == list(range(2, STEPS + 1, 2))
    if step % PER_EPOCH == 0:
        for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
            assert torch.equal(a, b)


def test_the_sentence_of_an_interrupted_run(tmp_path: Path) -> None:
    in_a_process(lambda: fit(tmp_path, SignalAt(5, signal.SIGTERM)), tmp_path / "said")
    path = tmp_path / FILE_NAME
    sentence = f"Interrupted at step 5: the run's state is in {path}; go on with trainer.fit(…, ckpt_path='{path}')."
    assert sentence in (tmp_path / "said").read_text()
    assert "Traceback" not in (tmp_path / "said").read_text()


def test_a_second_ctrl_c_stops_at_once_and_saves_no_half_step(tmp_path: Path) -> None:
    assert in_a_process(lambda: fit(tmp_path, SignalAt(9, signal.SIGINT, signal.SIGINT)), tmp_path / "said") == 1
    assert steps_of(tmp_path) == [2, 4, 6, 8]
    assert not (tmp_path / FILE_NAME).exists()
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 8


def test_an_interrupted_run_without_checkpoints(tmp_path: Path) -> None:
    run = lambda: fit(tmp_path, SignalAt(9, signal.SIGTERM), keep=False)  # noqa: E731
    assert in_a_process(run, tmp_path / "said") == 143
    assert steps_of(tmp_path) == [2, 4, 6, 8]
    assert not list(tmp_path.rglob("*.ckpt"))


def test_ctrl_c_is_the_users_own_again_after_a_fit(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    fit(tmp_path)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ValueError, match="stop here"):
        fit(tmp_path, Fail())
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / FILE_NAME).exists(), "an error is no interruption"


class Fail(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        raise ValueError("stop here")


@pytest.mark.parametrize("when", [3, 8, 15])
def test_a_kill_loses_nothing_that_was_written(when: int, tmp_path: Path) -> None:
    assert in_a_process(lambda: fit(tmp_path, SignalAt(when, signal.SIGKILL))) == -9
    assert steps_of(tmp_path) == list(range(2, when, 2))
    for sample in Posterior.load(tmp_path / "samples"):
        assert all(t.isfinite().all() for t in sample.parameters.values())
    for path in tmp_path.glob("*.ckpt"):
        torch.load(path, weights_only=True)


@pytest.mark.slow
def test_sigterm_to_the_command_line(tmp_path: Path) -> None:
    config = f"""
        trainer:
          accelerator: cpu
          max_steps: 100000
          enable_progress_bar: false
          default_root_dir: {tmp_path}
          logger: {{class_path: pytorch_lightning.loggers.CSVLogger, init_args: {{save_dir: {tmp_path}}}}}
          callbacks:
            - {{class_path: lightning_sgmcmc.callbacks.SamplingSchedule, init_args: {{every_n_steps: 5}}}}
            - {{class_path: lightning_sgmcmc.callbacks.SampleCollector, init_args: {{dirpath: {tmp_path}/samples, max_samples: 20}}}}
            - class_path: pytorch_lightning.callbacks.ModelCheckpoint
              init_args: {{dirpath: {tmp_path}, every_n_train_steps: 1000}}
        model:
          class_path: lightning_sgmcmc.BayesianModule
          init_args:
            net: {{class_path: torch.nn.Linear, init_args: {{in_features: 64, out_features: 10}}}}
            likelihood: lightning_sgmcmc.Categorical
            lr: 0.01
        data: {{class_path: lightning_sgmcmc.datamodules.DigitsDataModule}}
    """  # noqa: E501
    (tmp_path / "run.yaml").write_text(textwrap.dedent(config))
    command = [sys.executable, "-m", "lightning_sgmcmc.cli", "fit", "--config", str(tmp_path / "run.yaml")]
    code = "from lightning_sgmcmc.cli import main; main()"
    command = [sys.executable, "-c", code, *command[3:]]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 120
        while not list((tmp_path / "samples").glob("*.safetensors")):
            assert time.monotonic() < end
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    assert f"the run's state is in {tmp_path / FILE_NAME}" in said
    assert "Traceback" not in said
    step = torch.load(tmp_path / FILE_NAME, weights_only=True)["global_step"]
    assert steps_of(tmp_path)[-1] == step // 5 * 5
