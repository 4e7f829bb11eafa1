"""Read a Markdown file: its code blocks with their options, inline code, links, and the anchors of its headings."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^`\n]*)\n(?P<code>.*?)^(?P=indent)(?P=fence) *$", re.M | re.S
)
OPTION = re.compile(r'([\w-]+)="([^"]*)"')
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)")
HTML_LINK = re.compile(r'<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)="([^"]+)"')
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.M)


@dataclass(frozen=True)
class Block:
    """A code block.

    Args:
        path: its file.
        line: the number of its first line.
        language: the first word after the fence, "" if there is none.
        options: the rest, such as {"exec": "on"}.
        code: what is between the fences, without the fences' indentation.
    """

    path: Path
    line: int
    language: str
    options: dict[str, str]
    code: str


def code_blocks(path: Path) -> Iterator[Block]:
    """Return the fenced blocks of a file in order."""
    text = path.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        words = found["info"].split(maxsplit=1)
        options = dict(OPTION.findall(words[1])) if len(words) > 1 else {}
        line = text.count("\n", 0, found.start()) + 1
        yield Block(path, line, words[0] if words else "", options, textwrap.dedent(found["code"]))


def prose(path: Path) -> str:
    """Return a file without its fenced blocks."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def inline_code(path: Path) -> list[str]:
    """Return what stands between single backticks outside of blocks, in one line each."""
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(path))]


def links(path: Path) -> list[str]:
    """Return the targets of a file's links and pictures."""
    text = re.sub(r"(?<!`)`[^`]+`(?!`)", "", prose(path))
    return LINK.findall(text) + HTML_LINK.findall(text)


def anchors(path: Path) -> set[str]:
    """Return the anchors that a Markdown page's headings get."""
    found: dict[str, int] = {}
    for heading in HEADING.findall(prose(path)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = found.get(slug, 0)
        found[slug] = number + 1
        if number:
            found[f"{slug}-{number}"] = 1
    return set(found)
