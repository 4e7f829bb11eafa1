"""Figures that hand-written pages quote come from files: else they grow old beside new measurements."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.markdown import FENCE
from tests.support.paths import REPOSITORY

PAGES = [
    REPOSITORY / "README.md",
    *sorted((REPOSITORY / "docs" / "start").glob("*.md")),
    *(REPOSITORY / "docs" / name for name in ("choose.md", "validation.md", "howto/decisions.md", "howto/chains.md")),
]
FIGURE = re.compile(r"(?<![\w.,/-])(?:\d[\d,]*\.\d+(?: ?%)?|\d+ ?%)")
BLOCK = re.compile(r"<!-- from (\S+) -->.*?<!-- end -->", re.DOTALL)
SOURCES = re.compile(r"<!-- figures of ([^>]*?) -->")
SETTING = re.compile(
    r"(Python|torch|TensorBoard|at level|ε =|η =|times|below η =|a time of|every) [\d.]+( to [\d.]+)?"
    r"|9[059] ?%|\d+\.\d+ seconds"
)
"""What was set and not measured: versions, levels of intervals, steps."""
DERIVED = {
    "README.md": {"0.005"},  # a limit of `recipes/equal_cost/limits.py`
    "docs/start/install.md": {"0.3 %"},  # one of 359 images, in percent
    "docs/howto/decisions.md": {"0.14", "0.99"},  # 1.96·√(0.9·0.1/18); a level
}
"""Figures that follow by arithmetic, each with its formula."""


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def numbers(value: Any) -> Iterator[float]:
    """Yield the numbers in JSON or text."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers(part)
    elif isinstance(value, str):
        yield from (float(text.replace(",", "")) for text in re.findall(r"\d[\d,]*\.?\d*", value))
    elif isinstance(value, int | float):
        yield abs(float(value))


def in_file(path: Path) -> list[float]:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        return list(numbers(text))
    content = json.loads(text)
    runs = content.get("runs") if isinstance(content, dict) and "verdict" in content else None
    return list(numbers([run["rows"] for run in runs.values()] if runs else content))


def is_in(figure: str, known: list[float]) -> bool:
    """Return whether a figure is one of the numbers at its own digits, or a share in percent."""
    number = figure.rstrip(" %")
    value, half = float(number.replace(",", "")), 0.5001 * 10.0 ** -len(number.partition(".")[2])
    scales = (1, 100) if figure.endswith("%") else (1,)
    return any(abs(scale * one - value) <= half for one in known for scale in scales)


def without_source(text: str, derived: set[str]) -> list[str]:
    """Return the figures of a page's prose that no source has.

    Sources are the files of the page's `figures of` comments, its generated blocks, the recipes that a paragraph names
    in backticks, and a test that it names.
    """
    of_page = [name for names in SOURCES.findall(text) for name in names.split(", ")] + BLOCK.findall(text)
    known = [number for name in of_page for number in in_file(REPOSITORY / name)]
    lacking = []
    for paragraph in re.split(r"\n\s*\n|\n(?=[*|] )", FENCE.sub("", BLOCK.sub("", text))):
        code = re.findall(r"`([^`]*)`", paragraph)
        if any("tests/" in part for part in code):
            continue  # the test asserts it
        recipes = {word for part in code for word in re.findall(r"\w+", part)}
        own = [
            n for r in recipes if (file := REPOSITORY / f"recipes/expected/{r}.json").exists() for n in in_file(file)
        ]
        prose = re.sub(r"\]\([^)]*\)|`[^`]*`|\$[^$]*\$", "", paragraph)
        for figure in FIGURE.findall(SETTING.sub("", prose)):
            if figure not in derived and not is_in(figure, known + own):
                lacking.append(f"{figure}: {' '.join(prose.split())[:80]}")
    return lacking


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_quoted_figures_have_a_source(path: Path) -> None:
    assert without_source(path.read_text(encoding="utf-8"), DERIVED.get(name_of(path), set())) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("CSGLD finds 8.9 modes (`nine_modes`).", 0),
        ("CSGLD finds 9.1 modes (`nine_modes`).", 1),
        ("It takes 1.1 GB.\n\n<!-- figures of docs/measured/install.json -->", 0),
        ("It takes 1.2 GB, and Python 3.10.\n\n<!-- figures of docs/measured/install.json -->", 1),
        ("An interval of 95 % of something that has 87 % of it.", 1),
    ],
)
def test_the_check_finds_a_figure_without_a_source(text: str, found: int) -> None:
    assert len(without_source(text, set())) == found
