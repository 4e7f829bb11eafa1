"""Gradients and energies with less mini-batch noise: SVRG-LD and its relatives, from any sampler."""

import math
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc.callbacks.base import Run, SamplerCallback, refuse_loss_scaler
from lightning_sgmcmc.callbacks.planned import is_warming_up
from lightning_sgmcmc.chains.callback import ChainSizes, Place, RunCost
from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.execution import undisturbed_generators
from lightning_sgmcmc.chains.row_energies import weighed
from lightning_sgmcmc.checks import check_count, check_flag
from lightning_sgmcmc.evaluation.loader_average import HeldData, held_data
from lightning_sgmcmc.evaluation.passes import pass_over_data
from lightning_sgmcmc.run.logging import is_logged, log_cost
from lightning_sgmcmc.run.trainer import callbacks_of
from lightning_sgmcmc.subsampling.snapshot import Snapshot
from lightning_sgmcmc.tensors import exact, exact_device


class SnapshotCallback(SamplerCallback):
    """Base class for callbacks that compare mini-batches with a snapshot θ_q of the chains.

    It takes the snapshot at the beginning of every q-th epoch, and of an epoch with other data. It passes over all
    data, and also evaluates each mini-batch at θ_q: its energy, its gradient, or both from the same forward
    pass. Subclasses implement `process_batch` and `end_pass` for the pass over all data, and `correct_gradient` for the
    gradient of a whole batch.

    Args:
        start_epoch: first epoch, from 0, with a snapshot.
        every_n_epochs: q.
        gradients: whether gradients at θ_q are computed.
    """

    changes_chain = True
    place = Place.CHAIN

    shuffles_pass = False
    """Whether a pass over all data uses random batches."""

    def __init__(self, start_epoch: int, every_n_epochs: int, energy: bool, gradients: bool) -> None:
        check_count("start_epoch", start_epoch, least=0)
        check_count("every_n_epochs", every_n_epochs)
        check_flag("energy", energy)
        self.start_epoch = start_epoch
        self.every_n_epochs = every_n_epochs
        self.energy = energy
        self.needs_gradients = gradients
        self.reset()

    def reset(self) -> None:
        self._snapshot: Snapshot | None = None
        self._period = -1
        """The index of the snapshot, -1 before the first one."""
        self._num_data = 0
        """N of the snapshot."""
        self._held: HeldData | None = None
        """The training data of the snapshot."""
        self._correction: Tensor | None = None
        """The correction of this step's energies, the mean over its micro-batches so far."""

    def check(self, trainer: pl.Trainer, module: ChainModel) -> None:
        claims = module.chains.claims
        if self.needs_gradients:
            refuse_loss_scaler(trainer, f"{type(self).__name__} computes with gradients")
            claims.claim("snapshot gradients", self, self._batch_is_complete)
        if self.energy:
            claims.claim("energy correction", self, self._correction_of)

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        if saved is None:
            return
        if saved["snapshot"] is not None:
            self._snapshot = Snapshot(run.chains, self.needs_gradients)
            self._snapshot.load_state_dict(saved["snapshot"])
        self._period = saved["period"]
        self._num_data = saved.get("num_data", run.chains.observed.num_data)
        self._held = held_data(run.trainer)  # data that change during a run are part of the checkpoint
        if saved["correction"] is not None:
            correction = run.layout.own_unreduced(saved["correction"]).reshape(-1)
            self._correction = correction.to(exact_device(run.module.device))

    # -- the snapshot -------------------------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Return whether the coming step needs no snapshot."""
        return False

    def process_batch(self, log_likelihood: Tensor) -> None:
        """Process one batch of the pass over all data.

        Args:
            log_likelihood: log p(y|x,θ_q) of each datum, shape (C, n), with its graph if gradients are computed.
        """

    def end_pass(self) -> None:
        """Combine the results of the pass over all data."""

    def _refresh(self, trainer: pl.Trainer) -> None:
        """Take a snapshot of the chains, and pass over all data."""
        module = self.run.module
        if self._snapshot is None:
            self._snapshot = Snapshot(self.run.chains, self.needs_gradients)
        self._snapshot.take()
        total = torch.zeros_like(self._snapshot.log_likelihood)
        with undisturbed_generators(module):
            reason, sampler = type(self).__name__, module.sampler
            for batch in pass_over_data(trainer, module.chains, sampler, reason, "snapshot", self.shuffles_pass):
                each = self._at_snapshot(trainer, self._snapshot, batch)
                total += exact(each.detach()).sum(1)
                self.process_batch(each)
        ranks = self.run.layout.ranks_per_chain
        self._snapshot.log_likelihood.copy_(self.run.layout.mean_over_data(total) * ranks)
        self.end_pass()
        if self.needs_gradients:
            self.run.chains.counters.gradient_evaluations += self.run.chains.observed.num_data

    @staticmethod
    def _at_snapshot(trainer: pl.Trainer, snapshot: Snapshot, batch: Any) -> Tensor:
        with trainer.strategy.precision_plugin.val_step_context():
            return snapshot.of_batch(batch)

    def memory(self, sizes: ChainSizes) -> int:
        return sizes.tensors

    def added_gradients(self, cost: RunCost) -> int | None:
        if not self.needs_gradients:
            return 0
        share = max(cost.epochs - self.start_epoch, 0.0)
        if math.isnan(share):
            return None
        return round(cost.gradients * share / cost.epochs + math.ceil(share / self.every_n_epochs) * cost.num_data)

    # -- a step -------------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        since = trainer.current_epoch - self.start_epoch
        if since < 0 or is_warming_up(trainer, self.run.module, batch_idx) or self.is_idle():
            return
        position = batch_idx % trainer.accumulate_grad_batches
        present = since // self.every_n_epochs, self.run.chains.observed.num_data
        if position == 0 and (present != (self._period, self._num_data) or (batch_idx == 0 and self._is_old(trainer))):
            self._refresh(trainer)
            self._period, self._num_data = present
            self._held = held_data(trainer)
        if self._snapshot is None:
            return
        each = self._at_snapshot(trainer, self._snapshot, batch)
        weights = self.run.chains.weights
        factor = None if weights is None else weights.factor(batch_idx, self.run.chains.accumulation.candidates)
        if self.needs_gradients:
            size = each.shape[1]
            self._snapshot.add_gradients(each, size if factor is None else 1 / factor)
            self.run.chains.counters.gradient_evaluations += size * self.run.layout.ranks_per_chain
        if self.energy:
            self._correct_energy(self._snapshot, each.detach(), position, factor)

    def _is_old(self, trainer: pl.Trainer) -> bool:
        """Return whether the snapshot is of data that were replaced since, by others of the same number."""
        return self._held is not None and not self._held.is_same(held_data(trainer))

    def _correct_energy(self, snapshot: Snapshot, each: Tensor, position: int, factor: float | None) -> None:
        observed = self.run.chains.observed
        observed.reference_log_likelihood = each
        correction = self._term(snapshot, each, factor)
        if position > 0 and self._correction is not None:
            correction = self._correction + (correction - self._correction) / (position + 1)
        self._correction = observed.correction = correction

    def _term(self, snapshot: Snapshot, each: Tensor, factor: float | None) -> Tensor:
        """Return what is added to the energies of a batch, shape (C,), from its log likelihoods at the snapshot."""
        return self.run.chains.observed.num_data * weighed(exact(each), factor) - snapshot.log_likelihood

    def _correction_of(self, batch: Any, factor: float | None) -> Tensor:
        """Return what is added to the energies of any batch, shape (C,), with the factor of its log-likelihoods."""
        snapshot = self._snapshot
        if snapshot is None:
            module = self.run.module
            return torch.zeros(module.num_chains, dtype=torch.float64, device=exact_device(module.device))
        return self._term(snapshot, self._at_snapshot(self.run.trainer, snapshot, batch).detach(), factor)

    def _batch_is_complete(self) -> None:
        if self._snapshot is not None and self._snapshot.count > 0:
            with torch.no_grad():
                self.correct_gradient(self._snapshot)
            self._snapshot.clear()

    def correct_gradient(self, snapshot: Snapshot) -> None:
        """Process the gradient of a whole batch: the parameters hold it, times `batch_share`.

        Args:
            snapshot: the snapshot, with the summed gradients of the batch's micro-batches there.
        """

    # -- the end, checkpoints -----------------------------------------------------------------------------------------

    def end(self) -> None:
        self._snapshot = self._held = None

    def state(self) -> dict[str, Any]:
        snapshot, correction = self._snapshot, None
        if self._run is not None and self._correction is not None and self.run.chains.accumulation.accumulating:
            own = self._correction if self.run.module.num_chains > 1 else self._correction[0]
            correction = self.run.layout.gather_unreduced(own).cpu()
        return {
            "snapshot": snapshot.state_dict() if snapshot is not None else None,
            "period": self._period,
            "num_data": self._num_data,
            "correction": correction,
        }


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

    def check(self, trainer: pl.Trainer, module: ChainModel) -> None:
        super().check(trainer, module)
        if any(isinstance(callback, VarianceReducedEnergy) for callback in callbacks_of(trainer)):
            raise ValueError(
                "ControlVariates and VarianceReducedEnergy would each take a snapshot and pass over all data: use "
                "ControlVariates(energy=True), which corrects both from one snapshot"
            )

    def memory(self, sizes: ChainSizes) -> int:
        return super().memory(sizes) + 2 * sizes.parameters  # the gradients of a batch and of all data

    def process_batch(self, log_likelihood: Tensor) -> None:
        assert self._snapshot is not None
        self._snapshot.add_gradients(log_likelihood, self.run.chains.observed.num_data)

    def end_pass(self) -> None:
        assert self._snapshot is not None
        self._snapshot.keep_full()

    def correct_gradient(self, snapshot: Snapshot) -> None:
        assert snapshot.full is not None
        snapshot.reduce()
        share = self.run.chains.accumulation.batch_share
        rows = zip(snapshot.parameters.values(), snapshot.sums, snapshot.full, strict=True)
        present = [(p.grad, batch, full) for p, batch, full in rows if p.grad is not None]
        gradients, batches, fulls = ([row[place] for row in present] for place in range(3))
        torch._foreach_add_(gradients, batches, alpha=-share / snapshot.count)  # first, to cancel exactly
        torch._foreach_add_(gradients, fulls, alpha=share)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_logged(trainer, self.run.chains, self.run.sampler.step_count):
            log_cost(trainer, self.run.chains)


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
