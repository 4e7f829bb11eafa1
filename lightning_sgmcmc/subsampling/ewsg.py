"""The choice of a step's mini-batch: exponentially weighted stochastic gradients (EWSG).

The functions take batch gradients `g_j` of the mean potential Ũ/N, with any leading axes (chains). A sampler's step is
`m' = (1-a)·m - b·g + s·ξ` (`lightning_sgmcmc.samplers.StepLaw`); without momentum a = 0 and m is the parameter itself.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lightning_sgmcmc.samplers import StepLaw
from lightning_sgmcmc.tensors import Control, square_root, widest, widest_dtype

Guess: TypeAlias = Literal["unchanged", "stopped", "zero", "one"]
"""The guess of the momentum after the step, m', which eq. (4) needs before it is known.

"unchanged" is m' = m, so x = a·m/s (the paper's √h·γ·r/σ, and its choice; 0 without momentum). "stopped" is m' = 0, so
x = (a-1)·m/s. "zero" and "one" set x itself.
"""


def index_log_weights(gradients: Tensor, momentum: Tensor | None, law: StepLaw, guess: Guess) -> Tensor:
    """Return log p_j of each candidate batch up to a constant: ½‖x + b·g_j/s‖² - ½‖x‖².

    Args:
        gradients: g_j of each candidate, shape (…, J, d).
        momentum: m, shape (…, d); None without momentum.
        law: a, b and s² of the step, numbers or tensors of shape (…).
        guess: the choice of x, see `Guess`.

    Returns:
        shape (…, J), float64; zeros where s² = 0, since the step then has no law to match.

    Source: Li et al. 2021 (EWSG), eq. (4) and (6), appendices D and E.
    """
    damping, force, variance = map(_along_candidates, (law.damping, law.force, law.variance))
    inverse: Control
    if isinstance(variance, Tensor):
        inverse = torch.where(variance > 0, 1 / variance, 0.0)
    else:
        inverse = 1 / variance if variance > 0 else 0.0
    wide = widest_dtype(gradients.device)
    weights = torch.linalg.vector_norm(gradients, dim=-1, dtype=wide).square_() * (force * force * inverse / 2)
    if guess == "one":
        weights += gradients.sum(-1, dtype=wide) * (force * square_root(variance) * inverse)
    elif guess != "zero" and momentum is not None:
        factor = damping if guess == "unchanged" else damping - 1
        weights += (gradients @ momentum[..., None])[..., 0] * (force * factor * inverse)
    return weights


def _along_candidates(control: Control) -> Control:
    return widest(control)[..., None] if isinstance(control, Tensor) else control


def metropolis_index(log_weights: Tensor, log_uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Run a Metropolis chain over the candidates, from the first: j replaces i with probability min{1, p_j/p_i}.

    Args:
        log_weights: log p of each candidate, shape (…, M+1); a candidate with a NaN weight is rejected.
        log_uniforms: logarithms of uniform numbers, shape (…, M).

    Returns:
        the final index and the number of accepted candidates, each of shape (…), int64.

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
