"""Friction that takes out what mini-batch noise puts in: the VR of EWSG-VR."""

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, get_args

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from torch import Tensor

from lightning_sgmcmc.callbacks.base import name_after
from lightning_sgmcmc.callbacks.control_variates import ControlVariates
from lightning_sgmcmc.callbacks.schedule import Schedule
from lightning_sgmcmc.callbacks.snapshot import SnapshotCallback
from lightning_sgmcmc.chains.layout import layout_of
from lightning_sgmcmc.checks import check_choice
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.run.loggers import is_logged, log_cost, log_scalars
from lightning_sgmcmc.samplers import UnderdampedLangevin
from lightning_sgmcmc.samplers.base import Control
from lightning_sgmcmc.subsampling.moments import GradientMoments, advance_moments_
from lightning_sgmcmc.subsampling.snapshot import Snapshot, rows_of

FrictionForm: TypeAlias = Literal["diagonal", "matrix"]

LARGEST_MATRIX = 500
"""Parameters of one chain; a step computes the eigenvalues of a matrix of that size."""


class CovarianceFriction(SnapshotCallback):
    """Gives underdamped Langevin dynamics the friction that goes with its mini-batch noise.

        Γ = γ + h·κ²·C/(2τ),   C = cov[ñ_i],   ñ_i the gradient of the full potential U as batch i has it

    A step's batch adds noise of covariance h²·C to the momentum, over the 2γτh of the sampler, and γ alone would leave
    the chain too hot. C is calibrated on all training data, in random batches like those of the steps, at the beginning
    of every L-th epoch, at the place ω where the chain is then. Afterwards each batch seen takes its new gradient in
    place of that at ω in the two running moments, with a weight of one over the batches of an epoch. (As printed,
    Algorithm 2 calibrates in every L-th pass in place of sampling, so with L = 1, the paper's choice, it would never
    take a step; here each pass samples, and every L-th begins with a calibration. And with L > 2 the moments would take
    in a batch's change anew in each pass, and overshoot; here, from the second pass on, what was taken in before fades
    by the same weight.)

    Alone it corrects `UnderdampedLangevin` with uniform batches; with `EWSG` it is EWSG-VR, where every candidate tells
    of C. (To first order in h EWSG's own choice acts as a friction of h·C/(2τ) already, so that EWSG-VR counts the
    noise twice; where it could be measured, alone is nearer to the posterior: `recipes/ewsg_gaussian.py`.)

    Each chain has a friction of its own. While the temperature is 0 it rests. The price is the gradient of all data for
    each calibration, and the gradient of each batch at ω, so a step costs about twice as much. The gradient at ω is
    computed in evaluation mode (see `ControlVariates`), so noise of dropout is not seen by a calibration.

    Every `trainer.log_every_n_steps` it logs `sampler/extra_friction`, the mean of the diagonal of Γ-γ, per unit of
    time, and `sampler/gradient_evaluations` and `sampler/data_passes` as `ControlVariates` does.

    Args:
        start_epoch: first epoch, from 0, with this friction.
        every_n_epochs: L.
        form: "diagonal" takes the diagonal of C; "matrix" takes C itself, for few parameters (see Raises), at the price
            of its eigenvalues in each step. Either way eigenvalues that are estimated below 0, which would drive the
            chain, count as 0, and others at most so much that h·Γ = 1, where a step forgets its momentum.

    Raises:
        ValueError: for an argument out of range; at setup, for a loss scaler, data-parallel ranks, a
            `GradientAccumulationScheduler`, `ControlVariates`, or a schedule behind it; when training starts, for a
            sampler other than `UnderdampedLangevin`, several parameter groups, or a matrix of more than 500
            parameters.

    Source: Li et al. 2021 (EWSG), appendix F, Algorithm 2.
    """

    shuffles_pass = True

    def __init__(self, start_epoch: int = 0, every_n_epochs: int = 1, form: FrictionForm = "diagonal") -> None:
        check_choice("form", form, get_args(FrictionForm))
        self.form = form
        super().__init__(start_epoch, every_n_epochs, energy=False, gradients=True)

    def reset(self) -> None:
        super().reset()
        self._sampler: UnderdampedLangevin | None = None
        self._moments: GradientMoments | None = None
        """Of ñ less the first batch's at the calibration, so that large means cancel nothing away."""
        self._calibrated: GradientMoments | None = None
        """The moments at ω, where more than one pass follows."""
        self._seen = 0
        """Batches since the calibration."""
        self._origin = self._prior = torch.empty(0)
        """Of that first batch, (C, d): ñ without the prior's part, and that part."""
        self._covariance = torch.empty(0)
        """C as it was when this step began, shape (C, d) or (C, d, d)."""
        self._batches = 0
        """Batches of a calibration so far; in the end those of an epoch."""

    # -- before a run -------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        module: BayesianModule = pl_module  # type: ignore[assignment]
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if layout_of(trainer, module.num_chains).ranks_per_chain > 1:
            raise ValueError(
                "CovarianceFriction compares the gradients of batches, and here each batch is shared by data-parallel "
                "ranks: give every chain one rank, strategy='chains'"
            )
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
            raise ValueError(
                "CovarianceFriction is for batches of one size, and a GradientAccumulationScheduler changes it: give "
                "the trainer one accumulate_grad_batches"
            )
        name = name_after(trainer, self, (Schedule,))
        if name is not None:
            raise ValueError(
                f"{name} sets the temperature of a step, and without one CovarianceFriction rests: put "
                f"CovarianceFriction behind {name}"
            )
        if any(isinstance(callback, ControlVariates) for callback in callbacks):
            raise ValueError(
                "CovarianceFriction takes out the noise that batches put in, and ControlVariates let them put in less "
                "than it would reckon with: take one of them"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module: BayesianModule = pl_module  # type: ignore[assignment]
        sampler = module.sampler
        if not isinstance(sampler, UnderdampedLangevin):
            raise ValueError(
                f"CovarianceFriction needs a sampler with a friction matrix, which {type(sampler).__name__} has not: "
                "take sampler=UnderdampedLangevin"
            )
        if len(sampler.param_groups) > 1:
            raise ValueError("CovarianceFriction is for one friction γ, and the sampler has several parameter groups")
        self._check_size(sum(p.numel() for p in sampler.param_groups[0]["params"]) // module.num_chains)
        self._sampler = sampler
        super().on_train_start(trainer, pl_module)
        sampler.extra_drag = self._drag

    def _check_size(self, parameters: int) -> None:
        if self.form == "matrix" and parameters > LARGEST_MATRIX:
            raise ValueError(
                f"form='matrix' holds matrices of {parameters:,} by {parameters:,} numbers, one row for each "
                f"parameter, and {LARGEST_MATRIX:,} rows are the most: take form='diagonal'"
            )

    # -- calibration --------------------------------------------------------------------------------------------------

    def rests(self) -> bool:
        assert self._sampler is not None
        return not self._sampler.is_noisy(self._sampler.param_groups[0])

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._each = trainer.accumulate_grad_batches // self._state.candidates
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._moments is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            self._covariance = self._moments.covariance()

    def process_batch(self, log_likelihood: Tensor) -> None:
        snapshot = self._snapshot
        assert snapshot is not None
        snapshot.add_gradients(log_likelihood, log_likelihood.shape[1])
        if snapshot.count == self._each:
            self._take_in_batch(snapshot)

    def _take_in_batch(self, snapshot: Snapshot) -> None:
        """Add the gradient of a whole batch to the sums of the moments."""
        gradient = self._gradient_there(snapshot)
        if self._moments is None:
            self._moments = self._no_moments(gradient)
        if self._batches == 0:
            self._origin = gradient.clone()
            for moment in self._moments:
                moment.zero_()
        gradient -= self._origin
        advance_moments_(self._moments, gradient, torch.zeros_like(gradient), 1.0)
        self._batches += 1
        snapshot.clear()

    def _no_moments(self, gradient: Tensor) -> GradientMoments:
        shape = (*gradient.shape, gradient.shape[1]) if self.form == "matrix" else gradient.shape
        return GradientMoments(torch.zeros_like(gradient), gradient.new_zeros(shape))

    def _gradient_there(self, snapshot: Snapshot) -> Tensor:
        """Return N·g of the micro-batches in the snapshot's sums, without the prior's part, shape (C, d)."""
        return rows_of(snapshot.sums, self._module.num_chains).mul_(self._state.num_data / snapshot.count)

    def end_pass(self) -> None:
        snapshot = self._snapshot
        assert snapshot is not None
        if snapshot.count:
            self._take_in_batch(snapshot)
        assert self._moments is not None
        for moment in self._moments:
            moment.div_(self._batches)
        self._weight, self._batches, self._seen = 1 / self._batches, 0, 0
        if self.every_n_epochs > 1:
            self._calibrated = GradientMoments(*(moment.clone() for moment in self._moments))
        snapshot.add_gradients(snapshot.log_prior(), 1)
        self._prior = rows_of(snapshot.sums, self._module.num_chains)
        snapshot.clear()

    # -- a step -------------------------------------------------------------------------------------------------------

    def correct_gradient(self, snapshot: Snapshot) -> None:
        """Let the moments know of a batch."""
        if self._moments is None or self.rests():
            return
        chains, state = self._module.num_chains, self._state
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in snapshot.parameters.values()]
        present = rows_of(gradients, chains).mul_(state.num_data / state.batch_share)
        present.sub_(self._origin).sub_(self._prior)
        reference = self._gradient_there(snapshot).sub_(self._origin)
        finite = present.isfinite().all(1, keepdim=True)  # else the step may be left out
        if self._calibrated is not None and self._seen * self._weight > 1 - self._weight / 2:  # a whole pass
            for moment, calibrated in zip(self._moments, self._calibrated, strict=True):
                moment.lerp_(calibrated, self._weight)
        self._seen += 1
        advance_moments_(self._moments, torch.where(finite, present, reference), reference, self._weight)

    def _drag(self, momenta: list[Tensor]) -> list[Tensor] | None:
        """Return (Γ-γ)·r of momenta in the order of the sampler's parameters that have a gradient."""
        assert self._sampler is not None
        if self._moments is None or self._snapshot is None or self.rests():
            return None
        group = self._sampler.param_groups[0]
        held = {id(p): r for p, r in zip((p for p in group["params"] if p.grad is not None), momenta, strict=True)}
        own = list(self._snapshot.parameters.values())
        rows = rows_of([held[id(p)] if id(p) in held else torch.zeros_like(p) for p in own], self._module.num_chains)
        rows = self._extra(group, rows)
        pieces = rows.split([p.numel() // len(rows) for p in own], 1)
        drags = {id(p): piece.reshape(p.shape) for p, piece in zip(own, pieces, strict=True)}
        return [drags[identity] for identity in held]

    def _extra(self, group: dict[str, Any], rows: Tensor) -> Tensor:
        """Return (Γ-γ)·r of momenta, shape (C, d)."""
        if self.form == "diagonal":
            return self._bounded(group, self._covariance * self._factor(group)).mul_(rows)
        values, vectors = torch.linalg.eigh(self._covariance)
        extra = self._bounded(group, values * self._factor(group))
        turned = extra * torch.einsum("cji,cj->ci", vectors, rows)
        return torch.einsum("cij,cj->ci", vectors, turned)

    @staticmethod
    def _bounded(group: dict[str, Any], extra: Tensor) -> Tensor:
        """Return eigenvalues of Γ-γ, shape (C, d), so that 0 ≤ Γ-γ and h·Γ ≤ 1; changed in place."""
        step = _column(group["lr"])
        extra.clamp_(min=0)
        if isinstance(step, Tensor):
            return torch.minimum(extra, (1 / step - group["friction"]).clamp(min=0))
        return extra.clamp_(max=max(1 / step - group["friction"], 0.0)) if step > 0 else extra

    def _factor(self, group: dict[str, Any]) -> Control:
        """Return h·κ²/(2τ), a number or of shape (C, 1); 0 for chains at temperature 0."""
        step, temperature, multiplier = (_column(group[name]) for name in ("lr", "temperature", "gradient_multiplier"))
        factor = step * multiplier * multiplier / (2 * temperature)
        if isinstance(temperature, Tensor):
            factor = torch.where(temperature > 0, factor, 0.0)
        return factor

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._sampler is not None
        if not is_logged(trainer, self._module.chains, self._module.sampler.step_count):
            return
        log_cost(trainer, self._module.chains)
        if self._moments is not None and not self.rests():
            diagonal = self._covariance.diagonal(dim1=1, dim2=2) if self.form == "matrix" else self._covariance
            extra = (diagonal * self._factor(self._sampler.param_groups[0])).mean().item()
            log_scalars(trainer, {"sampler/extra_friction": extra}, trainer.global_step)

    # -- the end, checkpoints -----------------------------------------------------------------------------------------

    def release(self) -> None:
        super().release()
        if self._sampler is not None:
            self._sampler.extra_drag = None

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if stage == "fit":
            self._moments = self._calibrated = self._sampler = None

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._moments is None or "moments" in state:
            return state
        return state | {
            "form": self.form,
            "moments": self._stored(self._moments),
            "calibrated": self._stored(self._calibrated or ()),
            "tensors": self._stored((self._origin, self._prior, self._covariance)),
            "weight": self._weight,
            "seen": self._seen,
        }

    def _stored(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [self._layout.gather(tensor).cpu().clone() for tensor in tensors]

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: if it is of another form.
        """
        super().restore(saved)
        if "moments" not in saved:
            return
        if saved["form"] != self.form:
            raise ValueError(f"the checkpoint's friction is of form={saved['form']!r}: go on with the same form")
        self._moments = GradientMoments(*self._own(saved["moments"]))
        self._calibrated = GradientMoments(*self._own(saved["calibrated"])) if saved["calibrated"] else None
        self._origin, self._prior, self._covariance = self._own(saved["tensors"])
        self._weight, self._seen = saved["weight"], saved["seen"]

    def _own(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [self._layout.own(tensor).to(self._module.device, copy=True) for tensor in tensors]


def _column(control: Control) -> Control:
    """Return a control that is one number, or of shape (C, 1)."""
    return control.view(-1, 1) if isinstance(control, Tensor) else control
