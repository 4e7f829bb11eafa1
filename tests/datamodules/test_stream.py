"""Data that grow during a run: N, energies and noise follow them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_sgmcmc import SGHMC, SGLD, BayesianModule, Gaussian
from lightning_sgmcmc.callbacks import ControlVariates, SamplingSchedule
from lightning_sgmcmc.datamodules import DatasetDataModule, StreamDataModule
from lightning_sgmcmc.samplers import UnderdampedLangevin, pSGLD
from tests.support.comparisons import check_law
from tests.support.problems import PROBLEM
from tests.support.recorders import Draws
from tests.support.trainers import quiet_trainer

X, Y = PROBLEM.dataset().tensors
FIRST = 40


class Arrivals(pl.Callback):
    """Appends `count` of the problem's data before each of some epochs, after the last step of the epoch before."""

    def __init__(self, count: int, epochs: range) -> None:
        self.count, self.epochs = count, epochs

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        epoch = trainer.current_epoch + 1
        if epoch in self.epochs and batch_idx + 1 == trainer.num_training_batches:
            start = FIRST + self.count * (epoch - self.epochs.start)
            stream: Any = trainer.datamodule  # type: ignore[attr-defined]
            stream.append(X[start : start + self.count], Y[start : start + self.count])


class Steps(pl.Callback):
    """Keeps N, the batch, the states before each step, its gradients and energies."""

    def __init__(self) -> None:
        self.num_data: list[int | None] = []
        self.batches: list[Any] = []
        self.states: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.energies: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append(pl_module.net.weight.grad.clone())
        self.energies.append(pl_module.chains.observed.energy)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.num_data.append(pl_module.num_data)
        self.batches.append(batch)
        self.states.append(pl_module.net.weight.detach().clone())


def stream(steps: int, batch_size: int = FIRST, capacity: int | None = None) -> StreamDataModule:
    data = StreamDataModule(batch_size, steps, capacity)
    data.append(X[:FIRST], Y[:FIRST])
    return data


@pytest.mark.slow
def test_the_draws_have_the_posterior_of_all_data_once_they_have_arrived() -> None:
    """Eight chains of SGLD while 160 of 200 data arrive; then mean and covariance of the draws are the posterior's.

    The reference is the exact law of the step size without mini-batch noise. Batches of 40 without replacement heat by
    at most 0.8 times as much as batches with it, that is by 9 %, less than the allowance of 10 %. 60 means with |z| < 6
    and 6 covariances with |z| < 5, 39 degrees of freedom: false alarms have a probability of 1e-4. N = 40 in the noise
    would make the covariance five times as large.
    """
    module = PROBLEM.module(lr=0.05, num_chains=8, chain_start="same", chain_execution="vmap", seed=0)
    draws = Draws()
    trainer = quiet_trainer(
        max_epochs=35,
        callbacks=[SamplingSchedule(burn_in_steps=180, every_n_steps=4), draws, Arrivals(40, range(1, 5))],
    )
    trainer.fit(module, datamodule=stream(20))
    assert module.num_data == len(X)
    check_law(draws.array(8), PROBLEM.sgld_covariance(0.05, 10**9), slack=0.1)


@pytest.mark.parametrize("sampler", [SGLD, pSGLD, SGHMC, UnderdampedLangevin])
def test_noise_and_energy_after_growth_are_those_of_a_new_module(sampler: Any) -> None:
    module = PROBLEM.module(sampler=sampler, lr=1e-3, num_chains=2, seed=0)
    steps = Steps()
    trainer = quiet_trainer(max_epochs=2, callbacks=[steps, Arrivals(60, range(1, 2))])
    trainer.fit(module, datamodule=stream(2))
    assert steps.num_data == [40, 40, 100, 100]
    new = PROBLEM.module(sampler=sampler, lr=1e-3, num_chains=2, num_data=100)
    new.configure_model()
    with torch.no_grad():
        new.net.weight.copy_(steps.states[2])
    torch.testing.assert_close(steps.energies[2], new.potential_energy(steps.batches[2]).detach())
    fresh = sampler([torch.zeros(2, 3)], lr=1e-3, num_data=100, num_chains=2)
    laws = []
    for rule in (module.sampler, fresh):
        (group,) = rule.param_groups
        laws.append(rule.law(group) or rule.langevin_law(group))
    assert laws[0] == laws[1]


def test_a_full_stream_forgets_the_oldest_data() -> None:
    data = stream(3, batch_size=20, capacity=50)
    steps = Steps()
    module = PROBLEM.module(lr=1e-3, seed=0)
    quiet_trainer(max_epochs=3, callbacks=[steps, Arrivals(20, range(1, 3))]).fit(module, datamodule=data)
    assert steps.num_data == [40] * 3 + [50] * 6
    assert torch.equal(data.training_data().tensors[0], X[30:80])
    held = {tuple(row) for row in X[30:80].tolist()}
    assert all(tuple(row) in held for x, _ in steps.batches[6:] for row in x.tolist())


def test_control_variates_use_a_snapshot_of_the_present_data() -> None:
    """At lr = 0 every corrected gradient is the full gradient, of 40 data at first and then of 100."""
    module = PROBLEM.module(lr=0.0, temperature=0.0, seed=0)
    steps = Steps()
    callbacks = [ControlVariates(every_n_epochs=10), steps, Arrivals(60, range(1, 2))]
    quiet_trainer(max_epochs=2, callbacks=callbacks).fit(module, datamodule=stream(3, batch_size=10))
    for gradient, count in zip(steps.gradients, [40] * 3 + [100] * 3, strict=True):
        weight = steps.states[0].double()
        of_data = (X[:count].double() @ weight.T - Y[:count].double()).T @ X[:count].double()
        torch.testing.assert_close(gradient.double(), (of_data + weight) / count, rtol=1e-4, atol=1e-5)


def test_a_growing_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    def fit(folder: Path, ckpt_path: Path | None = None) -> tuple[BayesianModule, StreamDataModule]:
        module, data = PROBLEM.module(sampler=SGHMC, lr=1e-3, num_chains=2, seed=0), stream(4, 10, 90)
        checkpoints = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        options = {"max_epochs": 5, "enable_checkpointing": True}
        trainer = quiet_trainer(callbacks=[Arrivals(20, range(1, 5)), checkpoints], **options)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        return module, data

    whole, data = fit(tmp_path / "whole")
    for step in (4, 6, 8, 15):
        again, restored = fit(tmp_path / f"{step}", tmp_path / "whole" / f"step={step}.ckpt")
        assert torch.equal(again.net.weight, whole.net.weight), step
        assert torch.equal(restored.training_data().tensors[1], data.training_data().tensors[1])


def test_a_data_set_of_ones_own_may_grow_with_reloaded_loaders() -> None:
    """With `reload_dataloaders_every_n_epochs` each new loader continues the chains' own orders."""

    class Growing(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            data.train.tensors = tuple(tensor[: FIRST * (trainer.current_epoch + 2)] for tensor in (X, Y))

    data: Any = DatasetDataModule(TensorDataset(X[:FIRST], Y[:FIRST]), batch_size=20)
    steps = Steps()
    module = PROBLEM.module(lr=1e-3, num_chains=2, seed=0)
    options = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1, "max_steps": 12}
    quiet_trainer(callbacks=[steps, Growing()], **options).fit(module, datamodule=data)
    assert steps.num_data == [40] * 2 + [80] * 4 + [120] * 6
    seen = [[x for x, _ in batch] for batch in steps.batches]
    assert all(not torch.equal(*of_chains) for of_chains in seen)
    for first, last in ((0, 2), (2, 6), (6, 12)):
        for chain in range(2):
            rows = torch.cat([of_chains[chain] for of_chains in seen[first:last]])
            assert len(rows.unique(dim=0)) == len(rows), "each datum comes once an epoch"


def test_a_given_number_of_data_contradicts_growth() -> None:
    module = PROBLEM.module(lr=1e-3, num_data=FIRST)
    with pytest.raises(ValueError, match=r"num_data=40 contradicts .*, which says 60"):
        quiet_trainer(max_epochs=2, callbacks=[Arrivals(20, range(1, 2))]).fit(module, datamodule=stream(2))


def test_mistakes() -> None:
    data = StreamDataModule(4, 2)
    with pytest.raises(ValueError, match="holds 0 data, fewer than batch_size=4"):
        data.setup("fit")
    data.append(X[:3], Y[:3])
    with pytest.raises(ValueError, match="append data alike"):
        data.append(X[:3, :2], Y[:3])
    with pytest.raises(ValueError, match="same length"):
        data.append(X[:3], Y[:2])
    for options in ({"batch_size": 0}, {"batches_per_epoch": 0}, {"capacity": 3}):
        with pytest.raises(ValueError, match="must be at least"):
            StreamDataModule(**({"batch_size": 4, "batches_per_epoch": 2} | options))
    module = BayesianModule(net=torch.nn.Linear(3, 20, bias=False), likelihood=Gaussian(), lr=1e-3)
    data.append(X[3:9], Y[3:9])
    quiet_trainer(max_epochs=1).fit(module, datamodule=data)
    assert copy.deepcopy(data).num_data == 9
