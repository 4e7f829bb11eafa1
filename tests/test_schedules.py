"""The cyclical plan against equation (2) and its promises for every run; decay and annealing."""

import itertools
import math
import random
from typing import Any

import pytest

from lightning_sgmcmc.callbacks import SamplingSchedule
from lightning_sgmcmc.chains.schedule import RunLength
from lightning_sgmcmc.schedules import Annealing, CyclicalPlan, PolynomialDecay, cyclical_lr_factor


def feasible(total: int, cycles: int, exploration: float, samples: int) -> bool:
    """Whether every cycle has as many steps k with r(k) ≥ β as it should give samples: counted one by one."""
    period = -(-total // cycles)
    counts = [0] * cycles
    for k in range(1, total + 1):
        if ((k - 1) % period) / period >= exploration:
            counts[(k - 1) // period] += 1
    return min(counts) >= samples


@pytest.mark.parametrize("cycles", [1, 2, 3, 4, 7, 10])
@pytest.mark.parametrize("total", [10, 11, 12, 28, 97, 100, 1001])
def test_step_size_is_equation_2(total: int, cycles: int) -> None:
    period = math.ceil(total / cycles)
    plan = CyclicalPlan(total, 1, 0.0, 1) if cycles == 1 else None
    for k in range(1, total + 1):
        expected = 0.5 * (math.cos(math.pi * ((k - 1) % math.ceil(total / cycles)) / math.ceil(total / cycles)) + 1)
        assert cyclical_lr_factor(k, period) == pytest.approx(expected, abs=1e-15)
        if plan is not None:
            assert plan.lr_factor(k) == pytest.approx(expected, abs=1e-15)
    assert cyclical_lr_factor(1, period) == 1.0


def random_plans(count: int) -> list[tuple[int, int, float, int]]:
    chooser = random.Random(0)
    shares = [0.0, 0.1, 0.25, 0.29, 1 / 3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.94, 0.99]
    return [
        (chooser.randint(1, 300), chooser.randint(1, 12), chooser.choice([*shares, chooser.random()]), sample_count)
        for sample_count in (chooser.choice([1, 1, 2, 3, 4, 9]) for _ in range(count))
    ]


def test_every_feasible_run_gives_its_samples() -> None:
    """3,000 random runs: M·S samples, S a cycle, all in the sampling stage, the last one at the cycle's end."""
    made = refused = short = 0
    for total, cycles, exploration, samples in random_plans(3000):
        if not feasible(total, cycles, exploration, samples):
            with pytest.raises(ValueError, match="sampling steps for samples_per_cycle"):
                CyclicalPlan(total, cycles, exploration, samples)
            refused += 1
            continue
        plan = CyclicalPlan(total, cycles, exploration, samples)
        period = math.ceil(total / cycles)
        assert plan.period == period
        steps = plan.sample_steps()
        assert steps == sorted(set(steps)), "in order, none twice"
        assert len(steps) == cycles * samples
        for k in steps:
            assert 1 <= k <= total
            assert ((k - 1) % period) / period >= exploration
            assert not plan.is_exploration(k)
        for m in range(cycles):
            own = [k for k in steps if (k - 1) // period == m]
            assert len(own) == samples
            assert own[-1] == min((m + 1) * period, total)
            gaps = [b - a for a, b in itertools.pairwise(own)]
            assert not gaps or max(gaps) - min(gaps) <= 1, "evenly spaced"
            assert all(plan.cycle_of(k) == m for k in own)
        made += 1
        short += total % cycles > 0
    assert min(made, refused, short) > 300, "the sweep must reach all cases"


def test_stages_by_the_definition() -> None:
    for total, cycles, exploration, samples in random_plans(300):
        if not feasible(total, cycles, exploration, samples):
            continue
        plan = CyclicalPlan(total, cycles, exploration, samples)
        period = math.ceil(total / cycles)
        for k in range(1, total + 1):
            assert plan.is_exploration(k) == (((k - 1) % period) / period < exploration)
            assert plan.cycle_of(k) == (k - 1) // period
            assert plan.lr_factor(k) == cyclical_lr_factor(k, period)


def test_the_papers_run() -> None:
    """200 epochs of 391 steps, 4 cycles, β = 0.8, 3 samples a cycle (Zhang et al. 2020, section 6)."""
    plan = CyclicalPlan(200 * 391, 4, 0.8, 3)
    assert plan.period == 50 * 391
    steps = plan.sample_steps()
    assert len(steps) == 12
    assert steps[2::3] == [50 * 391, 100 * 391, 150 * 391, 200 * 391]
    assert min(steps) > 0.8 * 50 * 391


@pytest.mark.parametrize(
    ("total", "cycles", "exploration", "samples"),
    [(10, 4, 0.0, 2), (9, 6, 0.0, 1), (3, 5, 0.0, 1), (100, 10, 0.95, 1), (100, 10, 0.8, 3), (40, 4, 1.0, 1)],
)
def test_impossible_plans_are_refused(total: int, cycles: int, exploration: float, samples: int) -> None:
    assert not feasible(total, cycles, exploration, samples)
    with pytest.raises(ValueError, match=f"{total} steps in all .* train longer, or take fewer cycles"):
        CyclicalPlan(total, cycles, exploration, samples)


@pytest.mark.parametrize(
    "arguments", [(100, 0, 0.5, 1), (100, -1, 0.5, 1), (100, 4, -1.0, 1), (100, 4, 0.5, 0), (100, 4, 0.5, -2)]
)
def test_arguments_out_of_range_are_refused(arguments: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        CyclicalPlan(*arguments)


def test_polynomial_decay() -> None:
    decay = PolynomialDecay(a=0.3, b=7.0, gamma=0.55)
    for k in (1, 2, 10, 10**6):
        assert decay(k) == pytest.approx(0.3 * math.exp(-0.55 * math.log(7 + k)), rel=1e-12)
    assert PolynomialDecay(a=0.2, gamma=0.0)(123) == 0.2
    assert PolynomialDecay(a=0.2, gamma=1.0)(4) == pytest.approx(0.05)
    halved = PolynomialDecay(a=1.0, gamma=0.5)
    assert halved(400) / halved(100) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "options",
    [{}, {"burn_in_temperature": 0.5}, {"lr_decay": PolynomialDecay(0.1, 5.0, 0.6)}]
    + [{name: Annealing(1.1)} for name in ("lr_annealing", "temperature_annealing")],
)
def test_steps_alike_have_the_same_controls(options: dict[str, Any]) -> None:
    schedule = SamplingSchedule(burn_in_steps=17, every_n_steps=4, **options)
    schedule.lay_out(RunLength(60, 7, 0.1))
    several = 0
    for step in range(1, 61):
        alike = schedule.steps_alike(step)
        several += alike > 1
        assert {schedule.controls(step)} == {schedule.controls(k) for k in range(step, min(step + alike, 61))}
        assert alike == 1 or step + alike > 60 or schedule.controls(step + alike) != schedule.controls(step)
    assert (several > 0) == ("lr_decay" not in options)

    class Own(SamplingSchedule):
        def controls(self, step: int) -> Any:
            return super().controls(step)._replace(lr_factor=1 / step)

    own = Own(burn_in_steps=17, every_n_steps=4, **options)
    own.lay_out(RunLength(60, 7, 0.1))
    assert own.steps_alike(30) == 1


def test_annealing() -> None:
    annealing = Annealing(divisor=1.01, start_epoch=400)
    assert [annealing.factor(epoch) for epoch in (0, 399, 400)] == [1.0, 1.0, 1.0]
    value = 1.0
    for epoch in range(401, 500):
        value /= 1.01
        assert annealing.factor(epoch) == pytest.approx(value, rel=1e-12)
    assert all(Annealing(1.0).factor(epoch) == 1.0 for epoch in range(5))


@pytest.mark.parametrize("options", [{"a": 0.0}, {"a": -1.0}, {"a": 1.0, "b": -1.0}, {"a": 1.0, "gamma": -0.1}])
def test_bad_decays_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(
        ValueError, match=r"^(a|b|gamma) must be (positive|a finite number and not negative|in \[0, inf\)), got -?\d"
    ):
        PolynomialDecay(**options)


@pytest.mark.parametrize("options", [{"divisor": 0.99}, {"divisor": math.nan}, {"start_epoch": -1}])
def test_bad_annealings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^(divisor must be in \[1, inf\)|start_epoch must be at least 0), got"):
        Annealing(**options)
