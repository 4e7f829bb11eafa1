"""The kept results of the recipes: what a new run is compared with, and how long it takes."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "expected"
STANDARD_ERRORS = 4.0
"""Means of repeats may differ by as many standard errors of their difference."""
TOLERANCE = 0.05
"""Relative difference of figures without a standard error."""
ROUNDING = 0.01
"""Relative difference of means of repeats that is always allowed: two equal repeats have an error of 0."""
KEPT = ("scale", "seed", "settings", "rows", "seconds", "work", "data", "hardware", "stage", "sentences")
VERDICTS = {
    "reproduced": "the paper's claim holds, beyond our errors where the paper has numbers",
    "ranking reproduced": "the paper's order of the methods holds, its figures do not",
    "not reproduced": "our figures contradict a claim of the paper; the page names the reason and the run",
    "not run at this size": "the claim needs a larger run, most often on a GPU, which has not been made yet",
    "own experiment": "an experiment of our own, or an example",
}
"""What a verdict says."""
DIGITS, LINE = 9, 240
"""Significant digits of kept numbers, and the longest line of a kept list or row."""
OPTIONAL = ("error", "paper", "paper_error")
"""Parts of a row that may be None."""
TIMES = ("second", "time", "ms for")
"""Words in the names of figures that a machine decides, which are not compared."""
ENDS, WIDTH = (", 95 % from", ", 95 % to"), 2 * 1.96
"""The names of the ends of a figure's 95 % interval, and its width in standard errors."""


def all_expected() -> dict[str, dict[str, Any]]:
    """Return what is kept of every recipe, by its name."""
    return {path.stem: kept(path.stem) for path in sorted(FOLDER.glob("*.json"))}


def kept(name: str) -> dict[str, Any]:
    """Return what is kept of a recipe: its paper, our verdict, results by scale under "runs", and earlier tables.

    Args:
        name: the recipe.
    """
    content = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(content, dict), name
    for run in content["runs"].values():
        run["rows"] = [{**dict.fromkeys(OPTIONAL), **row} for row in run.get("rows", ())]
    return content


def keep(results: Mapping[str, Any], picture: str | None) -> None:
    """Keep a run's results instead of earlier ones of this scale.

    Args:
        results: the content of `results.json`.
        picture: the name of the picture that shows them.
    """
    entry = kept(results["recipe"])
    own = {key: results[key] for key in KEPT if key in results}
    own["origin"] = {key: value for key, value in results.get("origin", {}).items() if key != "command"}
    if picture is not None:
        own["picture"] = picture
    entry["runs"][results["scale"]] = own
    write(results["recipe"], entry)


def write(name: str, entry: Mapping[str, Any]) -> None:
    """Write what is kept of a recipe: each row on a line, its figures to nine digits, without empty `OPTIONAL` parts.

    Args:
        name: the recipe.
        entry: what `kept` returns.
    """
    runs = {}
    for scale, run in entry["runs"].items():
        rows = [
            {key: value for key, value in row.items() if value is not None or key not in OPTIONAL}
            for row in run["rows"]
        ]
        runs[scale] = {**run, "rows": _rounded(rows)}
    (FOLDER / f"{name}.json").write_text(_text({**entry, "runs": runs}) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _text(value: Any, indent: str = "") -> str:
    """Return JSON like that of `json.dumps` with an indent of 1, but for containers that fit on a line."""
    if not isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    inner = indent + " "
    if isinstance(value, dict):
        parts, (first, last) = [f"{json.dumps(key)}: {_text(part, inner)}" for key, part in value.items()], "{}"
    else:
        parts, (first, last) = [_text(part, inner) for part in value], "[]"
    line = first + ", ".join(parts) + last
    if "\n" not in line and len(indent + line) <= LINE:
        return line
    return f"{first}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{last}"


@dataclass(frozen=True)
class Comparison:
    """How a run compares with the kept one of its scale.

    Attributes:
        lines: a line for each figure that differs, or is missing on one side.
        compared: the number of figures that both have and that were compared.
        left_out: the number of figures of one repeat, whose error nobody knows.
    """

    lines: list[str]
    compared: int = 0
    left_out: int = 0


def compare(name: str, results: Mapping[str, Any]) -> Comparison:
    """Compare a run with the kept one.

    Figures with standard errors, or with 95 % intervals, may differ by four standard errors of their difference, others
    by 5 %, or by what "tolerances" of the kept file allows for a metric. Times are not compared, nor are figures of one
    repeat without a tolerance: another processor rounds differently, and so gives another draw.

    Args:
        name: the recipe.
        results: the content of `results.json`.
    """
    entry = kept(name)
    run = entry["runs"].get(results["scale"])
    if run is None:
        return Comparison([f"no results of scale {results['scale']} are kept"])
    if (run.get("settings") or {}) != (results.get("settings") or {}):
        return Comparison([f"the kept results have other settings: {run.get('settings')}"])
    tolerances = entry.get("tolerances", {})
    ours, theirs = _by_figure(results["rows"]), _by_figure(run["rows"])
    lines = [f"{' '.join(key)} is only in {where}" for key, where in _missing(ours, theirs)]
    both = ours.keys() & theirs.keys()
    left_out = {key for key in both if key[1] not in tolerances and _has_one_repeat(ours[key], theirs[key])}
    for key in both - left_out:
        new, old = ours[key], theirs[key]
        allowed = tolerances.get(key[1], _allowed(new, old))
        if abs(new["value"] - old["value"]) > allowed:
            lines.append(f"{' '.join(key)} is {new['value']:.5g}, kept {old['value']:.5g}, allowed ± {allowed:.2g}")
    return Comparison(sorted(lines), len(both) - len(left_out), len(left_out))


def predicted_seconds(name: str, scale: str, work: float | None) -> float | None:
    """Return the processor time of a recipe, from that of a kept run; None if it cannot be known.

    Args:
        name: the recipe.
        scale: its setting.
        work: the setting's work, in the recipe's own unit.
    """
    if not (FOLDER / f"{name}.json").exists():
        return None
    runs = kept(name)["runs"]
    if work is None:
        return runs[scale]["seconds"] if scale in runs else None
    known = [run["seconds"] * work / run["work"] for _, run in sorted(runs.items(), reverse=True) if run.get("work")]
    return known[0] if known else None


def _by_figure(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the figures to compare by method and metric; an interval's ends become its figure's standard error."""
    known = {(row["method"], row["metric"]): row for row in rows if row["value"] is not None}
    found = {}
    for (method, metric), row in known.items():
        if any(word in metric for word in TIMES) or metric.endswith(ENDS):
            continue
        low, high = (known.get((method, metric + end)) for end in ENDS)
        interval = {"error": (high["value"] - low["value"]) / WIDTH} if low and high else {}
        found[method, metric] = {**row, **interval}
    return found


def _has_one_repeat(*rows: Mapping[str, Any]) -> bool:
    return any(row.get("n") == 1 and row.get("error") is None for row in rows)


def _missing(ours: Mapping[tuple[str, str], Any], theirs: Mapping[tuple[str, str], Any]) -> list[tuple[Any, str]]:
    return [(key, "this run") for key in ours.keys() - theirs.keys()] + [
        (key, "the kept run") for key in theirs.keys() - ours.keys()
    ]


def _allowed(new: Mapping[str, Any], old: Mapping[str, Any]) -> float:
    errors = [error for row in (new, old) if isinstance(error := row.get("error"), float) and math.isfinite(error)]
    if len(errors) == 2:
        return max(STANDARD_ERRORS * math.hypot(*errors), ROUNDING * abs(old["value"]))
    return max(TOLERANCE * abs(old["value"]), 1e-6)
