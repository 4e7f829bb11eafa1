"""SLURM's requeue: its signal saves a state of the chain, from which the job goes on bit for bit."""

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import SLURMEnvironment

from lightning_sgmcmc import ChainStrategy, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from tests.support.comparisons import assert_same
from tests.support.problems import Data, Net

STEPS, SIGNALLED = 20, 6


class Signal(pl.Callback):
    """Sends one rank SLURM's signal in the middle of a step."""

    def __init__(self, rank: int, number: int) -> None:
        self.rank, self.number = rank, number

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, SIGNALLED):
            os.kill(os.getpid(), self.number)


def job(rank: int, folder: Path, ranks: int, number: int, callbacks: Any, steps: int = STEPS) -> None:
    """A task of a job; what `scontrol` is asked is in `requeued`."""
    os.environ |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": str(ranks)}
    os.environ["SLURM_NTASKS_PER_NODE"] = str(ranks)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    environment = SLURMEnvironment(requeue_signal=signal.Signals(number))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ChainStrategy() if ranks > 1 else "auto",
        plugins=[environment],
        max_steps=steps,
        max_epochs=-1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[SamplingSchedule(every_n_steps=5), SampleCollector(folder / "samples"), *callbacks],
    )
    trainer.fit(Net(), datamodule=Data())


@pytest.fixture(autouse=True)
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    command.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"PATH": f"{command.parent}:{os.environ['PATH']}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables |= {"SLURM_JOB_ID": "4321", "SLURM_JOB_NAME": "train", "SLURM_NODEID": "0"}
    for name, value in (variables | dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"), "0")).items():
        monkeypatch.setenv(name, value)


def run(folder: Path, ranks: int, number: int, *callbacks: pl.Callback, steps: int = STEPS) -> list[Any]:
    torch.multiprocessing.start_processes(job, (folder, ranks, number, callbacks, steps), ranks, start_method="fork")
    return list(Posterior.load(folder / "samples", model=Net()).store)


@pytest.mark.parametrize(
    ("ranks", "rank", "number"),
    [
        (1, 0, signal.SIGUSR1),
        (2, 1, signal.SIGUSR1),
        pytest.param(1, 0, signal.SIGUSR2, marks=pytest.mark.slow),
        pytest.param(2, 0, signal.SIGUSR2, marks=pytest.mark.slow),
    ],
)
def test_the_requeue_signal_saves_at_an_agreed_batch(ranks: int, rank: int, number: int, tmp_path: Path) -> None:
    """Lightning's own handler saves in mid-step; with several ranks amid another operation of theirs."""
    run(tmp_path, ranks, number, Signal(rank, number))
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    assert saved["global_step"] == SIGNALLED + 1, "the step is complete"
    assert (tmp_path / "requeued").read_text() == "requeue 4321\n"
    resumed = run(tmp_path, ranks, number)
    assert (tmp_path / "samples-1").exists(), "the job went on until its end; later samples were moved aside"
    assert_same(run(tmp_path / "whole", ranks, number), resumed)
