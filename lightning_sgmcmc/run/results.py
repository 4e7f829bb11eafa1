"""The files of a run's results: `results.json` and `table.md`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_sgmcmc.diagnostics.health import HealthReport
from lightning_sgmcmc.files import free_name, parse_json, read_regular, write_output

if TYPE_CHECKING:
    from rich.console import Console

RESULTS, TABLE = "results.json", "table.md"
OPTIMIZED = "states of an optimization (temperature 0)"
"""What `results.json` calls the samples of a run at temperature 0."""
HEALTH = "health.json"
STAGES = ("val", "test")
METHODS = {
    "single": "mean single sample",
    "best_single": "best single sample",
    "first_cycle": "first cycle",
    "bma": "model average",
}
"""What tables call the methods of `results.json`."""
LARGEST_HEALTH = 2**26


def write_results(folder: Path, results: Mapping[str, Any], table: str) -> None:
    """Write `results.json` and `table.md`.

    Args:
        folder: the run's folder, created if needed.
        results: plain data: recipe, scale, seed, rows (each with method, metric and value), seconds, …
        table: the rows as a Markdown table.
    """
    write_output(folder / RESULTS, (json.dumps(results, indent=2) + "\n").encode())
    write_output(folder / TABLE, table.encode())


def read_health(folder: Path) -> HealthReport | None:
    """Return the health report in a run's folder, None if there is none that can be read."""
    try:
        return HealthReport.from_json(parse_json(read_regular(folder / HEALTH, LARGEST_HEALTH).decode()))
    except (OSError, ValueError, AttributeError):
        return None


def keep_earlier_results(folder: Path, results: Mapping[str, Any]) -> None:
    """Rename other results in the folder by their stage, as `results-val.json` and `table-val.md`.

    Args:
        folder: the run's folder.
        results: the results that will be written there.
    """
    try:
        earlier = parse_json(read_regular(folder / RESULTS, LARGEST_HEALTH).decode())
    except (OSError, ValueError):
        return  # none, or a damaged file
    if not isinstance(earlier, dict) or (earlier.get("stage"), earlier.get("rows")) == (
        results["stage"],
        json.loads(json.dumps(results["rows"])),
    ):
        return
    stage = earlier.get("stage")
    stage = stage if stage in STAGES else "run"  # it comes from a file, and becomes a part of a file's name
    for name in (RESULTS, TABLE):
        path = folder / name
        if path.exists():
            path.rename(free_name(path.with_stem(f"{path.stem}-{stage}")))


def plain_console() -> "Console":
    """Return the terminal for tables: rich would read names of metrics and folders, such as "top1[/5]", as markup."""
    from rich.console import Console

    return Console(markup=False, emoji=False)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table.

    Args:
        columns: the column names.
        rows: one text per column; a name of the user's may have any characters.
    """
    lines = ["| " + " | ".join(map(_in_cell, line)) + " |" for line in (columns, *rows)]
    lines.insert(1, "|" + "---|" * len(columns))
    return "\n".join(lines) + "\n"


def _in_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").splitlines())
