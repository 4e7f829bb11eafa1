"""What made the files of this folder, at the commit before the packages: `python tests/written_by_0_1_0/make.py OUT`.

Later versions must read the store, and continue from the checkpoints to the same samples.
"""

import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, ContourRules, GaussianPrior
from lightning_sgmcmc.callbacks import (
    EWSG,
    BayesianModelAverage,
    ChainHealth,
    ContourGradient,
    SampleCollector,
    SamplingSchedule,
)
from lightning_sgmcmc.datamodules import DigitsDataModule


def module(num_chains: int) -> BayesianModule:
    """Return the module of the runs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 10))
    options: dict[str, Any] = {"likelihood": Categorical(), "prior": GaussianPrior(std=1.0), "sampler": SGHMC}
    return BayesianModule(net=net, lr=0.02, seed=1, num_chains=num_chains, **options)


def callbacks(num_chains: int) -> list[pl.Callback]:
    """Return the callbacks of the run of so many chains."""
    if num_chains == 1:
        return [
            ContourGradient(ContourRules(zeta=2.0), num_bins=8, first_edge=100.0, width=600.0, sample_energy="step"),
            ChainHealth(),
        ]
    return [EWSG(num_proposals=1)]


def fit(folder: Path, num_chains: int, ckpt_path: Path | None = None) -> pl.Trainer:
    """Make 20 steps with a sample at every fifth and a checkpoint after the twelfth."""
    saved = pl.callbacks.ModelCheckpoint(folder, filename="step-{step}", every_n_train_steps=12, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=20,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            SamplingSchedule(every_n_steps=5),
            *callbacks(num_chains),
            SampleCollector(folder / "samples"),
            BayesianModelAverage(),
            saved,
        ],
    )
    trainer.fit(module(num_chains), datamodule=DigitsDataModule(batch_size=64), ckpt_path=ckpt_path)
    return trainer


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chains in (1, 2):
        fit(Path(sys.argv[1]) / f"chains_{chains}", chains)
