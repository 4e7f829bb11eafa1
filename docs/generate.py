"""Pages of reproductions and benchmarks, from `recipes/expected/` and `docs/measured/`: `python -m docs.generate`.

In the other pages it fills what stands between `<!-- from FILE -->` and `<!-- end -->`: the table of a file of rows, or
the text of an output.

`python -m docs.generate --take RUN` first keeps the results and a picture of a recipe's run, from its folder's files.
`--check` writes nothing and fails if a page differs from what would be written.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_sgmcmc.recipes.shared.expected import keep, kept
from lightning_sgmcmc.recipes.shared.figures import half_width
from lightning_sgmcmc.recipes.shared.pages import pages as pages_of_recipes
from lightning_sgmcmc.recipes.shared.pages import table_of

DOCS = Path(__file__).parent
MEASURED, PAGES = DOCS / "measured", DOCS / "reproductions"
PICTURE_WIDTH = 1400
BLOCK = re.compile(r"(<!-- from (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""A part of a hand-written page that comes from a file, named from the repository's root."""
NOTE = "<!-- Written by `python -m docs.generate` from docs/measured/: change the data, not this page. -->\n\n"


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--take", metavar="RUN", type=Path, nargs="+", default=[], help="folders of recipes' runs")
    parser.add_argument(
        "--picture", metavar="NAME", help="the run's picture; without it that of the kept run, or the first"
    )
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
        name: stem of the picture to keep; None keeps that of an earlier kept run, or the first by name.
    """
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    earlier = kept(results["recipe"])["runs"].values()
    name = name or next((own["picture"] for own in earlier if own.get("picture")), None)
    chosen = run / f"{name}.png" if name else next(iter(sorted(run.glob("*.png"))), None)
    if chosen is not None and not chosen.exists():
        chosen = None
    keep(results, None if chosen is None else chosen.stem)
    if chosen is not None:
        _shrink(chosen, PAGES / "pictures" / f"{results['recipe']}.png")


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
    benchmarks = [_read(path) for path in sorted((MEASURED / "benchmarks").glob("*.json"))]
    written = pages_of_recipes(PAGES) | {DOCS / "benchmarks.md": _benchmarks(benchmarks)}
    hand_written = [path for path in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))] if path not in written]
    texts = {path: path.read_text(encoding="utf-8") for path in hand_written}
    return written | {path: BLOCK.sub(_filled, text) for path, text in texts.items() if BLOCK.search(text)}


def _filled(found: re.Match[str]) -> str:
    """Return a block with what its file holds."""
    path = DOCS.parent / found[2]
    if path.suffix == ".json":
        content = _read(path)
        if "measures" in content:
            content = _measures(content)
        elif "recipe" in content:
            content = _of_recipe(content)
        return f"{found[1]}\n{table_of(content['header'], content['rows'])}\n{found[3]}"
    return f"{found[1]}\n```text\n{path.read_text(encoding='utf-8')}```\n\n{found[3]}"


def _of_recipe(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the table of one metric of a kept run: a row for each method, a column for each data set.

    The lowest figure of a column is bold; the methods `apart` are left out of that comparison.
    """
    rows = kept(wanted["recipe"])["runs"][wanted["scale"]]["rows"]
    known = {row["method"]: row["value"] for row in rows if row["metric"] == wanted["metric"]}
    compared = [method for *_, method in wanted["methods"] if method not in wanted["apart"]]
    best = {data: min(known[f"{data}: {method}"] for method in compared) for data in wanted["data"]}
    table = []
    for label, how, method in wanted["methods"]:
        cells = []
        for data in wanted["data"]:
            value = known[f"{data}: {method}"]
            is_best = method in compared and f"{value:.3f}" == f"{best[data]:.3f}"
            text = f"{value:.3f}".replace("-", "−")
            cells.append(f"**{text}**" if is_best else text)
        table.append([label, how, *cells])
    return {"header": ["method", "callback", *wanted["data"]], "rows": table}


def _measures(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return a table of a kept run with a row for each measure and a column for each method."""
    rows = kept(wanted["recipe"])["runs"][wanted["scale"]]["rows"]
    known = {(row["method"], row["metric"]): row for row in rows}
    table = []
    for label, problem, metric in wanted["measures"]:
        found = [known.get((f"{problem}: {method}", metric)) for method in wanted["methods"].values()]
        table.append([label, *("" if row is None else _with_interval(row) for row in found)])
    return {"header": ["measure", *wanted["methods"]], "rows": table}


def _with_interval(row: dict[str, Any]) -> str:
    """Return a mean with half of its 95 % interval, to two digits of that; without repeats, the value."""
    value, error = row["value"], row.get("error")
    if error is None:
        return f"{value:.4f}".replace("-", "−")
    half = float(half_width(error, row["n"]))
    digits = max(1 - math.floor(math.log10(half)), 0)
    return f"{value:.{digits}f} ± {half:.{digits}f}".replace("-", "−")


def _read(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict), path
    return content


# -- benchmarks -------------------------------------------------------------------------------------------------------


def _benchmarks(entries: Sequence[dict[str, Any]]) -> str:
    parts = [
        f"{NOTE}# Benchmarks\n\nThese are timings, sizes and rates of the library and of others, each with its "
        "command, date and number of repeats. All but those of the first part are of a machine with two CPU cores. "
        "Ratios compare; seconds belong to that machine. Quality at equal cost is on [another page](equal_cost.md)."
    ]
    for entry in entries:
        facts = [["Command", f"`{entry['command']}`"]]
        facts += [[name, entry[key]] for key, name in (("n", "n"), ("date", "Date"), ("commit", "Commit"))]
        section = f"## {entry['title']}\n\n{entry['text']}\n\n{table_of(facts[0], facts[1:])}"
        if entry["rows"]:
            rows = [["" if cell is None else str(cell) for cell in row] for row in entry["rows"]]
            section += f"\n{table_of(entry['header'], rows)}"
        parts.append(section.rstrip())
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
