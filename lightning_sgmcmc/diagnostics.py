"""Diagnostics of weighted samples: pure functions of tensors."""

import torch
from torch import Tensor


def normalised_weights(log_weights: Tensor) -> Tensor:
    """Return w_j = exp(l_j)/Σ_i exp(l_i), computed in log space in float64.

    Args:
        log_weights: shape (S,), any constant offset; -inf is the weight 0.

    Raises:
        ValueError: if there are none, one is NaN or +inf, or all are -inf.
    """
    log_weights = log_weights.double()
    if log_weights.numel() == 0:
        raise ValueError("there are no samples to weigh")
    if bool((log_weights.isnan() | (log_weights == torch.inf)).any()):
        raise ValueError("a sample's log-weight is NaN or infinite")
    if bool((log_weights == -torch.inf).all()):
        raise ValueError("all samples have the weight 0")
    return log_weights.softmax(0)


def effective_sample_size(log_weights: Tensor) -> float:
    """Return (Σw)²/Σw² of importance weights, between 1 and the number of samples.

    Args:
        log_weights: shape (S,), any constant offset.
    """
    return 1 / float(normalised_weights(log_weights).square().sum())
