"""The linear rule of a sampler, from the law that it states of its steps."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.planning.recursion import LinearRule, Move
from lightning_sgmcmc.samplers import MCLMC, SGHMC, SGNHT, Sampler, StepLaw, UnderdampedLangevin

MOVES: dict[str, Move] = {"euler": "before", "baoab": "baoab", "obabo": "after", "ubu": "ubu"}
"""By integrator of `UnderdampedLangevin`."""


def linear_rule(
    sampler: Sampler, group: Mapping[str, Any], lr: Tensor, temperature: Tensor, num_data: int
) -> LinearRule | None:
    """Return the linear rule of a sampler with the controls of each block of steps.

    SGNHT has the rule with its initial friction, from which mini-batch noise moves it away.

    Args:
        sampler: the run's.
        group: a parameter group, for the options of the rule.
        lr: step sizes, shape (B, H).
        temperature: temperatures, shape (B, H).
        num_data: N.

    Returns:
        the rule; None for a sampler whose steps are not of that form, or have a scale for each coordinate (pSGLD).
    """
    law = _law(sampler, {**group, "lr": lr, "temperature": temperature, "gradient_multiplier": 1.0}, num_data)
    if law is None:
        return None
    move, time_step = _move(sampler, group, law, lr)
    damping, force, variance, time = (
        torch.as_tensor(value, dtype=torch.float64).expand_as(lr)
        for value in (law.damping, law.force, law.variance, time_step)
    )
    variance = torch.where(temperature > 0, variance, 0.0)
    return LinearRule(move, damping, force, variance, time, _rescaling(sampler, lr, temperature))


def _law(sampler: Sampler, group: dict[str, Any], num_data: int) -> StepLaw | None:
    if isinstance(sampler, SGNHT):  # its own law reads the thermostat, and would make it
        friction, lr, temperature = group["friction"], group["lr"], group["temperature"]
        return StepLaw(friction, lr, 2 * friction * lr * temperature / num_data, lr * temperature / num_data)
    return sampler.plain_law(group)


def _move(sampler: Sampler, group: Mapping[str, Any], law: StepLaw, lr: Tensor) -> tuple[Move, Any]:
    if law.thermal is None:
        return "alone", 1.0
    if isinstance(sampler, UnderdampedLangevin):
        return MOVES[group.get("integrator", "euler")], lr
    return ("baoab", lr) if isinstance(sampler, MCLMC) else ("after", 1.0)


def _rescaling(sampler: Sampler, lr: Tensor, temperature: Tensor) -> Tensor:
    """Return the factor of the momentum before each block: SGHMC's steps without noise store it over lr."""
    scale = torch.ones_like(lr)
    if isinstance(sampler, SGHMC) and len(lr) > 1:
        still = (temperature[1:] == 0) & (temperature[:-1] == 0) & (lr[:-1] > 0)
        scale[1:] = torch.where(still, lr[1:] / lr[:-1].clamp_min(1e-300), 1.0)
    return scale
