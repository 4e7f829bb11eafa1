"""Underdamped Langevin dynamics, by the Euler-Maruyama scheme or by the BAOAB splitting."""

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_choice, check_positive
from lightning_sgmcmc.samplers.base import Sampler
from lightning_sgmcmc.samplers.law import StepLaw
from lightning_sgmcmc.tensors import Control, exp, expm1, square_root

Integrator: TypeAlias = Literal["euler", "baoab"]


class UnderdampedLangevin(Sampler):
    """Stochastic gradient underdamped Langevin dynamics (SGULD), with one gradient g per step.

        "euler"                                                "baoab"
        θ ← θ + h·r                                            r ← r - h·κ·N·g
        r ← r - h·(κ·N·g + γ·r) + √(2·γ·τ·h)·ξ                 θ ← θ + h/2·r
                                                               r ← c·r + √(τ·(1-c²))·ξ,   c = exp(-γ·h)
                                                               θ ← θ + h/2·r

    with the old r in Euler's first line, and `lr` = h, the time step itself (not a step size of the mean potential: two
    steps move θ by h²·N·g, so h = √(lr/N) corresponds to the `lr` of the other samplers).

    Choose "baoab" to sample: with the full gradient its positions have an error of order h², none on a Gaussian, and
    it is stable while h·ω < 2 at the largest frequency ω of the potential, whatever γ. Euler's error is of order h.
    Choose "euler", the papers' scheme, to reproduce them. Mini-batch noise heats both alike.

    A step of "baoab" merges the last half-kick of a step with the first of the next one, which has the same gradient.
    So θ after a step is BAOAB's position, and r is its momentum before the last half-kick; on a Gaussian, r has
    variance τ. If h changes, the merged kick has the h of the later step.

    Args:
        params: parameters or parameter groups.
        lr: time step h; with "euler", `h·friction` must be below 2 for stability.
        friction: γ > 0, per unit of time.
        integrator: "euler" or "baoab".
        shared: `num_data`, `temperature`, `num_chains`, `seed`, `first_chain`, `noise_ahead`, as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`, or if h·γ ≥ 2 with "euler".

    Source: Li et al. 2021 (EWSG), eq. (1) and (3); Leimkuhler & Matthews 2013 (Rational construction of stochastic
    numerical methods), BAOAB.
    """

    elementwise: ClassVar[bool] = True

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
        integrator: Integrator = "euler",
        **shared: Any,
    ) -> None:
        check_positive("friction", friction)
        check_choice("integrator", integrator, get_args(Integrator))
        largest = float(torch.as_tensor(lr).max())
        if integrator == "euler" and largest * friction >= 2:
            raise ValueError(
                f"lr·friction must be below 2 for a stable step, got {largest}·{friction}: use smaller values, or "
                "integrator='baoab'"
            )
        super().__init__(params, lr, **shared)
        self._add_defaults(friction=friction, integrator=integrator)

    def _needs_num_data(self, temperature: Control) -> bool:
        return True

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        step, friction, splits = group["lr"], group["friction"], self._splits(group)
        momenta = self._buffers(params, self.momentum_buffer)
        drag = self.extra_drag(momenta) if self.extra_drag is not None else None
        if splits:
            self._kick(group, momenta, grads, drag)
            self._add(params, momenta, step / 2)
            self._scale(momenta, exp(-friction * step))
        else:
            self._add(params, momenta, step)
            self._scale(momenta, 1 - step * friction)
            self._kick(group, momenta, grads, drag)
        if noise is not None:
            self._add(momenta, noise, square_root(self._injected_variance(group)))
        if splits:
            self._add(params, momenta, step / 2)

    def _updates_rows(self) -> bool:
        return self.extra_drag is None and super()._updates_rows()  # a drag is a function of the tensors

    def _kick(
        self, group: dict[str, Any], momenta: list[Tensor], grads: list[Tensor], drag: list[Tensor] | None
    ) -> None:
        """Apply the force of the gradient and the extra drag for a time step."""
        step = group["lr"]
        if drag is not None:
            self._add(momenta, drag, -step)
        self._add(momenta, grads, -step * group["gradient_multiplier"] * self.num_data)

    @staticmethod
    def _splits(group: dict[str, Any]) -> bool:
        return group.get("integrator", "euler") == "baoab"  # version 0.1.0 saved no integrator

    def _injected_variance(self, group: dict[str, Any]) -> Control:
        """Return the variance of a step's noise in r."""
        step, friction, temperature = group["lr"], group["friction"], group["temperature"]
        if self._splits(group):
            return -temperature * expm1(-2 * friction * step)
        return 2 * friction * temperature * step

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore from `state_dict()`.

        Raises:
            ValueError: if the state is not a sampler's, belongs to another rule or integrator, or has another number of
                chains.
        """
        if state_dict.get("sampler", {}).get("rule") == type(self).__name__:
            for saved, own in zip(state_dict["param_groups"], self.param_groups, strict=False):
                names = [group.get("integrator", "euler") for group in (saved, own)]
                if names[0] != names[1]:
                    raise ValueError(
                        f"this state is an {type(self).__name__}'s with integrator={names[0]!r}, so one with "
                        f"integrator={names[1]!r} cannot continue from it"
                    )
        super().load_state_dict(state_dict)

    def law(self, group: dict[str, Any]) -> StepLaw:
        step, friction, temperature = group["lr"], group["friction"], group["temperature"]
        assert self.num_data is not None  # see `_needs_num_data`
        if self._splits(group):
            decay = exp(-friction * step)
            removed = temperature * expm1(2 * friction * step)  # over the square of `decay`
            return StepLaw(
                damping=-expm1(-friction * step),
                force=decay * step * group["gradient_multiplier"] * self.num_data,
                variance=self._injected_variance(group),
                thermal=temperature * (1 + decay) / 2,
                gradient_noise_factor=(step * self.num_data) ** 2 / removed if self.is_noisy(group) else math.inf,
            )
        factor = step * self.num_data**2 / (2 * friction * temperature) if self.is_noisy(group) else math.inf
        return StepLaw(
            damping=step * friction,
            force=step * group["gradient_multiplier"] * self.num_data,
            variance=self._injected_variance(group),
            thermal=temperature,
            gradient_noise_factor=factor,
        )
