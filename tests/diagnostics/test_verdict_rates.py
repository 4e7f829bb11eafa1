"""Rates of alarms on runs whose truth is known, and the benchmark's interval."""

import pytest

from tests.benchmarks.verdict_rates import cases, interval, outcome


def test_the_interval_of_a_rate() -> None:
    """Clopper and Pearson's bounds have closed forms at the ends: 1 - (α/2)^(1/n) and its mirror image."""
    low, high = interval(0, 30)
    assert low == 0.0
    assert high == pytest.approx(1 - 0.025 ** (1 / 30))
    assert interval(30, 30) == pytest.approx((0.025 ** (1 / 30), 1.0))


@pytest.mark.slow
def test_right_runs_get_no_warning_and_wrong_ones_the_right_one() -> None:
    """Six runs of each right case of the conjugate model and three cyclical networks: at most one warning in 27 (two
    are seen in 3 % of such sets at a rate of 1 %). Three runs of each wrong case that is quick: all are found."""
    right = wrong = 0
    missed: list[str] = []
    for case in cases(steps=1000):
        if "relaxed" in case.name or "more heat" in case.name:
            continue  # longer runs, which the benchmark makes
        seeds = 6 if case.name.startswith("conjugate") and not case.expected else 3
        for seed in range(100, 100 + seeds):
            found = outcome(case, seed)
            first = found["problems"][:1]
            if case.expected:
                wrong += 1
                assert first, f"{case.name}, seed {seed}: no warning"
                assert first[0] in [kind.value for kind in case.expected], f"{case.name}, seed {seed}: {first}"
            else:
                right += 1
                missed += [f"{case.name}, seed {seed}: {first[0]}"] if first else []
                assert case.kind in (None, found["kind"])
    assert (right, wrong) == (27, 15)
    assert len(missed) <= 1, missed
