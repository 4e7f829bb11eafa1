"""RunPlan: what a run will reach, cost and be called, before its first step, and these in words."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from lightning_sgmcmc.plain import as_plain, finite_or_none
from lightning_sgmcmc.planning.reach import Blocks, Reached, TensorFacts, reach
from lightning_sgmcmc.samplers import Sampler

COLD_BELOW = 0.5
"""A configurational temperature below this share of the target's makes a run a cold ensemble."""
LEAST_RELAXATION_TIMES = 1.0
"""With fewer relaxation times a run is a cold ensemble: its states have kept most of their start."""
WANTED = 3.0
"""Relaxation times that burn-in and sampling should cover together for a posterior sample.

After t of them a coordinate keeps e^-t of its start and has 1 - e^-2t of its variance: at 3 these are 5 % and 99.8 %,
and the average over the last three quarters of a run without burn-in is above 0.85 of the target's temperature, which
`ChainHealth` accepts."""
HOT_SHARE = 0.5
"""A target whose thermal energy exceeds this share of the energy of chance has too many parameters for its data."""
COOL_SHARE = 0.1
"""The share to which a lower temperature is advised to bring it."""
UNKNOWN = "unknown"
DIRECTIONS = "directions that the data leave to the prior"
"""Whose relaxation a plan knows: the likelihood's directions relax faster."""
RELAXED = 0.8
"""Share of the target's temperature from which the directions together are called relaxed, as in `ChainHealth`."""
HOTTEST = 1.2
"""Share of it above which the chain is planned to be still in the transient from a start that lies too far out."""


class RunKind(str, Enum):
    """What the states that a run collects are, together."""

    POSTERIOR_SAMPLE = "posterior sample"
    COLD_ENSEMBLE = "cold ensemble"
    SNAPSHOT_ENSEMBLE = "snapshot ensemble"
    DEEP_ENSEMBLE = "deep ensemble"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def of(cls, plan: "RunPlan", measured_configurational_temperature: float | None = None) -> "RunKind | None":
        """Return what a run is called, by its plan and by what was measured.

        At temperature 0 it is a deep ensemble of several chains, or a snapshot ensemble of one. Below temperature 1 it
        is a cold ensemble, since the posterior has 1. From 1 on it is a cold ensemble if it covers less than one
        relaxation time, or if its configurational temperature is below half of the target's; else it is a posterior
        sample. A measured temperature decides alone.

        Args:
            plan: the run's plan.
            measured_configurational_temperature: that of all tensors together in `ChainHealth`'s report; None without.

        Returns:
            the kind; None if neither is known.
        """
        if plan.temperature == 0:
            return cls.DEEP_ENSEMBLE if plan.chains > 1 else cls.SNAPSHOT_ENSEMBLE
        if plan.temperature < 1:
            return cls.COLD_ENSEMBLE
        reached, covered = measured_configurational_temperature, plan.relaxation_times
        if reached is None and covered is not None and covered < LEAST_RELAXATION_TIMES:
            return cls.COLD_ENSEMBLE
        if reached is None:
            reached = plan.configurational_temperature
        if reached is None:
            return None
        return cls.COLD_ENSEMBLE if reached < COLD_BELOW * plan.temperature else cls.POSTERIOR_SAMPLE


@dataclass(frozen=True)
class TensorPlan:
    """The plan for one parameter tensor, in the prior's directions.

    Attributes:
        numel: number of elements in one chain.
        prior_std: standard deviation of the Gaussian prior, or of the one with the curvature of another prior; None if
            unknown.
        relaxation_times: relaxation times that the longest stretch of steps with noise covers.
        configurational_temperature: expected configurational temperature, as `ChainHealth` measures it.
    """

    numel: int
    prior_std: float | None = None
    relaxation_times: float | None = None
    configurational_temperature: float | None = None


@dataclass(frozen=True)
class RunPlan:
    """What a run will reach and cost, from its settings alone; an unknown part is None, and `notes` has the reason.

    The numbers follow from the exact linear law of the sampler's steps in directions that the prior alone constrains.
    The likelihood's directions relax faster. Of a linear regression (a `Linear` network with `Gaussian` noise) the
    posterior's own directions are known, and the numbers are theirs. Mini-batch noise adds variance; it is not in the
    plan.

    Attributes:
        steps: optimizer steps K.
        samples: samples that all chains draw.
        chains: chains of the run, over all processes.
        num_data: N at the start.
        parameters: d, parameters of one chain.
        temperature: τ of the target, the mean over chains.
        lr: largest step size of the sampling stages, the mean over chains and parameter groups.
        relaxation_times: those that the longest stretch of steps with noise covers, burn-in at the target's
            temperature included: the median over all weights, or of the slowest direction if `is_exact`. A step
            without noise ends a stretch.
        burn_in_relaxation_times: the part of them before the stage of sampling.
        sampling_relaxation_times: the part of them in the stage of sampling.
        slowest_tensor: name of the tensor with the fewest relaxation times.
        configurational_temperature: the expected configurational temperature of all tensors together, a mean over the
            observed steps as `ChainHealth` measures it.
        configurational_range: its smallest and largest value over the chains, if they differ.
        independent_draws: n, independent draws to expect, over all chains; once they have relaxed, the error of an
            average over them is 1/√n standard deviations of the posterior.
        stages: number of sampling stages (cycles).
        heat: τ·d/2, the thermal energy in nats of d harmonic coordinates at the target's temperature.
        chance: the energy in nats of a model that guesses, N·log K for K classes; None if there are no classes.
        gradient_evaluations: per-datum gradients for each chain.
        data_passes: the same over N.
        disk_bytes: size of all samples.
        memory_bytes: parameters, gradients, sampler state, noise and observers' copies of this process's chains.
        seconds: duration, measured on the first steps; None before.
        seconds_per_step: the same for one step.
        prior_std: the element-weighted median of the tensors' prior standard deviations.
        tensors: the plan of each parameter tensor, by name.
        notes: sentences on what is approximate or unknown.
        label: what a baseline calls itself ("SWAG"), None for a run that samples.
        is_exact: whether the numbers are those of the posterior's own directions.
    """

    steps: int | None
    samples: int | None
    chains: int
    num_data: int
    parameters: int
    temperature: float
    lr: float | None = None
    relaxation_times: float | None = None
    burn_in_relaxation_times: float | None = None
    sampling_relaxation_times: float | None = None
    slowest_tensor: str | None = None
    configurational_temperature: float | None = None
    configurational_range: tuple[float, float] | None = None
    independent_draws: float | None = None
    stages: int | None = None
    heat: float | None = None
    chance: float | None = None
    gradient_evaluations: int | None = None
    data_passes: float | None = None
    disk_bytes: int | None = None
    memory_bytes: int | None = None
    seconds: float | None = None
    seconds_per_step: float | None = None
    prior_std: float | None = None
    tensors: Mapping[str, TensorPlan] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    label: str | None = None
    is_exact: bool = False

    @property
    def kind(self) -> RunKind | None:
        """What the run will be called, None if the plan does not know."""
        return RunKind.of(self)

    @property
    def name(self) -> str | None:
        """What the run is called: a baseline's own name, else its kind."""
        return self.label or (None if self.kind is None else self.kind.value)

    @property
    def warnings(self) -> list[str]:
        """At most one sentence, with the numbers to change, for a run that claims a posterior (τ > 0)."""
        if self.temperature == 0:
            return []
        covered, reached = self.relaxation_times, self.configurational_temperature
        if covered is not None and covered < WANTED:
            times = WANTED / covered if covered > 0 else math.inf
            remedies = [f"{_rounded(max(times, 1.1))} times the steps" if times < math.inf else "steps with noise"]
            if self.lr is not None and 1 < times <= 10:
                remedies.append(f"lr {self.lr * times:.2g} at the steps with noise (check it with sgmcmc tune)")
            if self.prior_std is not None and times < math.inf and not self.is_exact:
                remedies.append(f"prior std {self.prior_std / math.sqrt(times):.2g}")
            cold = "" if reached is None or reached <= 0 else f" with temperature {reached:.2g}"
            called = f"call it a cold ensemble{cold}"
            caution = " (with fewer weights than data there may be no such directions: ChainHealth measures it)"
            if self.is_exact or self.parameters >= self.num_data:
                caution = ""
            share = math.nan if reached is None else reached / self.temperature
            if share > HOTTEST:
                called = f"a longer burn-in or WarmStart, since the start is too far out (temperature {reached:.2g})"
            elif self.is_exact and share >= RELAXED:
                called = f"accept it, since the temperature over all directions is {reached:.2g}"
            return [
                f"{covered:.2g} of {WANTED:g} required relaxation times in {_where(self)}: {', or '.join(remedies)}, "
                f"or {called}{caution}"
            ]
        if self.heat is not None and self.chance is not None and self.heat > HOT_SHARE * self.chance:
            cooler, narrower = self.temperature * COOL_SHARE * self.chance / self.heat, self.prior_std
            smaller = "" if narrower is None else f", a smaller prior std (now {narrower:.2g})"
            return [
                f"too many parameters for the data: at the target's temperature their thermal energy τd/2 is "
                f"{self.heat:,.0f} nats and guessing costs {self.chance:,.0f}, so samples may be little better than "
                "guesses: more data, fewer "
                f"weights{smaller}, or temperature {cooler:.1g}"
            ]
        return []

    def sentences(self) -> list[str]:
        """Return the plan in two lines of under 80 characters: what the run will be, and its length and cost."""
        name, reached, covered = self.name or "of unknown kind", self.configurational_temperature, self.relaxation_times
        count = "" if self.samples is None else f"{_counted(self.samples, 'sample')} of "
        at = f"target temperature {self.temperature:.3g}"
        if self.temperature == 0:
            at = "temperature 0 is optimization"
        elif reached is not None:
            at = f"temperature {reached:.2g} (target {self.temperature:.3g})"
        length = ["unknown" if self.steps is None else f"{_short(self.steps)} steps"]
        if self.data_passes is not None:
            length.append(_counted(self.data_passes, "epoch"))
        if self.temperature > 0 and covered is not None:
            length.append(f"{_rounded(covered)} relaxation times ({WANTED:g} needed)")
        disk = "" if self.disk_bytes is None else f"; disk {size(self.disk_bytes)}"
        return [
            f"Plan: {name}; {count}{_counted(self.chains, 'chain')}; {at}.",
            f"Length: {', '.join(length)}{disk}.",
        ]

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values of a table of the whole plan, "unknown" where the plan has no number."""
        reached, between = self.configurational_temperature, self.configurational_range
        spread = "" if between is None else f" ({between[0]:.2g} to {between[1]:.2g} over the chains)"
        duration = "measured on the first steps"
        if self.seconds is not None:
            duration = f"{self.seconds:,.0f} s ({self.seconds_per_step or 0:.2g} s a step)"
        whole = "{:,}".format
        rounded = "{:,.0f}".format
        table: list[tuple[str, Any, Callable[[Any], str]]] = [
            ("This run is called", self.name, str),
            ("Optimizer steps", self.steps, whole),
            ("Samples", self.samples, whole),
            ("Chains", self.chains, whole),
            ("Number of data N", self.num_data, whole),
            ("Parameters of a chain", self.parameters, whole),
            ("Target temperature", self.temperature, "{:.3g}".format),
            ("Expected configurational temperature", reached, lambda found: f"{found:.2g}{spread}"),
            (f"Relaxation times ({WANTED:g} required)", self.relaxation_times, _rounded),
            ("  in burn-in", self.burn_in_relaxation_times, _rounded),
            ("  in a stage of sampling", self.sampling_relaxation_times, _rounded),
            ("Slowest tensor", "all tensors together" if self.is_exact else self.slowest_tensor, str),
            ("Independent draws to expect", self.independent_draws, _rounded),
            ("Thermal energy τ·d/2, nats", self.heat, rounded),
            ("Energy of guessing, nats", self.chance, rounded),
            ("Per-datum gradients", self.gradient_evaluations, "{:,} of each chain".format),
            ("Epochs", self.data_passes, rounded),
            ("Time", duration, str),
            ("Samples on disk", self.disk_bytes, size),
            ("Memory of the chains", self.memory_bytes, size),
        ]
        return [(name, UNKNOWN if value is None else text(value)) for name, value, text in table]

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain data, with its name as "kind", warnings and sentences."""
        said = {"sentences": self.sentences(), "warnings": self.warnings, "rows": self.rows()}
        return {"kind": self.name, **as_plain(self), **as_plain(said), "wanted_relaxation_times": WANTED}

    def scalars(self) -> dict[str, float]:
        """Return the known numbers by name, for a logger's hyperparameters."""
        names = ("relaxation_times", "configurational_temperature", "independent_draws", "heat", "chance")
        values = {name: getattr(self, name) for name in (*names, "data_passes")}
        return {name: float(value) for name, value in values.items() if value is not None}


# -- in words --------------------------------------------------------------------------------------------------------


def _where(plan: RunPlan) -> str:
    return "the posterior's slowest direction" if plan.is_exact else DIRECTIONS


def duration_sentence(seconds: float, seconds_per_step: float) -> str:
    """Return the line that reports the measured time."""
    return f"Time: about {seconds:,.0f} s at {_rounded(seconds_per_step * 1e3)} ms a step, without evaluations."


def size(count: float) -> str:
    """Return a number of bytes as text.

    >>> size(1_234), size(12_345_678)
    ('1.2 kB', '12 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _short(value: float) -> str:
    return f"{value:.2g}" if value >= 1e6 else f"{value:,.0f}"


def _rounded(value: float) -> str:
    """Return a number with two digits and without an exponent.

    >>> _rounded(136.2), _rounded(3.14159), _rounded(0.0123)
    ('140', '3.1', '0.012')
    """
    return f"{float(f'{value:.2g}'):,.0f}" if abs(value) >= 10 else f"{value:.2g}"


def _counted(count: float, name: str) -> str:
    number = _short(count)
    return f"{number} {name}{'' if number == '1' else 's'}"


def with_article(name: str) -> str:
    """Return the name of a run as a sentence has it after "is".

    >>> [with_article(name) for name in ("cold ensemble", "MC dropout ensemble", "SWAG")]
    ['a cold ensemble', 'an MC dropout ensemble', 'SWAG']
    """
    if not name.endswith(("sample", "ensemble", "network")):
        return name  # a method's
    return f"{'an' if name.startswith('MC') else 'a'} {name}"


# -- make --------------------------------------------------------------------------------------------------------------


FAR = 0.6
"""A start that takes away more than this share of the heat that the noise adds lies farther out than the target: about
a start of 1.2 times the target's variance in a short run. What is measured then is the transient."""
FAR_START = (
    "The chain starts farther out than its target, so its temperature is not planned: a longer burn-in, or WarmStart, "
    "ends the transient before the samples."
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
        prior_std=stds[_median(stds, sizes)],
    )


def _median(values: Mapping[str, float], sizes: Mapping[str, int]) -> str:
    """Return the tensor with the element-weighted median of values."""
    names = sorted(values, key=values.__getitem__)
    half, so_far = sum(sizes[name] for name in names) / 2, 0
    for name in names:
        so_far += sizes[name]
        if so_far >= half:
            return name
    return names[-1]


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
        why = f"{type(sampler).__name__}'s law does not say how its position moves (StepLaw(move=…))"
        if sampler.planned_law(sampler.param_groups[0]) is None:
            why = "The sampler's steps depend on the gradients"
        notes.append(f"{why}, so relaxation and temperature are not planned.")
    return tuple(notes)
