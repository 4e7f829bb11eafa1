"""Scores of predictive distributions against their definitions: integrals, orderings, guarantees."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_sgmcmc.diagnostics import (
    agreement,
    aurc,
    class_scores,
    conformal_threshold,
    gaussian_mixture_crps,
    interval_score,
    pit_histogram,
    risk_at_coverage,
    risk_coverage,
    sample_crps,
    total_variation,
)


def mixture() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(3, 5, 2, generator=generator, dtype=torch.float64)
    stds = 0.3 + torch.rand(3, 5, 2, generator=generator, dtype=torch.float64)
    return torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), means, stds


def test_crps_of_a_mixture_is_its_integral() -> None:
    weights, means, stds = mixture()
    y = torch.linspace(-2, 2, 10, dtype=torch.float64).reshape(5, 2)
    grid = torch.linspace(-9, 9, 40_001, dtype=torch.float64)[:, None, None]
    cdf = sum(w * torch.special.ndtr((grid - m) / s) for w, m, s in zip(weights, means, stds, strict=True))
    integral = torch.trapezoid((cdf - (grid >= y).double()).square(), grid[:, 0, 0], dim=0)
    torch.testing.assert_close(gaussian_mixture_crps(weights, means, stds, y), integral, rtol=1e-3, atol=1e-4)


def test_crps_from_draws_tends_to_the_closed_form() -> None:
    """Within five standard errors at each of 10 data: a false alarm in about 170,000 seeds."""
    weights, means, stds = mixture()
    generator = torch.Generator().manual_seed(1)
    chosen = torch.multinomial(weights, 200 * 60, True, generator=generator)
    draws = means[chosen] + stds[chosen] * torch.randn(12_000, 5, 2, generator=generator, dtype=torch.float64)
    y = torch.linspace(-2, 2, 10, dtype=torch.float64).reshape(5, 2)
    each = torch.stack([sample_crps(part, y) for part in draws.split(60)])
    error = each.std(0) / math.sqrt(len(each))
    assert bool(((each.mean(0) - gaussian_mixture_crps(weights, means, stds, y)).abs() < 5 * error).all())
    with pytest.raises(ValueError, match="at least 2 draws"):
        sample_crps(draws[:1], y)


def test_true_quantiles_have_the_best_interval_score() -> None:
    y = torch.as_tensor(stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000))
    end = stats.norm.ppf(0.95)
    scores = {
        width: float(interval_score(-width * torch.ones(()), width * torch.ones(()), y, 0.9).mean())
        for width in (0.7 * end, 0.9 * end, end, 1.1 * end, 1.3 * end)
    }
    assert min(scores, key=lambda width: scores[width]) == end
    expected = 2 * end + 2 / 0.1 * 2 * (stats.norm.pdf(end) - end * 0.05)
    assert scores[end] == pytest.approx(expected, rel=1e-3)


def test_the_histogram_shows_too_sure_predictives() -> None:
    y = torch.as_tensor(stats.norm.ppf((np.arange(10_000) + 0.5) / 10_000))
    flat, sure, wide = (pit_histogram(torch.special.ndtr(y / std)) for std in (1.0, 0.5, 2.0))
    torch.testing.assert_close(flat, torch.full((10,), 0.1), rtol=0, atol=2e-3)
    assert sure[0] > 0.2 > 0.09 > sure[5]
    assert wide[5] > 0.15 > 0.05 > wide[0]


# -- selective prediction ---------------------------------------------------------------------------------------------


def test_the_area_is_the_mean_risk_over_coverages() -> None:
    generator = torch.Generator().manual_seed(2)
    p = torch.softmax(2 * torch.randn(50, 4, generator=generator), 1)
    y = torch.randint(0, 4, (50,), generator=generator)
    confidence, wrong = p.max(1).values, (p.argmax(1) != y).double()
    surest = wrong[confidence.argsort(descending=True)]
    risks = [float(surest[:k].mean()) for k in range(1, 51)]
    assert float(aurc(p, y)) == pytest.approx(np.mean(risks), rel=1e-6)
    assert float(risk_at_coverage(p, y, 0.8)) == pytest.approx(risks[39], rel=1e-6)
    assert float(risk_at_coverage(p, y, 1.0)) == pytest.approx(float(wrong.mean()), rel=1e-6)
    # The order among equal confidences does not matter, and a constant confidence has the error rate everywhere.
    coverage, risk = risk_coverage(torch.ones(50), wrong)
    torch.testing.assert_close(risk, torch.full_like(risk, float(wrong.mean())))
    assert coverage[-1] == 1


# -- conformal prediction ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "level"), [(9, 0.9), (20, 0.8), (99, 0.95), (50, 0.9)])
def test_conformal_coverage_has_the_law_of_order_statistics(n: int, level: float) -> None:
    """The coverage given the calibration data is Beta(k, n + 1 - k), k = ⌈(n + 1)·level⌉.

    Its mean is within 4 standard errors: a false alarm in about 4,000 seeds for all four together.
    """
    scores = torch.rand(n, 4000, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    covered = conformal_threshold(scores, level)  # of uniform scores, the threshold is the coverage itself
    k = math.ceil((n + 1) * level - 1e-9)
    law = stats.beta(k, n + 1 - k)
    assert law.mean() >= level - 1e-12
    assert abs(float(covered.mean()) - law.mean()) < 4 * law.std() / math.sqrt(4000)
    assert bool((conformal_threshold(scores[: int(level / (1 - level)) - 1], level) == torch.inf).all())


def test_adaptive_scores_are_the_mass_of_likelier_classes() -> None:
    p = torch.tensor([[0.5, 0.2, 0.3], [0.4, 0.4, 0.2]], dtype=torch.float64)
    torch.testing.assert_close(class_scores(p, adaptive=False), 1 - p)
    u = torch.tensor([0.5, 1.0])
    expected = torch.tensor([[0.25, 0.9, 0.65], [0.4, 0.8, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(class_scores(p, True, u), expected)


# -- references -------------------------------------------------------------------------------------------------------


def test_agreement_and_total_variation() -> None:
    p = torch.tensor([[0.9, 0.1], [0.3, 0.7], [0.6, 0.4]])
    q = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.6, 0.4]])
    assert float(agreement(p, q)) == pytest.approx(2 / 3)
    assert float(total_variation(p, q)) == pytest.approx((0.1 + 0.3 + 0) / 3)
    with pytest.raises(ValueError, match="same order"):
        total_variation(p, q[:2])
