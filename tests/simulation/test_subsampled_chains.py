"""Gradient estimators in the light loop: EWSG's law, exact stationary variances, and friction."""

import functools
import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc.samplers import SGHMC, SGLD, SGNHT, Sampler, UnderdampedLangevin
from lightning_sgmcmc.simulation import (
    CalibratedFriction,
    ControlVariateGradient,
    ExponentialGradient,
    FullGradient,
    UniformGradient,
    sample_sum,
)
from lightning_sgmcmc.simulation.finite_sums import GaussianSum
from lightning_sgmcmc.subsampling.ewsg import Guess
from tests.support.finite_sums import CENTRES, GAUSSIAN, LOGISTIC, MIXED, UNDERDAMPED, begin, draws, take

# -- the index chain --------------------------------------------------------------------------------------------------


def exact_law(gradients: Tensor, momentum: Tensor, name: str, guess: Guess, lr: float) -> Tensor:
    """Return eq. (4) for all batches, from the papers' own letters: n̂a_j = √h·∇Ũ_j/σ and x of the guess."""
    tau, friction = 0.7, 10.0
    if name == "SGLD":  # appendix E, at temperature τ: √(2h) becomes √(2hτ); there is no momentum to guess
        a, x = math.sqrt(lr / (2 * tau)) * gradients, torch.zeros(2).double()
        x = x + 1 if guess == "one" else x
    else:
        sigma = math.sqrt(2 * friction * tau)
        a = math.sqrt(lr) * gradients / sigma
        x = {
            "unchanged": math.sqrt(lr) * friction * momentum / sigma,
            "stopped": (-1 + lr * friction) * momentum / (sigma * math.sqrt(lr)),
            "zero": torch.zeros(2).double(),
            "one": torch.ones(2).double(),
        }[guess]
    return (0.5 * (x + a).square().sum(-1)).softmax(0)


@pytest.mark.parametrize("guess", get_args(Guess))
@pytest.mark.parametrize(("name", "lr"), [("SGLD", 0.02), ("UnderdampedLangevin", 0.1)])
@pytest.mark.parametrize("size", [1, 2])
def test_a_long_index_chain_has_the_law_of_eq_4(name: str, lr: float, guess: Guess, size: int) -> None:
    """20,000 index chains of 60 proposals at one place, against the enumerated law of the 5^b batches.

    χ² exceeds its quantile at 1 - 10⁻⁵ by chance once in 10⁵ seeds, for each of the 16 cases; a uniform law is refused.
    """
    target, chains = GaussianSum(2 * draws(5, 2)), 20_000
    x, momentum = torch.tensor([0.4, -0.3]).double(), torch.tensor([0.9, -0.6]).double()
    sampler = SGLD if name == "SGLD" else UNDERDAMPED
    estimator = ExponentialGradient(size, 60, guess)
    run = begin(target, sampler, estimator, lr, x.expand(chains, 2), seed=2)
    for momenta in run.rule.momenta(run.group) or []:
        momenta.copy_(momentum)
    chosen, indices = estimator.chosen(run, estimator.draw(run, 1)[0])
    batches = torch.cartesian_prod(*[torch.arange(5)] * size).view(-1, size)
    every = target.batch_gradients(x[None], batches[None])[0]
    code = (indices * 5 ** torch.arange(size - 1, -1, -1)).sum(1)
    torch.testing.assert_close(chosen, every[code])
    counts = torch.bincount(code, minlength=len(every)).double()
    freedom = len(every) - 1
    # Wilson and Hilferty's quantile of χ², 4.26 standard deviations up.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.26 * math.sqrt(2 / (9 * freedom))) ** 3

    def distance(law: Tensor) -> float:
        return float(((counts - chains * law).square() / (chains * law)).sum())

    law = exact_law(every, momentum, name, guess, lr)
    assert chains * float(law.min()) > 5  # so that χ² is one
    assert distance(law) < limit
    assert distance(torch.full_like(law, 1 / len(law))) > limit


@pytest.mark.parametrize("proposals", [1, None])
def test_the_choice_is_a_friction_to_first_order(proposals: int | None) -> None:
    """With x = √hγr/σ, E[g] moves with r by h·cov·r/(2τ), under eq. (4) as after one proposal already.

    Half the difference between r and -r, enumerated.
    """
    h, tau, momentum = 1e-6, 0.7, torch.tensor([0.9, -0.6]).double()
    every = GAUSSIAN.batch_gradients(torch.zeros(1, 2).double(), torch.arange(50)[None, :, None])[0]

    def mean(sign: int) -> Tensor:
        law = exact_law(every, sign * momentum, "UnderdampedLangevin", "unchanged", h)
        if proposals is None:
            return law @ every
        accepted = (law / law[:, None]).clamp(max=1)  # from i, in rows, to j
        return (accepted[..., None] * every + (1 - accepted[..., None]) * every[:, None]).mean((0, 1))

    expected = h * torch.cov(every.T, correction=0) @ momentum / (2 * tau)
    torch.testing.assert_close((mean(1) - mean(-1)) / 2, expected, rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("sampler", [SGLD, UNDERDAMPED, functools.partial(SGHMC, friction=0.2), SGNHT])
def test_no_proposals_are_uniform_batches(sampler: Callable[..., Sampler]) -> None:
    """Bit for bit."""
    uniform, none = (
        sample_sum(LOGISTIC, sampler, estimator, lr=1e-2, num_steps=50, num_chains=4, seed=1)
        for estimator in (UniformGradient(3), ExponentialGradient(3, 0))
    )
    assert torch.equal(uniform.last, none.last)
    assert none.acceptance is None
    chosen = sample_sum(LOGISTIC, sampler, ExponentialGradient(3, 1), lr=1e-2, num_steps=50, num_chains=4, seed=1)
    assert not torch.equal(chosen.last, none.last)
    assert chosen.acceptance is not None
    assert 0.4 < chosen.acceptance < 1


# -- linear dynamics: exact stationary variances ----------------------------------------------------------------------


def stationary_variance(h: float, friction: float, noise: Tensor | float, curvature: float = 50.0) -> Tensor:
    """Return the exact variance of θ in z' = Az + w, w of the momentum's noise: Σ = AΣAᵀ + Q by Kronecker's product."""
    matrix = torch.tensor([[1.0, h], [-h * curvature, 1 - h * friction]]).double()
    kronecker = torch.eye(4).double() - torch.kron(matrix, matrix)
    unit = torch.linalg.solve(kronecker, torch.tensor([0.0, 0, 0, 1]).double())
    return unit[0] * torch.as_tensor(noise)


def close_variance(x: Tensor, expected: Tensor) -> None:
    """Within 4.5 standard errors, √(2/C) of it: by chance outside once in 10⁵ seeds, for each coordinate."""
    ratio = x.var(0) / expected
    assert float((ratio - 1).abs().max()) < 4.5 * math.sqrt(2 / len(x)), ratio


@pytest.mark.parametrize("h", [0.01, 0.05, 0.07])
def test_full_gradient_underdamped_variance(h: float) -> None:
    """Euler's bias: 1.054, 1.387 and 1.671 times the target's variance; another program measured 1.39 at h = 0.05."""
    expected = stationary_variance(h, 10.0, 2 * 10.0 * h)
    assert float(expected * 50) == pytest.approx({0.01: 1.0540, 0.05: 1.3867, 0.07: 1.6709}[h], abs=1e-4)
    run = MIXED(UNDERDAMPED, FullGradient(), lr=h, num_steps=round(4 / h))
    close_variance(run.last, expected.expand(2))


@pytest.mark.parametrize("size", [1, 4])
def test_uniform_batches_have_their_exact_variance(size: int) -> None:
    """A batch adds N²·var(c)/b to the gradient's variance, var(c) that of each coordinate of the centres."""
    of_batch = 50**2 * CENTRES.var(0, unbiased=False) / size
    lr = 5e-3
    run = MIXED(SGLD, UniformGradient(size), lr=lr, num_steps=60)
    close_variance(run.last, (lr**2 * of_batch + 2 * lr) / (1 - (1 - lr * 50) ** 2))
    h = 0.03
    run = MIXED(UNDERDAMPED, UniformGradient(size), lr=h, num_steps=150)
    close_variance(run.last, stationary_variance(h, 10.0, 20 * h + h**2 * of_batch))


def test_svrg_is_exact_on_the_gaussian() -> None:
    """∇U_i(θ) - ∇U_i(θ_q) does not depend on i, so that SVRG-LD walks as the full gradient does, to rounding.

    Its error of the stationary variance is the discretisation's alone, εN/2 of it; SGLD's at the same step is larger.
    """
    lr = 2e-3
    variate, full = (
        MIXED(SGLD, estimator, lr=lr, num_steps=60) for estimator in (ControlVariateGradient(1, 0.2), FullGradient())
    )
    torch.testing.assert_close(variate.last, full.last, rtol=1e-9, atol=1e-9)
    chosen = MIXED(SGLD, ExponentialGradient(1, 2, control_variate=ControlVariateGradient(1, 0.5)), lr=lr, num_steps=60)
    torch.testing.assert_close(chosen.last, full.last, rtol=1e-9, atol=1e-9)
    expected = torch.tensor(2 * lr / (1 - (1 - lr * 50) ** 2)).double()
    long = MIXED(SGLD, ControlVariateGradient(1, 1), lr=lr, num_steps=150)
    close_variance(long.last, expected.expand(2))
    uniform = MIXED(SGLD, UniformGradient(1), lr=lr, num_steps=150)
    errors = [(50 * run.last.var(0) - 1).abs() for run in (long, uniform)]
    assert float(errors[0].max()) < 0.1 < float(errors[1].min())


def test_control_variates_are_unbiased_and_vanish_at_the_snapshot() -> None:
    """On logistic regression: their mean over all batches is the gradient; at θ_q each is the full gradient."""
    estimator = ControlVariateGradient(1, 1.0)
    run = begin(LOGISTIC, SGLD, estimator, 1e-3, draws(40_000, 3)[:1].expand(40_000, 3))
    full = LOGISTIC.gradient(run.place.detach())
    torch.testing.assert_close(take(estimator, run).detach(), full)
    run.place.data += 0.3
    after = take(estimator, run).detach()
    full = LOGISTIC.gradient(run.place.detach())
    error = after.std(0) / math.sqrt(len(after))
    assert bool((error > 0).all())
    # 4.5 standard errors: by chance outside once in 10⁵ seeds, for each of three coordinates.
    assert float(((after.mean(0) - full[0]) / error).abs().max()) < 4.5
    plain = UniformGradient(1)
    of_plain = take(plain, begin(LOGISTIC, SGLD, plain, 1e-3, run.place.detach()))
    assert bool((after.std(0) < 0.5 * of_plain.std(0)).all())


# -- friction ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_calibrated_friction_of_the_gaussian(size: int) -> None:
    """Γ - γI = h·N²·cov(c)/(2τb) wherever the chains are, exactly after each calibration and nearly so in between."""
    h = 0.01
    expected = h * 50**2 * torch.cov(CENTRES.T, correction=0) / (2 * 0.7 * size)
    x = draws(6, 2)
    often = CalibratedFriction(ExponentialGradient(size, 1), 0.01)
    run = begin(GAUSSIAN, UNDERDAMPED, often, h, x)
    for _ in range(4):
        take(often, run)
        torch.testing.assert_close(run.friction, expected.expand(6, 2, 2))
        run.place.data += 0.1
    seldom = CalibratedFriction(UniformGradient(size), 1.0)
    run = begin(GAUSSIAN, UNDERDAMPED, seldom, h, x)
    for step in range(50 // size):
        take(seldom, run)
        off = float((run.friction.detach() - expected).norm() / expected.norm())
        assert off < (1e-12 if step == 0 else 0.1)
        run.place.data = x + 0.02 * draws(6, 2, seed=step)
    diagonal = CalibratedFriction(UniformGradient(size), matrix=False)
    run = begin(GAUSSIAN, UNDERDAMPED, diagonal, h, x)
    take(diagonal, run)
    torch.testing.assert_close(run.friction, expected.diagonal().expand(6, 2))


def test_moments_move_with_each_batch() -> None:
    """Lines 16 and 17 of Algorithm 2, with n∇V for its ∇V: against sums over the batches that were drawn."""
    x = draws(3, 3)
    estimator = CalibratedFriction(UniformGradient(1), 10**9)
    run = begin(LOGISTIC, UNDERDAMPED, estimator, 0.01, x)
    take(estimator, run)
    start = [moment.clone() for moment in run.moments]  # the batch at ω itself moved nothing
    run.place.data = x + 0.5
    expected = [moment.clone() for moment in start]
    for _ in range(15):
        index = estimator.draw(run, 1)[0]
        estimator.estimate(run, index)
        now, then = (LOGISTIC.batch_gradients(p, index)[:, 0] for p in (x + 0.5, x))
        expected[0] += (now - then) / 20
        expected[1] += (now[:, :, None] * now[:, None] - then[:, :, None] * then[:, None]) / 20
    for one, other in zip(run.moments, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_drag_of_a_scalar_matrix_is_a_larger_friction_with_the_old_noise() -> None:
    """γ + δ with the noise of γ is UnderdampedLangevin(γ + δ) at the temperature τ·γ/(γ + δ)."""
    friction, extra, h = 4.0, 3.0, 0.05
    start, gradients = draws(5, 2), draws(30, 5, 2, seed=1)
    options: dict[str, Any] = {"lr": h, "num_data": 1, "num_chains": 5, "seed": 9}
    places = [nn.Parameter(start.clone()) for _ in range(2)]
    with_drag = UnderdampedLangevin([places[0]], friction=friction, temperature=0.7, **options)
    matrix = extra * torch.eye(2).double().expand(5, 2, 2)
    with_drag.extra_drag = lambda momenta: [(matrix @ momenta[0][:, :, None])[:, :, 0]]
    tau = 0.7 * friction / (friction + extra)
    larger = UnderdampedLangevin([places[1]], friction=friction + extra, temperature=tau, **options)
    for gradient in gradients:
        for place, rule in zip(places, (with_drag, larger), strict=True):
            place.grad = gradient.clone()
            rule.step()
    torch.testing.assert_close(places[0], places[1], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(places[0], start)


def test_calibrated_friction_takes_batch_noise_out() -> None:
    """With uniform batches and the exact cov, Γ = γ + h·cov/2: the variance is that of Euler's scheme with Γ."""
    target, h, friction = GaussianSum(CENTRES[:10]), 0.1, 4.0
    sampler = functools.partial(UnderdampedLangevin, friction=friction)
    options: dict[str, Any] = {"lr": h, "num_steps": 80, "num_chains": 8000, "dtype": torch.float64}
    run = sample_sum(target, sampler, CalibratedFriction(UniformGradient(1), 0.001), **options)
    of_batch = 10**2 * torch.cov(CENTRES[:10].T, correction=0)
    axes, turn = torch.linalg.eigh(of_batch)  # both noise and friction are diagonal there
    noises = [2 * friction * h + h**2 * one for one in axes]
    expected = [
        stationary_variance(h, friction + h * float(one) / 2, noise, 10.0)
        for one, noise in zip(axes, noises, strict=True)
    ]
    close_variance(run.last @ turn, torch.stack(expected))
    plain = sample_sum(target, sampler, UniformGradient(1), **options)
    errors = [(10 * one.last.var(0) - 1).abs() for one in (run, plain)]
    assert bool((errors[0] < 0.5 * errors[1]).all()), errors
