"""Intervals over data have their coverage; the calibration error by chance is that of calibrated predictions."""

import math

import torch

from lightning_sgmcmc.diagnostics.scores import (
    calibration_error_by_chance,
    classification_metrics,
    mean_interval,
    share_interval,
)


def test_coverage_of_the_bootstrap() -> None:
    """Of 100 intervals of 60 exponential numbers about 93 contain the mean; fewer than 85 have a chance of 0.4 %."""
    generator = torch.Generator().manual_seed(0)
    draws = -torch.rand(100, 60, generator=generator).log()
    hits = sum(low < 1 < high for low, high in map(mean_interval, draws))
    assert 85 <= hits <= 99


def test_blocks_have_the_width_of_single_data() -> None:
    """The standard error of a mean of n numbers is 1/√n, however many blocks they are resampled in."""
    generator = torch.Generator().manual_seed(0)
    for count in (3_000, 7_999, 50_000):
        values = torch.randn(count, generator=generator)
        low, high = mean_interval(values)
        assert 0.85 < (high - low) / (2 * 1.96 / math.sqrt(count)) < 1.15
        assert abs((low + high) / 2 - float(values.mean())) < 0.3 / math.sqrt(count), "all data count"
    assert all(math.isnan(end) for end in mean_interval(torch.ones(1)))


def test_wilson_covers_shares_of_all_and_none() -> None:
    low, high = share_interval(1.0, 20)
    assert high == 1.0
    assert 0.8 < low < 0.9
    assert share_interval(0.0, 20)[0] == 0.0


def test_calibration_error_by_chance_is_that_of_calibrated_predictions() -> None:
    """The ECE of labels drawn from the predictions: its mean over 60 draws lies within 4 standard errors."""
    generator = torch.Generator().manual_seed(0)
    probabilities = (3 * torch.randn(300, 4, generator=generator)).softmax(-1)
    mean, most = calibration_error_by_chance(probabilities.max(-1).values)
    draws = [torch.multinomial(probabilities, 1, generator=generator)[:, 0] for _ in range(60)]
    errors = torch.stack([classification_metrics(probabilities, labels)["ece"] for labels in draws]).double()
    assert abs(float(errors.mean()) - mean) < 4 * float(errors.std()) / math.sqrt(60)
    assert float((errors > most).double().mean()) < 0.2
    normal, _ = calibration_error_by_chance(probabilities.max(-1).values.repeat(100))
    assert abs(normal - mean / 10) < 0.1 * mean / 10, "the normal law of many data"
