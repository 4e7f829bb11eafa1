"""Runs that are killed (`kill -9`) at random moments, several times, and go on from their newest checkpoint."""

import os
import random
import signal
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.fit.folder import newest_checkpoint
from tests.support.comparisons import differences
from tests.support.trainers import resumable_run

# Every feature at once, in runs of a second and of half of one: 7 of the 8 batches of an epoch in windows of two,
# validation in mid-window, dropout, BatchNorm, augmentation, a sample store and a running average.
LIMITED_BY_EPOCHS = {
    "max_epochs": 40,
    "limit_train_batches": 7,
    "accumulate_grad_batches": 2,
    "val_check_interval": 3,
    "gradient_clip_val": 1.0,
}
LIMITED_BY_STEPS = LIMITED_BY_EPOCHS | {"max_epochs": -1, "max_steps": 158}
LONG = (LIMITED_BY_EPOCHS, LIMITED_BY_STEPS)
SHORT = (LIMITED_BY_EPOCHS | {"max_epochs": 18}, LIMITED_BY_STEPS | {"max_steps": 70})


class Newest(pl.Callback):
    """What `ckpt_path` is looked up from, as the command line does it."""

    @staticmethod
    def in_folder(folder: Path) -> Path | None:
        saver = pl.callbacks.ModelCheckpoint(folder / "checkpoints")
        return newest_checkpoint(pl.Trainer(accelerator="cpu", logger=False, callbacks=[saver], max_steps=1))


def attempt(folder: Path, options: dict[str, Any], kind: str, seed: int) -> None:
    """One process's life: begin, or go on, and write down the outcome at the end."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    saver = pl.callbacks.ModelCheckpoint(
        folder / "checkpoints", every_n_train_steps=1 + seed % 7, save_top_k=-1, save_last=seed % 2 == 0
    )
    outcome = resumable_run(folder, options, kind, saver, ckpt_path=Newest.in_folder(folder))
    torch.save({name: outcome[name] for name in ("state", "running", "members", "step")}, folder / "outcome.tmp")
    os.replace(folder / "outcome.tmp", folder / "outcome.pt")


def killed_sequence(folder: Path, options: dict[str, Any], kind: str, dice: random.Random) -> int:
    """Let processes begin, or go on, and kill each at a random moment, until one comes to the end; count the kills.

    A process dies some checkpoints and some milliseconds behind its start; so a busy machine sees as many kills as an
    idle one, in start-up, in steps, in writing samples and checkpoints.
    """
    kills, wanted = 0, dice.randint(2, 6)
    while not (folder / "outcome.pt").exists():
        process: BaseProcess = get_context("fork").Process(
            target=attempt, args=(folder, options, kind, dice.randrange(1000))
        )
        last = saved(folder) + dice.choice([0, 1, 2, 3, 5, 8])
        process.start()
        if kills < wanted:
            while process.is_alive() and saved(folder) < last:
                process.join(0.002)
            process.join(dice.uniform(0, 0.1))
            if process.is_alive():
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
        process.join(120)
        assert process.exitcode in (0, -signal.SIGKILL), "a run failed after a kill"
    return kills


def saved(folder: Path) -> int:
    """Return how many checkpoints there are."""
    return len(list((folder / "checkpoints").glob("*.ckpt")))


def check_sequences(
    tmp_path: Path, count: int, seed: int, runs: tuple[dict[str, Any], ...], kinds: tuple[str, ...] = ("memory",)
) -> list[int]:
    """Check sequences until so many of them had two kills or more; return the kills of all."""
    dice = random.Random(seed)
    kills: list[int] = []
    wholes = {}
    while sum(number >= 2 for number in kills) < count:
        assert len(kills) < 3 * count, f"too few kills: {kills}"
        number = len(kills)
        kind = kinds[number % len(kinds)]
        options = runs[number // len(kinds) % 2]
        key = (kind, options["max_epochs"])
        if key not in wholes:
            wholes[key] = resumable_run(tmp_path / f"whole-{kind}-{options['max_epochs']}", options, kind)
        whole, folder = wholes[key], tmp_path / f"sequence-{number}"
        folder.mkdir()
        kills.append(killed_sequence(folder, options, kind, dice))
        outcome = torch.load(folder / "outcome.pt", weights_only=True)
        assert not differences({name: whole[name] for name in outcome}, outcome), f"sequence {number}"
        posterior = Posterior.load(folder / "samples")
        assert posterior.records == whole["records"], "samples are lost or repeated"
        assert not differences(whole["samples"], [sample.state for sample in posterior])
    return kills


def test_a_few_sequences_of_kills(tmp_path: Path) -> None:
    check_sequences(tmp_path, 2, 1, SHORT)


@pytest.mark.slow
def test_many_sequences_of_kills(tmp_path: Path) -> None:
    kills = check_sequences(tmp_path, 27, 2, LONG, kinds=("memory", "workers 0", "workers 2"))
    print(f"kills in each of {len(kills)} sequences: {kills}")
