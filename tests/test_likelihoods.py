"""Likelihoods and figures of merit against torch's distributions and scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from lightning_sgmcmc import Bernoulli, Categorical, Gaussian
from lightning_sgmcmc.metrics import classification_metrics, predictive_entropy, reliability


def test_log_densities() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(9, 4), torch.randint(4, (9,))
    torch.testing.assert_close(
        Categorical().log_prob(logits, labels), torch.distributions.Categorical(logits=logits).log_prob(labels)
    )
    logit, bits = torch.randn(9), torch.randint(2, (9,))
    expected = torch.distributions.Bernoulli(logits=logit).log_prob(bits.float())
    for output in (logit, logit[:, None]):
        for target in (bits, bits[:, None], bits.float(), bits.bool()):
            torch.testing.assert_close(Bernoulli().log_prob(output, target), expected)
    mean, y = torch.randn(9, 2), torch.randn(9, 2)
    torch.testing.assert_close(
        Gaussian(0.3).log_prob(mean, y), torch.distributions.Normal(mean, 0.3).log_prob(y).sum(1)
    )
    for output, target in ((mean[:, 0], y[:, :1]), (mean[:, :1], y[:, 0])):
        assert Gaussian().log_prob(output, target).shape == (9,), "(n,) and (n, 1) must not broadcast to (n, n)"


def test_half_precision_outputs_are_scored_in_float32() -> None:
    logits, labels = torch.randn(9, 4), torch.randint(4, (9,))
    assert Categorical().log_prob(logits.bfloat16(), labels).dtype == torch.float32
    assert Categorical().terms(logits.bfloat16())["probabilities"].sum(1).numpy() == pytest.approx(1, abs=1e-6)
    assert Gaussian().terms(logits.bfloat16())["mean"].dtype == torch.float32


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits of shape \(n, K\) and integer labels"):
        Categorical().log_prob(torch.randn(9, 4), torch.randn(9))
    with pytest.raises(ValueError, match=r"logits of shape \(n, K\)"):
        Categorical().log_prob(torch.randn(9, 4), torch.zeros(8, dtype=torch.long))
    with pytest.raises(ValueError, match="outputs of shape"):
        Gaussian().log_prob(torch.randn(9, 4), torch.randn(9))
    with pytest.raises(ValueError, match=r"output of shape \(n,\) or \(n, 1\)"):
        Bernoulli().log_prob(torch.randn(9, 2), torch.zeros(9))
    with pytest.raises(ValueError, match="std must be a positive number"):
        Gaussian(std=0.0)


def test_classification_figures_are_scikit_learns() -> None:
    torch.manual_seed(0)
    probabilities, labels = torch.randn(400, 3).softmax(1), torch.randint(3, (400,))
    figures = {name: float(value) for name, value in classification_metrics(probabilities, labels).items()}
    assert figures["accuracy"] == pytest.approx(accuracy_score(labels, probabilities.argmax(1)))
    assert figures["nll"] == pytest.approx(log_loss(labels, probabilities.double().numpy()), rel=1e-5)
    onehot = torch.nn.functional.one_hot(labels, 3)
    assert figures["brier"] == pytest.approx((probabilities - onehot).square().sum(1).mean().item(), rel=1e-5)
    binary, bits = torch.rand(200), torch.randint(2, (200,))
    two = classification_metrics(torch.stack([1 - binary, binary], 1), bits)
    assert float(two["brier"]) == pytest.approx(2 * brier_score_loss(bits, binary), rel=1e-5)
    confidence, accuracy, count = reliability(probabilities, labels)
    ece = (count / count.sum() * (confidence - accuracy).abs()).sum()
    assert figures["ece"] == pytest.approx(ece.item(), rel=1e-5)
    assert count.sum() == 400


def test_entropy_limits() -> None:
    assert predictive_entropy(torch.tensor([[1.0, 0.0, 0.0]])).item() == 0
    assert predictive_entropy(torch.full((1, 5), 0.2)).item() == pytest.approx(np.log(5))
