"""EWSG's numerics: the law of the index chain, weights in every form, running moments."""

import pytest
import scipy.stats
import torch
from torch import Tensor, nn

from lightning_sgmcmc import SGHMC, SGLD, SGNHT, UnderdampedLangevin, pSGLD
from lightning_sgmcmc.samplers import StepLaw
from lightning_sgmcmc.subsampling.covariance_friction import (
    GradientMoments,
    advance_moments_,
    extra_friction,
    square_of,
)
from lightning_sgmcmc.subsampling.ewsg import index_log_weights, metropolis_index


def candidates(count: int = 5, dimension: int = 3, chains: int = 1, scale: float = 0.3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    gradients = torch.randn(chains, count, dimension, generator=generator, dtype=torch.float64) * scale
    return gradients, torch.randn(chains, dimension, generator=generator, dtype=torch.float64)


def test_a_long_index_chain_has_the_law_of_equation_4() -> None:
    """5,000 chains of 60 uniform proposals among five batches: chi-square; the chance of a false alarm is 1e-4."""
    gradients, momentum = candidates()
    weights = index_log_weights(gradients, momentum, StepLaw(0.2, 1.5, 0.4), "unchanged")[0]
    place, drift = 0.2 * momentum[0] / 0.4**0.5, 1.5 * gradients[0] / 0.4**0.5
    law = (0.5 * (place + drift).square().sum(1)).softmax(0)
    generator = torch.Generator().manual_seed(0)
    proposals = torch.randint(5, (5000, 61), generator=generator)
    uniforms = torch.rand(5000, 60, generator=generator, dtype=torch.float64)
    place_in_row, accepted = metropolis_index(weights[proposals], uniforms.log())
    index = proposals.gather(1, place_in_row[:, None])[:, 0]
    counts = torch.bincount(index, minlength=5)
    assert scipy.stats.chisquare(counts.numpy(), (law * 5000).numpy()).pvalue > 1e-4
    assert scipy.stats.chisquare(counts.numpy()).pvalue < 1e-4, "the uniform law is refused, so the test can fail"
    assert 0 < int(accepted.min()) <= int(accepted.max()) <= 60


@pytest.mark.parametrize("guess", ["unchanged", "stopped", "zero", "one"])
def test_weights_are_those_of_equation_6(guess: str) -> None:
    """Against the formula in the paper's own quantities, √h·∇Ũ/σ and x."""
    gradients, momentum = candidates(chains=2)
    step, friction, num_data, temperature = 0.1, 3.0, 50, 0.7
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
    sampler = UnderdampedLangevin(
        [parameter], step, friction=friction, num_data=num_data, temperature=temperature, num_chains=2
    )
    sigma = (2 * friction * temperature) ** 0.5
    x = {
        "unchanged": step**0.5 * friction * momentum / sigma,
        "stopped": (step * friction - 1) * momentum / (sigma * step**0.5),
        "zero": torch.zeros_like(momentum),
        "one": torch.ones_like(momentum),
    }[guess]
    expected = 0.5 * (x[:, None] + step**0.5 * num_data * gradients / sigma).square().sum(2)
    law = sampler.law(sampler.param_groups[0])
    found = index_log_weights(gradients, momentum, law, guess)  # type: ignore[arg-type]
    torch.testing.assert_close(found - found[:, :1], expected - expected[:, :1])


@pytest.mark.parametrize(
    ("sampler", "options"),
    [(SGLD, {}), (SGHMC, {"noise_estimate": 0.03}), (SGNHT, {}), (UnderdampedLangevin, {"friction": 2.0})],
)
def test_a_law_is_what_the_sampler_does(sampler: type, options: dict[str, float]) -> None:
    """m' = (1-a)·m - b·g + s·ξ in mean (the same noise with and without gradient and momentum) and in variance."""

    def step(gradient: float, momentum: float) -> Tensor:
        parameter = nn.Parameter(torch.zeros(20_000, dtype=torch.float64))
        rule = sampler([parameter], lr=0.1, num_data=30, temperature=0.5, seed=1, **options)
        group = rule.param_groups[0]
        rule.set_control("gradient_multiplier", 1.7)
        held = rule.momenta(group)
        if held is not None:
            held[0].fill_(momentum)
        laws.append(rule.law(group))
        parameter.grad = torch.full_like(parameter, gradient)
        rule.step()
        return (parameter if held is None else rule.momenta(group)[0]).detach()

    laws: list[StepLaw] = []
    still, pushed = step(0.0, 0.0), step(0.8, 0.3)
    damping, force, variance = (float(control) for control in (laws[0].damping, laws[0].force, laws[0].variance))
    held = 0.3 * (1 - damping) if sampler is not SGLD else 0.0
    torch.testing.assert_close(pushed - still, torch.full_like(still, held - force * 0.8))
    # The variance of 20,000 draws is known to 1 %; beyond five times that lies a chance of 6e-7.
    assert float(still.var()) == pytest.approx(variance, rel=0.05)


def test_a_rule_whose_step_depends_on_the_gradient_in_another_way_has_no_law() -> None:
    rule = pSGLD([nn.Parameter(torch.zeros(3))], num_data=3)
    assert rule.law(rule.param_groups[0]) is None


def test_a_noise_of_zero_has_no_law_to_match() -> None:
    gradients, _ = candidates(chains=2)
    variance = torch.tensor([0.0, 1.0], dtype=torch.float64)
    weights = index_log_weights(gradients, None, StepLaw(0.0, 1.0, variance), "unchanged")
    assert weights[0].tolist() == [0.0] * 5
    assert len(set(weights[1].tolist())) == 5
    assert not index_log_weights(gradients, None, StepLaw(0.0, 0.0, 0.0), "unchanged").any()


def test_a_weight_that_is_nan_is_not_accepted() -> None:
    index, accepted = metropolis_index(torch.tensor([[0.0, float("nan"), 5.0]]), torch.tensor([[-1.0, -1.0]]))
    assert (index.tolist(), accepted.tolist()) == ([2], [1])


@pytest.mark.parametrize("matrix", [False, True])
def test_moments_after_a_pass_are_those_of_the_new_place(matrix: bool) -> None:
    """When each batch has been seen once the running moments are exact again, from any calibration."""
    old, new = (torch.randn(6, 4, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (1, 2))

    def of(gradients: Tensor) -> GradientMoments:
        return GradientMoments(gradients.mean(0), square_of(gradients, matrix).mean(0))

    moments = of(old)
    for present, reference in zip(new, old, strict=True):
        advance_moments_(moments, present, reference, 1 / 6)
    torch.testing.assert_close(tuple(moments), tuple(of(new)))
    friction = extra_friction(moments, 0.1, 0.5)
    covariance = torch.cov(new.T, correction=0)
    torch.testing.assert_close(friction, 0.1 * (covariance if matrix else covariance.diagonal()))


def test_a_diagonal_is_not_negative() -> None:
    moments = GradientMoments(torch.tensor([2.0, 1.0]), torch.tensor([3.0, 3.0]))
    assert extra_friction(moments, 1.0, 1.0).tolist() == [0.0, 1.0]


def test_an_extra_drag_is_more_friction_with_the_old_noise() -> None:
    """With Γ-γ = 1.5 the momentum falls as with friction 2 + 1.5, and the noise is that of 2."""
    ends = []
    for extra in (None, 1.5):
        parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        rule = UnderdampedLangevin([parameter], 0.1, friction=2.0, num_data=4, seed=2)
        if extra is not None:
            rule.extra_drag = lambda momenta: [1.5 * momentum for momentum in momenta]
        rule.momenta(rule.param_groups[0])[0].fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
        rule.step()
        ends.append(rule.momenta(rule.param_groups[0])[0].clone())
    torch.testing.assert_close(ends[0] - ends[1], torch.full((3,), 0.15, dtype=torch.float64))
