"""What was measured of the chain's health."""

from typing import Any, TypeGuard

from lightning_sgmcmc.report import html_page
from lightning_sgmcmc.report.html_page import Cell, folded, is_finite, number, paragraph, table

TOLERANCE = 0.2
"""A temperature is marked where its whole interval is more than this share off the target."""


def tensors(health: dict[str, Any]) -> str:
    """Return the table of measured temperatures."""
    tensors: dict[str, dict[str, Any]] = health.get("tensors") or {}
    if not tensors:
        return ""
    target, shares = health.get("temperature"), health.get("gradient_noise_share") or {}
    total = health.get("total")
    everything = {"all tensors together": total, **tensors} if isinstance(total, dict) else tensors
    rows = [
        [
            name,
            values.get("numel"),
            _temperature(values, "kinetic", target),
            _temperature(values, "configurational", target),
            shares.get(name),
        ]
        for name, values in everything.items()
    ]
    header = ["tensor", "elements", "kinetic temperature", "configurational temperature", "share of gradient noise"]
    content = table(header, rows, f"Measured temperatures at step {number(health.get('step'))}")
    energy = health.get("energy") or {}
    expected = energy.get("expected")
    facts = html_page.facts(
        [
            ("Target temperature", target),
            ("Mean energy", energy.get("mean")),
            ("Its standard deviation", energy.get("std")),
            ("Expected energy", _interval(expected) if _is_interval(expected) else None),
        ]
    )
    note = f"In brackets the measurement's interval; marked where all of it is over {TOLERANCE:.0%} off the target."
    return (
        facts + (content if len(rows) <= 40 else folded(f"All {len(rows)} tensors", content)) + paragraph(note, "note")
    )


def _temperature(values: dict[str, Any], name: str, target: Any) -> Any:
    value, interval = values.get(name), values.get(f"{name}_interval")
    if not is_finite(value):
        return None
    if not _is_interval(interval):
        return number(value)
    text = f"{number(value)} {_interval(interval)}"
    low, high = interval
    off = is_finite(target) and (low > target * (1 + TOLERANCE) or high < target * (1 - TOLERANCE))
    return Cell(text, "bad") if off else text


def _is_interval(value: Any) -> TypeGuard[list[float]]:
    return isinstance(value, list) and len(value) == 2 and all(map(is_finite, value))


def _interval(value: list[float]) -> str:
    return f"[{number(value[0])}, {number(value[1])}]"
