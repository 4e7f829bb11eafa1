"""Which mini-batch a step takes, and what its noise does: exponentially weighted stochastic gradients (EWSG).

Everything here is of batches' gradients `g_j` of the mean potential Ũ/N, along any leading axes (chains). A step of a
sampler is read as `m' = (1-a)·m - b·g + s·ξ` (`lightning_sgmcmc.samplers.StepLaw`); without momentum m is the
place itself, with a = 0.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lightning_sgmcmc.samplers import StepLaw
from lightning_sgmcmc.tensors import Control, square_root

Guess: TypeAlias = Literal["unchanged", "stopped", "zero", "one"]
"""What stands for the momentum after the step, m', which eq. (4) asks for before it is known.

"unchanged" takes m' = m, so x = a·m/s (the paper's √h·γ·r/σ, its choice; 0 without momentum); "stopped" m' = 0, so
x = (a-1)·m/s; "zero" and "one" give x itself.
"""


def index_log_weights(gradients: Tensor, momentum: Tensor | None, law: StepLaw, guess: Guess) -> Tensor:
    """Return log p_j of every candidate batch, up to a constant: ½‖x + n̂a_j‖² - ½‖x‖² with n̂a_j = b·g_j/s.

    Args:
        gradients: g_j of each candidate, shape (…, J, d).
        momentum: m, shape (…, d); None without momentum.
        law: a, b and s² of the step, numbers or tensors of shape (…).
        guess: which x.

    Returns:
        shape (…, J), float64; zeros where s² is 0, since there is no law to match then.

    Source: Li et al. 2021 (EWSG), eq. (4) and (6), appendices D and E.
    """
    damping, force, variance = map(_along_candidates, (law.damping, law.force, law.variance))
    inverse: Control
    if isinstance(variance, Tensor):
        inverse = torch.where(variance > 0, 1 / variance, 0.0)
    else:
        inverse = 1 / variance if variance > 0 else 0.0
    weights = torch.linalg.vector_norm(gradients, dim=-1, dtype=torch.float64).square_() * (force * force * inverse / 2)
    if guess == "one":
        weights += gradients.sum(-1, dtype=torch.float64) * (force * square_root(variance) * inverse)
    elif guess != "zero" and momentum is not None:
        factor = damping if guess == "unchanged" else damping - 1
        weights += (gradients @ momentum[..., None])[..., 0] * (force * factor * inverse)
    return weights


def _along_candidates(control: Control) -> Control:
    return control.double()[..., None] if isinstance(control, Tensor) else control


def metropolis_index(log_weights: Tensor, log_uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Run a Metropolis chain through candidates, from the first: j replaces i with chance min{1, p_j/p_i}.

    Args:
        log_weights: log p of each candidate, shape (…, M+1); a candidate whose weight is NaN is not accepted.
        log_uniforms: logarithms of uniform numbers, shape (…, M).

    Returns:
        the index in the end and how many candidates were accepted, each of shape (…), int64.

    Source: Li et al. 2021 (EWSG), eq. (6) and Algorithm 1.
    """
    present, *candidates = log_weights.unbind(-1)
    index = accepted = torch.zeros_like(present, dtype=torch.int64)
    for candidate, (proposed, chance) in enumerate(zip(candidates, log_uniforms.unbind(-1), strict=True), 1):
        accepts = chance < proposed - present
        present = torch.where(accepts, proposed, present)
        index = torch.where(accepts, candidate, index)
        accepted = accepted + accepts
    return index, accepted
