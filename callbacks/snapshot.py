"""Base class for callbacks that compare mini-batches with a snapshot of the chains."""

import math
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc.callbacks.base import SamplerCallback, bayesian, refuse_loss_scaler
from lightning_sgmcmc.callbacks.schedule import is_warming_up
from lightning_sgmcmc.chains.callback import ChainSizes, Place, RunCost
from lightning_sgmcmc.chains.chains import Chains, chains_of
from lightning_sgmcmc.chains.execution import undisturbed_generators
from lightning_sgmcmc.chains.row_energies import weighed
from lightning_sgmcmc.checks import check_count, check_flag
from lightning_sgmcmc.evaluation.loader_average import HeldData, held_data
from lightning_sgmcmc.evaluation.passes import pass_over_data
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
        energy: whether energies are corrected.
        gradients: whether gradients at θ_q are computed.

    Raises:
        ValueError: for an argument out of range; at setup, for gradients under a loss scaler.
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
        self._restored: dict[str, Any] = {}
        self._chains: Chains | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self.needs_gradients:
            refuse_loss_scaler(trainer, f"{type(self).__name__} computes with gradients")
            chains_of(pl_module).claims.claim("snapshot gradients", self, self._batch_is_complete)
        if stage == "fit" and self.energy:
            chains_of(pl_module).claims.claim("energy correction", self, self._correction_of)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._module = bayesian(pl_module, self)
        self._chains, self._layout = self._module.chains, self._module.chains.layout
        if self._restored:
            self.restore(self._restored)

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore from `state_dict()`, when a fit begins."""
        if saved["snapshot"] is not None:
            self._snapshot = Snapshot(self.chains, self.needs_gradients)
            self._snapshot.load_state_dict(saved["snapshot"])
        self._period = saved["period"]
        self._num_data = saved.get("num_data", self.chains.observed.num_data)
        self._held = held_data(self._module.trainer)  # data that change during a run are part of the checkpoint
        if saved["correction"] is not None:
            correction = self._layout.own_unreduced(saved["correction"]).reshape(-1)
            self._correction = correction.to(exact_device(self._module.device))
        self._restored = {}

    @property
    def chains(self) -> Chains:
        """The chains of the running fit."""
        assert self._chains is not None, "chains exist only during a fit"
        return self._chains

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
        module = self._module
        if self._snapshot is None:
            self._snapshot = Snapshot(self.chains, self.needs_gradients)
        self._snapshot.take()
        total = torch.zeros_like(self._snapshot.log_likelihood)
        with undisturbed_generators(module):
            reason, sampler = type(self).__name__, module.sampler
            for batch in pass_over_data(trainer, module.chains, sampler, reason, "snapshot", self.shuffles_pass):
                each = self._at_snapshot(trainer, self._snapshot, batch)
                total += exact(each.detach()).sum(1)
                self.process_batch(each)
        ranks = self._layout.ranks_per_chain
        self._snapshot.log_likelihood.copy_(self._layout.mean_over_data(total) * ranks)
        self.end_pass()
        if self.needs_gradients:
            self.chains.counters.gradient_evaluations += self.chains.observed.num_data

    @staticmethod
    def _at_snapshot(trainer: pl.Trainer, snapshot: Snapshot, batch: Any) -> Tensor:
        with trainer.strategy.precision_plugin.val_step_context():
            return snapshot.of_batch(batch)

    def memory(self, sizes: ChainSizes) -> int:
        return sizes.tensors

    def gradients(self, cost: RunCost) -> int | None:
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
        if since < 0 or is_warming_up(trainer, self._module, batch_idx) or self.is_idle():
            return
        position = batch_idx % trainer.accumulate_grad_batches
        present = since // self.every_n_epochs, self.chains.observed.num_data
        if position == 0 and (present != (self._period, self._num_data) or (batch_idx == 0 and self._is_old(trainer))):
            self._refresh(trainer)
            self._period, self._num_data = present
            self._held = held_data(trainer)
        if self._snapshot is None:
            return
        each = self._at_snapshot(trainer, self._snapshot, batch)
        weights = self.chains.weights
        factor = None if weights is None else weights.factor(batch_idx, self.chains.accumulation.candidates)
        if self.needs_gradients:
            size = each.shape[1]
            self._snapshot.add_gradients(each, size if factor is None else 1 / factor)
            self.chains.counters.gradient_evaluations += size * self._layout.ranks_per_chain
        if self.energy:
            self._correct_energy(self._snapshot, each.detach(), position, factor)

    def _is_old(self, trainer: pl.Trainer) -> bool:
        """Return whether the snapshot is of data that were replaced since, by others of the same number."""
        return self._held is not None and not self._held.is_same(held_data(trainer))

    def _correct_energy(self, snapshot: Snapshot, each: Tensor, position: int, factor: float | None) -> None:
        observed = self.chains.observed
        observed.reference_log_likelihood = each
        correction = self._term(snapshot, each, factor)
        if position > 0 and self._correction is not None:
            correction = self._correction + (correction - self._correction) / (position + 1)
        self._correction = observed.correction = correction

    def _term(self, snapshot: Snapshot, each: Tensor, factor: float | None) -> Tensor:
        """Return what is added to the energies of a batch, shape (C,), from its log likelihoods at the snapshot."""
        return self.chains.observed.num_data * weighed(exact(each), factor) - snapshot.log_likelihood

    def _correction_of(self, batch: Any, factor: float | None) -> Tensor:
        """Return what is added to the energies of any batch, shape (C,), with the factor of its log-likelihoods."""
        snapshot = self._snapshot
        if snapshot is None:
            return torch.zeros(self._module.num_chains, dtype=torch.float64, device=exact_device(self._module.device))
        return self._term(snapshot, self._at_snapshot(self._module.trainer, snapshot, batch).detach(), factor)

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

    def release(self) -> None:
        """Drop the run, so that the module can be copied and pickled."""
        if self._chains is not None:
            self._chains.claims.release(self)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.release()  # the snapshot may still be saved

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or self._snapshot is None:
            return
        if not self._layout.is_spread:  # the state can be saved after the fit as well
            self._restored = self.state_dict()
        self._snapshot = None  # it holds the module

    def state_dict(self) -> dict[str, Any]:
        if self._restored:
            return self._restored
        snapshot, correction = self._snapshot, None
        if self._correction is not None and self.chains.accumulation.accumulating:
            own = self._correction if self._module.num_chains > 1 else self._correction[0]
            correction = self._layout.gather_unreduced(own).cpu()
        return {
            "snapshot": snapshot.state_dict() if snapshot is not None else None,
            "period": self._period,
            "num_data": self._num_data,
            "correction": correction,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict
