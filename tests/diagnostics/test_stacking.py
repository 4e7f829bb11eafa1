"""Weights of samples by held-out data, and how sure predictions are: against optima, and factors that were put in."""

import pytest
import torch
from torch import Tensor

from lightning_sgmcmc import Categorical
from lightning_sgmcmc.diagnostics.decisions import stacking_weights, window_weights
from lightning_sgmcmc.likelihoods import Gaussian
from lightning_sgmcmc.posterior.calibration import noise_share, overconfidence


def test_stacking_weights_are_the_optimum() -> None:
    """At the optimum each weight is w_j = (1/n)·Σ_i w_j·p_j(y_i)/Σ_k w_k·p_k(y_i), and no other weights do better."""
    logs = torch.randn(4, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = stacking_weights(logs, pseudo_count=0.0, iterations=3000)
    mixture = (weights[:, None] * logs.exp()).sum(0)
    torch.testing.assert_close((weights[:, None] * logs.exp() / mixture).mean(1), weights, atol=1e-6, rtol=1e-5)
    for _ in range(50):
        other = torch.distributions.Dirichlet(torch.ones(4, dtype=torch.float64)).sample()
        assert (other[:, None] * logs.exp()).sum(0).log().mean() <= mixture.log().mean() + 1e-9


def drawn(means: Tensor, count: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Return log N(y_i; m_j, 1) of targets from N(0, scale²), shape (S, n)."""
    y = scale * torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return -((y - means[:, None]) ** 2) / 2


def mean_log(weights: Tensor, logs: Tensor) -> float:
    return float((weights[:, None] * logs.exp()).sum(0).log().mean())


@pytest.mark.parametrize("count", [100, 1_000])
def test_early_samples_of_a_network_in_training_lose_their_weight(count: int) -> None:
    """Sample j is off by 2·exp(-j/10): the average of all is far worse than the last one, and new data show it."""
    means = 2 * torch.exp(-torch.arange(80) / 10.0).double()
    val, new = drawn(means, count), drawn(means, 20_000, 1)
    weights = stacking_weights(val, window_weights(val, range(80)))
    assert float(weights.sum()) == pytest.approx(1)
    assert float(weights[:20].sum()) < 0.1
    even = torch.full((80,), 1 / 80, dtype=torch.float64)
    assert mean_log(even, new) < mean_log(weights, new) - 0.02
    assert mean_log(weights, new) > float(new[-1].mean()) - 0.005


def test_samples_of_one_law_keep_even_weights_nearly() -> None:
    """Means from N(0, 1) and targets from N(0, 2): only the average over all samples is the targets' law."""
    means = torch.randn(64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    start = window_weights(drawn(means, 5_000, scale=2**0.5), range(64))
    assert float(start.max()) < 2 / 64


def test_samples_of_a_step_share_their_windows() -> None:
    """Chains that draw at one step: the order of the samples does not matter, and equal densities weigh alike."""
    means = 2 * torch.exp(-torch.arange(8) / 2.0).double()
    logs = drawn(means, 200)
    both = window_weights(torch.cat([logs, logs]), [*range(8), *range(8)])
    torch.testing.assert_close(both[:8], both[8:])
    torch.testing.assert_close(2 * both[:8], window_weights(logs, range(8)))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(window_weights(logs[order], order.tolist()), window_weights(logs, range(8))[order])


def test_sureness_is_the_factor_that_was_put_in() -> None:
    """Predictions sharpened by 2 have sureness near 2.

    With 20,000 data the standard error is about 0.01; the prior's pull is below that.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, 4, generator=generator)
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    sharp = (2 * logits).softmax(-1)
    terms = {"probabilities": sharp, "sample_entropy": torch.zeros(len(sharp))}
    assert overconfidence(Categorical(), terms, target, 0.15) == pytest.approx(2, rel=0.05)


def test_few_data_hardly_move_the_overconfidence() -> None:
    """Two right predictions ask for an infinite sharpening; with the prior they ask for a few percent."""
    terms = {"probabilities": torch.tensor([[0.9, 0.1], [0.9, 0.1]]), "sample_entropy": torch.zeros(2)}
    assert 0.9 < (overconfidence(Categorical(), terms, torch.tensor([0, 0]), 0.15) or 0) <= 1


def test_the_overconfidence_of_numbers_is_what_was_put_in() -> None:
    """Standard deviations that are half of the noise's, which is a fifth of the targets' variance; a NaN target has
    no part. The standard errors of 20,000 data are about 0.01 and 0.004, the step of the factors 4 %."""
    generator = torch.Generator().manual_seed(0)
    mean, noise = 2 * torch.randn(20_000, 1, generator=generator), torch.randn(20_000, 1, generator=generator)
    target, likelihood = mean + noise, Gaussian(0.5)
    target[0] = torch.nan
    terms = likelihood.terms(mean) | likelihood.target_terms(mean, target)
    assert overconfidence(likelihood, terms, target, 0.3) == pytest.approx(2, rel=0.05)
    assert noise_share(likelihood, terms, target) == pytest.approx(0.2, abs=0.02)
