"""Pages of the recipes' results, with those of the papers beside them."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_sgmcmc.recipes.shared.expected import VERDICTS, all_expected, kept
from lightning_sgmcmc.recipes.shared.figures import half_width
from lightning_sgmcmc.recipes.shared.listing import RECIPES, description, source

UNKNOWN = "not recorded"
HEADER = ("experiment", "paper", "n", "date", "verdict", "shown by")
ARCHIVE = (
    *("digits_auto", "digits_csghmc", "digits_csghmc_contour", "digits_posterior"),
    *("cifar100_uncertainty", "cifar_csghmc", "cifar_csgmcmc", "cifar_sprint"),
    *("ewsg_vr_logistic", "logistic_ess", "misspecified", "subsampling_error", "theta_variance"),
)
"""Recipes whose pages come last in the table."""
ROUNDING = 1e-12
"""A relative error below this is that of floating-point sums of equal values."""
FEWEST = 4
"""Repeats from which a mean has an interval."""
LONG_TABLE = 30
"""Longer tables are folded."""
NOTE = "<!-- Written by `python -m docs.generate` from recipes/expected/: change the data, not this page. -->\n\n"


def write_pages(folder: Path, runs: Mapping[str, Path]) -> Path:
    """Write a page for each recipe that has results, and a matrix of verdicts; return the folder.

    Args:
        folder: where to write; made if needed.
        runs: folders of recipes' runs by name; one without results is left out.
    """
    entries = {}
    for name, run in runs.items():
        if (run / "results.json").exists():
            results = json.loads((run / "results.json").read_text(encoding="utf-8"))
            entry = kept(name)
            entries[name] = entry | {"runs": {results["scale"]: results}, "tables": []}
    folder.mkdir(parents=True, exist_ok=True)
    for name, entry in entries.items():
        pictures = "".join(
            f"\n![{path.stem}]({path.resolve().as_uri()})\n" for path in sorted(runs[name].glob("*.png"))
        )
        (folder / f"{name}.md").write_text(experiment(name, entry) + pictures, encoding="utf-8")
    (folder / "index.md").write_text(matrix(entries), encoding="utf-8")
    return folder


def pages(folder: Path) -> dict[Path, str]:
    """Return the text of each page on the kept results.

    Args:
        folder: the pages' folder.
    """
    entries = all_expected()
    return {folder / f"{name}.md": experiment(name, entry) for name, entry in entries.items()} | {
        folder / "index.md": matrix(entries)
    }


def matrix(entries: Mapping[str, dict[str, Any]]) -> str:
    """Return the page with a line for each recipe.

    Args:
        entries: what is kept of each.
    """
    rows: dict[bool, list[list[str]]] = {False: [], True: []}
    for name, entry in entries.items():
        date, _, repeats, _ = _facts(entry)
        shown_by = entry.get("verdict_by", "")
        rows[name in ARCHIVE].append(
            [f"[{name}]({name}.md)", _short(entry["paper"]), repeats, date, f"**{entry['verdict']}**", shown_by]
        )
    return (
        f"{NOTE}# Reproductions\n\nThese pages compare the papers' experiments with ours: one page for each recipe.\n\n"
        + "".join(f"* *{verdict}*: {meaning}.\n" for verdict, meaning in VERDICTS.items())
        + "\n"
        "No experiment on CIFAR has been run at the paper's size, because no GPU was available. Dates and numbers of "
        "repeats that were not written down at the time are *not recorded*. "
        "What was measured before these pages is in the docstrings of `recipes/`.\n\n"
        + table_of(HEADER, rows[False])
        + (
            f"\n## Archive\n\nExamples, checks of single theorems, and what waits for a GPU.\n\n{table_of(HEADER, old)}"
            if (old := rows[True])
            else ""
        )
        + "\nA recipe's run is kept by `python -m docs.generate --take runs/NAME`, which also writes its page again.\n"
    )


def _short(paper: str) -> str:
    return paper.split(" (")[0]


def _newest(entry: dict[str, Any]) -> dict[str, Any] | None:
    """Return the kept run at the paper's setting, else the quick one, else None."""
    runs: dict[str, dict[str, Any]] = entry["runs"]
    return next((runs[scale] for scale in ("full", "quick") if scale in runs), None)


def _facts(entry: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return date, commit, number of repeats and time of an experiment's newest figures."""
    run, tables = _newest(entry), entry["tables"]
    repeats = f"{entry['repeats']} {entry['repeats_of'] or ''}".strip() if entry.get("repeats") else UNKNOWN
    if run is not None:
        origin = run["origin"]
        commit = f"`{origin['commit'][:9]}`{origin['commit'][40:]}" if origin.get("commit") else UNKNOWN
        counts = {row["n"] for row in run["rows"] if row.get("n")}
        if counts:
            repeats = _counted(max(counts), entry.get("repeats_of") or "repeats")
        return origin.get("date") or UNKNOWN, commit, "1 run" if repeats == UNKNOWN else repeats, _time(run)
    if tables:
        first = tables[0]
        return first["date"], first["commit"], repeats, first["time"]
    return UNKNOWN, UNKNOWN, repeats, UNKNOWN


def _counted(number: int | str, plural: str) -> str:
    """Return a number, or several, with their noun, whose first word is a plural in -s."""
    first, _, rest = plural.partition(" ")
    return f"{number} {first.removesuffix('s') if str(number) == '1' else first} {rest}".rstrip()


def _time(run: dict[str, Any]) -> str:
    if "hardware" not in run:
        return f"{run['seconds']:,.0f} s on two busy CPU cores"
    cores, instructions = run["hardware"]["cores"], run["hardware"].get("instructions")
    place = run["hardware"]["gpu"] or f"a machine with {cores} CPU {'core' if cores == 1 else 'cores'}"
    place += f" ({instructions})" if instructions and not run["hardware"]["gpu"] else ""
    return f"{run['seconds']:,.0f} s of processor time, on {place}"


def experiment(name: str, entry: dict[str, Any]) -> str:
    """Return a recipe's page.

    Args:
        name: the recipe.
        entry: what is kept of it.
    """
    date, commit, repeats, time = _facts(entry)
    has_figures = bool(entry["tables"] or entry["runs"])
    facts = [
        ["Paper", entry["paper"]],
        ["Authors' program", entry["program"]],
        ["Ours", entry["ours"]],
        ["Command", f"`{entry['command']}`"],
        ["Paper's setting (`--full`)", entry["full"]],
        ["n", repeats if has_figures else "no figures"],
        ["Time", time],
        ["Date", date],
        ["Commit", commit],
    ]
    parts = [
        f"{NOTE}# {name}\n\n{description(name)}",
        f"Verdict: **{entry['verdict']}**. {entry['why']}"
        + (f"\n\nShown by: {entry['verdict_by']}" if entry.get("verdict_by") else ""),
        table_of(facts[0], facts[1:]).strip(),
    ]
    if entry["differences"]:
        parts.append("## Differences of the settings\n\n" + "\n".join(f"* {one}" for one in entry["differences"]))
    if has_figures:
        parts.append("## Figures")
    for scale in ("full", "quick"):
        if scale in entry["runs"]:
            parts += _run(name, entry, entry["runs"][scale])
    parts += [_measured(table) for table in entry["tables"]]
    parts.append(
        f"All settings and what else was tried are in `{source(name).relative_to(RECIPES.parent)}`. "
        f"The data of this page are in `recipes/expected/{name}.json`."
    )
    return "\n\n".join(parts) + "\n"


def _run(name: str, entry: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """Return what was kept of a recipe's run: its sentences, its rows with intervals, its picture and settings."""
    count = entry.get("repeats")
    parts = []
    if run.get("sentences"):
        parts.append("\n".join(f"> {text}\n>" for text in run["sentences"].values()).removesuffix("\n>"))
    has_paper = any(row.get("paper") is not None for row in run["rows"])
    rows = []
    for row in run["rows"]:
        repeats = row.get("n") or count
        cells = [row["method"], row["metric"], _number_with_interval(row["value"], row.get("error"), repeats)]
        if has_paper:
            paper, error = row.get("paper"), row.get("paper_error")
            cells.append("" if paper is None else f"{paper:.4g}" + ("" if error is None else f" ± {error:.2g}"))
        rows.append([str(cell) for cell in cells])
    header = ["method", "figure", "ours", *(["paper"] if has_paper else [])]
    parts.append(_folded(_caption(entry, run), table_of(header, rows), len(rows)))
    if "picture" in run:
        parts.append(f"![{name}: {run['picture'].replace('_', ' ')}](pictures/{name}.png)")
    if run.get("settings"):
        lines = [[key, f"`{json.dumps(value, ensure_ascii=False)}`"] for key, value in run["settings"].items()]
        parts.append(_indented(f"Settings of `{run['scale']}`", table_of(["setting", "value"], lines)))
    if run.get("data"):
        lines = [[key, f"`{value}`"] for key, value in run["data"].items()]
        parts.append(_indented("Checksums of the data", table_of(["data", "SHA-256, first 16 digits"], lines)))
    return parts


def _caption(entry: dict[str, Any], run: dict[str, Any]) -> str:
    counts = sorted({row["n"] for row in run["rows"] if row.get("n")})
    count = (", ".join(map(str, counts)) if counts else None) or entry.get("repeats")
    of = f"n = {_counted(count, entry.get('repeats_of') or 'repeats')}" if count else "one run"
    interval = _meaning(counts or ([count] if isinstance(count, int) else [])) if count else ""
    if "stage" in run:
        interval = f", on the {run['stage']} data; the number after ± is the standard deviation over the samples"
    return f"Setting `{run['scale']}`, seed {run['seed']}, {of}{interval}."


def _meaning(counts: Sequence[int]) -> str:
    """Return what a table with these numbers of repeats shows of their spread."""
    few = {2: "of two repeats both values", 3: "of three repeats their mean"}
    parts = (
        ["in brackets the 95 % interval of the mean, by Student's t"] if max(counts, default=FEWEST) >= FEWEST else []
    )
    return "".join(f"; {part}" for part in [*parts, *(few[n] for n in sorted({*counts}) if n in few)])


def _folded(caption: str, table: str, rows: int) -> str:
    """Return a table with its caption, folded if it is long."""
    if rows <= LONG_TABLE:
        return f"{caption}\n\n{table}".rstrip()
    return f"{caption}\n\n{_indented(f'All {rows} rows', table)}"


def _indented(title: str, table: str) -> str:
    body = "".join(f"    {line}\n" for line in table.splitlines())
    return f'??? note "{title}"\n\n{body}'.rstrip()


def _measured(table: dict[str, Any]) -> str:
    count = table["n"] if isinstance(table["n"], int) else None
    spread = table["error"] == "standard deviation"
    rows = [[_cell(cell, count, spread) for cell in row] for row in table["rows"]]
    n = f"n = {table['n']} {table['of']}".strip() if table["n"] else f"n {UNKNOWN}"
    has_errors = any(isinstance(cell, list) for row in table["rows"] for cell in row)
    kind = _meaning([count] if count else []) if has_errors else f"; errors: {table['error']}"
    known = f"Setting `{table['setting']}`, {n}{kind}. Date: {table['date']}. Time: {table['time']}."
    caption = f"{table['caption']}. {known}"
    return f"{caption}\n\n{table_of(table['header'], rows)}".rstrip()


def _cell(cell: Any, count: int | None, spread: bool) -> str:
    if isinstance(cell, list):
        value, error = cell
        return _number_with_interval(value, error / math.sqrt(count) if spread and count else error, count)
    return "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _number_with_interval(value: float | None, error: float | None, count: int | None) -> str:
    """Return a number with the 95 % interval of a mean over repeats, or ± its standard error if n is not known.

    Fewer than four repeats have no interval worth the name: of two their values are shown, of three the mean.
    """
    if value is None:
        return ""
    if error is None or not math.isfinite(error):
        return f"{value:.4g}"
    if error <= ROUNDING * abs(value):
        return f"{value:.6g}"
    if not count or count < 2:
        return f"{value:.4g} ± {error:.2g}"
    if count == 2:  # the standard error is half their distance
        return f"{value - error:.4g}, {value + error:.4g}"
    if count < FEWEST:
        return f"{value:.4g}"
    half = float(half_width(error, count))
    digits = max(0, 1 - math.floor(math.log10(half)))
    return f"{value:.{digits}f} [{value - half:.{digits}f}, {value + half:.{digits}f}]"


def table_of(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(map(_escape, line)) + " |" for line in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join(lines) + "\n"


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")
