"""Pages from the templates beside this file; whatever they are given is escaped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Cell:
    """A table cell, marked as "good" or "bad" if it is."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
        header: the columns' names.
        rows: text, numbers or `Cell`s; None is a dash.
        label: description of the table, for screen readers.
        groups: a second header above the first: names and the numbers of columns they span.
        note: a paragraph below the table.
        folded: what the folded table is called; "" shows it.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    label: str
    groups: Sequence[tuple[str, int]] = ()
    note: str = ""
    folded: str = ""

    def cells(self) -> list[list[Cell]]:
        """Return the rows with their numbers as text."""
        return [[value if isinstance(value, Cell) else Cell(number(value)) for value in row] for row in self.rows]


def render(template: str, **parts: Any) -> str:
    """Return the page of a template; a part that it lacks raises."""
    return _environment().get_template(template).render(parts)


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    folder = files("lightning_sgmcmc.report")
    found = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8")),
    )
    found.filters |= {"number": number, "anchor": lambda text: "".join(c if c.isalnum() else "-" for c in text.lower())}
    return found


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
