"""Gradients with less mini-batch noise: SVRG-LD and its relatives, from any sampler."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc.callbacks.snapshot import SnapshotCallback
from lightning_sgmcmc.chains.callback import ChainSizes
from lightning_sgmcmc.run.loggers import is_logged, log_cost
from lightning_sgmcmc.run.trainer import callbacks_of
from lightning_sgmcmc.subsampling.snapshot import Snapshot


class ControlVariates(SnapshotCallback):
    """Reduces the mini-batch noise of the gradient by a control variate.

        g ← g - (1/n)·Σ_{i in batch} ∇U_i(θ_q) + (1/N)·Σ_i ∇U_i(θ_q),   U_i = -log p(y_i|x_i,θ)

    with θ_q a snapshot of the chain, taken at the beginning of every q-th epoch. It has the same mean as g, and less
    noise the nearer θ_q is; the prior's gradient is exact anyway. It works with any sampler: with `SGLD` it is
    SVRG-LD, with `SGHMC` its version with momentum. Each chain has its own snapshot. With `EWSG` each candidate's
    gradient is corrected.

    Each snapshot costs a full-data gradient, and each batch its gradient there, so a step costs about twice as
    much. Every `trainer.log_every_n_steps` it logs `sampler/gradient_evaluations` (per-datum gradients, for each chain)
    and `sampler/data_passes`, that number over N. Clipping applies to the corrected gradient.

    The snapshot is computed in evaluation mode: dropout is off, and BatchNorm uses the running statistics at θ_q, so
    that U_i(θ_q) is a function of one datum. The mean of g is unchanged, but so is its noise from dropout, and with
    BatchNorm, whose statistics in g are the batch's, much of the mini-batch noise. If training data are augmented, the
    sum over all data uses one draw of the augmentation, so until the next snapshot the mean of g has that draw's
    error.

    Args:
        start_epoch: first epoch, from 0, in which gradients are corrected.
        every_n_epochs: q.
        energy: also correct the energies, as `VarianceReducedEnergy` does, from the same snapshot and forward passes.

    Raises:
        ValueError: for an argument out of range; at setup, for a loss scaler or a `VarianceReducedEnergy`.

    Source: Dubey et al. 2016 (Variance reduction in stochastic gradient Langevin dynamics), Algorithm 2; Baker et al.
    2019 (Control variates for stochastic gradient MCMC).
    """

    setting = "control_variates"

    def __init__(self, start_epoch: int = 0, every_n_epochs: int = 1, energy: bool = False) -> None:
        super().__init__(start_epoch, every_n_epochs, energy=energy, gradients=True)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if any(isinstance(callback, VarianceReducedEnergy) for callback in callbacks_of(trainer)):
            raise ValueError(
                "ControlVariates and VarianceReducedEnergy would each take a snapshot and pass over all data: use "
                "ControlVariates(energy=True), which corrects both from one snapshot"
            )

    def memory(self, sizes: ChainSizes) -> int:
        return super().memory(sizes) + 2 * sizes.parameters  # the gradients of a batch and of all data

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
    """Reduces the mini-batch noise of the energy by a control variate.

        Ũ_VR(θ) = Ũ(θ) - (N/n)·Σ_{i in batch} U_i(θ_q) + Σ_i U_i(θ_q),   U_i = -log p(y_i|x_i,θ)

    with θ_q a snapshot of the chain, taken at the beginning of every q-th epoch. It has the same mean as Ũ, and
    less noise the nearer θ_q is. `ContourGradient` and `ReplicaExchange` use this energy instead of Ũ; gradients are
    unchanged (`ControlVariates` corrects gradients, and also energies from the same snapshot). Each chain has its own
    snapshot. Each snapshot costs a pass over all data, and each step a forward pass at the snapshot; both run in
    evaluation mode, with the training data's augmentation.

    Args:
        start_epoch: first epoch, from 0, in which energies are corrected.
        every_n_epochs: q.

    Raises:
        ValueError: for an argument out of range.

    Source: Deng et al. 2022 (ICSGLD), appendix B.1; Deng et al. 2021 (variance-reduced replica exchange).
    """

    setting = "variance_reduced_energy"

    def __init__(self, start_epoch: int = 0, every_n_epochs: int = 2) -> None:
        super().__init__(start_epoch, every_n_epochs, energy=True, gradients=False)
