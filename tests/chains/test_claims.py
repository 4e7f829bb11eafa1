"""Claims: one callback for each subject, called in the order of a step."""

from typing import Any

import pytest

from lightning_sgmcmc.chains.state import BEFORE_UPDATE, SUBJECTS, Claims


class First:
    """A claimant."""


class Second:
    """Another claimant."""


def test_a_second_claimant_is_refused_by_both_names_and_the_reason() -> None:
    for subject, reason in SUBJECTS.items():
        claims, first = Claims(), First()
        claims.claim(subject, first)
        claims.claim(subject, first, print)  # the same callback may claim again
        assert claims.get(subject) is print
        with pytest.raises(ValueError, match="First and Second cannot be combined") as caught:
            claims.claim(subject, Second())
        assert reason in str(caught.value)
        assert "remove one of them" in str(caught.value)


def test_an_unknown_subject_is_an_error() -> None:
    with pytest.raises(KeyError, match="paint"):
        Claims().claim("paint", First())


def test_after_clear_all_subjects_are_free() -> None:
    claims, first, second = Claims(), First(), Second()
    claims.claim("choose gradient", first, print)
    claims.clear()
    assert claims.get("choose gradient") is None
    claims.claim("choose gradient", second)


@pytest.mark.parametrize("order", [BEFORE_UPDATE, BEFORE_UPDATE[::-1]])
def test_claims_are_called_in_the_order_of_a_step_once_an_update(order: tuple[str, ...]) -> None:
    claims, calls = Claims(), []
    for subject in order:
        claims.claim(subject, First(), lambda *args, subject=subject: calls.append((subject, *args)))
    for update in range(2):
        claims.before_update(update)
        claims.before_update(update)  # by the second claimant in the trainer's list
        claims.end_update()
    assert calls == [(subject, update) for update in range(2) for subject in BEFORE_UPDATE]


def test_a_reserved_subject_calls_nothing() -> None:
    claims: Any = Claims()
    claims.claim("observe step", First())
    claims.before_update()
    assert claims.get("chain temperatures") is None
