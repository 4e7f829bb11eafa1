"""The findings as a page, and the numbers that decide."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Finding = dict[str, Any]

NO_COLUMN = ("stage", "case", "error", "said")


@dataclass(frozen=True)
class Decision:
    """A number with a limit.

    Attributes:
        what: what is measured.
        value: the number; None where it was not measured.
        limit: its largest good value.
    """

    what: str
    value: float | None
    limit: float

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "holds" if self.value <= self.limit else "FAILS"


def find(findings: Iterable[Finding], stage: str, case: str, name: str) -> float | None:
    """Return a number of a stage's case, None where it was not measured."""
    for finding in findings:
        if (finding["stage"], finding["case"]) == (stage, case):
            value = finding.get(name)
            return None if value is None else float(value)
    return None


def decisions(findings: Sequence[Finding]) -> list[Decision]:
    """Return the numbers that decide.

    A ratio is of the time of a step on the device's stream, which is the wall's where the host is slower.
    """

    def step(case: str) -> float | None:
        stream = find(findings, "headline", case, "stream_ms")
        return stream if stream is not None else find(findings, "headline", case, "wall_ms")

    plain = [time for time in (step("plain"), step("plain again")) if time is not None]
    found = []
    for case, limit in {"4, interacting": 0.4, "4": 0.4, "16": 1.6}.items():
        time = step(case)
        ratio = time / (sum(plain) / len(plain)) if plain and time is not None else None
        found.append(Decision(f"step of {case} chains / step of plain SGD", ratio, limit))
    for case, most in {"4": 20.0, "4, interacting": 30.0, "16": 35.0}.items():
        found.append(Decision(f"launches of {case} chains beside the graphs", _launches(findings, case), most))
    found.append(Decision("waits of an ordinary step", _waits(findings, "ordinary"), 0))
    found.append(Decision("waits of a step that draws samples", _waits(findings, "drawing"), 3))
    for finding in findings:
        if finding["stage"] == "blocks" and "loop_us" in finding:
            ratio = finding["captured_us"] / finding["loop_us"]
            found.append(Decision(f"step in blocks / step of the loop: {finding['case']}", ratio, 0.1))
        if finding["stage"] == "blocks" and "captured_difference" in finding:
            found.append(Decision(f"difference: blocks, {finding['case']}", finding["captured_difference"], 1e-3))
        if finding["stage"] == "correctness" and "difference" in finding:
            limit = 0.0 if "deterministic" in finding["case"] else 0.03 if "mixed" in finding["case"] else 1e-3
            found.append(Decision(f"difference: {finding['case']}", finding["difference"], limit))
    return found


def _launches(findings: Sequence[Finding], case: str) -> float | None:
    parts = [find(findings, "headline", case, name) for name in ("launches", "copies")]
    return None if None in parts else sum(part for part in parts if part is not None)


def _waits(findings: Sequence[Finding], name: str) -> float | None:
    total, steps = (find(findings, "waits", "4, interacting", key) for key in (name, "steps"))
    if total is None or steps is None:
        return None
    return total / steps if name == "ordinary" else total


def page(findings: Sequence[Finding]) -> str:
    """Return the findings as Markdown: device and date, what decides, then a table for each stage."""
    environment = next((f for f in findings if f["stage"] == "environment" and "date" in f), {})
    parts = ["# The library on one GPU\n", "`python -m tests.benchmarks.gpu`\n"]
    parts.append("\n".join(f"* {name}: {_shown(v)}" for name, v in environment.items() if name not in NO_COLUMN))
    tiny = bool(environment.get("tiny"))
    if tiny:
        parts.append("\nA tiny run: its numbers mean nothing.")
    decided = [
        f"| {d.what} | {_shown(d.value)} | {d.limit:g} | {'tiny' if tiny else d.verdict} |" for d in decisions(findings)
    ]
    parts += ["\n## What decides\n", "\n".join(["| | measured | at most | |\n|---|---|---|---|", *decided])]
    for stage in dict.fromkeys(finding["stage"] for finding in findings):
        if stage != "environment" or not environment:
            parts += [f"\n## {stage.capitalize()}\n", _table([f for f in findings if f["stage"] == stage])]
    return "\n".join(parts) + "\n"


def _table(findings: Sequence[Finding]) -> str:
    """Return one stage's numbers with a row for each case, then its lists and errors line by line."""
    names = [n for f in findings for n, v in f.items() if n not in NO_COLUMN and not isinstance(v, dict | list)]
    names = list(dict.fromkeys(names))
    lines = [f"| case | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    after = []
    for finding in findings:
        if "error" in finding:
            after.append(f"* {finding['case'] or finding['stage']}: **{finding['error']}**")
            if finding.get("said"):
                after.append(f"\n```\n{finding['said']}\n```")
            continue
        lines.append(f"| {finding['case']} | {' | '.join(_shown(finding.get(name)) for name in names)} |")
        for name, value in finding.items():
            if isinstance(value, dict) and value:
                after.append(
                    f"* {finding['case']}, {name}: " + "; ".join(f"`{k}` {_shown(v)}" for k, v in value.items())
                )
    return "\n".join([*(lines if len(lines) > 2 else []), "", *after])


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
