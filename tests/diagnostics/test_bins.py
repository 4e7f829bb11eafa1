"""Binned figures at the edges: reliability, calibration error, risk-coverage, PIT histograms, conformal ranks.

The values are computed here by hand, in exact fractions where edges matter: other libraries are no reference.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from lightning_sgmcmc.diagnostics import conformal_threshold, pit_histogram, reliability, risk_coverage
from lightning_sgmcmc.diagnostics.scores import calibration_error, calibration_error_by_chance, classification_metrics

DTYPES = [torch.float32, torch.float64]


def two_classes(confidence: Tensor) -> Tensor:
    return torch.stack([confidence, 1 - confidence], 1)


def by_hand(confidence: list[Fraction], right: list[bool], bins: int) -> tuple[list[int], float]:
    """Return the counts of the bins ((b-1)/B, b/B], and Σ_b |Σ (right - confidence)|/n."""
    places = [max(math.ceil(c * bins), 1) - 1 for c in confidence]
    gaps = [Fraction(0)] * bins
    for place, c, r in zip(places, confidence, right, strict=True):
        gaps[place] += r - c
    return [places.count(b) for b in range(bins)], float(sum(map(abs, gaps)) / len(confidence))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bins", [1, 2, 3, 7, 10, 15, 16, 100])
def test_confidences_on_edges(bins: int, dtype: torch.dtype) -> None:
    """Every edge k/B of at least 1/2, among others 1: number and figure agree with the fractions."""
    confidence = [Fraction(k, bins) for k in range(bins + 1) if 2 * k > bins] * 3 + [Fraction(4, 5), Fraction(1)]
    right = [i % 3 > 0 for i in range(len(confidence))]
    values = torch.tensor([float(c) for c in confidence], dtype=torch.float64).to(dtype)
    target = 1 - torch.tensor(right).long()
    counts, error = by_hand(confidence, right, bins)
    mean, accuracy, number = reliability(two_classes(values), target, bins)
    assert number.tolist() == counts
    assert float(calibration_error(two_classes(values), target, bins)) == pytest.approx(error, abs=1e-6)
    assert float((number * (mean - accuracy).abs()).sum() / number.sum()) == pytest.approx(error, abs=1e-6)


def test_saturated_probabilities() -> None:
    """Half of 200 data have confidence 1, of which 20 are wrong; the others have .97 and are right."""
    probabilities = two_classes(torch.tensor([1.0] * 100 + [0.97] * 100))
    target = torch.tensor([1] * 20 + [0] * 180)
    assert float(classification_metrics(probabilities, target)["ece"]) == pytest.approx(0.0850, abs=1e-6)


def test_a_bin_for_confidence_0_and_1_by_chance() -> None:
    assert calibration_error_by_chance(torch.ones(50)) == (0.0, 0.0)
    assert calibration_error_by_chance(torch.tensor([0.6]).repeat(4000), bins=5)[0] == pytest.approx(
        math.sqrt(2 * 0.24 / math.pi / 4000), rel=0.15
    )


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_labels_of_every_integer_dtype(kind: torch.dtype) -> None:
    probabilities = two_classes(torch.tensor([0.9, 0.7, 0.4, 1.0]))
    target = torch.tensor([0, 1, 1, 0])
    expected = classification_metrics(probabilities, target)
    assert classification_metrics(probabilities, target.to(kind)) == expected
    assert reliability(probabilities, target.to(kind))[1].equal(reliability(probabilities, target)[1])
    with pytest.raises(ValueError, match=r"labels must be integers, got torch.float32: convert them by .long\(\)"):
        classification_metrics(probabilities, target.float())


LAWS = {
    "Poisson(0.1)": stats.poisson(0.1),
    "Poisson(1)": stats.poisson(1.0),
    "Poisson(300)": stats.poisson(300.0),
    "negative binomial": stats.nbinom(2, 0.3),
    "Bernoulli(0.5)": stats.bernoulli(0.5),
    "Bernoulli(0.03)": stats.bernoulli(0.03),
    "ordinal": stats.rv_discrete(values=(range(4), (0.1, 0.2, 0.3, 0.4))),
    "a point": stats.rv_discrete(values=((0,), (1.0,))),
    "binomial": stats.binom(7, 0.6),
}


@pytest.mark.parametrize("bins", [1, 7, 10])
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_the_pit_of_counts_is_flat(law: stats.rv_discrete, bins: int) -> None:
    """Each value occurs as often as the law says, in 10⁵ data up to rounding: shares within 1e-3."""
    values = np.arange(0, 600)
    times = np.round(1e5 * law.pmf(values)).astype(int)
    y = np.repeat(values, times)
    pair = torch.from_numpy(law.cdf(y - 1)), torch.from_numpy(law.cdf(y))
    found = pit_histogram(pair, bins)
    assert found.sum().item() == pytest.approx(1.0, abs=1e-6)
    assert (found - 1 / bins).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bins", [1, 3, 10, 29, 100])
def test_pit_on_edges(bins: int, dtype: torch.dtype) -> None:
    cdf = (torch.arange(bins + 1, dtype=torch.float64) / bins).to(dtype)
    expected = torch.tensor([*[1.0] * (bins - 1), 2.0]) / (bins + 1)
    torch.testing.assert_close(pit_histogram(cdf, bins), expected)
    with pytest.raises(ValueError, match="cdf must be in"):
        pit_histogram(torch.tensor([0.1, math.nan]))


def test_risk_coverage_at_its_ends() -> None:
    coverage, risk = risk_coverage(torch.tensor([0.0, 1.0, 0.5, 1.0]), torch.tensor([1.0, 0.0, 0.0, 1.0]))
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert risk.tolist() == pytest.approx([1.0, 1 / 2, (1 + 0 + 0.5) / 3, 0.5])


@pytest.mark.parametrize(("count", "level"), [(n, level) for n in (1, 8, 9, 10, 19, 99) for level in (0.5, 0.9, 0.95)])
def test_conformal_rank(count: int, level: float) -> None:
    rank = math.ceil((count + 1) * Fraction(str(level)))
    found = float(conformal_threshold(torch.arange(1.0, count + 1), level))
    assert found == (rank if rank <= count else math.inf)
