"""RunPlan: what a run will reach, cost and be called, before its first step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_sgmcmc.plain import as_plain
from lightning_sgmcmc.planning import words
from lightning_sgmcmc.planning.kind import WANTED, RunKind


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
    posterior's own directions are known, and the numbers are theirs. Mini-batch noise heats a chain; it is not in the
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
        heat: τ·d/2, the energy in nats that d harmonic coordinates take up at the target's temperature.
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
        return words.warnings(self, WANTED)

    def sentences(self) -> list[str]:
        """Return the plan in at most five lines of under 80 characters."""
        return words.sentences(self, WANTED)

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values of a table of the whole plan."""
        return words.rows(self, WANTED)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain data, with its name as "kind", warnings and sentences."""
        said = {"sentences": self.sentences(), "warnings": self.warnings, "rows": self.rows()}
        return {"kind": self.name, **as_plain(self), **as_plain(said), "wanted_relaxation_times": WANTED}

    def scalars(self) -> dict[str, float]:
        """Return the known numbers by name, for a logger's hyperparameters."""
        names = ("relaxation_times", "configurational_temperature", "independent_draws", "heat", "chance")
        values = {name: getattr(self, name) for name in (*names, "data_passes")}
        return {name: float(value) for name, value in values.items() if value is not None}
