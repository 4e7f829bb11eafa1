"""Running moments of mini-batch gradients, and the friction that cancels their noise."""

from typing import NamedTuple

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
