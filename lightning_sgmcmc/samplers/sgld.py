"""Stochastic gradient Langevin dynamics."""

from typing import Any, ClassVar

from torch import Tensor

from lightning_sgmcmc.samplers.base import Sampler
from lightning_sgmcmc.samplers.fused import coefficients, compiled, sgld_step
from lightning_sgmcmc.samplers.law import StepLaw
from lightning_sgmcmc.tensors import square_root


class SGLD(Sampler):
    """Stochastic gradient Langevin dynamics.

        θ ← θ - lr·κ·g + √(2·lr·τ/N)·ξ

    with g the gradient of the mean potential Ũ/N and ξ standard normal. Its stationary law is exp(-U/τ) up to a bias of
    order lr. At τ = 0 it is `torch.optim.SGD(lr)`, bit for bit.

    Args:
        params: parameters or parameter groups.
        lr: step size for the mean potential, `lr = ε·N` for a paper's ε.

    `num_data`, `temperature`, `num_chains`, `seed`, `first_chain` and `noise_ahead` are as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`.

    Source: Welling & Teh 2011, eq. (4); Deng et al. 2020 (CSGLD), eq. (1) and (9).
    """

    elementwise: ClassVar[bool] = True

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        lr = group["lr"]
        if noise is not None and self._is_fused(params):
            assert self.num_data is not None
            compiled(sgld_step)(params[0], grads[0], noise[0], *coefficients(group, params[0], self.num_data))
            return
        self._add(params, grads, -lr * group["gradient_multiplier"])
        if noise is not None:
            self._add(params, noise, square_root(self._noise_variance(group)))

    def law(self, group: dict[str, Any]) -> StepLaw:
        return self.langevin_law(group)
