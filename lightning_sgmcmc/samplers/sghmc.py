"""Stochastic gradient Hamiltonian Monte Carlo, in momentum form."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_within
from lightning_sgmcmc.samplers.base import Sampler
from lightning_sgmcmc.samplers.fused import coefficients, compiled, sghmc_step
from lightning_sgmcmc.samplers.law import StepLaw
from lightning_sgmcmc.tensors import Control, square_root


class SGHMC(Sampler):
    """Stochastic gradient Hamiltonian Monte Carlo, in momentum form.

        v ← (1-η)·v - lr·κ·g + √(2·(η-γ̂)·lr·τ/N)·ξ
        θ ← θ + v

    If τ = 0 throughout, it is `torch.optim.SGD(lr, momentum=1-η)`, bit for bit, with any schedule of lr. Torch stores
    `b = -v/lr` instead of v, so a change of lr rescales the velocity, and steps without noise do the same. With noise a
    restart of the step size would then throw the chain far away, so noisy steps store v itself.

    Args:
        params: parameters or parameter groups.
        lr: step size for the mean potential, `lr = ε·N` for a paper's ε.
        friction: η in (0, 1], one minus the momentum.
        noise_estimate: γ̂ in [0, η], the estimate of the gradient noise's own share of the friction.
        shared: `num_data`, `temperature`, `num_chains`, `seed`, `first_chain`, `noise_ahead`, as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`.

    Source: Chen et al. 2014, eq. (15); Zhang et al. 2020 (cSG-MCMC), section 2.
    """

    elementwise: ClassVar[bool] = True

    momentum_buffer: ClassVar[str] = "momentum_buffer"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        friction: float = 0.1,
        noise_estimate: float = 0.0,
        **shared: Any,
    ) -> None:
        check_within("friction", friction, "(0, 1]")
        if not 0 <= noise_estimate <= friction:
            raise ValueError(f"noise_estimate must be between 0 and friction={friction}, got {noise_estimate}")
        super().__init__(params, lr, **shared)
        self._add_defaults(friction=friction, noise_estimate=noise_estimate, holds_velocity=False, last_lr=lr)

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        lr, friction = group["lr"], group["friction"]
        momenta = self._momenta(group, params, as_velocity=noise is not None)
        if noise is not None and self._is_fused(params):
            assert self.num_data is not None
            controls = coefficients(group, params[0], self.num_data)
            options = friction, group["noise_estimate"]
            compiled(sghmc_step)(params[0], momenta[0], grads[0], noise[0], *controls, *options)
            group["last_lr"] = lr.clone() if isinstance(lr, Tensor) else lr
            return
        torch._foreach_mul_(momenta, 1 - friction)
        if noise is None:  # momenta are b = -v/lr, as in torch.optim.SGD
            self._add(momenta, grads, group["gradient_multiplier"])
            self._add(params, momenta, -lr)
        else:
            variance = self._noise_variance(group, friction - group["noise_estimate"])
            self._add(momenta, grads, -lr * group["gradient_multiplier"])
            self._add(momenta, noise, square_root(variance))
            torch._foreach_add_(params, momenta)
        group["last_lr"] = lr.clone() if isinstance(lr, Tensor) else lr

    def law(self, group: dict[str, Any]) -> StepLaw:
        friction, estimate = group["friction"], group["noise_estimate"]
        return StepLaw(
            damping=friction,
            force=group["lr"] * group["gradient_multiplier"],
            variance=self._noise_variance(group, friction - estimate),
            thermal=self._thermal_variance(group),
            gradient_noise_factor=self._noise_factor(group) / friction,
            gradient_noise_allowance=float(estimate / friction),
        )

    def momenta(self, group: dict[str, Any]) -> list[Tensor]:
        return self._momenta(group, group["params"], as_velocity=True)

    def rescale_momenta(self, group: dict[str, Any], factor: Control) -> None:
        if group["holds_velocity"]:  # otherwise the last step had no noise
            super().rescale_momenta(group, factor)

    def _momenta(self, group: dict[str, Any], params: list[Tensor], as_velocity: bool) -> list[Tensor]:
        """Return the momentum buffers as velocities v or as b = -v/lr, converting them if necessary."""
        momenta = self._buffers(params, self.momentum_buffer)
        if group["holds_velocity"] != as_velocity:
            if as_velocity:
                self._scale(momenta, -group["last_lr"])
            else:
                lr = group["lr"]
                inverse = lr.reciprocal() if isinstance(lr, Tensor) else (1 / lr if lr > 0 else 0.0)
                self._scale(momenta, -inverse)
            group["holds_velocity"] = as_velocity
        return momenta
