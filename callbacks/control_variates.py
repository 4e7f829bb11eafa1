"""Gradients with less mini-batch noise: SVRG-LD and the like, from any sampler."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc.callbacks.snapshot import SnapshotCallback
from lightning_sgmcmc.run.loggers import is_logged, log_cost
from lightning_sgmcmc.run.trainer import callbacks_of
from lightning_sgmcmc.subsampling.snapshot import Snapshot


class ControlVariates(SnapshotCallback):
    """Takes the mini-batch's noise out of the gradient by a control variate.

        g ← g - (1/n)·Σ_{i in batch} ∇U_i(θ_q) + (1/N)·Σ_i ∇U_i(θ_q),   U_i = -log p(y_i|x_i,θ)

    with θ_q a snapshot of the chain, taken at the beginning of every q-th epoch. It has the same mean as g, and the
    less noise the nearer θ_q is; the prior's gradient is exact as it is. It works with any sampler: with `SGLD` it is
    SVRG-LD, with `SGHMC` its form with momentum. Each chain has a snapshot of its own. With `EWSG` each candidate's
    gradient is corrected.

    The price is the gradient of all data for each snapshot, and the snapshot's gradient of each batch, so a step costs
    about twice as much; every `trainer.log_every_n_steps` it logs `sampler/gradient_evaluations` (data whose gradient
    was computed, for each chain) and `sampler/data_passes`, the same over N. What is clipped is the corrected gradient.

    The snapshot is computed in evaluation mode: dropout is off, and BatchNorm takes the running statistics at θ_q, so
    that U_i(θ_q) is a function of one datum. The mean of g stays exactly as it is, but its noise from dropout stays
    too, and with BatchNorm, whose statistics are the batch's in g, much of what the batch brings. Where training data
    are augmented, the sum over all data is of one draw of the augmentation, so until the next snapshot the mean of g is
    off by that draw's error.

    Args:
        start_epoch: first epoch, from 0, in which gradients are corrected.
        every_n_epochs: q.
        energy: also correct the energies, as `VarianceReducedEnergy` does, from the same snapshot and forward passes.

    Raises:
        ValueError: for an argument out of range; at setup, for a loss scaler or a `VarianceReducedEnergy`.

    Source: Dubey et al. 2016 (Variance reduction in stochastic gradient Langevin dynamics), Algorithm 2; Baker et al.
    2019 (Control variates for stochastic gradient MCMC).
    """

    def __init__(self, start_epoch: int = 0, every_n_epochs: int = 1, energy: bool = False) -> None:
        super().__init__(start_epoch, every_n_epochs, energy=bool(energy), gradients=True)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if any(isinstance(callback, VarianceReducedEnergy) for callback in callbacks_of(trainer)):
            raise ValueError(
                "ControlVariates and VarianceReducedEnergy would take a snapshot and go over all data each: take "
                "ControlVariates(energy=True), which corrects both from one"
            )

    def process_batch(self, log_likelihood: Tensor) -> None:
        assert self._snapshot is not None
        self._snapshot.add_gradients(log_likelihood, self.chains.observed.num_data)

    def end_pass(self) -> None:
        assert self._snapshot is not None
        self._snapshot.keep_full()

    def correct_gradient(self, snapshot: Snapshot) -> None:
        assert snapshot.full is not None
        snapshot.reduce()
        share = self.chains.accumulation.batch_share
        rows = zip(snapshot.parameters.values(), snapshot.sums, snapshot.full, strict=True)
        present = [(p.grad, batch, full) for p, batch, full in rows if p.grad is not None]
        gradients, batches, fulls = ([row[place] for row in present] for place in range(3))
        torch._foreach_add_(gradients, batches, alpha=-share / snapshot.count)  # first, to cancel exactly
        torch._foreach_add_(gradients, fulls, alpha=share)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_logged(trainer, self._module.chains, self._module.sampler.step_count):
            log_cost(trainer, self._module.chains)


class VarianceReducedEnergy(SnapshotCallback):
    """Takes the mini-batch's noise out of the energy by a control variate.

        Ũ_VR(θ) = Ũ(θ) - (N/n)·Σ_{i in batch} U_i(θ_q) + Σ_i U_i(θ_q),   U_i = -log p(y_i|x_i,θ)

    with θ_q a snapshot of the chain, taken at the beginning of every q-th epoch. It has the same mean as Ũ, and the
    less noise the nearer θ_q is. `ContourGradient` and `ReplicaExchange` look at this energy in place of Ũ; gradients
    stay as they are (`ControlVariates` corrects them, and energies too from the same snapshot). Each chain has a
    snapshot of its own. The price is a pass over all data for each snapshot, and a forward pass of the snapshot at each
    step; both are made in evaluation mode, with the training data's augmentation.

    Args:
        start_epoch: first epoch, from 0, in which energies are corrected.
        every_n_epochs: q.

    Raises:
        ValueError: for an argument out of range.

    Source: Deng et al. 2022 (ICSGLD), appendix B.1; Deng et al. 2021 (variance-reduced replica exchange).
    """

    def __init__(self, start_epoch: int = 0, every_n_epochs: int = 2) -> None:
        super().__init__(start_epoch, every_n_epochs, energy=True, gradients=False)
