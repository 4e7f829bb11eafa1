"""What a schedule reaches: relaxation times and configurational temperatures of each parameter tensor.

The controls of a run's steps are blocks of equal steps; in each, the sampler's law is a linear rule, whose moments
`recursion.py` computes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc.planning.recursion import LinearRule, draws_of_mean, stage_moments
from lightning_sgmcmc.samplers import Sampler

MOST_BLOCKS = 3000
"""Steps of a longer run are grouped: a block has the controls of its middle step."""
MOST_CHAINS = 4
"""Chains with controls of their own that are followed; of more, this many, evenly spread over their lr·τ."""


@dataclass(frozen=True)
class TensorFacts:
    """What a plan knows of a tensor.

    Attributes:
        numel: its elements in one chain.
        std: standard deviation of its prior; None if unknown.
        group: index of its parameter group.
        start: mean square of its elements' distance from the prior's centre at the start.
    """

    numel: int
    std: float | None
    group: int = 0
    start: float = 0.0


@dataclass(frozen=True)
class Reached:
    """What one tensor reaches, the mean over the followed chains.

    Attributes:
        burn_in: relaxation times of the longest stretch of steps with noise before the sampling stage, in the prior's
            directions.
        sampling: those in its sampling stage.
        whole: those from the first sampling step to the end, with and without noise.
        draws: independent draws that the mean over these steps is worth.
        configurational: expected configurational temperature over τ for each followed chain, shape (C,).
        from_start: the part of it that the start's way in contributes, which is not positive, shape (C,).
    """

    burn_in: float
    sampling: float
    whole: float
    draws: float
    configurational: Tensor
    from_start: Tensor


def reach(sampler: Sampler, blocks: "Blocks", tensors: Mapping[str, TensorFacts], num_data: int) -> dict[str, Reached]:
    """Return what each tensor with a known prior scale reaches; empty for a sampler without a linear law.

    Args:
        sampler: the run's.
        blocks: the controls of the run's steps.
        tensors: the tensors by name.
        num_data: N.
    """
    chains = _followed(blocks)
    known = {name: facts for name, facts in tensors.items() if facts.std is not None and facts.std > 0}
    classes = list(dict.fromkeys((facts.std or 0.0, facts.group) for facts in known.values()))
    if not classes:
        return {}
    numbers = []
    for chain in chains:
        found = _of_chain(sampler, blocks, chain, classes, num_data)
        if found is None:
            return {}
        numbers.append(found)
    temperatures, decays, parts, draws = (torch.stack([chain[place] for chain in numbers]) for place in range(4))
    place_of = {key: place for place, key in enumerate(classes)}
    result = {}
    for name, facts in known.items():
        place = place_of[facts.std or 0.0, facts.group]
        burn_in, sampling, whole = parts[:, :, place].mean(0).tolist()
        from_start = facts.start * decays[:, place]
        worth = float(draws[:, place].mean())
        result[name] = Reached(burn_in, sampling, whole, worth, temperatures[:, place] + from_start, from_start)
    return result


def _followed(blocks: "Blocks") -> list[int]:
    """Return one chain of each kind of controls."""
    columns = torch.cat([blocks.lrs, blocks.temperatures[:, None]], 1).flatten(0, 1).T
    kinds, place = columns.unique(dim=0, return_inverse=True)
    first = [int((place == kind).nonzero()[0]) for kind in range(len(kinds))]
    if len(first) <= MOST_CHAINS:
        return sorted(first)
    heat = blocks.lrs.sum((0, 1)) * blocks.temperatures.sum(0)
    ordered = sorted(first, key=heat.tolist().__getitem__)
    return [ordered[round(i * (len(ordered) - 1) / (MOST_CHAINS - 1))] for i in range(MOST_CHAINS)]


def _of_chain(
    sampler: Sampler, blocks: "Blocks", chain: int, classes: Sequence[tuple[float, int]], num_data: int
) -> tuple[Tensor, ...] | None:
    """Return for each class the temperature from a start at rest, that of a unit start, relaxation times (3, H), and
    the draws that the mean over the steps from the first sampling one is worth."""
    curvature = torch.tensor([1 / (std**2 * num_data) for std, _ in classes], dtype=torch.float64)
    groups = torch.tensor([group for _, group in classes])
    lrs = blocks.lrs[:, groups, chain]
    temperatures = blocks.temperatures[:, chain][:, None].expand_as(lrs)
    rule: LinearRule | None = None
    for index, options in enumerate(sampler.param_groups):
        own = linear_rule(sampler, options, lrs, temperatures)
        if own is None:
            return None
        mine = groups == index
        rule = own if rule is None else own.mapped(lambda one, other, mine=mine: torch.where(mine, one, other), rule)
    assert rule is not None
    weights = torch.where(temperatures > 0, curvature * num_data / temperatures.clamp_min(1e-300), 0.0)
    quiet = replace(rule, variance=rule.variance * 0)
    start = torch.cat([torch.zeros_like(curvature), torch.ones_like(curvature)])
    joined, twice = rule.mapped(lambda *pair: torch.cat(pair, 1), quiet), curvature.repeat(2)
    moments = stage_moments(joined, blocks.counts, blocks.is_sampling, twice, start, weights.repeat(1, 2))
    noise, decay = moments.anchored.chunk(2)
    times = rule.relaxation(curvature).clamp_min(0) * torch.tensor(blocks.counts)[:, None]
    first = blocks.is_sampling.index(True) if any(blocks.is_sampling) else len(blocks.counts)
    later = rule.mapped(lambda tensor: tensor[first:])
    draws = draws_of_mean(later, blocks.counts[first:], curvature)
    return noise, decay, _stretches(times, temperatures[:, 0] > 0, blocks.is_sampling), draws


def _stretches(times: Tensor, is_hot: Tensor, is_sampling: Sequence[bool]) -> Tensor:
    """Return the relaxation times of the longest stretch of noisy blocks, before and in sampling, and of all blocks
    from the first sampling one, shape (3, H)."""
    best, now = torch.zeros(2, times.shape[1]).double(), torch.zeros(2, times.shape[1]).double()
    for row, hot, sampling in zip(times, is_hot.tolist(), is_sampling, strict=True):
        if not hot:
            now = torch.zeros_like(now)
            continue
        now[int(sampling)] += row
        best = torch.where(now.sum(0) > best.sum(0), now, best)
    first = next((place for place, sampling in enumerate(is_sampling) if sampling), len(times))
    return torch.cat([best, times[first:].sum(0, keepdim=True)])


# -- the controls of a run -------------------------------------------------------------------------------------------


class ChainControls(NamedTuple):
    """The controls of one step.

    Attributes:
        lrs: step sizes of each parameter group and chain, shape (G, C).
        temperatures: temperature of each chain, shape (C,).
        is_sampling: whether the step belongs to a sampling stage.
    """

    lrs: Tensor
    temperatures: Tensor
    is_sampling: bool


@dataclass(frozen=True)
class Blocks:
    """B blocks of steps with constant controls.

    Attributes:
        counts: steps of each block.
        lrs: shape (B, G, C).
        temperatures: shape (B, C).
        is_sampling: whether each block belongs to a sampling stage.
    """

    counts: list[int]
    lrs: Tensor
    temperatures: Tensor
    is_sampling: list[bool]

    @property
    def steps(self) -> int:
        """K, the number of steps."""
        return sum(self.counts)


def blocks_of(steps: int, controls: Callable[[int], ChainControls], most: int = MOST_BLOCKS) -> Blocks:
    """Return the blocks of steps 1 to K; neighbours with equal controls are one block.

    Args:
        steps: K.
        controls: the controls of step k.
        most: largest number of steps at which the controls are read.
    """
    size = max(1, -(-steps // most))
    counts: list[int] = []
    found: list[ChainControls] = []
    for first in range(1, steps + 1, size):
        count = min(size, steps - first + 1)
        now = controls(first + count // 2)
        before = found[-1] if found else None
        if before is now or (
            before is not None and before.is_sampling == now.is_sampling and all(map(torch.equal, before[:2], now[:2]))
        ):
            counts[-1] += count
        else:
            counts.append(count)
            found.append(now)
    return Blocks(
        counts,
        torch.stack([block.lrs for block in found]).double(),
        torch.stack([block.temperatures for block in found]).double(),
        [block.is_sampling for block in found],
    )


# -- the law of its steps --------------------------------------------------------------------------------------------


def linear_rule(sampler: Sampler, group: Mapping[str, Any], lr: Tensor, temperature: Tensor) -> LinearRule | None:
    """Return the linear rule of a sampler with the controls of each block of steps.

    Args:
        sampler: the run's.
        group: a parameter group, for the options of the rule.
        lr: step sizes, shape (B, H).
        temperature: temperatures, shape (B, H).

    Returns:
        the rule; None for a sampler whose steps are not of that form, whose law does not say how its position moves,
        or which has a scale for each coordinate (pSGLD).
    """
    law = sampler.planned_law({**group, "lr": lr, "temperature": temperature, "gradient_multiplier": 1.0})
    if law is None or (law.thermal is not None and law.move is None):
        return None
    damping, force, variance, time = (
        torch.as_tensor(value, dtype=torch.float64).expand_as(lr)
        for value in (law.damping, law.force, law.variance, law.time_step)
    )
    variance = torch.where(temperature > 0, variance, 0.0)
    move = "alone" if law.thermal is None or law.move is None else law.move
    scale = torch.ones_like(lr)  # of the momentum before each block
    if sampler.cold_momentum_is_over_lr and len(lr) > 1:
        still = (temperature[1:] == 0) & (temperature[:-1] == 0) & (lr[:-1] > 0)
        scale[1:] = torch.where(still, lr[1:] / lr[:-1].clamp_min(1e-300), 1.0)
    return LinearRule(move, damping, force, variance, time, scale)
