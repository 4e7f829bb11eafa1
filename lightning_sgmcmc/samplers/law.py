"""The law of one sampler step, used by the plan, diagnostics, EWSG and replica exchange; splittings."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_sgmcmc.tensors import Control, expm1

Move = Literal["alone", "after", "before", "baoab", "ubu"]
"""How the position moves: without a momentum, by the new one, by the old one, by halves of both (BAOAB), or by the
exact law of a free particle between both (UBU)."""


@dataclass(frozen=True)
class StepLaw:
    """How a step moves the momentum m of each coordinate, given the gradient g of the mean potential Ũ/N.

        m ← (1-a)·m - b·g + s·ξ,   ξ standard normal

    A rule without momentum has a = 0, and m is the parameter θ itself.

    Each rule computes both gradient-noise numbers itself, since a quotient of the other fields is 0/0 at τ = 0. Where
    τ > 0 they are what the formulas below give; a rule whose friction adapts has s² instead of 2·a·T in the first.

    Attributes:
        damping: a.
        force: b, which includes the gradient multiplier κ.
        variance: s².
        thermal: T, the variance of m at temperature τ for an infinitely short step; None without momentum.
        gradient_noise_factor: (b/κ)²/(2·a·T), or (b/κ)²/s² without momentum. It multiplies the variance of κ·g to give
            the heat from mini-batch noise over the heat that friction removes; infinite at τ = 0.
        gradient_noise_allowance: 1 - s²/(2·a·T), the mini-batch noise that the rule makes room for, over the heat that
            friction removes; infinite where friction adapts to any noise.
        move: how θ follows a momentum m, by `time_step` times it; None if the law leaves it open, so that no plan of
            the run can say how fast it relaxes. A rule without momentum needs none.
        time_step: the factor of m in the move of θ.
    """

    damping: Control
    force: Control
    variance: Control
    thermal: Control | None = None
    gradient_noise_factor: Control = math.inf
    gradient_noise_allowance: float = 0.0
    move: Move | None = None
    time_step: Control = 1.0

    @property
    def adapts(self) -> bool:
        """Whether the friction adapts to the mini-batch noise."""
        return self.gradient_noise_allowance == math.inf

    def momentum_variance(self, before: Control | None = None, steps: int = 1) -> Control | None:
        """Return the variance of a momentum coordinate after k steps without force; None without momentum.

            u + (1-a)²ᵏ·(v - u),   u = T/(1 - a/2)

        Where friction adapts it is T, which the thermostat holds.

        Args:
            before: v, the variance before the steps; None asks for the stationary variance u.
            steps: k.
        """
        if self.thermal is None or self.adapts:
            return self.thermal
        stationary = self.thermal / (1 - self.damping / 2)
        return stationary if before is None else stationary + (1 - self.damping) ** (2 * steps) * (before - stationary)


def heat_of_gradient_noise(force: Control, variance: Control) -> Control:
    """Return b²/s² of a law with κ = 1, infinite where s² = 0, and 0 where b = 0 too, as at a step size of 0."""
    if isinstance(force, Tensor) or isinstance(variance, Tensor):
        quotient = torch.as_tensor(force**2 / variance)
        return quotient.nan_to_num(nan=0.0, posinf=math.inf)
    if variance == 0:
        return math.inf if force else 0.0
    return force**2 / variance


# -- splitting ---------------------------------------------------------------------------------------------------------

# The numbers of a splitting step of kinetic Langevin dynamics with time step h and friction γ, precise for small h·γ.
#
# Every splitting here treats the Ornstein-Uhlenbeck part of the equation exactly. UBU's part U also has the position:
#
#     dθ = r·dt,   dr = -γ·r·dt + √(2·γ·τ)·dW
#
# Over a time h, with c = exp(-γ·h) and y = γ·h/2, its joint Gaussian law of (θ, r) is
#
#     r' = c·r + √(τ·(1-c²))·ξ
#     θ' = θ + tanh(y)/γ·(r + r') + 2/γ·√(τ·(y - tanh y))·ζ
#
# with independent standard normal ξ and ζ. Given the momenta at both ends, the position's displacement is a bridge's:
# `half_move` of their sum, and noise of the variance `bridge_variance`.


LEVELS = 8
"""Levels of the continued fraction, for a relative error below 1e-15 at y ≤ 1."""


def momentum_variance(step: Control, friction: Control, temperature: Control) -> Control:
    """Return τ·(1-c²), the variance of the noise that a time h adds to the momentum."""
    return -temperature * expm1(-2 * friction * step)


def half_move(step: Control, friction: Control) -> Control:
    """Return tanh(γ·h/2)/γ, which is h/2 without friction."""
    half = step * (friction / 2)
    return (half.tanh() if isinstance(half, Tensor) else math.tanh(half)) / friction


def bridge_variance(step: Control, friction: Control, temperature: Control) -> Control:
    """Return 4·τ·(y - tanh y)/γ², about γ·τ·h³/6, the variance of the displacement given the momenta at both ends."""
    return temperature * lag(step * (friction / 2)) * (4 / friction**2)


def lag(half: Control) -> Control:
    """Return y - tanh y for y ≥ 0, without cancellation.

    Up to y = 1 by Lambert's continued fraction, whose terms are all positive: y - tanh y = y·q/(1 + q) with
    q = y²/(3 + y²/(5 + y²/(7 + …))).
    """
    if not isinstance(half, Tensor):
        return half * _quotient(half * half) if half < 1 else half - math.tanh(half)
    near: Tensor = half.clamp(max=1.0)
    return torch.where(half < 1, near * _quotient(near * near), half - half.tanh())


def _quotient(square: Control) -> Control:
    """Return q/(1 + q) for a square of y."""
    q: Control = 0.0
    for odd in range(2 * LEVELS + 1, 1, -2):
        q = square / (odd + q)
    return q / (1 + q)
