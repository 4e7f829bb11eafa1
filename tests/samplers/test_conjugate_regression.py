"""Truth: mini-batch sampling of a conjugate posterior through `Trainer.fit`, against closed forms.

For SGLD, SGHMC and underdamped Langevin the law that the draws must have at a finite step size is known exactly
(`tests/support/problems.py`), so the draws are held against it within Monte-Carlo error, and the law against the
posterior. For pSGLD, pSGHMC and SGNHT, which are not linear, the distance to the posterior must fall with the step.

Forty chains run at once, each with batches of its own, so a hundred steps of each have the Monte-Carlo error that
thousands of one would have. A step costs the same for 40 chains as for one.

Standard errors are of 40 batch means, one a chain, so they are independent. A mean's largest |z| of 60 is compared with
6, a covariance's largest of 6 with 5: under Student's t with 39 degrees of freedom a false alarm has probability
60·5e-7 = 3e-5 and 6·1.3e-5 = 8e-5. Seeds are fixed.
"""

import functools
from typing import Any

import numpy as np
import pytest

from lightning_sgmcmc.samplers import (
    SGHMC,
    SGLD,
    SGNHT,
    AdamSGLD,
    ScaleAdaptedSGHMC,
    UnderdampedLangevin,
    pSGHMC,
    pSGLD,
)
from tests.support.comparisons import check_law, covariance_with_error, mean_with_error
from tests.support.problems import PROBLEM, Array
from tests.support.trainers import sample

FRICTION = 10.0
BATCH = 50
CHAINS = 40

# name, sampler, larger and smaller step, and the exact stationary covariance at a step
LINEAR = [
    pytest.param(SGLD, 0.1, 0.025, PROBLEM.sgld_covariance, id="SGLD"),
    pytest.param(SGHMC, 0.02, 0.005, functools.partial(PROBLEM.sghmc_covariance, friction=0.1), id="SGHMC"),
    pytest.param(
        functools.partial(UnderdampedLangevin, friction=FRICTION),
        0.01,
        0.0025,
        functools.partial(PROBLEM.underdamped_covariance, friction=FRICTION),
        id="UnderdampedLangevin",
    ),
]
BAOAB = pytest.param(
    functools.partial(UnderdampedLangevin, friction=FRICTION, integrator="baoab"),
    0.02,
    0.005,
    functools.partial(PROBLEM.baoab_covariance, friction=FRICTION),
    id="UnderdampedLangevin-baoab",
    marks=pytest.mark.slow,  # the formulas of `test_baoab.py` and `test_updates.py` are checked by default
)


def trace_ratio(covariance: Array) -> float:
    return float(np.trace(covariance) / np.trace(PROBLEM.covariance))


@pytest.mark.by_default("SGLD", "UnderdampedLangevin")
@pytest.mark.parametrize(("sampler", "step", "small_step", "law"), [*LINEAR, BAOAB])
def test_draws_have_the_exact_law_of_their_step_size(sampler: Any, step: float, small_step: float, law: Any) -> None:
    draws = sample(PROBLEM, 250, 100, 2, BATCH, CHAINS, sampler=sampler, lr=step)
    check_law(draws, law(step, BATCH))
    # That law is off the posterior by more than the draws' error, so the check above can tell them apart ...
    assert abs(trace_ratio(law(step, BATCH)) - 1) > 0.15
    # ... and the difference is of first order in the step.
    biases = [trace_ratio(law(h, BATCH)) - 1 for h in (small_step, small_step / 2, small_step / 4)]
    assert biases[0] / biases[1] == pytest.approx(2, rel=0.1)
    assert biases[1] / biases[2] == pytest.approx(2, rel=0.05)


@pytest.mark.by_default("SGHMC")
@pytest.mark.parametrize(("sampler", "step", "small_step", "law"), LINEAR)
def test_small_steps_sample_the_posterior(sampler: Any, step: float, small_step: float, law: Any) -> None:
    draws = sample(PROBLEM, 500, 300, 4, BATCH, CHAINS, sampler=sampler, lr=small_step)
    bias = trace_ratio(law(small_step, BATCH)) - 1
    assert abs(bias) < 0.2
    check_law(draws, PROBLEM.covariance, slack=1.5 * bias)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "burn_in", "steps"),
    [
        pytest.param(functools.partial(pSGLD, alpha=0.99), 600, {0.04: 92, 0.01: 240}, id="pSGLD"),
        pytest.param(AdamSGLD, 600, {0.01: 200, 0.0025: 600}, id="AdamSGLD"),
        pytest.param(
            functools.partial(ScaleAdaptedSGHMC, friction=0.3),
            400,
            {0.02: 92, 0.004: 240},
            id="ScaleAdaptedSGHMC",
        ),
        pytest.param(pSGHMC, 900, {0.04: 92, 0.01: 240}, id="pSGHMC"),
        pytest.param(SGNHT, 1500, {0.04: 92, 0.01: 140}, id="SGNHT"),
    ],
)
def test_adaptive_samplers_come_closer_as_the_step_shrinks(sampler: Any, burn_in: int, steps: dict[float, int]) -> None:
    errors, uncertainty = [], 0.0
    for lr, count in steps.items():
        draws = sample(PROBLEM, burn_in + count, burn_in, 4, BATCH, CHAINS, sampler=sampler, lr=lr)
        mean, mean_error = mean_with_error(draws)
        assert np.abs((mean - PROBLEM.mean) / mean_error).max() < 6
        covariance, error = covariance_with_error(draws, PROBLEM.mean)
        errors.append(abs(trace_ratio(covariance) - 1))
        uncertainty = trace_ratio(error)
    assert errors[0] > 0.1
    assert errors[1] < errors[0] / 2 + 3 * uncertainty
    assert errors[1] < 0.25


def test_temperature_scales_the_covariance() -> None:
    draws = sample(PROBLEM, 360, 200, 2, BATCH, CHAINS, sampler=SGLD, lr=0.05, temperature=0.25)
    check_law(draws, PROBLEM.sgld_covariance(0.05, BATCH, temperature=0.25))


@pytest.mark.by_default("SGHMC")
@pytest.mark.parametrize("sampler", [SGLD, SGHMC])
def test_bfloat16_autocast_has_the_same_law(sampler: Any) -> None:
    lr = 0.1 if sampler is SGLD else 0.02
    law = PROBLEM.sgld_covariance(lr, BATCH) if sampler is SGLD else PROBLEM.sghmc_covariance(lr, BATCH, 0.1)
    draws = sample(PROBLEM, 250, 100, 2, BATCH, CHAINS, sampler=sampler, lr=lr, trainer_precision="bf16-mixed")
    assert draws.dtype == np.float64
    check_law(draws, law, slack=0.03)  # bfloat16 rounds the gradients by up to 0.4 %


@pytest.mark.by_default("SGHMC")
@pytest.mark.parametrize("sampler", [SGLD, SGHMC])
def test_accumulation_has_the_law_of_the_whole_batch(sampler: Any) -> None:
    """Four micro-batches of 10 are a batch of 40: the prior counts once, the noise is drawn once."""
    lr = 0.1 if sampler is SGLD else 0.02
    law = PROBLEM.sgld_covariance(lr, 40) if sampler is SGLD else PROBLEM.sghmc_covariance(lr, 40, 0.1)
    draws = sample(PROBLEM, 250, 100, 2, 10, CHAINS, sampler=sampler, lr=lr, trainer_accumulate_grad_batches=4)
    check_law(draws, law)
