"""The law of one sampler step, used by diagnostics, EWSG and replica exchange."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sgmcmc.tensors import Control


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
    """

    damping: Control
    force: Control
    variance: Control
    thermal: Control | None = None
    gradient_noise_factor: Control = math.inf
    gradient_noise_allowance: float = 0.0

    @property
    def adapts(self) -> bool:
        """Whether the friction adapts to the mini-batch noise."""
        return self.gradient_noise_allowance == math.inf

    def momentum_variance(self, before: Control | None = None) -> Control | None:
        """Return the variance of a momentum coordinate after a step without force; None without momentum.

            (1-a)²·v + 2·a·T,   stationary at T/(1 - a/2)

        Where friction adapts it is T, which the thermostat holds.

        Args:
            before: v, the variance before the step; None asks for the stationary variance.
        """
        if self.thermal is None or self.adapts:
            return self.thermal
        if before is None:
            return self.thermal / (1 - self.damping / 2)
        return (1 - self.damping) ** 2 * before + 2 * self.damping * self.thermal


def heat_of_gradient_noise(force: Control, variance: Control) -> Control:
    """Return b²/s², infinite where s² = 0, and 0 where b = 0 too, as at a step size of 0.

    Args:
        force: b of a law with κ = 1.
        variance: s².
    """
    if isinstance(force, Tensor) or isinstance(variance, Tensor):
        quotient = torch.as_tensor(force**2 / variance)
        return quotient.nan_to_num(nan=0.0, posinf=math.inf)
    if variance == 0:
        return math.inf if force else 0.0
    return force**2 / variance
