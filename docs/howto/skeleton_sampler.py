"""A sampler to copy: the Leimkuhler-Matthews integrator of overdamped Langevin dynamics."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc import Sampler
from lightning_sgmcmc.tensors import square_root


class LeimkuhlerMatthews(Sampler):
    """Overdamped Langevin dynamics with the mean of two successive noises.

        θ ← θ - lr·κ·g + √(2·lr·τ/N)·(ξ_k + ξ_{k-1})/2

    with g the gradient of the mean potential. On a Gaussian its stationary law has no error of the step size.

    Source: Leimkuhler & Matthews 2013 (Rational construction of stochastic numerical methods), eq. (1.4).
    """

    elementwise: ClassVar[bool] = True
    """Each coordinate is treated by itself, so all tensors may be joined to one: remove it if that is not so."""

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        # Controls are numbers, or tensors with one entry for each chain: `_add` takes both.
        self._add(params, grads, -group["lr"] * group["gradient_multiplier"])
        if noise is None:  # temperature 0
            return
        half = square_root(self._noise_variance(group)) / 2
        previous = self._buffers(params, "previous_noise")  # in the state: saved, loaded, moved, one for each chain
        self._add(params, noise, half)
        self._add(params, previous, half)
        torch._foreach_copy_(previous, noise)
