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
    path
    for path in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    if "<!-- Written by" not in path.read_text(encoding="utf-8")[:200] and "measured" not in path.parts
    if path.name != "equal_cost.md"
]
"""Those that a program does not write as a whole; recipe `equal_cost` writes its page."""
FIGURE = re.compile(r"(?<![\w.,/-])(?:\d[\d,]*)?(?:\.\d+(?: ?%)?|(?<=\d) ?%)(?!\d|\.\d)")
BLOCK = re.compile(r"<!-- from (\S+) -->.*?<!-- end -->", re.DOTALL)
SOURCES = re.compile(r"<!-- figures of ([^>]*?) -->")
SETTING = re.compile(
    r"(Python|torch|TensorBoard|blackjax|posteriors|torch-uncertainty|lightning-uq-box|devinterp|Deep-UQ|at level"
    r"|ε =|η =|times|below η =|a time of|every|section|Theorem) [\d.]+( to [\d.]+)?"
    r"|9[059] ?%|\d+\.\d+ seconds"
)
"""What was set and not measured: versions, levels of intervals, steps."""
DERIVED = {
    "README.md": {"0.005"},  # a limit of `recipes/equal_cost/limits.py`
    "docs/start/install.md": {"0.3 %"},  # one of 359 images, in percent
    "docs/howto/decisions.md": {"0.14", "0.99"},  # 1.96·√(0.9·0.1/18); a level
    "docs/how_long.md": {"99.8 %", "5 %", "7.5", "0.25"},  # 1 - e^(-2·3), e^-3; the plan above it; a setting
    "docs/health/index.md": {"0.02", "5 %", "0.3", "0.8"},  # a setting and limits; part of a quoted message
    "docs/health/warnings.md": {"0.73", "0.1", "0.002", "0.05"},  # σ(1); settings; a limit of `health/verdict.py`
    "docs/howto/automatic.md": {
        "0.025",
        "0.65",
        "0.3",
        "0.35",
        "0.06",
    },  # limits of `AutoSampling`, of tuners
    "docs/howto/command_line.md": {"5 %"},  # a tolerance
    "docs/howto/learning_coefficient.md": {"0.02", "1.1"},  # settings
    "docs/howto/posterior.md": {"0.3", "1.2"},  # GB of 33 and 179 megapixels
    "docs/howto/reports.md": {"2.13", "3.17"},  # versions
    "docs/howto/targets.md": {"0.1"},  # a setting
    "docs/migrate/index.md": {"0.3", "0.05"},  # a version; a setting
    "docs/migrate/torch.md": {"1.25", "0.08"},  # the closed form of with replacement; lr·steps over N·s²
    "docs/theory/discretisation.md": {"1.39", "0.05", "0.01"},  # a closed form; settings
    "docs/theory/energy.md": {"0.1"},  # a published setting
    "docs/theory/modes.md": {"782.25", "0.5", "99.9 %", "5 %", "0.75", "1.7", "2.9", "8.5"},  # settings
    "docs/theory/switching_diffusion.md": {"1.2"},  # a figure's number
}
"""Figures that follow by arithmetic or were set, each with where it is from."""


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def numbers(value: Any) -> Iterator[float]:
    """Yield the numbers in JSON or text."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers(part)
    elif isinstance(value, str):
        yield from (float(text.replace(",", "")) for text in re.findall(r"\.\d+|\d[\d,]*\.?\d*", value))
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
        ("It loses .016 nats with version 1.7.1.", 1),
        ("It loses .0016 nats.\n\n<!-- figures of docs/measured/window_weights.json -->", 0),
    ],
)
def test_the_check_finds_a_figure_without_a_source(text: str, found: int) -> None:
    assert len(without_source(text, set())) == found
