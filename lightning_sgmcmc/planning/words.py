"""A plan in words: the lines at the start of a run, the warning, and the table."""

import math
from typing import Any

from lightning_sgmcmc.planning.kind import HOT_SHARE

UNKNOWN = "unknown"
DIRECTIONS = "directions that the data leave to the prior"
"""Whose relaxation a plan knows: the likelihood's directions relax faster."""
RELAXED = 0.8
"""Share of the target's temperature from which the directions together are called relaxed, as in `ChainHealth`."""


def sentences(plan: Any, wanted: float) -> list[str]:
    """Return the plan in at most five lines of under 80 characters."""
    name = plan.name or "of unknown kind"
    count = "" if plan.samples is None else f"{_counted(plan.samples, 'sample')} of "
    lines = [f"Plan: {name}; {count}{_counted(plan.chains, 'chain')}; {_temperature(plan)}."]
    if plan.temperature > 0:
        lines.append(f"Relaxation times in {_where(plan)}: {_known(plan.relaxation_times)} of {wanted:g}.")
        lines.append(_draws(plan, wanted))
        lines.append(_heat(plan))
    lines.append(_cost(plan))
    return [line for line in lines if line]


def _temperature(plan: Any) -> str:
    if plan.temperature == 0:
        return "temperature 0 is optimization"
    if plan.configurational_temperature is None:
        return f"target temperature {plan.temperature:.3g}"
    return f"temperature {plan.configurational_temperature:.2g} of {plan.temperature:.3g}"


def _draws(plan: Any, wanted: float) -> str:
    """Return the line on independent draws; the error of an average over n of them is 1/√n standard deviations."""
    draws, covered = plan.independent_draws, plan.relaxation_times
    if draws is None:
        return ""
    if covered is None or covered < wanted:  # the average keeps a part of the start
        return f"Independent draws: {_rounded(draws)}."
    return f"Independent draws: {_rounded(draws)}; averages within 1/√draws = {draws**-0.5:.2g} posterior sd."


def _heat(plan: Any) -> str:
    if plan.heat is None:
        return ""
    chance = "" if plan.chance is None else f"; guessing costs {_short(plan.chance)} nats"
    return f"Heat at the target's temperature: {_short(plan.heat)} nats{chance}."


def _cost(plan: Any) -> str:
    passes = None if plan.data_passes is None else f"{_short(plan.data_passes)} data passes"
    disk = None if plan.disk_bytes is None else f"{size(plan.disk_bytes)} of samples"
    memory = None if plan.memory_bytes is None else f"{size(plan.memory_bytes)} in memory"
    steps = None if plan.steps is None else f"{_short(plan.steps)} steps"
    return f"Cost: {', '.join(part for part in (steps, passes, disk, memory) if part)}."


def warnings(plan: Any, wanted: float) -> list[str]:
    """Return at most one sentence with the numbers to change, for a run that claims a posterior."""
    if plan.temperature == 0:
        return []
    covered, reached = plan.relaxation_times, plan.configurational_temperature
    if covered is not None and covered < wanted:
        times = wanted / covered if covered > 0 else math.inf
        remedies = [f"{_rounded(max(times, 1.1))} times the steps" if times < math.inf else "steps with noise"]
        if plan.lr is not None and 1 < times <= 10:
            remedies.append(f"lr {plan.lr * times:.2g} at the noisy steps (check it with sgmcmc tune)")
        if plan.prior_std is not None and times < math.inf and not plan.is_exact:
            remedies.append(f"prior std {plan.prior_std / math.sqrt(times):.2g}")
        cold = "" if reached is None or reached <= 0 else f" with temperature {reached:.2g}"
        called = f"call it a cold ensemble{cold}"
        if plan.is_exact and reached is not None and reached >= RELAXED * plan.temperature:
            called = f"accept it, since the temperature over all directions is {reached:.2g}"
        return [
            f"{covered:.2g} relaxation times of {wanted:g} wanted in {_where(plan)}: {', or '.join(remedies)}, "
            f"or {called}{_caution(plan)}"
        ]
    if plan.heat is not None and plan.chance is not None and plan.heat > HOT_SHARE * plan.chance:
        cooler, narrower = plan.temperature * HOT_SHARE * plan.chance / plan.heat, plan.prior_std
        smaller = "" if narrower is None else f", a smaller prior std (now {narrower:.2g})"
        return [
            f"the target takes up {plan.heat:,.0f} nats of heat and guessing costs {plan.chance:,.0f}, so its samples "
            f"may be little better than guesses: more data, fewer weights{smaller}, or temperature {cooler:.2g}"
        ]
    return []


def _where(plan: Any) -> str:
    return "the posterior's slowest direction" if plan.is_exact else DIRECTIONS


def _caution(plan: Any) -> str:
    """Return what limits the warning: with more data than weights, the data may leave no direction to the prior."""
    if plan.is_exact or plan.parameters >= plan.num_data:
        return ""
    return " (with fewer weights than data there may be no such directions: ChainHealth measures it)"


def rows(plan: Any, wanted: float) -> list[tuple[str, str]]:
    """Return names and values of a table of the whole plan."""
    reached, between = plan.configurational_temperature, plan.configurational_range
    spread = "" if between is None else f" ({between[0]:.2g} to {between[1]:.2g} over the chains)"
    duration = None if plan.seconds is None else f"{plan.seconds:,.0f} s ({plan.seconds_per_step or 0:.2g} s a step)"
    evaluations = None if plan.gradient_evaluations is None else f"{plan.gradient_evaluations:,} of each chain"
    found = [
        ("This run is called", plan.name),
        ("Optimizer steps", _number(plan.steps)),
        ("Samples", _number(plan.samples)),
        ("Chains", _number(plan.chains)),
        ("Number of data N", _number(plan.num_data)),
        ("Parameters of a chain", _number(plan.parameters)),
        ("Target temperature", f"{plan.temperature:.3g}"),
        ("Expected configurational temperature", None if reached is None else f"{reached:.2g}{spread}"),
        (f"Relaxation times (of {wanted:g} wanted)", _known(plan.relaxation_times)),
        ("  in burn-in", _known(plan.burn_in_relaxation_times)),
        ("  in a stage of sampling", _known(plan.sampling_relaxation_times)),
        ("Slowest tensor", "all tensors together" if plan.is_exact else plan.slowest_tensor),
        ("Independent draws to expect", _known(plan.independent_draws)),
        ("Heat of the target, nats", None if plan.heat is None else f"{plan.heat:,.0f}"),
        ("Energy of guessing, nats", None if plan.chance is None else f"{plan.chance:,.0f}"),
        ("Per-datum gradients", evaluations),
        ("Data passes", None if plan.data_passes is None else f"{plan.data_passes:,.0f}"),
        ("Time", duration or "measured on the first steps"),
        ("Samples on disk", None if plan.disk_bytes is None else size(plan.disk_bytes)),
        ("Memory of the chains", None if plan.memory_bytes is None else size(plan.memory_bytes)),
    ]
    return [(name, UNKNOWN if value is None else value) for name, value in found]


def duration_sentence(seconds: float, seconds_per_step: float) -> str:
    """Return the line that reports the measured time."""
    return f"Plan: about {seconds:,.0f} s at {_rounded(seconds_per_step * 1e3)} ms a step, without evaluations."


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


def _known(value: float | None) -> str:
    return UNKNOWN if value is None else _rounded(value)


def _number(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _counted(count: int, name: str) -> str:
    return f"{_short(count)} {name}{'' if count == 1 else 's'}"
