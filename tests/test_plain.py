"""Dataclasses to and from the plain values of JSON."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal

import pytest

from lightning_sgmcmc.plain import as_plain, check_known, from_plain


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    WRITTEN: ClassVar = ("double", "number", "place")
    IF_SET: ClassVar = ("place",)
    number: float
    place: tuple[float, float] | None = None

    @property
    def double(self) -> float:
        return 2 * self.number


@dataclass(frozen=True)
class Outer:
    inner: Inner
    parts: tuple[Inner, ...] = ()
    count: int = 3
    kind: Literal["a", "b"] = "a"
    colour: Colour = Colour.RED
    shares: Mapping[str, float] = field(default_factory=dict)
    names: tuple[Any, ...] = ()
    maybe: float | None = None


WHOLE = Outer(Inner(0.5, (1.0, 2.0)), (Inner(1.0),), 4, "b", Colour.RED, {"x": 0.25}, ("a", ("b", 1)), 2.0)


def test_what_is_written_is_read() -> None:
    plain = as_plain(WHOLE)
    assert plain["inner"] == {"double": 1.0, "number": 0.5, "place": [1.0, 2.0]}
    assert plain["parts"] == [{"double": 2.0, "number": 1.0}]
    assert list(plain) == list(Outer.__dataclass_fields__)
    assert from_plain(Outer, json.loads(json.dumps(plain))) == WHOLE


def test_numbers_that_are_not_finite() -> None:
    values = {"inner": {"number": math.inf}, "maybe": math.nan}
    found = from_plain(Outer, values)
    assert (found.inner.number, math.isnan(found.maybe)) == (math.inf, True)
    assert as_plain(found, finite=True)["inner"]["number"] is None
    assert math.isnan(from_plain(Inner, {"number": None}).number)
    assert from_plain(Outer, {"inner": {"number": 1.0}, "maybe": math.inf}, lenient=True).maybe is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": [1]}, "its inner should be a dictionary, got"),
        ({"inner": {}}, "its inner should be a dictionary with number"),
        ({"inner": {"number": "x"}}, "its inner.number should be a number, got 'x'"),
        ({"parts": {}}, "its parts should be a list"),
        ({"parts": [{"number": True}]}, "its parts.* should be a"),
        ({"count": 1.5}, "its count should be an integer, got '1.5'"),
        ({"count": 10**30}, "its count should be an integer"),
        ({"kind": "c"}, "its kind should be 'a' or 'b', got 'c'"),
        ({"colour": {}}, "its colour should be a known word"),
        ({"shares": {"x": []}}, "its shares should be numbers by name"),
    ],
)
def test_another_value_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_plain(Outer, as_plain(WHOLE) | change)


def test_lenient_reading_takes_defaults_for_single_values_only() -> None:
    odd = as_plain(WHOLE) | {"count": "x", "kind": [], "colour": 3, "shares": {"x": "y", "z": 1}, "unknown": 1}
    odd["inner"]["place"] = [1]
    found = from_plain(Outer, odd, lenient=True)
    assert (found.count, found.kind, found.colour, found.shares) == (3, "a", Colour.RED, {"z": 1})
    assert found.inner == Inner(0.5)
    with pytest.raises(ValueError, match="its inner should be"):
        from_plain(Outer, odd | {"inner": 1}, lenient=True)
    with pytest.raises(ValueError, match="unknown entry 'unknown'"):
        check_known(Outer, odd)
