"""The report's section on temperatures and energies, from the run's `health.json`."""

from typing import Any

from lightning_sgmcmc.diagnostics.assessment import ALL_TENSORS
from lightning_sgmcmc.diagnostics.health import HealthReport, Interval, TemperatureKind, Temperatures
from lightning_sgmcmc.planning.kind import with_article
from lightning_sgmcmc.report import html_page
from lightning_sgmcmc.report.html_page import Cell, folded, is_finite, number, paragraph, table

TOLERANCE = 0.2
"""A temperature is marked if its whole interval is further from the target than this share of it."""
NOT_MEASURABLE = "not measurable in this run"
FOLD_ABOVE = 40
"""A table with more rows is folded."""


def tensors(health: HealthReport | None) -> str:
    """Return the table of measured temperatures, or "" without measurements."""
    if health is None or not health.tensors:
        return ""
    total = {} if health.total is None else {ALL_TENSORS: health.total}
    rows = [
        [
            name,
            entry.numel,
            _temperature(entry, "kinetic", health.temperature),
            _temperature(entry, "configurational", health.temperature),
            health.gradient_noise_share.get(name),
        ]
        for name, entry in {**total, **health.tensors}.items()
    ]
    header = ["tensor", "elements", "kinetic temperature", "configurational temperature", "share of gradient noise"]
    content = table(header, rows, f"Measured temperatures at step {number(health.step)}")
    note = (
        f"Intervals are in brackets; a temperature is marked if its whole interval is over {TOLERANCE:.0%} off the "
        "target."
    )
    return (
        _facts(health)
        + (content if len(rows) <= FOLD_ABOVE else folded(f"All {len(rows)} tensors", content))
        + paragraph(note, "note")
    )


def _facts(health: HealthReport) -> str:
    energy, run = health.energy, health.run
    times = None if run.relaxation_times is None else number(run.relaxation_times)
    return html_page.facts(
        [
            ("The samples are", None if health.kind is None else f"{with_article(health.kind)}: {health.reason}"),
            ("Target temperature", health.temperature if is_finite(health.temperature) else None),
            ("Mean energy", energy.mean),
            ("Its standard deviation", energy.std),
            ("Expected energy", None if energy.expected is None else _brackets(energy.expected)),
            ("Heat that the target takes up (nats)", run.heat),
            ("Mean NLL per datum, training data", run.nll),
            ("The same of a guess", run.chance_nll),
            ("Relaxation times of a sampling stage", times),
            ("‖θ‖²/(d·σ²), τ at equilibrium", run.prior_norm),
            ("Split R-hat of predictions", run.rhat),
            ("Bulk ESS of predictions", run.ess),
        ]
    )


def _temperature(entry: Temperatures, kind: TemperatureKind, target: float) -> Any:
    value, interval = entry.measured(kind)
    if value is None:
        return None
    if interval is None:
        return NOT_MEASURABLE
    low, high = interval
    text = f"{number(value)} {_brackets(interval)}"
    return Cell(text, "bad") if low > target * (1 + TOLERANCE) or high < target * (1 - TOLERANCE) else text


def _brackets(interval: Interval) -> str:
    return f"[{number(interval[0])}, {number(interval[1])}]"
