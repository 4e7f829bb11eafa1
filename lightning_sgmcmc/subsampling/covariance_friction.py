"""The covariance of mini-batch gradients along a chain, and the friction that cancels its heating."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_sgmcmc.chains.callback import ChainSizes, Run
from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.layout import layout_of
from lightning_sgmcmc.chains.trainer import instances_of, is_logged, log_cost, log_scalars
from lightning_sgmcmc.checks import check_choice
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.samplers import UnderdampedLangevin
from lightning_sgmcmc.subsampling.control_variates import ControlVariates, Snapshot, SnapshotCallback, rows_of
from lightning_sgmcmc.tensors import Control, along_first_axis

GradientAccumulationScheduler = pl.callbacks.GradientAccumulationScheduler


class GradientMoments(NamedTuple):
    """Running moments of batch gradients ñ = N·g of the full potential.

    `first` is E[ñ], shape (…, d) with chains along the leading axes. `second` is E[ñ²], shape (…, d), or the matrix
    E[ññᵀ], shape (…, d, d).
    """

    first: Tensor
    second: Tensor

    @property
    def is_matrix(self) -> bool:
        """Whether the second moment is a matrix."""
        return self.second.dim() > self.first.dim()

    def covariance(self) -> Tensor:
        """Return the covariance in the second moment's shape; a diagonal is clamped at 0, a matrix is as estimated."""
        covariance = self.second - square_of(self.first, self.is_matrix)
        return covariance if self.is_matrix else covariance.clamp(min=0)


def square_of(gradient: Tensor, matrix: bool) -> Tensor:
    """Return ñ², shape (…, d), or ññᵀ, shape (…, d, d)."""
    return gradient[..., :, None] * gradient[..., None, :] if matrix else gradient.square()


def advance_moments_(moments: GradientMoments, present: Tensor, reference: Tensor, weight: float) -> None:
    """Replace a batch's gradient of the last calibration by its present one, in both moments.

        m₁ += w·(ñ_i(θ) - ñ_i(ω)),   m₂ += w·(ñ_i(θ)ñ_i(θ)ᵀ - ñ_i(ω)ñ_i(ω)ᵀ)

    Args:
        moments: updated in place.
        present: ñ_i at the present parameters θ, shape (…, d).
        reference: ñ_i at the parameters ω of the calibration, shape (…, d).
        weight: w, one over the number of batches.

    Source: Li et al. 2021 (EWSG), Algorithm 2, lines 16 and 17.
    """
    moments.first.add_(present - reference, alpha=weight)
    matrix = moments.is_matrix
    moments.second.add_(square_of(present, matrix) - square_of(reference, matrix), alpha=weight)


def extra_friction(moments: GradientMoments, step: Control, temperature: Control) -> Tensor:
    """Return h·cov/(2τ), the friction that removes the heat of mini-batch noise, in the second moment's shape.

    A diagonal is clamped at 0; a matrix is as estimated, so it may have negative eigenvalues.

    Args:
        moments: the moments of the batch gradients.
        step: h, a number or one for each chain, shape (C,).
        temperature: τ > 0, likewise.

    Source: Li et al. 2021 (EWSG), appendix F: Γ = (σ²I + h·cov[n∇V_I])/(2T) with σ² = 2γT.
    """
    covariance = moments.covariance()
    factor = step / (2 * temperature)
    if isinstance(factor, Tensor) and factor.dim():
        factor = along_first_axis(factor, covariance.dim())
    return covariance * factor


FrictionForm: TypeAlias = Literal["diagonal", "matrix"]


class MovingCovariance:
    """The covariance C of mini-batch gradients ñ, or its diagonal, calibrated on a pass over all batches at a place ω.

    Afterwards each batch replaces its gradient at ω by its present one, with weight w = 1/batches of an epoch; see
    `CovarianceFriction`.
    """

    def __init__(self, form: FrictionForm) -> None:
        self.form = form
        self.current = torch.empty(0)
        """C at the beginning of the present step, shape (C, d) or (C, d, d)."""
        self._moments: GradientMoments | None = None
        """Of gradients minus the origin, so that large means cause no cancellation."""
        self._calibrated: GradientMoments | None = None
        """The moments at ω, if more than one epoch follows a calibration."""
        self._origin = self._prior = torch.empty(0)
        """Of the calibration's first batch, (C, d): ñ without the prior's part, and that part."""
        self._weight = 0.0
        self._batches = 0
        """Batches of the calibration in progress."""
        self._seen = 0
        """Batches since the calibration."""

    @property
    def is_known(self) -> bool:
        """Whether a calibration has begun."""
        return self._moments is not None

    # -- calibration --------------------------------------------------------------------------------------------------

    def add(self, gradient: Tensor) -> None:
        """Add a batch's gradient at ω, without the prior's part, shape (C, d); it is overwritten."""
        if self._moments is None:
            shape = (*gradient.shape, gradient.shape[1]) if self.form == "matrix" else gradient.shape
            self._moments = GradientMoments(torch.zeros_like(gradient), gradient.new_zeros(shape))
        if self._batches == 0:
            self._origin = gradient.clone()
            for moment in self._moments:
                moment.zero_()
        gradient -= self._origin
        advance_moments_(self._moments, gradient, torch.zeros_like(gradient), 1.0)
        self._batches += 1

    def end_calibration(self, prior: Tensor, several_epochs: bool) -> None:
        """Turn the sums of the calibration into moments; `prior` is the gradient of -log p(ω), shape (C, d)."""
        if self._moments is None:
            raise RuntimeError("a calibration ends before a batch was added")
        for moment in self._moments:
            moment.div_(self._batches)
        self._weight, self._batches, self._seen = 1 / self._batches, 0, 0
        if several_epochs:
            self._calibrated = GradientMoments(*(moment.clone() for moment in self._moments))
        self._prior = prior

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Set `current` to the present estimate."""
        if self._moments is not None:
            self.current = self._moments.covariance()

    def replace(self, present: Tensor, reference: Tensor) -> None:
        """Replace a batch's gradient at ω by its present one, with the prior's part, both of shape (C, d) and
        overwritten."""
        if self._moments is None:
            return
        present.sub_(self._origin).sub_(self._prior)
        reference.sub_(self._origin)
        finite = present.isfinite().all(1, keepdim=True)  # a chain's other step may be skipped
        if self._calibrated is not None and self._seen * self._weight > 1 - self._weight / 2:  # a whole epoch
            for moment, calibrated in zip(self._moments, self._calibrated, strict=True):
                moment.lerp_(calibrated, self._weight)
        self._seen += 1
        advance_moments_(self._moments, torch.where(finite, present, reference), reference, self._weight)

    def diagonal(self) -> Tensor:
        """Return the diagonal of `current`, shape (C, d)."""
        return self.current.diagonal(dim1=1, dim2=2) if self.form == "matrix" else self.current

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self, gather: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return the state of all chains, empty before a calibration."""
        if self._moments is None:
            return {}

        def stored(tensors: Iterable[Tensor]) -> list[Tensor]:
            return [gather(tensor).cpu().clone() for tensor in tensors]

        return {
            "form": self.form,
            "moments": stored(self._moments),
            "calibrated": stored(self._calibrated or ()),
            "tensors": stored((self._origin, self._prior, self.current)),
            "weight": self._weight,
            "seen": self._seen,
        }

    def load_state_dict(self, state: dict[str, Any], own: Callable[[Tensor], Tensor]) -> None:
        """Restore from `state_dict()`; `own` makes this process's rows, as new tensors, from those of all chains."""
        if "moments" not in state:
            return
        if state["form"] != self.form:
            raise ValueError(f"the checkpoint's friction has form={state['form']!r}: continue with the same form")
        self._moments = GradientMoments(*map(own, state["moments"]))
        self._calibrated = GradientMoments(*map(own, state["calibrated"])) if state["calibrated"] else None
        self._origin, self._prior, self.current = map(own, state["tensors"])
        self._weight, self._seen = state["weight"], state["seen"]


def friction_factor(group: Mapping[str, Any]) -> Control:
    """Return h·κ²/(2τ) of a parameter group, a number or of shape (C, 1); 0 for chains at temperature 0."""
    controls = ("lr", "temperature", "gradient_multiplier")
    step, temperature, multiplier = (_column(group[name]) for name in controls)
    factor = step * multiplier * multiplier / (2 * temperature)
    if isinstance(temperature, Tensor):
        factor = torch.where(temperature > 0, factor, 0.0)
    return factor


def friction_force(covariance: Tensor, momenta: Tensor, factor: Control, step: Control, friction: float) -> Tensor:
    """Return (Γ-γ)·r with Γ = γ + h·κ²·C/(2τ), shape (C, d), for C of shape (C, d, d) or its diagonal, shape (C, d).

    Eigenvalues of Γ-γ below 0 count as 0, since they would drive the chain. Larger ones are limited so that h·Γ ≤ 1: a
    step with h·Γ = 1 forgets the momentum. The factor is what `friction_factor` returned.
    """
    if covariance.dim() == 2:
        return _bounded_(covariance * factor, step, friction).mul_(momenta)
    values, vectors = torch.linalg.eigh(covariance)
    extra = _bounded_(values * factor, step, friction)
    turned = extra * torch.einsum("cji,cj->ci", vectors, momenta)
    return torch.einsum("cij,cj->ci", vectors, turned)


def _bounded_(extra: Tensor, step: Control, friction: float) -> Tensor:
    """Limit eigenvalues of Γ-γ, shape (C, d), to 0 ≤ Γ-γ and h·Γ ≤ 1, in place."""
    step = _column(step)
    extra.clamp_(min=0)
    if isinstance(step, Tensor):
        return torch.minimum(extra, (1 / step - friction).clamp(min=0))
    return extra.clamp_(max=max(1 / step - friction, 0.0)) if step > 0 else extra


def _column(control: Control) -> Control:
    """Return a control as a number or with shape (C, 1)."""
    return along_first_axis(control, 2) if isinstance(control, Tensor) else control


# -- callback ----------------------------------------------------------------------------------------------------------


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
        if layout_of(trainer, module.num_chains).ranks_per_chain > 1:
            raise ValueError(
                "CovarianceFriction compares the gradients of batches, but data-parallel ranks share each batch here: "
                "use one rank per chain, strategy='chains'"
            )
        if instances_of(trainer, GradientAccumulationScheduler):
            raise ValueError(
                "CovarianceFriction needs batches of one size, but a GradientAccumulationScheduler changes it: set "
                "the trainer's accumulate_grad_batches instead"
            )
        if instances_of(trainer, ControlVariates):
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
        parameters = sum(p.numel() for p in sampler.param_groups[0]["params"]) // chains.num_chains
        if self.form == "matrix" and parameters > LARGEST_MATRIX:
            raise ValueError(
                f"form='matrix' needs matrices of {parameters:,} by {parameters:,} numbers, one row for each "
                f"parameter, and the limit is {LARGEST_MATRIX:,} rows: use form='diagonal'"
            )
        super().begin(run, saved)
        if saved is not None:
            own, device = run.layout.own, run.module.device
            self.covariance.load_state_dict(saved, lambda rows: own(rows).to(device, copy=True))
        sampler.extra_drag = self._drag

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

    def process_batch(self, snapshot: Snapshot, log_likelihood: Tensor) -> None:
        run = self.run
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

    def end_pass(self, snapshot: Snapshot) -> None:
        if snapshot.count:
            self._add_batch(snapshot)
        snapshot.add_gradients(snapshot.log_prior(), 1)
        prior = rows_of(snapshot.sums, self.run.chains.num_chains)
        self.covariance.end_calibration(prior, several_epochs=self.every_n_epochs > 1)
        snapshot.clear()

    # -- a step -------------------------------------------------------------------------------------------------------

    def acts_in(self, step: int) -> bool:
        return True  # each batch is compared with the snapshot, and changes the friction

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
        rows = friction_force(self.covariance.current, rows, friction_factor(group), group["lr"], group["friction"])
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
            extra = (self.covariance.diagonal() * friction_factor(self._group)).mean().item()
            log_scalars(trainer, {"sampler/extra_friction": extra}, trainer.global_step)

    # -- the end, checkpoints -----------------------------------------------------------------------------------------

    def end(self) -> None:
        super().end()
        vars(self.run.sampler).pop("extra_drag", None)
        self.covariance = MovingCovariance(self.form)

    def state(self) -> dict[str, Any]:
        return super().state() | ({} if self._run is None else self.covariance.state_dict(self.run.layout.gather))
