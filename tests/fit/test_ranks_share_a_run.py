"""Ranks have one seed, also without one given, and the same state where they share a chain."""

import copy
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.multiprocessing import ProcessRaisedException

from lightning_sgmcmc import BayesianModule, ChainStrategy, Gaussian, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.fit import resume as settings
from tests.support.random_runs import DATA, as_in_a_new_process, state
from tests.support.trainers import quiet_trainer


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    as_in_a_new_process(monkeypatch)


def linear(**options: Any) -> BayesianModule:
    return BayesianModule(**({"net": nn.Linear(3, 1), "likelihood": Gaussian(), "lr": 0.01} | options))


def fit(module: BayesianModule, strategy: Any, folder: Path | None = None, *callbacks: pl.Callback) -> None:
    collected = [] if folder is None else [SampleCollector(folder)]
    trainer = quiet_trainer(
        max_steps=4,
        devices=2,
        strategy=strategy,
        callbacks=[SamplingSchedule(every_n_steps=2), *collected, *callbacks],
    )
    trainer.fit(module, datamodule=DatasetDataModule(DATA, batch_size=4))


def of_chains(folder: Path) -> dict[int, torch.Tensor]:
    """Return the samples of each chain, flat."""
    found: dict[int, list[torch.Tensor]] = {}
    for sample in Posterior.load(folder).store:
        found.setdefault(sample.chain, []).append(torch.cat([p.flatten() for p in sample.parameters.values()]))
    return {chain: torch.stack(states) for chain, states in found.items()}


@pytest.mark.parametrize("is_seeded", [True, False])
@pytest.mark.parametrize("chains", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", ["chains_fork", pytest.param("ddp_fork", marks=pytest.mark.slow)])
def test_two_processes_without_a_seed(
    strategy: str, chains: int, is_seeded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_seeded:
        monkeypatch.delenv("PL_GLOBAL_SEED")
    fit(linear(num_chains=chains), strategy, tmp_path / "samples")
    found = of_chains(tmp_path / "samples")
    assert sorted(found) == list(range(chains * (2 if strategy == "chains_fork" else 1)))
    assert all(not torch.equal(found[a], found[b]) for a in found for b in range(a))


@pytest.mark.by_default("ddp_fork")
@pytest.mark.parametrize("strategy", ["chains_fork", "ddp_fork"])
def test_runs_and_fits_of_processes_that_a_trainer_starts_differ(strategy: str, tmp_path: Path) -> None:
    """The processes end with the fit, so each begins without knowledge of earlier ones."""
    net = nn.Linear(3, 1)
    module = linear(net=copy.deepcopy(net))
    moves = []
    for place, one in enumerate((module, linear(net=copy.deepcopy(net)), module)):
        torch.rand(1)  # as the next network's initialisation
        start = state(one)
        fit(one, strategy, tmp_path / f"{place}")
        moves.append(of_chains(tmp_path / f"{place}")[0][0] - start)
    assert all(not torch.isclose(a, b, rtol=1e-2).all() for k, a in enumerate(moves) for b in moves[:k])


class Drifts(pl.Callback):
    """Changes a parameter of one rank a little."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            pl_module.net.weight.data[0, 0] += 1e-5


@pytest.mark.parametrize("strategy", ["ddp_fork", ChainStrategy(2, start_method="fork")], ids=["ddp", "a group"])
def test_replicas_that_differ_are_noticed(strategy: Any) -> None:
    with pytest.raises(ProcessRaisedException, match="rank 1 has other parameters than rank 0 at step 4, and they sha"):
        fit(linear(seed=0), strategy, None, Drifts())


def test_replicas_that_differ_are_not_saved(tmp_path: Path) -> None:
    saver = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3)
    trainer = quiet_trainer(
        max_steps=4, devices=2, strategy="ddp_fork", enable_checkpointing=True, callbacks=[Drifts(), saver]
    )
    with pytest.raises(ProcessRaisedException, match="rank 1 has other parameters than rank 0 at step 3"):
        trainer.fit(linear(), datamodule=DatasetDataModule(DATA, batch_size=4))
    assert not list(tmp_path.glob("*.ckpt"))


def test_devices_of_two_kinds_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def kind(device: torch.device) -> str:
        return f"A{torch.distributed.get_rank()}00 with {device.type} cores"

    monkeypatch.setattr(settings, "device_text", kind)
    with pytest.raises(ProcessRaisedException, match=r"rank 1 runs on A100 .* and rank 0 on A000 .*share a chain: use"):
        fit(linear(), "ddp_fork")
    fit(linear(), "chains_fork", tmp_path / "samples")  # each chain has a device of its own
    assert sorted(of_chains(tmp_path / "samples")) == [0, 1]
