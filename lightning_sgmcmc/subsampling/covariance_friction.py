"""The covariance of mini-batch gradients along a chain, and the friction that cancels its heating."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_sgmcmc.tensors import Control, along_first_axis


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


# -- covariance friction -----------------------------------------------------------------------------------------------


FrictionForm: TypeAlias = Literal["diagonal", "matrix"]


class MovingCovariance:
    """The covariance C of mini-batch gradients ñ, or its diagonal, calibrated on a pass over all batches at a place ω.

    Afterwards each batch of a step replaces its gradient at ω by its present one, with weight w = 1/batches of an
    epoch. From the second epoch after a calibration on, earlier replacements decay with the same weight.

    Source: Li et al. 2021 (EWSG), Algorithm 2.
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
        """Replace a batch's gradient at ω by its present one, both of shape (C, d) and overwritten, the present one
        with the prior's part. Chains whose gradient is not finite keep the one at ω, since their step may be
        skipped.
        """
        if self._moments is None:
            return
        present.sub_(self._origin).sub_(self._prior)
        reference.sub_(self._origin)
        finite = present.isfinite().all(1, keepdim=True)
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


def friction_factor(step: Control, temperature: Control, multiplier: Control) -> Control:
    """Return h·κ²/(2τ), a number or of shape (C, 1); 0 for chains at temperature 0."""
    step, temperature, multiplier = (_column(control) for control in (step, temperature, multiplier))
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
