"""HTML building blocks of a report; each escapes its text."""

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any, TypeGuard


@dataclass(frozen=True)
class Cell:
    """A table cell marked as good or bad."""

    text: str
    kind: str


def page(title: str, subtitle: str, sections: Iterable[tuple[str, str]], unfolded: int | None = None) -> str:
    """Return a self-contained page: no script, no network.

    Args:
        title, subtitle: text.
        sections: heading (text) and contents (HTML) of each; those without contents are omitted.
        unfolded: number of sections, counted with the omitted ones, that are shown; the others are folded. None shows
            all.
    """
    parts = list(sections)
    shown = len(parts) if unfolded is None else unfolded
    links = "".join(f'<li><a href="#{_anchor(heading)}">{escape(heading)}</a></li>' for heading, of in parts if of)
    # The folded sections' summaries are a table of contents.
    contents = f'<nav aria-label="Sections"><ul>{links}</ul></nav>' if unfolded is None else ""
    body = "".join(_section(heading, of, index >= shown) for index, (heading, of) in enumerate(parts) if of)
    style = files("lightning_sgmcmc.report").joinpath("report.css").read_text()
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p>{contents}</header>
<main>{body}</main>
</body>
</html>
"""


def _section(heading: str, content: str, is_folded: bool) -> str:
    if is_folded:  # a link to an element within a folded one unfolds it
        summary = f"<summary><h2>{escape(heading)}</h2></summary>"
        return f'<details class="part">{summary}<section id="{_anchor(heading)}">{content}</section></details>'
    return f'<section id="{_anchor(heading)}"><h2>{escape(heading)}</h2>{content}</section>'


def table(
    header: Sequence[str], rows: Iterable[Sequence[Any]], label: str, groups: Sequence[tuple[str, int]] = ()
) -> str:
    """Return a table that scrolls within its box if it is wide; the first column names the row.

    Args:
        header: the columns' names.
        rows: text, numbers or `Cell`s; None is a dash.
        label: description of the table, for screen readers.
        groups: a second header above the first: names and the numbers of columns they span.
    """
    upper = "".join(f'<th scope="colgroup" colspan="{span}">{escape(name)}</th>' for name, span in groups)
    upper = f"<tr>{upper}</tr>" if groups else ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}"><table>'
        f"<caption>{escape(label)}</caption><thead>{upper}<tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cells(row: Sequence[Any]) -> str:
    first, *others = row
    cells = [f'<th scope="row">{escape(number(first))}</th>']
    for value in others:
        kind = f' class="{value.kind}"' if isinstance(value, Cell) else ""
        cells.append(f"<td{kind}>{escape(value.text if isinstance(value, Cell) else number(value))}</td>")
    return "".join(cells)


def facts(pairs: Iterable[tuple[str, Any]]) -> str:
    """Return a list of names and values, omitting those that are None."""
    texts = [(name, number(value)) for name, value in pairs if value is not None]
    items = "".join(
        f"<div{' class=wide' * (len(text) > 18)}><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"
        for name, text in texts
    )
    return f'<dl class="facts">{items}</dl>' if items else ""


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of text."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def bullets(texts: Iterable[str]) -> str:
    """Return a list of sentences, or "" if there are none."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def folded(summary: str, content: str, is_open: bool = False) -> str:
    """Return contents (HTML) that unfold on a click on their summary (text)."""
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{content}</details>"


def preformatted(text: str) -> str:
    """Return preformatted text."""
    return f'<pre tabindex="0">{escape(text)}</pre>'


def picture(png: bytes, caption: str, alternative: str) -> str:
    """Return an embedded picture, with a caption and an alternative text."""
    data = base64.b64encode(png).decode()
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{escape(alternative)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def number(value: Any) -> str:
    """Return a value as text: numbers with the digits they need, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 100:
        return f"{value:.4f}"
    return f"{value:,.1f}" if 100 <= abs(value) < 1e9 else f"{value:.3e}"


def is_finite(value: Any) -> TypeGuard[int | float]:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _anchor(heading: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in heading.lower())
