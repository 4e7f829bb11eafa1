"""The numbers of a splitting step of kinetic Langevin dynamics with time step h and friction γ, precise for small h·γ.

Every splitting here treats the Ornstein-Uhlenbeck part of the equation exactly. UBU's part U also has the position:

    dθ = r·dt,   dr = -γ·r·dt + √(2·γ·τ)·dW

Over a time h, with c = exp(-γ·h) and y = γ·h/2, its joint Gaussian law of (θ, r) is

    r' = c·r + √(τ·(1-c²))·ξ
    θ' = θ + tanh(y)/γ·(r + r') + 2/γ·√(τ·(y - tanh y))·ζ

with independent standard normal ξ and ζ. Given the momenta at both ends, the position's displacement is a bridge's:
`half_move` of their sum, and noise of the variance `bridge_variance`.
"""

import math

import torch
from torch import Tensor

from lightning_sgmcmc.tensors import Control, expm1

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
    """Return 4·τ·(y - tanh y)/γ², the variance of the position's displacement given the momenta at both ends.

    It is γ·τ·h³/6 for small h·γ.
    """
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
