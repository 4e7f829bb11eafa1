"""One voice: the field's terms in place of this project's own, and short sentences."""

import re
from pathlib import Path

import pytest

from tests.docs.markdown import prose
from tests.support.paths import REPOSITORY

BANNED = {
    r"variance over the (posterior|truth)'s": "posterior variance ratio",
    r"\bnats of heat\b|\btakes? up( more)? heat\b|\bmini-batch(es)?'? heat\b": "thermal energy, or excess variance",
    r"\bcannot heat\b|\bheats the chain\b|\bhot target\b|\btarget is (too|so) hot\b": "inflate the variance",
    r"(?<!\d )\bdata passes\b": "epochs",
    r"\bare worth \d|, worth \d": "effective sample size",
    r"\bis the run right\b|\b(right|wrong) run\b|\bright step\b|\bnoisy steps?\b": "correct, stable, with noise",
    r"\b[Cc]ures?\b": "fix",
    r"\bno fault\b": "not a problem",
    r"\b(inputs|data) from elsewhere\b|\binputs from other sources\b": "out-of-distribution inputs",
    r"\bunsure\b|\btoo sure\b": "uncertain, overconfident",
    r"\bbeside (other libraries|blackjax|plain|guessing|the truth)\b": "compared with",
    r"\bin the same contract\b|\bleaf [A-D]\b": "with the same API, option",
    r"\bthe way in\b": "the transient",
    r"\bis no (log likelihood|cure|way to|sampler)\b": "is not a …",
    r"\b(sentence|message) has the\b": "the message gives",
    r"\brounds otherwise\b|\bdraws follow\b": "rounds differently",
    r"\bsays of itself\b|\bcalled by its name\b": "reports, is labelled",
    r"\b(is|are|was) refused\b": "raises an error",
    r"\bbrings nothing\b|\b[Ww]hat it brought\b": "gives no gain, results",
    r"\bof 3 wanted\b|\brelaxation times of 3\b": "of 3 required relaxation times",
    r"\bper datum\b|\ba datum\b": "per example",
    r"\bnothing is wrong\b|\bnot certainly different\b|\brarely over\b": "what was found, with its interval",
}
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
SOURCES = [
    path
    for folder in ("lightning_sgmcmc", "callbacks", "datamodules", "sgmcmc", "recipes", "docs")
    for path in sorted((REPOSITORY / folder).rglob("*.*"))
    if path.suffix in (".py", ".yaml", ".html", ".css")
]
"""What a run prints and reports, docstrings, recipes and tutorials."""
LONGEST = 25
"""Words of a sentence."""


def found_in(text: str) -> list[str]:
    """Return the banned phrases in a text, each with what to write."""
    plain = " ".join(text.split())
    return [f"{match[0]!r}: {instead}" for phrase, instead in BANNED.items() for match in re.finditer(phrase, plain)]


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=name_of)
def test_no_banned_phrase(path: Path) -> None:
    assert found_in(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text", ["the target takes up 9 nats of heat", "80 samples, worth 55.8", "nothing is\nwrong", "the cure"]
)
def test_the_lint_finds(text: str) -> None:
    assert found_in(text) != []


def sentences(path: Path) -> list[str]:
    """Return the sentences of a page: of its paragraphs, list items and cells; links, code and numbers are one word."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", prose(path))
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\$\$.*?\$\$", "\n\n", text, flags=re.DOTALL))
    text = re.sub(r"\$[^$]*\$", "formula", text)
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[*\-|#>]|\d+\.) )|\|", text)
    return [one for part in parts for one in re.split(r"(?<=[.!?:;])\s", " ".join(part.split())) if one]


def is_generated(path: Path) -> bool:
    """Return whether a program writes the whole page."""
    return "<!-- Written by" in path.read_text(encoding="utf-8")[:200] or path.name in ("equal_cost.md", "gpu.md")


@pytest.mark.parametrize("path", [path for path in PAGES if not is_generated(path)], ids=name_of)
def test_sentences_are_short(path: Path) -> None:
    long = [one for one in sentences(path) if len(re.findall(r"[\w'’=/.-]*\w[\w'’=/.-]*", one)) > LONGEST]
    assert long == []
