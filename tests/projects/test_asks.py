"""What people ask in public threads, as they would write it, where no other test checks it."""

import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, Posterior
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import DigitsDataModule
from tests.support.trainers import quiet_trainer
from tests.support.wandb_records import contained, finished_records, wandb_row

pytestmark = pytest.mark.slow


def test_fits_of_one_process_and_a_resumed_one_keep_their_steps_in_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb#1626, wandb#2812: nothing is dropped, with `wandb.finish()` between the fits or without."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    contained(monkeypatch, tmp_path)

    def fit(name: str, epochs: int, folder: Path, resumed: bool = False) -> None:
        logger = pl.loggers.WandbLogger(save_dir=str(folder), offline=True, name=name)
        callbacks = [
            SamplingSchedule(burn_in_steps=4, every_n_steps=4),
            SampleCollector(in_memory=True),
            BayesianModelAverage(),
            pl.callbacks.ModelCheckpoint(folder, save_last=True),
        ]
        module = BayesianModule(nn.Linear(64, 10), Categorical(), sampler=SGHMC, lr=0.05, seed=1)
        trainer = quiet_trainer(
            max_epochs=epochs, logger=logger, log_every_n_steps=2, callbacks=callbacks, enable_checkpointing=True
        )
        trainer.fit(
            module, datamodule=DigitsDataModule(batch_size=256), ckpt_path=folder / "last.ckpt" if resumed else None
        )

    def steps(folder: Path) -> list[list[int]]:
        files = sorted(folder.glob("wandb/offline*/*.wandb"), key=lambda path: path.stat().st_mtime)
        rows = [[wandb_row(r) for r in finished_records(path) if r.HasField("history")] for path in files]
        return [[row["trainer/global_step"] for row in own if "val/bma_nll" in row] for own in rows]

    first, second = [8, 12], [16, 20, 24, 28]  # an epoch has five steps; a sample every four
    for apart in (True, False):
        folder = tmp_path / str(apart)
        folder.mkdir()
        for name, epochs, resumed in (("one", 3, False), ("two", 3, False), ("resumed", 6, True)):
            fit(name, epochs, folder, resumed)
            if apart:
                wandb.finish()
        wandb.finish()
        assert steps(folder) == ([first, first, second] if apart else [first + first + second])
    wandb.teardown()


MEMORY = """
import sys, torch
from torch import nn
from lightning_sgmcmc import Categorical, Posterior, process

process.free_host_memory = lambda root: 2**30
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 10))
posterior = Posterior.load(sys.argv[1], net=net)
posterior.predict(torch.zeros(500, 64))
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own figures")
def test_the_memory_of_predictions_does_not_grow_with_the_samples(tmp_path: Path) -> None:
    """numpyro#1503: where 1 GB is free, 200 samples of 400,000 weights, 310 MB, take what 20 of 31 MB take."""
    peaks = []
    for count in (20, 200):
        nets = []
        for seed in range(count):
            torch.manual_seed(seed)
            nets.append(
                nn.Sequential(nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 10))
            )
        folder = tmp_path / str(count)
        Posterior.from_states(nets[0], nets, Categorical()).save(folder)
        command = [sys.executable, "-c", MEMORY, str(folder)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout))
    assert peaks[1] - peaks[0] < 150, f"MB at the peak: {peaks}"
