"""Control variates on gradients: the mean stays, the noise goes, and every layout has the same chains."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc import SGLD, BayesianModule, ContourRules
from lightning_sgmcmc.callbacks import (
    ContourGradient,
    ControlVariates,
    SampleCollector,
    SamplerCallback,
    SamplingSchedule,
    VarianceReducedEnergy,
)
from lightning_sgmcmc.posterior.posterior import Posterior
from lightning_sgmcmc.subsampling.control_variates import rows_of
from tests.support.comparisons import assert_same, covariance_with_error, differences, mean_with_error
from tests.support.problems import CHAINS, Array, ConjugateRegression, Data, Even, Net, Plain, Stream, full_energy
from tests.support.recorders import Draws, Energies, Gradients, Nudge, SaveEverywhere
from tests.support.trainers import OneOfMany, fit_chains, fit_in_layout, quiet_trainer, resumable_run, seeded


class Start(SamplerCallback):
    """The gradient and the energy of all data where the chains begin."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.gradient, self.energy = full_gradient(pl_module), full_energy(pl_module)


def full_gradient(module: BayesianModule) -> Tensor:
    """Return the gradient of U/N of each chain, shape (C, d)."""
    data = Even()
    data.setup("fit")
    train = data.splits[0]
    energy = module.potential_energy((train.inputs, train.targets)).sum() / module.num_data
    gradients = torch.autograd.grad(energy, list(module.parameters()))
    return rows_of(gradients, module.num_chains)


class Counting(Plain):
    """Counts the data of the snapshot's forward passes."""

    at_snapshot = 0

    def log_likelihood(self, batch: Any) -> Tensor:
        if not self.training:
            self.at_snapshot += len(batch[0])
        return super().log_likelihood(batch)


@pytest.mark.parametrize("execution", ["loop", "vmap"])
@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"accumulate_grad_batches": 3}])
def test_the_mean_is_exact_and_the_noise_is_less(execution: Any, chains: int, options: dict[str, Any]) -> None:
    """Chains that do not move, so everything can be computed: on the snapshot each batch's gradient is that of all
    data; off it an epoch's batches, which make up all data, have it as their mean, with a fraction of the spread."""
    module = Plain(chains, lr=0.0, seed=1, chain_execution=execution)
    gradients, energies, start = Gradients(), Energies(), Start()
    variates = ControlVariates(1, 3, energy=True)
    callbacks = [SamplingSchedule(every_n_steps=1), variates, gradients, energies, Nudge(), start]
    trainer = quiet_trainer(max_epochs=4, callbacks=callbacks, **options)
    trainer.fit(module, datamodule=Even(16))
    after, energy_after = full_gradient(module), full_energy(module)

    plain, on_snapshot = torch.stack(gradients.by_epoch[0]), torch.stack(gradients.by_epoch[1])
    torch.testing.assert_close(on_snapshot, start.gradient.expand_as(on_snapshot), rtol=1e-5, atol=1e-6)
    assert float((plain - start.gradient).abs().amax()) > 0.01
    energy = torch.stack(energies.corrected[1])
    torch.testing.assert_close(energy, start.energy.expand_as(energy), rtol=1e-5, atol=1e-3)
    assert float((after - start.gradient).abs().amax()) > 1e-3
    windows = torch.tensor([3.0, 1.0] if options.get("accumulate_grad_batches") == 3 else [1.0] * len(plain))
    for epoch in (2, 3):
        corrected = torch.stack(gradients.by_epoch[epoch])
        mean = (corrected * (windows / windows.sum()).view(-1, 1, 1)).sum(0)
        torch.testing.assert_close(mean, after, rtol=1e-5, atol=1e-6)
        assert float((corrected - after).norm() / (plain - start.gradient).norm()) < 0.3
        weighted = (torch.stack(energies.corrected[epoch]) * (windows / windows.sum()).view(-1, 1)).sum(0)
        torch.testing.assert_close(weighted, energy_after, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("energy", [False, True])
def test_one_pass_over_the_data_and_one_forward_pass_a_step(energy: bool) -> None:
    """For the energy as well as the gradient; and the cost that is counted is the cost."""
    module = Counting(lr=0.01)
    trainer = quiet_trainer(max_epochs=4, callbacks=[ControlVariates(1, 2, energy=energy)], limit_val_batches=0)
    trainer.fit(module, datamodule=Even(16))
    looks = 16 + 8 + 5 * (16 + 3)  # the first batch and its half; five batches, and a datum's classes
    passes = module.at_snapshot - looks
    assert passes == 2 * 64 + 3 * 64  # snapshots of epochs 1 and 3; steps from epoch 1 on
    assert module.gradient_evaluations == 4 * 64 + passes
    assert (module.chains.observed.correction is not None) == energy


def test_the_cost_is_logged(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    options = {"logger": logger, "log_every_n_steps": 4, "limit_val_batches": 0}
    trainer = quiet_trainer(max_epochs=2, callbacks=[ControlVariates()], **options)
    trainer.fit(Plain(), datamodule=Even(16))
    logger.save()
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    names = rows[0].split(",")
    last = dict(zip(names, rows[-1].split(","), strict=True))
    assert float(last["sampler/data_passes"]) == 6.0
    assert float(last["sampler/gradient_evaluations"]) == 6 * 64


def test_bfloat16_cancels_on_the_snapshot_too() -> None:
    """A batch and the snapshot's are computed alike, so in half precision what is left is the pass over all data."""
    module = Plain(2, lr=0.0, seed=1)
    gradients, start = Gradients(), Start()
    trainer = quiet_trainer(max_epochs=1, callbacks=[ControlVariates(), gradients, start], precision="bf16-mixed")
    trainer.fit(module, datamodule=Even(16))
    found = torch.stack(gradients.by_epoch[0])
    assert float((found - found[0]).abs().max()) < 1e-7
    torch.testing.assert_close(found[0], start.gradient, rtol=0.05, atol=2e-3)


# -- the law -----------------------------------------------------------------------------------------------------------

WIDE = ConjugateRegression(outputs=60)


def svrg_covariance(lr: float, batch_size: int) -> Array:
    """Return the covariance of SVRG-LD's draws on `WIDE`, over all steps of an epoch.

    With δ and φ the deviations of θ and θ_q from the posterior mean, δ' = (I - lr·A)·δ - lr·D·(δ - φ) + noise, where A
    is the Hessian of U/N and D a batch's deviation from it; φ = δ at an epoch's beginning.
    """
    d, n = WIDE.features, WIDE.num_data
    identity, zero = np.eye(d), np.zeros((d, d))
    per_datum = np.einsum("ni,nj->nij", WIDE.x, WIDE.x) / WIDE.noise_std**2
    hessian = per_datum.mean(0) + identity / (n * WIDE.prior_std**2)
    drift = np.block([[identity - lr * hessian, zero], [zero, identity]])
    noise = np.block([[2 * lr / n * identity, zero], [zero, zero]])
    deviations = [
        lr * np.block([[-one, one], [zero, zero]]) / np.sqrt(n * batch_size) for one in per_datum - per_datum.mean(0)
    ]
    transfer = np.kron(drift, drift) + sum(np.kron(one, one) for one in deviations)
    steps = n // batch_size
    begin = np.block([[identity, zero], [identity, zero]])
    state, total = np.zeros((2 * d, 2 * d)), zero
    for _ in range(300):
        state, total = begin @ state @ begin.T, zero
        for _ in range(steps):
            state = (transfer @ state.reshape(-1)).reshape(state.shape) + noise
            total = total + state[:d, :d] / steps
    return total


@pytest.mark.slow
def test_svrg_langevin_dynamics_is_nearer_to_the_posterior() -> None:
    """At a step where batches' noise makes up most of SGLD's error, SVRG-LD has the law that theory says; false alarms
    as in tests/samplers/test_conjugate_regression.py, Student's t with 39 degrees of freedom at 5 and 6: below 4e-4."""
    lr, batch = 0.05, 10
    exact, sgld, svrg = (np.trace(c) for c in (WIDE.covariance, *(f(lr, batch) for f in LAWS)))
    assert sgld / exact - 1 > 10 * abs(svrg / exact - 1)
    for variates, law in (([], LAWS[0]), ([ControlVariates()], LAWS[1])):
        draws = Draws()
        schedule = SamplingSchedule(burn_in_steps=300, every_n_steps=3)  # all places of an epoch of 20 in turn
        trainer = quiet_trainer(max_steps=2700, callbacks=[schedule, draws, *variates])
        trainer.fit(WIDE.module(sampler=SGLD, lr=lr, seed=3), WIDE.loader(batch))
        mean, error = mean_with_error(draws.array())
        assert np.abs((mean - WIDE.mean) / error).max() < 6
        found, error = covariance_with_error(draws.array(), WIDE.mean)
        assert np.abs((found - law(lr, batch)) / error).max() < 5
        assert np.trace(error) / exact < 0.05


LAWS = (WIDE.sgld_covariance, svrg_covariance)


# -- chains, ranks, checkpoints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "trainer"),
    [
        ({"sampler": SGLD}, {"accumulate_grad_batches": 3}),
        ({}, {"precision": "bf16-mixed", "gradient_clip_val": 0.3}),
    ],
)
def test_each_chain_is_bit_for_bit_the_chain_alone(options: dict[str, Any], trainer: dict[str, Any]) -> None:
    def fit(chains: int, **more: Any) -> Any:
        variates = [ControlVariates(0, 1, energy=True)]
        return fit_chains(seeded(lambda: Net(chains, **options)), callbacks=variates, **trainer, **more)

    together = fit(CHAINS)
    for chain in range(CHAINS):
        alone = fit(1, strategy=OneOfMany(chain, CHAINS))
        assert_same(alone, [sample for sample in together if sample.chain == chain])


def test_all_chains_at_once_are_the_same_to_rounding() -> None:
    samples = [
        fit_chains(seeded(lambda how=how: Plain(CHAINS, chain_execution=how)), callbacks=[ControlVariates()])
        for how in ("loop", "vmap")
    ]
    for one, other in zip(*samples, strict=True):
        torch.testing.assert_close(one.parameters, other.parameters, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_data_parallel_ranks_share_the_data(tmp_path: Path) -> None:
    """Two ranks with half a batch each have the draws of one process with the whole, in DDP and in groups."""

    def make() -> list[pl.Callback]:
        contour = ContourGradient(ContourRules(zeta=0.75), first_edge=20.0, width=2.0, num_bins=99)
        return [ControlVariates(0, 1, energy=True), contour]

    options: dict[str, Any] = {"model": Plain, "accumulate_grad_batches": 2, "steps": 10}
    whole, _ = fit_in_layout(tmp_path / "whole", 2, 1, datamodule=Even(16), callbacks=make(), **options)
    groups, _ = fit_in_layout(tmp_path / "groups", 1, 4, 2, datamodule=Even(8), callbacks=make(), **options)
    collector = SampleCollector(tmp_path / "samples")
    schedule = SamplingSchedule(every_n_steps=5)
    trainer = quiet_trainer(
        max_steps=10,
        devices=2,
        strategy="ddp_fork",
        callbacks=[schedule, collector, *make()],
        accumulate_grad_batches=2,
    )
    torch.manual_seed(0)
    trainer.fit(Plain(2), datamodule=Even(8))
    shared = Posterior.load(tmp_path / "samples", model=Plain()).store
    plain, _ = fit_in_layout(tmp_path / "plain", 2, 1, datamodule=Even(16), **options)
    for one, group, rank, without in zip(whole, groups, shared, plain, strict=True):
        torch.testing.assert_close(group.parameters, one.parameters, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rank.parameters, one.parameters, rtol=1e-4, atol=1e-5)
        assert group.log_weight == pytest.approx(one.log_weight, rel=1e-4)
        assert not torch.equal(one.parameters["net.0.weight"], without.parameters["net.0.weight"])


@pytest.mark.by_default("options0")
@pytest.mark.parametrize("options", [{"max_epochs": 4}, {"max_epochs": 5, "accumulate_grad_batches": 3}])
def test_every_save_point(tmp_path: Path, options: dict[str, Any]) -> None:
    """Behind batches, micro-batches, validations and epochs, also those with an older snapshot; and after the fit."""
    options = {"val_check_interval": 3, "precision": "bf16-mixed"} | options
    folder = tmp_path / "whole"
    whole = resumable_run(folder, options, "memory", ControlVariates(1, 2, energy=True), SaveEverywhere(tmp_path))
    assert differences(whole, resumable_run(tmp_path / "plain", options, "memory"))
    for checkpoint in sorted(tmp_path.glob("*.ckpt"))[4::11]:
        torch.load(checkpoint, weights_only=True)
        again = tmp_path / checkpoint.stem
        shutil.copytree(folder / "samples", again / "samples")
        variates = ControlVariates(1, 2, energy=True)
        resumed = resumable_run(again, options, "memory", variates, ckpt_path=checkpoint)
        assert not differences(whole, resumed), checkpoint.stem


def test_energies_go_on_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """The correction of a step's first micro-batches is in the checkpoint, also of `VarianceReducedEnergy`."""

    class Last(SamplerCallback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.energy = pl_module.chains.observed.corrected(include_prior=True)

    def fit(callback: pl.Callback, *extra: pl.Callback, **options: Any) -> Tensor:
        module = seeded(Plain)
        energies = Last()
        trainer = quiet_trainer(
            max_epochs=2, enable_checkpointing=True, accumulate_grad_batches=4, callbacks=[callback, energies, *extra]
        )
        trainer.fit(module, datamodule=Data(), **options)
        return energies.energy

    for make in (lambda: VarianceReducedEnergy(0, 1), lambda: ControlVariates(0, 1, energy=True)):
        folder = tmp_path / type(make()).__name__
        whole = fit(make(), SaveEverywhere(folder))
        assert torch.equal(whole, fit(make(), ckpt_path=folder / "014-batch.ckpt"))


def test_a_checkpoint_made_after_the_fit_holds_the_snapshot(tmp_path: Path) -> None:
    def fit(epochs: int, **options: Any) -> tuple[BayesianModule, pl.Trainer]:
        module = seeded(Plain)
        trainer = quiet_trainer(max_epochs=epochs, enable_checkpointing=True, callbacks=[ControlVariates(0, 2)])
        trainer.fit(module, datamodule=Even(16), **options)
        return module, trainer

    whole, _ = fit(4)
    _, trainer = fit(3)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    resumed, _ = fit(4, ckpt_path=tmp_path / "after.ckpt")
    assert not differences(whole.state_dict(), resumed.state_dict())


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="every_n_epochs must be at least 1, got 0"):
        ControlVariates(0, 0)
    with pytest.raises(ValueError, match="start_epoch must be at least 0, got -1"):
        ControlVariates(-1)
    trainer = quiet_trainer(max_epochs=1, callbacks=[ControlVariates(), VarianceReducedEnergy()])
    with pytest.raises(ValueError, match=r"use ControlVariates\(energy=True\), which corrects both from one"):
        trainer.fit(Plain(), datamodule=Even(16))


def test_a_loss_scaler_is_refused() -> None:
    trainer = quiet_trainer(max_epochs=1, callbacks=[ControlVariates()])
    trainer.strategy.precision_plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="ControlVariates computes with gradients, but a loss scaler rescales them"):
        trainer.fit(Plain(), datamodule=Even(16))


def test_data_without_a_length_are_refused() -> None:
    trainer = quiet_trainer(max_epochs=1, callbacks=[ControlVariates()])
    with pytest.raises(ValueError, match=r"passes over all training data, .* has no length"):
        trainer.fit(Plain(num_data=8), torch.utils.data.DataLoader(Stream([(torch.zeros(5), torch.tensor(0))] * 8), 4))
