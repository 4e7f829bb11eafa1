"""Pages of reproductions and benchmarks from `docs/measured/`: `python -m docs.generate`, in a clone.

`python -m docs.generate --take RUN` first keeps the results and a picture of a recipe's run, from its folder's files.
`--check` writes nothing and fails if a page differs from what would be written.
"""

import argparse
import ast
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_sgmcmc.figures.errors import half_width

DOCS = Path(__file__).parent
MEASURED, PAGES = DOCS / "measured", DOCS / "reproductions"
RECIPES = DOCS.parent / "recipes"
PICTURE_WIDTH = 1400
UNKNOWN = "not recorded"
LONG_TABLE = 30
"""Longer tables are folded."""
NOTE = "<!-- Written by `python -m docs.generate` from docs/measured/: change the data, not this page. -->\n\n"


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--take", metavar="RUN", type=Path, nargs="+", default=[], help="folders of recipes' runs")
    parser.add_argument("--picture", metavar="NAME", help="the run's picture; without it the first one by name")
    parser.add_argument("--check", action="store_true", help="fail if a page is out of date")
    options = parser.parse_args(arguments)
    for run in options.take:
        take(run, options.picture)
    written = pages()
    stale = [path for path, text in written.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if options.check:
        for path in stale:
            print(f"{path.relative_to(DOCS.parent)} is out of date: run `python -m docs.generate`")
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(written[path], encoding="utf-8")
    print(f"{len(stale)} of {len(written)} pages written")
    return 0


def take(run: Path, name: str | None = None) -> None:
    """Keep a run's results and picture.

    Args:
        run: the run's folder.
        name: stem of the picture to keep; None keeps the first by name.
    """
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    recipe = results["recipe"]
    path = MEASURED / "reproductions" / f"{recipe}.json"
    entry = json.loads(path.read_text(encoding="utf-8"))
    origin = {key: value for key, value in results.get("origin", {}).items() if key != "command"}
    kept = {key: results[key] for key in ("scale", "seed", "rows", "seconds", "stage", "sentences") if key in results}
    entry["run"] = kept | {"origin": origin}
    chosen = run / f"{name}.png" if name else next(iter(sorted(run.glob("*.png"))), None)
    if chosen is not None and chosen.exists():
        entry["run"]["picture"] = chosen.stem
        _shrink(chosen, PAGES / "pictures" / f"{recipe}.png")
    path.write_text(json.dumps(entry, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _shrink(source: Path, path: Path) -> None:
    """Write a picture with 128 colours, small enough for a repository."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    with Image.open(source) as image:
        small = image.convert("RGB")
        if small.width > PICTURE_WIDTH:
            small = small.resize((PICTURE_WIDTH, round(small.height * PICTURE_WIDTH / small.width)))
        small.quantize(128).save(path, optimize=True)


def pages() -> dict[Path, str]:
    """Return the text of each page."""
    entries = {path.stem: _read(path) for path in sorted((MEASURED / "reproductions").glob("*.json"))}
    found = {PAGES / f"{name}.md": _experiment(name, entry) for name, entry in entries.items()}
    benchmarks = [_read(path) for path in sorted((MEASURED / "benchmarks").glob("*.json"))]
    return found | {PAGES / "index.md": _matrix(entries), DOCS / "benchmarks" / "index.md": _benchmarks(benchmarks)}


def _read(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict), path
    return content


# -- reproductions ----------------------------------------------------------------------------------------------------


def _matrix(entries: Mapping[str, dict[str, Any]]) -> str:
    rows = []
    for name, entry in entries.items():
        date, _, repeats, _ = _facts(entry)
        rows.append([f"[{name}]({name}.md)", _short(entry["paper"]), repeats, date, f"**{entry['verdict']}**"])
    return (
        f"{NOTE}# Reproductions\n\nThese pages compare the papers' experiments with ours: one page for each recipe.\n\n"
        "* *reproduced*: the paper's order or its bound holds, beyond our errors where the paper has numbers.\n"
        "* *in part*: some of the paper's claims hold; the page says which do not.\n"
        "* *another order*: our figures contradict the paper's, and the page says why as far as we know.\n"
        "* *not at the paper's size*: only a small setting was run, which cannot decide.\n"
        "* *no paper*: our own experiment or an example.\n\n"
        "No experiment on CIFAR has been run at the paper's size, because no GPU was available. Dates and numbers of "
        "repeats that were not written down at the time are *not recorded*. "
        "What was measured before these pages is in the docstrings of `recipes/`.\n\n"
        + _table(["experiment", "paper", "n", "date", "verdict"], rows)
        + "\nA recipe's run is kept by `python -m docs.generate --take runs/NAME`, which also writes its page again.\n"
    )


def _short(paper: str) -> str:
    return paper.split(" (")[0]


def _facts(entry: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return date, commit, number of repeats and time of an experiment's newest figures."""
    run, tables = entry.get("run"), entry["tables"]
    repeats = f"{entry['repeats']} {entry['repeats_of'] or ''}".strip() if entry.get("repeats") else UNKNOWN
    if run is not None:
        origin = run["origin"]
        commit = f"`{origin['commit'][:9]}`{origin['commit'][40:]}" if origin.get("commit") else UNKNOWN
        time = f"{run['seconds']:,.0f} s on two busy CPU cores"
        return origin.get("date") or UNKNOWN, commit, repeats if entry.get("repeats") else "1 run", time
    if tables:
        first = tables[0]
        return first["date"], first["commit"], repeats, first["time"]
    return UNKNOWN, UNKNOWN, repeats, UNKNOWN


def _experiment(name: str, entry: dict[str, Any]) -> str:
    date, commit, repeats, time = _facts(entry)
    has_figures = bool(entry["tables"]) or "run" in entry
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
        f"{NOTE}# {name}\n\n{_description(name)}",
        f"Verdict: **{entry['verdict']}**. {entry['why']}",
        _table(["", ""], facts).strip(),
    ]
    if entry["differences"]:
        parts.append("## Differences of the settings\n\n" + "\n".join(f"* {one}" for one in entry["differences"]))
    if has_figures:
        parts.append("## Figures")
    if "run" in entry:
        parts += _run(name, entry)
    parts += [_measured(table) for table in entry["tables"]]
    parts.append(
        f"All settings and what else was tried are in `{_source(name).relative_to(DOCS.parent)}`. "
        f"The data of this page are in `docs/measured/reproductions/{name}.json`."
    )
    return "\n\n".join(parts) + "\n"


def _source(name: str) -> Path:
    paths = (RECIPES / f"{name}.py", RECIPES / f"{name}.yaml", RECIPES / name / "__init__.py")
    return next(path for path in paths if path.exists())


def _description(name: str) -> str:
    """Return the first line of a recipe."""
    source = _source(name)
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".yaml":
        return text.splitlines()[0].removeprefix("# ")
    return (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]


def _run(name: str, entry: dict[str, Any]) -> list[str]:
    """Return what was kept of a recipe's run: its sentences, its rows with intervals, and its picture."""
    run, count = entry["run"], entry.get("repeats")
    parts = []
    if run.get("sentences"):
        parts.append("\n".join(f"> {text}\n>" for text in run["sentences"].values()).removesuffix("\n>"))
    has_paper = any(row.get("paper") is not None for row in run["rows"])
    rows = []
    for row in run["rows"]:
        cells = [row["method"], row["metric"], _number_with_interval(row["value"], row.get("error"), count)]
        if has_paper:
            paper, error = row.get("paper"), row.get("paper_error")
            cells.append("" if paper is None else f"{paper:.4g}" + ("" if error is None else f" ± {error:.2g}"))
        rows.append([str(cell) for cell in cells])
    of = f"n = {count} {entry['repeats_of']}" if count else "one run"
    interval = "; in brackets the 95 % interval of the mean, by Student's t" if count else ""
    if "stage" in run:
        interval = f", on the {run['stage']} data; the number after ± is the standard deviation over the samples"
    caption = f"Setting `{run['scale']}`, seed {run['seed']}, {of}{interval}."
    table = _table(["method", "figure", "ours", *(["paper"] if has_paper else [])], rows)
    if len(rows) > LONG_TABLE:
        body = "".join(f"    {line}\n" for line in table.splitlines())
        parts.append(f'{caption}\n\n??? note "All {len(rows)} rows"\n\n{body}'.rstrip())
    else:
        parts.append(f"{caption}\n\n{table}".rstrip())
    if "picture" in run:
        parts.append(f"![{name}: {run['picture'].replace('_', ' ')}](pictures/{name}.png)")
    return parts


def _measured(table: dict[str, Any]) -> str:
    count = table["n"] if isinstance(table["n"], int) else None
    spread = table["error"] == "standard deviation"
    rows = [[_cell(cell, count, spread) for cell in row] for row in table["rows"]]
    n = f"n = {table['n']} {table['of']}".strip() if table["n"] else f"n {UNKNOWN}"
    has_errors = any(isinstance(cell, list) for row in table["rows"] for cell in row)
    kind = "in brackets the 95 % interval of the mean, by Student's t" if has_errors else f"errors: {table['error']}"
    known = f"Setting `{table['setting']}`, {n}; {kind}. Date: {table['date']}. Time: {table['time']}."
    caption = f"{table['caption']}. {known}"
    return f"{caption}\n\n{_table(table['header'], rows)}".rstrip()


def _cell(cell: Any, count: int | None, spread: bool) -> str:
    if isinstance(cell, list):
        value, error = cell
        return _number_with_interval(value, error / math.sqrt(count) if spread and count else error, count)
    return "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _number_with_interval(value: float | None, error: float | None, count: int | None) -> str:
    """Return a number with the 95 % interval of a mean over repeats, or ± its standard error if n is not known."""
    if value is None:
        return ""
    if error is None or not math.isfinite(error):
        return f"{value:.4g}"
    if not count or count < 2:
        return f"{value:.4g} ± {error:.2g}"
    half = float(half_width(error, count))
    digits = max(0, 1 - math.floor(math.log10(half))) if half > 0 else 3
    return f"{value:.{digits}f} [{value - half:.{digits}f}, {value + half:.{digits}f}]"


# -- benchmarks -------------------------------------------------------------------------------------------------------


def _benchmarks(entries: Sequence[dict[str, Any]]) -> str:
    parts = [
        f"{NOTE}# Benchmarks\n\nThese are timings, sizes and rates of the library, each with its command, date and "
        "number of repeats. All are of a machine with two CPU cores. Ratios compare; seconds belong to that machine."
    ]
    for entry in entries:
        facts = [["Command", f"`{entry['command']}`"]]
        facts += [[name, entry[key]] for key, name in (("n", "n"), ("date", "Date"), ("commit", "Commit"))]
        section = f"## {entry['title']}\n\n{entry['text']}\n\n{_table(['', ''], facts)}"
        if entry["rows"]:
            rows = [["" if cell is None else str(cell) for cell in row] for row in entry["rows"]]
            section += f"\n{_table(entry['header'], rows)}"
        parts.append(section.rstrip())
    return "\n\n".join(parts) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (header, *([_escape(cell) for cell in row] for row in rows))]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join(lines) + "\n"


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
