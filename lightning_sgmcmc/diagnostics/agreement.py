"""How close class probabilities are to those of a reference predictive, such as one by HMC."""

from torch import Tensor

from lightning_sgmcmc.tensors import widest


def agreement(probabilities: Tensor, reference: Tensor) -> Tensor:
    """Return the share of data for which both predict the same class; 1 is best.

    Args:
        probabilities: shape (n, K).
        reference: shape (n, K), rows in the same order.

    Source: Izmailov et al. 2021 (What are Bayesian neural network posteriors really like?), section 4.
    """
    _check(probabilities, reference)
    return (probabilities.argmax(-1) == reference.argmax(-1)).float().mean()


def total_variation(probabilities: Tensor, reference: Tensor) -> Tensor:
    """Return the mean over data of ½·Σ_k |p_k - q_k|, in [0, 1]; 0 is best.

    Args:
        probabilities: shape (n, K).
        reference: shape (n, K), rows in the same order.

    Source: Izmailov et al. 2021, section 4.
    """
    _check(probabilities, reference)
    return (widest(probabilities) - widest(reference)).abs().sum(-1).mean().float() / 2


def _check(probabilities: Tensor, reference: Tensor) -> None:
    if probabilities.shape != reference.shape:
        raise ValueError(
            f"the reference has the shape {tuple(reference.shape)} and the predictions {tuple(probabilities.shape)}: "
            "both need a row for each datum, in the same order, and the same classes"
        )
