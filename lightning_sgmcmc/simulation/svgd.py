"""Stein variational gradient descent: interacting particles that move towards a density, without noise.

A particle follows the others' gradients, averaged by a kernel, and is pushed away from them:

    x_i += lr·φ(x_i),   φ(x) = n⁻¹·Σ_j [k(x_j, x)·∇log p(x_j) + ∇_{x_j} k(x_j, x)],   k(x, y) = exp(-‖x-y‖²/h)

with h = median of the squared distances over log n, so that Σ_j k(x_j, x) is about 1 for each x. A step costs n²
kernel evaluations. Leading axes hold independent sets of particles.

Source: Liu & Wang 2016 (Stein variational gradient descent), eq. (8), Algorithm 1 and section 5.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor


def median_bandwidth(particles: Tensor) -> Tensor:
    """Return h of the median heuristic, (…), for n ≥ 2 particles (…, n, d): the median squared distance over log n."""
    count = particles.shape[-2]
    first, second = torch.triu_indices(count, count, 1, device=particles.device)
    return _squares(particles)[..., first, second].median(-1).values / math.log(count)


def stein_direction(particles: Tensor, gradients: Tensor) -> Tensor:
    """Return φ at each particle; particles, gradients of the energy U = -log p and φ have shape (…, n, d)."""
    count = particles.shape[-2]
    if count < 2:
        raise ValueError(f"particles must be at least two, since they repel each other, got {count}")
    scale = median_bandwidth(particles)[..., None, None]
    kernel = torch.exp(-_squares(particles) / scale)
    # ∇_{x_j} k(x_j, x_i) = (2/h)·(x_i - x_j)·k, summed over j without another tensor of all pairs.
    repulsion = 2 / scale * (particles * kernel.sum(-1, keepdim=True) - kernel @ particles)
    return (repulsion - kernel @ gradients) / count


def descend(
    gradient: Callable[[Tensor], Tensor],
    particles: Tensor,
    lr: float,
    num_steps: int,
    note: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Return the particles after `num_steps` steps.

    Args:
        gradient: ∇U at positions (…, n, d).
        particles: initial positions, shape (…, n, d); not changed.
        lr: step size.
        num_steps: number of steps.
        note: called with the step k = 1, 2, … and the particles after it.

    Raises:
        ValueError: for a negative lr, or a final particle that is not finite.
    """
    if not 0 <= lr < math.inf:
        raise ValueError(f"lr must be finite and not negative, got {lr}")
    for step in range(1, num_steps + 1):
        particles = particles + lr * stein_direction(particles, gradient(particles))
        if note is not None:
            note(step, particles)
    if not bool(particles.isfinite().all()):
        raise ValueError(f"a particle diverged to infinity within {num_steps} steps: use a smaller lr")
    return particles


def _squares(particles: Tensor) -> Tensor:
    """Return all squared distances, shape (…, n, n)."""
    columns = (particles[..., i] for i in range(particles.shape[-1]))
    return functools.reduce(torch.add, ((column[..., :, None] - column[..., None, :]).square() for column in columns))
