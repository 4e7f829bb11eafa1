"""Schedules against their equations."""

import itertools
import math
import random

import pytest

from lightning_sgmcmc import Annealing, PolynomialDecay
from lightning_sgmcmc.callbacks import CyclicalSchedule, SamplingSchedule
from lightning_sgmcmc.schedules import CyclicalPlan


def test_random_plans_keep_their_promises() -> None:
    rng, refused = random.Random(0), 0
    for _ in range(1500):
        total, cycles, beta, count = rng.randint(1, 400), rng.randint(1, 9), rng.random(), rng.randint(1, 5)
        period = math.ceil(total / cycles)
        try:
            plan = CyclicalPlan(total, cycles, beta, count)
        except ValueError:
            refused += 1
            # The last cycle is the shortest; it must be the one that lacks room.
            stage = [k for k in range((cycles - 1) * period + 1, total + 1) if ((k - 1) % period) / period >= beta]
            assert len(stage) < count
            continue
        steps = plan.sample_steps()
        assert len(steps) == len(set(steps)) == cycles * count
        assert steps == sorted(steps)
        for cycle in range(cycles):
            own = steps[cycle * count : (cycle + 1) * count]
            end = min((cycle + 1) * period, total)
            assert own[-1] == end, "the last sample of a cycle is at its end"
            assert all(plan.cycle_of(k) == cycle and not plan.is_exploration(k) for k in own)
            gaps = [b - a for a, b in itertools.pairwise(own)]
            assert not gaps or max(gaps) - min(gaps) <= 1, "samples are evenly spaced"
        for k in range(1, total + 1):
            r = ((k - 1) % period) / period
            assert plan.lr_factor(k) == pytest.approx((math.cos(math.pi * r) + 1) / 2, abs=1e-15)
            assert plan.is_exploration(k) == (r < beta)
    assert 100 < refused < 1400


def test_polynomial_decay_and_annealing() -> None:
    assert PolynomialDecay(0.05, 0, 0.55)(1) == 0.05
    assert PolynomialDecay(0.05, 10, 0.5)(90) == pytest.approx(0.005)
    annealing = Annealing(1.01, start_epoch=400)
    assert annealing.factor(400) == 1
    assert annealing.factor(500) == pytest.approx(1.01**-100)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CyclicalSchedule(num_cycles=0), "num_cycles must be at least 1, got 0"),
        (lambda: CyclicalSchedule(exploration=1.0), r"exploration must be in \[0, 1\), got 1.0"),
        (lambda: CyclicalSchedule(samples_per_cycle=0), "samples_per_cycle must be at least 1"),
        (lambda: CyclicalSchedule(temperature=-1.0), "temperature must not be negative, got -1.0"),
        (lambda: SamplingSchedule(), "exactly one of every_n_steps and every_n_epochs"),
        (lambda: SamplingSchedule(every_n_steps=1, every_n_epochs=1), "exactly one of"),
        (lambda: SamplingSchedule(burn_in_steps=1, burn_in_epochs=1, every_n_steps=1), "not both"),
        (lambda: SamplingSchedule(every_n_steps=0), "every_n_steps must be at least 1, got 0"),
        (lambda: SamplingSchedule(every_n_steps=1, burn_in_steps=-1), "burn_in_steps must be at least 0, got -1"),
        (lambda: PolynomialDecay(a=0.0), "a > 0"),
        (lambda: Annealing(divisor=0.5), "divisor ≥ 1"),
    ],
)
def test_mistakes_say_what_is_wrong(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]
