"""Plain data: dataclasses to and from the values of JSON, by their annotations, and tables of Markdown.

`as_plain` writes a dataclass as a dictionary of its fields. A class attribute `WRITTEN` names others, properties too,
in their order; `IF_SET` names those that are left out where they have their default. `from_plain` reads it again.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Part = TypeVar("Part")

WORDS: dict[Any, str] = {bool: "flag", int: "integer", float: "number", str: "text"}
LONGEST = 80
"""Characters of a wrong value in a message."""


class Unfit(ValueError):
    """Raised for a single value that is not of its annotation."""


def finite_or_none(value: Any) -> Any:
    """Return a value as JSON has it: None in place of a number that is NaN or infinite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_plain(value: Any, finite: bool = False) -> Any:
    """Return dictionaries, lists, texts and numbers for dataclasses, mappings, sequences, enums and tensors."""
    if is_dataclass(value) and not isinstance(value, type):
        defaults = {part.name: part.default for part in fields(value)}
        names = getattr(value, "WRITTEN", defaults)
        left_out = [name for name in getattr(value, "IF_SET", ()) if getattr(value, name) == defaults[name]]
        return {name: as_plain(getattr(value, name), finite) for name in names if name not in left_out}
    if isinstance(value, Mapping):
        return {name: as_plain(part, finite) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(part, finite) for part in value]
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "tolist"):
        return as_plain(value.tolist(), finite)
    return finite_or_none(value) if finite else value


def from_plain(kind: Any, content: Any, place: str = "it", lenient: bool = False) -> Any:
    """Return a value of an annotation from the plain values of a file, which may come from anywhere.

    Missing entries have their defaults, unknown ones are ignored, and None is NaN where a number is expected. If
    lenient, a single value of the wrong kind or a number that is not finite counts as missing.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if content is None else from_plain(inner[0], content, place, lenient)
    if kind is Any:
        return content
    if is_dataclass(kind):
        return _dataclass(kind, content, place, lenient)
    if origin in (list, tuple):
        return _sequence(kind, content, place, lenient)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(content, Mapping):
            raise _wrong(ValueError, kind, content, place)
        found = {}
        for name, part in content.items():
            try:
                found[name] = from_plain(inner[1], part, _inside(place, name), lenient)
            except Unfit:
                if not lenient:
                    raise _wrong(ValueError, kind, content, place) from None
        return found
    return _single(kind, content, place, lenient)


def check_known(kind: Any, content: Mapping[str, Any], place: str = "it") -> None:
    """Raise ValueError if the plain values of a dataclass have an entry that it lacks."""
    unknown = next((name for name in content if name not in _parts(kind)), None)
    if unknown is not None:
        raise ValueError(f"{place} has an unknown entry {str(unknown)[:LONGEST]!r}")


def _dataclass(kind: Any, content: Any, place: str, lenient: bool) -> Any:
    if not isinstance(content, Mapping):
        raise _wrong(ValueError, kind, content, place)
    found = {}
    for name, (part, annotation) in _parts(kind).items():
        has_default = part.default is not MISSING or part.default_factory is not MISSING
        if name not in content and not has_default:
            raise ValueError(f"{place} should be a dictionary with {name}, and has none")
        if name not in content or (lenient and content[name] is None and has_default):
            continue
        try:
            found[name] = from_plain(annotation, content[name], _inside(place, name), lenient)
        except Unfit:
            if not (lenient and has_default):
                raise
    return kind(**found)


def _sequence(kind: Any, content: Any, place: str, lenient: bool) -> Any:
    """Return a list, a tuple of any length, or one of a certain length, which is a single value."""
    origin, inner = get_origin(kind), get_args(kind)
    is_open = origin is list or inner[1:] == (...,)
    error = ValueError if is_open else Unfit
    if not isinstance(content, list | tuple) or not (is_open or len(content) == len(inner)):
        raise _wrong(error, kind, content, place)
    if origin is tuple and inner[0] is Any:
        return _as_tuple(content)
    kinds = [inner[0]] * len(content) if is_open else inner
    try:
        return origin(from_plain(one, part, place, lenient) for one, part in zip(kinds, content, strict=True))
    except Unfit:
        raise _wrong(error, kind, content, place) from None


def _as_tuple(content: Any) -> Any:
    """Return nested lists as tuples, such as a frame's names of columns."""
    return tuple(map(_as_tuple, content)) if isinstance(content, list | tuple) else content


def _single(kind: Any, value: Any, place: str, lenient: bool) -> Any:
    """Return a number, a text or a flag, one of several words, or a member of an enum."""
    if kind is float and value is None and not lenient:
        return math.nan
    if kind in (int, float):
        if _is_number(kind, value, lenient):
            return int(value) if kind is int else value
    elif get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
    elif issubclass(kind, Enum):
        with suppress(ValueError):
            return kind(value)
    elif isinstance(value, kind):
        return value
    raise _wrong(Unfit, kind, value, place)


def _is_number(kind: type, value: Any, lenient: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(value, int):
        return abs(value) < 2**63
    return math.isfinite(value) if lenient else kind is float


@cache
def _parts(kind: Any) -> dict[str, tuple[Field[Any], Any]]:
    """Return the fields of a dataclass with their annotations."""
    hints = get_type_hints(kind)
    return {part.name: (part, hints[part.name]) for part in fields(kind)}


def _inside(place: str, name: Any) -> str:
    return f"its {str(name)[:LONGEST]}" if place == "it" else f"{place}.{str(name)[:LONGEST]}"


def _wrong(error: type[ValueError], kind: Any, value: Any, place: str) -> ValueError:
    return error(f"{place} should be {_called(kind)}, got {str(value)[:LONGEST]!r}")


def _called(kind: Any) -> str:
    """Return what a value of an annotation is called."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin in (Union, UnionType):
        return f"{_called(inner[0])} or null"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        of = next((part for part in get_args(inner[1]) if part in WORDS), inner[1])
        return f"{WORDS.get(of, 'entrie')}s by name"
    if origin in (list, tuple):
        return f"a list of {WORDS.get(inner[0], 'entrie')}s"
    return f"{'an' if kind is int else 'a'} {WORDS.get(kind, 'dictionary' if is_dataclass(kind) else 'known word')}"


def parts_in(nested: Any, kind: type[Part]) -> Iterator[Part]:
    """Yield the parts of a class in nested mappings, lists and tuples: the tensors of a batch, the texts of data."""
    if isinstance(nested, kind):
        yield nested
    elif isinstance(nested, Mapping | list | tuple):
        for part in nested.values() if isinstance(nested, Mapping) else nested:
            yield from parts_in(part, kind)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of rows with one text per column."""
    lines = ["| " + " | ".join(map(_in_cell, line)) + " |" for line in (columns, *rows)]
    lines.insert(1, "|" + "---|" * len(columns))
    return "\n".join(lines) + "\n"


def _in_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").splitlines())
