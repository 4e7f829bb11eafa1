"""Underdamped (kinetic) Langevin dynamics, by the Euler-Maruyama scheme or by a splitting: BAOAB, OBABO or UBU."""

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_choice, check_positive
from lightning_sgmcmc.samplers.law import (
    Move,
    StepLaw,
    bridge_variance,
    half_move,
    heat_of_gradient_noise,
    momentum_variance,
)
from lightning_sgmcmc.samplers.sampler import Sampler
from lightning_sgmcmc.tensors import Control, exp, expm1, square_root

Integrator: TypeAlias = Literal["euler", "baoab", "obabo", "ubu"]

MOVES: dict[str, Move] = {"euler": "before", "baoab": "baoab", "obabo": "after", "ubu": "ubu"}


class UnderdampedLangevin(Sampler):
    """Stochastic gradient underdamped (kinetic) Langevin dynamics, with one gradient g per step.

        "euler"                                                "baoab"
        θ ← θ + h·r                                            r ← r - h·κ·N·g
        r ← r - h·(κ·N·g + γ·r) + √(2·γ·τ·h)·ξ                 θ ← θ + h/2·r
                                                               r ← c·r + √(τ·(1-c²))·ξ,   c = exp(-γ·h)
                                                               θ ← θ + h/2·r

        "obabo"                                                "ubu"
        r ← r - h/2·κ·N·g                                      r ← r - h·κ·N·g
        r ← c·r + √(τ·(1-c²))·ξ                                r' = c·r + √(τ·(1-c²))·ξ
        r ← r - h/2·κ·N·g                                      θ ← θ + tanh(y)/γ·(r + r') + 2/γ·√(τ·(y-tanh y))·ζ
        θ ← θ + h·r                                            r ← r',   y = γ·h/2

    with the old r in Euler's first line, and `lr` = h, the time step itself (not a step size of the mean potential: two
    steps move θ by h²·N·g, so h = √(lr/N) corresponds to the `lr` of the other samplers). The last three lines of "ubu"
    are the exact law of θ and r without a force, whose two independent normals ξ, ζ cost twice the noise.

    Choose a splitting to sample. With the full gradient its positions have an error of order h², and it is stable while
    h·ω < 2 at the largest frequency ω of the potential, whatever γ. On a Gaussian the variance of "baoab" is exact,
    that of "obabo" is 1/(1 - (h·ω)²/4) times the target's, that of "ubu" about 1 + (h·ω)²/12 for small h·γ. Euler's
    error is of order h: choose it to reproduce papers. Mini-batch noise heats all four alike, and the order of the data
    decides how much (`CyclicOrder`).

    A step merges the parts of two steps that have the same gradient: BAOAB's and OBABO's last half-kick and the first
    of the next step, UBU's two halves of U. So θ after a step is BAOAB's and OBABO's position, and UBU's in the middle
    of its step, where it takes its gradient. r is BAOAB's momentum before its last half-kick, OBABO's after its
    first, UBU's with θ. If h changes, what is merged has the h of the later step.

    Args:
        params: parameters or parameter groups.
        lr: time step h; with "euler", `h·friction` must be below 2 for stability.
        friction: γ > 0, per unit of time.
        integrator: "euler", "baoab", "obabo" or "ubu".
        shared: `num_data`, `temperature`, `num_chains`, `seed`, `first_chain`, `noise_ahead`, as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`, or if h·γ ≥ 2 with "euler".

    Source: Li et al. 2021 (EWSG), eq. (1) and (3); Leimkuhler & Matthews 2013 (Rational construction of stochastic
    numerical methods), BAOAB; Bussi & Parrinello 2007 (Accurate sampling using Langevin dynamics), OBABO; Sanz-Serna &
    Zygalakis 2021 (Wasserstein distance estimates for the distributions of numerical approximations to ergodic
    stochastic differential equations), UBU.

    Example::

        sampler = partial(UnderdampedLangevin, integrator="baoab", friction=10.0)
        module = BayesianModule(net, Categorical(), sampler=sampler, lr=2e-3)
    """

    elementwise: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = True

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
        self._noise.draws = self.draws

    def _needs_num_data(self, temperature: Control) -> bool:
        return True

    @property
    def draws(self) -> int:
        return 2 if any(self._integrator(group) == "ubu" for group in self.param_groups) else 1

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        step, friction, integrator = group["lr"], group["friction"], self._integrator(group)
        momenta = self._buffers(params, self.momentum_buffer)
        drag = self.extra_drag(momenta) if self.extra_drag is not None else None
        xi, zeta = (noise[: len(params)], noise[len(params) :]) if isinstance(noise, list) else (noise, None)
        if integrator == "euler":
            self._add(params, momenta, step)
            self._scale(momenta, 1 - step * friction)
            self._kick(group, momenta, grads, drag)
            if xi is not None:
                self._add(momenta, xi, square_root(self._injected_variance(group)))
            return
        if integrator == "obabo":
            self._kick(group, momenta, grads, drag, 0.5)
            self._relax(group, momenta, xi)
            self._kick(group, momenta, grads, drag, 0.5)
            self._add(params, momenta, step)
            return
        move = half_move(step, friction) if integrator == "ubu" else step / 2
        self._kick(group, momenta, grads, drag)
        self._add(params, momenta, move)
        self._relax(group, momenta, xi)
        self._add(params, momenta, move)
        if integrator == "ubu" and zeta is not None:
            self._add(params, zeta, square_root(bridge_variance(step, friction, group["temperature"])))

    def _updates_rows(self) -> bool:
        return self.extra_drag is None and super()._updates_rows()  # a drag is a function of the tensors

    def _kick(
        self,
        group: dict[str, Any],
        momenta: list[Tensor],
        grads: list[Tensor],
        drag: list[Tensor] | None,
        share: float = 1.0,
    ) -> None:
        """Apply the force of the gradient and the extra drag for a share of the time step."""
        step = share * group["lr"]
        if drag is not None:
            self._add(momenta, drag, -step)
        self._add(momenta, grads, -step * group["gradient_multiplier"] * self.num_data)

    def _relax(
        self, group: dict[str, Any], momenta: list[Tensor], noise: list[Tensor] | None, share: float = 1.0
    ) -> None:
        """Make the Ornstein-Uhlenbeck part of a share of the time step, in the momenta."""
        step, friction = share * group["lr"], group["friction"]
        self._scale(momenta, exp(-friction * step))
        if noise is not None:
            self._add(momenta, noise, square_root(momentum_variance(step, friction, group["temperature"])))

    @staticmethod
    def _integrator(group: dict[str, Any]) -> str:
        found: str = group["integrator"]
        return found

    def _injected_variance(self, group: dict[str, Any]) -> Control:
        """Return the variance of a step's noise in r."""
        step, friction, temperature = group["lr"], group["friction"], group["temperature"]
        if self._integrator(group) == "euler":
            return 2 * friction * temperature * step
        return momentum_variance(step, friction, temperature)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore from `state_dict()`.

        Raises:
            ValueError: if the state is not a sampler's, belongs to another rule or integrator, or has another number of
                chains.
        """
        if state_dict.get("sampler", {}).get("rule") == type(self).__name__:
            for saved, own in zip(state_dict["param_groups"], self.param_groups, strict=False):
                names = [group.get("integrator") for group in (saved, own)]
                if names[0] != names[1]:
                    raise ValueError(
                        f"this state is an {type(self).__name__}'s with integrator={names[0]!r}, so one with "
                        f"integrator={names[1]!r} cannot continue from it"
                    )
        super().load_state_dict(state_dict)

    def law(self, group: dict[str, Any]) -> StepLaw:
        step, friction, temperature = group["lr"], group["friction"], group["temperature"]
        assert self.num_data is not None  # see `_needs_num_data`
        force, variance = step * self.num_data, self._injected_variance(group)
        damping, thermal = step * friction, temperature
        if (integrator := self._integrator(group)) != "euler":
            decay, damping = exp(-friction * step), -expm1(-friction * step)
            force = force * ((1 + decay) / 2 if integrator == "obabo" else decay)
            thermal = temperature * (1 + decay) / 2
        return StepLaw(
            damping=damping,
            force=force * group["gradient_multiplier"],
            variance=variance,
            thermal=thermal,
            gradient_noise_factor=heat_of_gradient_noise(force, variance) if self.is_noisy(group) else math.inf,
            move=MOVES[integrator],
            time_step=step,
        )
