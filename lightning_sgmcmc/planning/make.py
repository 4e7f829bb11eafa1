"""Make a plan from a run's facts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lightning_sgmcmc.plain import finite_or_none
from lightning_sgmcmc.planning.plan import RunPlan, TensorPlan
from lightning_sgmcmc.planning.reach import Blocks, Reached, TensorFacts, reach
from lightning_sgmcmc.samplers import Sampler

FAR = 0.6
"""A start that takes away more than this share of the heat that the noise adds lies farther out than the target: about
a start of 1.2 times the target's variance in a short run. What is measured then is the way in."""
FAR_START = (
    "The chain starts farther out than its target, so its temperature is not planned: a longer burn-in, or WarmStart, "
    "ends the way in before the draws."
)


@dataclass(frozen=True)
class PlanInputs:
    """What is known of a run before its first step.

    Attributes:
        chains: chains of the run.
        sampled_chains: those of them that draw samples.
        num_data: N.
        temperature: τ of the target, the mean over chains.
        draws: samples of each sampled chain, None if unknown.
        classes: K, the number of classes; None without.
        gradient_evaluations: per-datum gradients for each chain, None if unknown.
        disk_bytes_of_sample: size of one sample.
        memory_bytes: memory of this process's chains.
        notes: sentences on what is approximate or unknown.
        label: what a baseline calls itself, None for a run that samples.
        directions: the posterior's own directions, as tensors with a prior of its curvature; None if they are unknown.
    """

    chains: int
    num_data: int
    temperature: float
    sampled_chains: int = 1
    draws: int | None = None
    classes: int | None = None
    gradient_evaluations: int | None = None
    disk_bytes_of_sample: int = 0
    memory_bytes: int | None = None
    notes: tuple[str, ...] = ()
    label: str | None = None
    directions: Mapping[str, TensorFacts] | None = None


def make_plan(
    sampler: Sampler, blocks: Blocks | None, tensors: Mapping[str, TensorFacts], facts: PlanInputs
) -> RunPlan:
    """Return the plan of a run.

    Args:
        sampler: the run's.
        blocks: the controls of its steps; None if its length is unknown.
        tensors: its parameter tensors by name.
        facts: the rest.
    """
    d = sum(tensor.numel for tensor in tensors.values())
    parts = tensors if facts.directions is None else facts.directions
    reached = {} if blocks is None or facts.temperature == 0 else reach(sampler, blocks, parts, facts.num_data)
    samples = None if facts.draws is None else facts.draws * facts.sampled_chains
    chance = None if facts.classes is None else facts.num_data * math.log(facts.classes)
    evaluations = facts.gradient_evaluations
    plan = RunPlan(
        steps=None if blocks is None else blocks.steps,
        samples=samples,
        chains=facts.chains,
        num_data=facts.num_data,
        parameters=d,
        temperature=facts.temperature,
        lr=None if blocks is None else _largest_lr(blocks),
        stages=None if blocks is None else _stages(blocks.is_sampling),
        heat=facts.temperature * d / 2,
        chance=chance,
        gradient_evaluations=evaluations,
        data_passes=None if evaluations is None else evaluations / facts.num_data,
        disk_bytes=None if samples is None else samples * facts.disk_bytes_of_sample,
        memory_bytes=facts.memory_bytes,
        tensors={name: _tensor_plan(tensor, reached.get(name), facts.temperature) for name, tensor in tensors.items()},
        notes=_notes(sampler, facts, blocks, tensors, reached),
        label=facts.label,
    )
    return _with_reached(plan, parts, reached, facts) if reached else plan


def _with_reached(
    plan: RunPlan, tensors: Mapping[str, TensorFacts], reached: Mapping[str, Reached], facts: PlanInputs
) -> RunPlan:
    sizes = {name: tensors[name].numel for name in reached}
    is_exact = facts.directions is not None
    times = {name: own.burn_in + own.sampling for name, own in reached.items()}
    worth = {name: own.draws for name, own in reached.items()}
    slowest = min(times, key=times.__getitem__)
    middle = reached[slowest if is_exact else _median(times, sizes)]
    # Directions that oscillate relax alike, and their means are worth different numbers of draws.
    expected = min(worth.values()) if is_exact else worth[_median(worth, sizes)]
    share = {name: sizes[name] / sum(sizes.values()) for name in reached}
    total = torch.stack([own.configurational * share[name] for name, own in reached.items()]).sum(0)
    from_start = torch.stack([own.from_start * share[name] for name, own in reached.items()]).sum(0)
    is_far = _is_far(total, from_start)
    each = [math.nan] if is_far else (total * facts.temperature).tolist()
    draws = facts.draws if facts.draws is not None else 10**9
    plan = replace(
        plan,
        burn_in_relaxation_times=middle.burn_in,
        sampling_relaxation_times=middle.sampling,
        relaxation_times=middle.burn_in + middle.sampling,
        configurational_temperature=finite_or_none(sum(each) / len(each)),
        independent_draws=facts.sampled_chains * min(expected, float(draws)),
        notes=(*plan.notes, FAR_START) if is_far else plan.notes,
    )
    if is_exact:
        return replace(plan, is_exact=True)
    stds = {name: tensors[name].std or 0.0 for name in reached}
    return replace(
        plan,
        slowest_tensor=slowest,
        configurational_range=(min(each), max(each)) if max(each) > 1.001 * min(each) else None,
        prior_std=sorted(stds.values())[_place_of_median([sizes[n] for n in sorted(stds, key=lambda n: stds[n])])],
    )


def _median(values: Mapping[str, float], sizes: Mapping[str, int]) -> str:
    """Return the tensor with the element-weighted median of values."""
    names = sorted(values, key=values.__getitem__)
    return names[_place_of_median([sizes[name] for name in names])]


def _place_of_median(weights: Sequence[int]) -> int:
    half, so_far = sum(weights) / 2, 0
    for place, weight in enumerate(weights):
        so_far += weight
        if so_far >= half:
            return place
    return len(weights) - 1


def _tensor_plan(tensor: TensorFacts, reached: Reached | None, temperature: float) -> TensorPlan:
    if reached is None:
        return TensorPlan(tensor.numel, tensor.std)
    is_far = _is_far(reached.configurational, reached.from_start)
    share = math.nan if is_far else float(reached.configurational.mean())
    return TensorPlan(tensor.numel, tensor.std, reached.burn_in + reached.sampling, finite_or_none(share * temperature))


def _is_far(configurational: torch.Tensor, from_start: torch.Tensor) -> bool:
    """Return whether a chain starts so far out that its way in is what would be measured."""
    return bool((from_start < -FAR * (configurational - from_start)).any())


def _largest_lr(blocks: Blocks) -> float | None:
    """Return the largest step size of the sampling blocks, the mean over groups and chains."""
    means = blocks.lrs.mean((1, 2)).tolist()
    return max((lr for lr, sampling in zip(means, blocks.is_sampling, strict=True) if sampling), default=None)


def _stages(is_sampling: Sequence[bool]) -> int:
    return sum(now and not before for now, before in zip(is_sampling, [False, *is_sampling[:-1]], strict=True))


def _notes(
    sampler: Sampler,
    facts: PlanInputs,
    blocks: Blocks | None,
    tensors: Mapping[str, TensorFacts],
    reached: Mapping[str, Reached],
) -> tuple[str, ...]:
    notes = list(facts.notes)
    unknown = [name for name, tensor in tensors.items() if tensor.std is None]
    if blocks is None:
        notes.append("The run's length is unknown, so relaxation times, samples and cost are too.")
    elif facts.temperature > 0 and unknown:
        which = "all tensors" if len(unknown) == len(tensors) else ", ".join(unknown[:3])
        notes.append(f"The prior's scale is unknown for {which}: relaxation and temperature are not planned there.")
    elif facts.temperature > 0 and not reached:
        notes.append(_without_law(sampler))
    return tuple(notes)


def _without_law(sampler: Sampler) -> str:
    """Return why no linear rule follows a sampler's steps."""
    name, law = type(sampler).__name__, sampler.planned_law(sampler.param_groups[0])
    if law is None:
        return "The sampler's steps depend on the gradients, so relaxation and temperature are not planned."
    return (
        f"{name}'s law does not say how its position moves (StepLaw(move=…)), so relaxation and temperature are not "
        "planned."
    )
