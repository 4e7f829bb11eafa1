"""Running averages against the sums written out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics import effective_sample_size, normalised_weights
from lightning_sgmcmc.evaluation import CycleAverage, WeightedAverage


def members(count: int, n: int = 5) -> list[tuple[dict[str, Tensor], Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            {"p": torch.rand(n, 3, generator=generator, dtype=torch.float64)},
            -500 * torch.rand(n, generator=generator, dtype=torch.float64),
        )
        for _ in range(count)
    ]


def direct(data: list[tuple[dict[str, Tensor], Tensor]], log_weights: Tensor) -> tuple[Tensor, Tensor]:
    weights = log_weights.softmax(0)
    mean = sum(w * terms["p"] for w, (terms, _) in zip(weights, data, strict=True))
    density = torch.logsumexp(torch.stack([d for _, d in data]) + log_weights.log_softmax(0)[:, None], 0)
    return torch.as_tensor(mean), density


@pytest.mark.parametrize("offset", [0.0, 1e6, -1e6])
@pytest.mark.parametrize("spread", [0.0, 3.0, 300.0])
def test_weighted_average(offset: float, spread: float) -> None:
    data = members(12)
    log_weights = torch.randn(12, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * spread + offset
    for order in (range(12), reversed(range(12))):
        average = WeightedAverage()
        for j in order:
            average.add(*data[j], float(log_weights[j]))
        mean, density = direct(data, log_weights)
        torch.testing.assert_close(average.terms["p"], mean, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(average.log_density, density, rtol=1e-8, atol=1e-8)


def test_zero_weights_do_not_count_and_nan_is_refused() -> None:
    data = members(3)
    average = WeightedAverage()
    average.add(*data[0], -float("inf"))
    average.add(*data[1], 0.0)
    average.add(*data[2], -float("inf"))
    assert torch.equal(average.terms["p"], data[1][0]["p"])
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="log-weight must be a number"):
            average.add(*data[0], wrong)


@pytest.mark.parametrize("interrupt", [False, True])
def test_cycle_average_is_equation_4(interrupt: bool) -> None:
    """Three cycles of two chains with full-data log likelihoods near -10⁵, where 1/p overflows."""
    data = members(18)
    log_likelihood = -1e5 + 3 * torch.randn(18, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    log_weights = torch.randn(18, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    average: Any = CycleAverage()
    groups: dict[tuple[int, int], list[int]] = {}
    for j in range(18):
        chain, cycle = j % 2, j // 6
        groups.setdefault((chain, cycle), []).append(j)
        average.add(*data[j], float(log_weights[j]), chain=chain, cycle=cycle, log_likelihood=float(log_likelihood[j]))
        if interrupt and j in (3, 8, 14):
            again = CycleAverage()
            again.load_state_dict(average.state_dict())
            average = again
    means, densities, cycle_weights = [], [], []
    for indices in groups.values():
        mean, density = direct([data[j] for j in indices], log_weights[indices])
        means.append(mean)
        densities.append(density)
        cycle_weights.append(torch.tensor(3.0).log() - torch.logsumexp(-log_likelihood[indices], 0))
    weights = torch.stack(cycle_weights).softmax(0)
    combined = average.combined()
    expected = (weights[:, None, None] * torch.stack(means)).sum(0)
    torch.testing.assert_close(combined.terms["p"], expected, rtol=1e-8, atol=1e-12)
    density = torch.logsumexp(torch.stack(densities) + weights.log()[:, None], 0)
    torch.testing.assert_close(combined.log_density, density, rtol=1e-8, atol=1e-8)
    assert 0.01 < weights.max() < 0.999


def test_weights_and_their_effective_number() -> None:
    assert effective_sample_size(torch.zeros(7) + 1e6) == pytest.approx(7)
    assert effective_sample_size(torch.tensor([0.0, -1e6, -1e6])) == pytest.approx(1)
    assert effective_sample_size(torch.tensor([0.0, 0.0, -float("inf")])) == pytest.approx(2)
    for wrong in (torch.empty(0), torch.tensor([float("nan"), 0.0]), torch.full((2,), -float("inf"))):
        with pytest.raises(ValueError, match=r"no samples|NaN|weight 0"):
            normalised_weights(wrong)
