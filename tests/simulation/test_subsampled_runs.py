"""Light loops on sums: what is counted, when places are noted, seeds, compiled blocks, and misuse."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sgmcmc.samplers import SGLD, SGNHT, pSGLD
from lightning_sgmcmc.simulation import (
    CalibratedFriction,
    ControlVariateGradient,
    ExponentialGradient,
    FullGradient,
    GradientEstimator,
    UniformGradient,
    loop,
    sample_sum,
)
from lightning_sgmcmc.simulation.finite_sums import LogisticRegressionSum
from lightning_sgmcmc.simulation.loop import has_compiler
from tests.support.finite_sums import CENTRES, EWSG, GAUSSIAN, LOGISTIC, UNDERDAMPED, draws


class Counting(LogisticRegressionSum):
    """Counts the evaluations that are asked for."""

    def __init__(self) -> None:
        super().__init__(LOGISTIC.inputs, LOGISTIC.labels, 2.0)
        self.count = [0]

    def batch_gradients(self, x: Tensor, indices: Tensor) -> Tensor:
        self.count[0] += indices[0].numel()
        return super().batch_gradients(x, indices)

    def gradient(self, x: Tensor) -> Tensor:
        self.count[0] += self.num_data
        return super().gradient(x)


@pytest.mark.parametrize(
    "estimator",
    [
        FullGradient(),
        UniformGradient(3),
        ExponentialGradient(3, 2),
        ControlVariateGradient(3, 0.5, stored=False),
        ExponentialGradient(2, 1, control_variate=ControlVariateGradient(2, 1, stored=False)),
        CalibratedFriction(ExponentialGradient(2, 3), 1, stored=False),
        CalibratedFriction(UniformGradient(1), 0.3, matrix=False, stored=False),
    ],
)
def test_every_evaluation_is_counted(estimator: GradientEstimator) -> None:
    target = Counting()
    run = sample_sum(target, UNDERDAMPED, estimator, lr=1e-3, num_steps=37, num_chains=3)
    assert run.evaluations == target.count[0]


def test_what_is_stored_is_not_counted_again() -> None:
    """37 steps of 3 data, a snapshot every ⌈0.5·20/3⌉ = 4 steps: ten of them. EWSG-VR's every ⌈20/8⌉ = 3: thirteen."""
    options: dict[str, Any] = {"lr": 1e-3, "num_steps": 37, "num_chains": 3}
    run = sample_sum(LOGISTIC, SGLD, ControlVariateGradient(3, 0.5), **options)
    assert run.evaluations == 37 * 3 + 10 * 20
    run = sample_sum(LOGISTIC, UNDERDAMPED, CalibratedFriction(ExponentialGradient(2, 3)), **options)
    assert run.evaluations == 37 * 8 + 13 * 20


def test_marks_are_the_last_places_within_the_budget() -> None:
    """SVRG with N = 20, b = 3: the first step costs 23, so that one pass makes none, and 23 evaluations make it."""
    options: dict[str, Any] = {"lr": 1e-3, "num_chains": 3, "seed": 4, "initial": draws(3, 3)}
    estimator = ControlVariateGradient(3, 0.5)
    marks = (0.0, 1.0, 1.15, 1.25, 1.6, 2.55, 2.6, 2.75, 3.0)
    run = sample_sum(LOGISTIC, SGLD, estimator, num_passes=3, at_passes=marks, **options)
    # Evaluations after each step: 23, 26, 29, 32, then with the next snapshot 55, 58, 61.
    assert run.steps.tolist() == [0, 0, 1, 1, 4, 4, 4, 5, 6]
    assert (run.num_steps, run.evaluations) == (6, 58)
    by_steps = sample_sum(LOGISTIC, SGLD, estimator, num_steps=6, at_steps=[0, 1, 4, 5, 6], **options)
    assert torch.equal(by_steps.positions, run.positions[[0, 2, 4, 7, 8]])
    assert by_steps.passes.tolist() == [0, 1.15, 1.6, 2.75, 2.9]
    assert torch.equal(run.positions[0], options["initial"].float())
    assert torch.equal(run.positions[-1], run.last)


def test_averages_are_those_of_the_positions() -> None:
    run = sample_sum(
        GAUSSIAN, SGLD, EWSG, lr=1e-3, num_steps=8, at_steps=range(9), num_chains=4, observe=lambda x: x**2
    )
    squares = run.positions.square().double()
    assert bool(run.averages[0].isnan().all())
    for step in (1, 5, 8):
        torch.testing.assert_close(run.averages[step], squares[1 : step + 1].mean(0))


def test_runs_are_functions_of_the_seed() -> None:
    one, same, other = (
        sample_sum(LOGISTIC, UNDERDAMPED, EWSG, lr=1e-2, num_passes=2, num_chains=4, seed=seed).last
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


def test_a_temperature_of_zero_is_plain_descent() -> None:
    run = sample_sum(GAUSSIAN, SGLD, FullGradient(), lr=0.01, num_steps=100, num_chains=3, temperature=0)
    torch.testing.assert_close(run.last, CENTRES.mean(0).float().expand(3, 2))


def test_bad_combinations_are_refused() -> None:
    def run(sampler: Any, estimator: GradientEstimator, **options: Any) -> None:
        sample_sum(GAUSSIAN, sampler, estimator, **({"lr": 1e-3, "num_steps": 3} | options))

    with pytest.raises(ValueError, match="pSGLD has no step law"):
        run(pSGLD, EWSG)
    with pytest.raises(ValueError, match="temperature=0"):
        run(SGLD, EWSG, temperature=0)
    with pytest.raises(ValueError, match="needs UnderdampedLangevin"):
        run(SGLD, CalibratedFriction(EWSG))
    with pytest.raises(ValueError, match="not ControlVariateGradient"):
        CalibratedFriction(ControlVariateGradient())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="omit the control variate"):
        CalibratedFriction(ExponentialGradient(control_variate=ControlVariateGradient()))
    with pytest.raises(ValueError, match="batch_size=2"):
        ExponentialGradient(1, 1, control_variate=ControlVariateGradient(2))
    with pytest.raises(ValueError, match="guess"):
        ExponentialGradient(guess="nought")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="either num_passes or num_steps"):
        run(SGLD, FullGradient(), num_passes=1)
    with pytest.raises(ValueError, match="need num_passes"):
        run(SGLD, FullGradient(), at_passes=[1])
    with pytest.raises(ValueError, match="increase"):
        run(SGLD, FullGradient(), at_steps=[2, 1])
    with pytest.raises(ValueError, match="initial"):
        run(SGLD, FullGradient(), initial=torch.zeros(3))
    with pytest.raises(ValueError, match="infinity"):
        run(SGLD, FullGradient(), lr=1e6, num_steps=60)


COMPILED = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=[pytest.mark.slow, COMPILED])])
@pytest.mark.parametrize("sampler", [SGLD, functools.partial(SGNHT, friction=1.0)])
@pytest.mark.parametrize("gradient", [UniformGradient(5), FullGradient()])
def test_blocks_are_the_eager_steps(
    sampler: Any, gradient: GradientEstimator, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same random numbers, at marks within blocks of 16 steps and between them."""
    if not is_compiled:
        monkeypatch.setattr(loop, "compiled_block", lambda method, device: method)
    options: dict[str, Any] = {"lr": 0.01, "num_chains": 3, "num_steps": 40, "at_steps": [0, 1, 2, 17, 18, 40]}
    eager, compiled = (
        sample_sum(LOGISTIC, sampler, gradient, observe=torch.square, compile=compile, seed=3, **options)
        for compile in (False, True)
    )
    torch.testing.assert_close(compiled.positions, eager.positions, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compiled.averages, eager.averages, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(compiled.last, eager.last, rtol=1e-4, atol=1e-5)
    assert (compiled.num_steps, compiled.evaluations) == (eager.num_steps, eager.evaluations)


def test_blocks_need_gradients_without_a_memory() -> None:
    with pytest.raises(ValueError, match="compile=True needs FullGradient or UniformGradient"):
        sample_sum(GAUSSIAN, SGLD, ControlVariateGradient(), lr=0.01, num_steps=2, compile=True)
