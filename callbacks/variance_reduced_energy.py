"""Energies with less mini-batch noise, for callbacks that look at energies."""

from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from lightning_sgmcmc.callbacks.base import SamplerCallback, bayesian
from lightning_sgmcmc.callbacks.full_data import full_log_likelihood, unnoticed
from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.seeding import derive_seed, reseed
from lightning_sgmcmc.snapshot import Snapshot


class VarianceReducedEnergy(SamplerCallback):
    """Takes the mini-batch's noise out of the energy by a control variate.

        Ũ_VR(θ) = Ũ(θ) - (N/n)·Σ_{i in batch} U_i(θ_q) + Σ_i U_i(θ_q),   U_i = -log p(y_i|x_i,θ)

    with θ_q a snapshot of the chain, taken at the beginning of every q-th epoch. It has the same mean as Ũ, and the
    less noise the nearer θ_q is. `ContourGradient` and `ReplicaExchange` look at this energy in place of Ũ; gradients
    stay as they are. Each chain has a snapshot of its own. The price is a pass over all data for each snapshot, and a
    forward pass of the snapshot at each step; both are made in evaluation mode, with the training data's augmentation.

    Args:
        start_epoch: first epoch, from 0, in which energies are corrected.
        every_n_epochs: q.

    Raises:
        ValueError: for an argument out of range.

    Source: Deng et al. 2022 (ICSGLD), appendix B.1; Deng et al. 2021 (variance-reduced replica exchange).
    """

    def __init__(self, start_epoch: int = 0, every_n_epochs: int = 2) -> None:
        check_count("start_epoch", start_epoch, least=0)
        check_count("every_n_epochs", every_n_epochs)
        self.start_epoch = start_epoch
        self.every_n_epochs = every_n_epochs
        self.reset()

    def reset(self) -> None:
        self._snapshot: Snapshot | None = None
        self._restored: dict[str, Any] | None = None
        self._correction: Tensor | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = bayesian(pl_module, self)
        if self._restored is not None:
            self._snapshot = Snapshot(module)
            self._snapshot.load_state_dict(self._restored)
            self._restored = None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        since = trainer.current_epoch - self.start_epoch
        if since >= 0 and since % self.every_n_epochs == 0:
            self._refresh(trainer, bayesian(pl_module, self))

    def _refresh(self, trainer: pl.Trainer, module: BayesianModule) -> None:
        """Take a snapshot of the chains, and its likelihood of all data."""
        snapshot = self._snapshot = Snapshot(module)
        for index, chain in enumerate(module.layout.chains):
            with unnoticed(trainer, module):
                stream = module.layout.stream(chain)
                reseed(derive_seed(module.sampler.seed, "snapshot", stream, trainer.current_epoch), module.device)
                snapshot.log_likelihood[index] = full_log_likelihood(
                    trainer, module, snapshot.state(index), "VarianceReducedEnergy", of_own_chain=True, augmented=True
                )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._snapshot is None:
            return
        module = bayesian(pl_module, self)
        with trainer.strategy.precision_plugin.val_step_context():
            each = self._snapshot.of_batch(batch)
        state = module.chain_state
        state.reference_log_likelihood = each
        correction = state.num_data * each.double().mean(1) - self._snapshot.log_likelihood
        position = batch_idx % trainer.accumulate_grad_batches
        if position > 0 and self._correction is not None:
            correction = self._correction + (correction - self._correction) / (position + 1)
        self._correction = state.energy_correction = correction

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._snapshot = None  # it holds the module

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._snapshot = None

    def state_dict(self) -> dict[str, Any]:
        return {"snapshot": self._snapshot.state_dict() if self._snapshot is not None else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict["snapshot"]
