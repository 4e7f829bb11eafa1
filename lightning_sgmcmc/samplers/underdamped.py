"""Underdamped Langevin dynamics by the Euler-Maruyama scheme."""

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_positive
from lightning_sgmcmc.samplers.base import Sampler
from lightning_sgmcmc.samplers.law import StepLaw
from lightning_sgmcmc.tensors import Control, square_root


class UnderdampedLangevin(Sampler):
    """Stochastic gradient underdamped Langevin dynamics (SGULD), Euler-Maruyama.

        θ ← θ + h·r
        r ← r - h·(κ·N·g + γ·r) + √(2·γ·τ·h)·ξ

    with the old r in the first line, and `lr` = h, the time step itself (not a step size of the mean potential: two
    steps move θ by h²·N·g, so h = √(lr/N) corresponds to the `lr` of the other samplers).

    Args:
        params: parameters or parameter groups.
        lr: time step h; `h·friction` must be below 2 for stability.
        friction: γ > 0, per unit of time.
        shared: `num_data`, `temperature`, `num_chains`, `seed`, `first_chain`, `noise_ahead`, as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`, or if h·γ ≥ 2.

    Source: Li et al. 2021 (EWSG), eq. (1) and (3).
    """

    momentum_buffer: ClassVar[str] = "momentum_buffer"

    extra_drag: "Callable[[list[Tensor]], list[Tensor] | None] | None" = None
    """Function from the momenta before a step to the extra drag (Γ-γ)·r of a friction matrix Γ, or to None for none.

    The injected noise stays that of γ, since the extra friction balances mini-batch noise of known covariance
    (EWSG-VR). The function is not part of the state."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        friction: float = 1.0,
        **shared: Any,
    ) -> None:
        check_positive("friction", friction)
        largest = float(torch.as_tensor(lr).max())
        if largest * friction >= 2:
            raise ValueError(f"lr·friction must be below 2 for a stable step, got {largest}·{friction}")
        super().__init__(params, lr, **shared)
        self._add_defaults(friction=friction)

    def _needs_num_data(self, temperature: Control) -> bool:
        return True

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        step, friction = group["lr"], group["friction"]
        momenta = self._buffers(params, self.momentum_buffer)
        self._add(params, momenta, step)
        drag = self.extra_drag(momenta) if self.extra_drag is not None else None
        self._scale(momenta, 1 - step * friction)
        if drag is not None:
            self._add(momenta, drag, -step)
        self._add(momenta, grads, -step * group["gradient_multiplier"] * self.num_data)
        if noise is not None:
            self._add(momenta, noise, square_root(2 * friction * group["temperature"] * step))

    def law(self, group: dict[str, Any]) -> StepLaw:
        step, friction, temperature = group["lr"], group["friction"], group["temperature"]
        assert self.num_data is not None  # see `_needs_num_data`
        factor = step * self.num_data**2 / (2 * friction * temperature) if self.is_noisy(group) else math.inf
        return StepLaw(
            damping=step * friction,
            force=step * group["gradient_multiplier"] * self.num_data,
            variance=2 * friction * temperature * step,
            thermal=temperature,
            gradient_noise_factor=factor,
        )
