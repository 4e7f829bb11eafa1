"""Mini-batch gradients with less noise: exponentially weighted choices, snapshots, gradient moments."""

from lightning_sgmcmc.subsampling.covariance_friction import (
    GradientMoments,
    advance_moments_,
    extra_friction,
    square_of,
)
from lightning_sgmcmc.subsampling.ewsg import Guess, index_log_weights, metropolis_index

__all__ = [
    "GradientMoments",
    "Guess",
    "advance_moments_",
    "extra_friction",
    "index_log_weights",
    "metropolis_index",
    "square_of",
]
