"""Friction that cancels the heating by mini-batch noise: the variance reduction of EWSG-VR."""

from typing import Any, get_args

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from torch import Tensor

from lightning_sgmcmc.callbacks.base import Run
from lightning_sgmcmc.callbacks.control_variates import ControlVariates, SnapshotCallback
from lightning_sgmcmc.chains.callback import ChainSizes
from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.layout import layout_of
from lightning_sgmcmc.checks import check_choice
from lightning_sgmcmc.run.logging import is_logged, log_cost, log_scalars
from lightning_sgmcmc.run.trainer import callbacks_of
from lightning_sgmcmc.samplers import UnderdampedLangevin
from lightning_sgmcmc.subsampling.covariance_friction import (
    FrictionForm,
    MovingCovariance,
    friction_factor,
    friction_force,
)
from lightning_sgmcmc.subsampling.snapshot import Snapshot, rows_of

LARGEST_MATRIX = 500
"""Largest number of parameters per chain; each step computes the eigenvalues of a matrix of that size."""


class CovarianceFriction(SnapshotCallback):
    """Adds to underdamped Langevin dynamics the friction that balances its mini-batch noise.

        Γ = γ + h·κ²·C/(2τ),   C = cov[ñ_i],   ñ_i the estimate of ∇U from batch i

    Each step's batch adds noise with covariance h²·C to the momentum, beyond the sampler's 2γτh, so with γ alone the
    chain is too hot. At the beginning of every L-th epoch, C is calibrated at the chain's position ω, on all training
    data in random batches like those of the steps. Afterwards each batch replaces its gradient at ω by its new gradient
    in two running moments, with weight one over the batches of an epoch.

    This deviates from Algorithm 2 as printed. There every L-th pass calibrates instead of sampling, so with L = 1, the
    paper's choice, the chain never takes a step. Here each pass samples, and every L-th begins with a calibration.
    With L > 2 the printed moments would add a batch's change again in each pass and overshoot. Here, from the second
    pass, earlier changes decay with the same weight.

    Alone it corrects `UnderdampedLangevin` with uniform batches. With `EWSG` it is EWSG-VR, where every candidate
    updates C. To first order in h, EWSG's choice already acts as a friction of h·C/(2τ), so EWSG-VR counts the noise
    twice. In the experiments that measure this, the callback alone is closer to the posterior
    (`recipes/ewsg_gaussian.py`).

    Each chain has its own friction. While the temperature is 0, the callback is idle. Each calibration costs a
    full-data gradient, and each batch its gradient at ω, so a step costs about twice as much. Gradients at ω are
    computed in evaluation mode (see `ControlVariates`), so a calibration does not include the noise of dropout.

    Every `trainer.log_every_n_steps` it logs `sampler/extra_friction`, the mean of the diagonal of Γ-γ per unit of
    time, and `sampler/gradient_evaluations` and `sampler/data_passes` as `ControlVariates` does.

    Args:
        start_epoch: first epoch, from 0, with this friction.
        every_n_epochs: L.
        form: "diagonal" estimates the diagonal of C; "matrix" all of C, for few parameters (see Raises), at the cost of
            an eigendecomposition per step. Negative estimated eigenvalues would drive the chain and count as 0;
            others are limited so that h·Γ ≤ 1, since a step with h·Γ = 1 discards its momentum.

    Raises:
        ValueError: if an argument is out of range; at setup, for a loss scaler, data-parallel ranks, a
            `GradientAccumulationScheduler`, `ControlVariates`, or a schedule after this callback; when training starts,
            for a sampler other than `UnderdampedLangevin`, several parameter groups, or a matrix of more than 500
            parameters.

    Source: Li et al. 2021 (EWSG), appendix F, Algorithm 2.
    """

    shuffles_pass = True

    setting = "covariance_friction"

    def __init__(self, start_epoch: int = 0, every_n_epochs: int = 1, form: FrictionForm = "diagonal") -> None:
        check_choice("form", form, get_args(FrictionForm))
        self.form: FrictionForm = form
        super().__init__(start_epoch, every_n_epochs, energy=False, gradients=True)

    def reset(self) -> None:
        super().reset()
        self.covariance = MovingCovariance(self.form)

    # -- before a run -------------------------------------------------------------------------------------------------

    def check(self, trainer: pl.Trainer, module: ChainModel) -> None:
        super().check(trainer, module)
        callbacks = callbacks_of(trainer)
        if layout_of(trainer, module.num_chains).ranks_per_chain > 1:
            raise ValueError(
                "CovarianceFriction compares the gradients of batches, but data-parallel ranks share each batch here: "
                "use one rank per chain, strategy='chains'"
            )
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
            raise ValueError(
                "CovarianceFriction needs batches of one size, but a GradientAccumulationScheduler changes it: set "
                "the trainer's accumulate_grad_batches instead"
            )
        if any(isinstance(callback, ControlVariates) for callback in callbacks):
            raise ValueError(
                "CovarianceFriction cancels the noise of uniform batches, but ControlVariates reduces that noise, so "
                "the friction would be too large: remove one of them"
            )

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        sampler, chains = run.sampler, run.chains
        if not isinstance(sampler, UnderdampedLangevin):
            raise ValueError(
                f"CovarianceFriction needs a sampler with a friction matrix, but {type(sampler).__name__} has none: "
                "use sampler=UnderdampedLangevin"
            )
        if len(sampler.param_groups) > 1:
            raise ValueError(
                "CovarianceFriction supports one friction γ, but the sampler has several parameter groups: give the "
                "sampler one group"
            )
        self._check_size(sum(p.numel() for p in sampler.param_groups[0]["params"]) // chains.num_chains)
        super().begin(run, saved)
        if saved is not None:
            own, device = run.layout.own, run.module.device
            self.covariance.load_state_dict(saved, lambda rows: own(rows).to(device, copy=True))
        sampler.extra_drag = self._drag

    def _check_size(self, parameters: int) -> None:
        if self.form == "matrix" and parameters > LARGEST_MATRIX:
            raise ValueError(
                f"form='matrix' needs matrices of {parameters:,} by {parameters:,} numbers, one row for each "
                f"parameter, and the limit is {LARGEST_MATRIX:,} rows: use form='diagonal'"
            )

    def memory(self, sizes: ChainSizes) -> int:
        second = sizes.parameters * (sizes.numel if self.form == "matrix" else 1)
        # A batch's gradient at ω, the calibration's origin and the prior's part; two moments and the covariance.
        kept = 4 * sizes.parameters + 2 * second
        return super().memory(sizes) + kept + (sizes.parameters + second if self.every_n_epochs > 1 else 0)

    # -- calibration --------------------------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        return not self.run.sampler.is_noisy(self._group)

    @property
    def _group(self) -> dict[str, Any]:
        """The sampler's one parameter group."""
        group: dict[str, Any] = self.run.sampler.param_groups[0]
        return group

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.covariance.begin_step()

    def process_batch(self, log_likelihood: Tensor) -> None:
        snapshot, run = self._snapshot, self.run
        assert snapshot is not None
        snapshot.add_gradients(log_likelihood, log_likelihood.shape[1])
        # With EWSG a step has several batches.
        if snapshot.count == run.trainer.accumulate_grad_batches // run.chains.accumulation.candidates:
            self._add_batch(snapshot)

    def _add_batch(self, snapshot: Snapshot) -> None:
        """Add the gradient of a whole batch to the calibration."""
        self.covariance.add(self._gradient_there(snapshot))
        snapshot.clear()

    def _gradient_there(self, snapshot: Snapshot) -> Tensor:
        """Return N·g for the micro-batches in the snapshot's sums, without the prior's part, shape (C, d)."""
        chains = self.run.chains
        return rows_of(snapshot.sums, chains.num_chains).mul_(chains.observed.num_data / snapshot.count)

    def end_pass(self) -> None:
        snapshot = self._snapshot
        assert snapshot is not None
        if snapshot.count:
            self._add_batch(snapshot)
        snapshot.add_gradients(snapshot.log_prior(), 1)
        prior = rows_of(snapshot.sums, self.run.chains.num_chains)
        self.covariance.end_calibration(prior, several_epochs=self.every_n_epochs > 1)
        snapshot.clear()

    # -- a step -------------------------------------------------------------------------------------------------------

    def correct_gradient(self, snapshot: Snapshot) -> None:
        """Update the covariance with the gradient of a batch, which is unchanged."""
        run = self.run
        if self.is_idle():
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in snapshot.parameters.values()]
        scale = run.chains.observed.num_data / run.chains.accumulation.batch_share
        present = rows_of(gradients, run.chains.num_chains).mul_(scale)
        self.covariance.replace(present, self._gradient_there(snapshot))

    def _drag(self, momenta: list[Tensor]) -> list[Tensor] | None:
        """Return (Γ-γ)·r for momenta, in the order of the sampler's parameters that have a gradient."""
        run, snapshot = self.run, self._snapshot
        if snapshot is None or not self.covariance.is_known or self.is_idle():
            return None
        group = self._group
        held = {id(p): r for p, r in zip((p for p in group["params"] if p.grad is not None), momenta, strict=True)}
        own = list(snapshot.parameters.values())
        rows = rows_of([held[id(p)] if id(p) in held else torch.zeros_like(p) for p in own], run.chains.num_chains)
        rows = friction_force(self.covariance.current, rows, _factor(group), group["lr"], group["friction"])
        pieces = rows.split([p.numel() // len(rows) for p in own], 1)
        drags = {id(p): piece.reshape(p.shape) for p, piece in zip(own, pieces, strict=True)}
        return [drags[identity] for identity in held]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        run = self.run
        if not is_logged(trainer, run.chains, run.sampler.step_count):
            return
        log_cost(trainer, run.chains)
        if self.covariance.is_known and not self.is_idle():
            extra = (self.covariance.diagonal() * _factor(self._group)).mean().item()
            log_scalars(trainer, {"sampler/extra_friction": extra}, trainer.global_step)

    # -- the end, checkpoints -----------------------------------------------------------------------------------------

    def end(self) -> None:
        super().end()
        vars(self.run.sampler).pop("extra_drag", None)
        self.covariance = MovingCovariance(self.form)

    def state(self) -> dict[str, Any]:
        return super().state() | ({} if self._run is None else self.covariance.state_dict(self.run.layout.gather))


def _factor(group: dict[str, Any]) -> float | Tensor:
    """Return h·κ²/(2τ) for a parameter group."""
    return friction_factor(group["lr"], group["temperature"], group["gradient_multiplier"])
