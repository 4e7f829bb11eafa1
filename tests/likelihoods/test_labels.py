"""Likelihoods of labels: ordered classes, several labels, pixels and tokens; and their predictions over samples."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special
from torch import Tensor, distributions

from lightning_sgmcmc import Categorical, Likelihood, MultiLabelBernoulli, Ordinal, PixelCategorical, TokenCategorical
from lightning_sgmcmc.evaluation.averages import WeightedAverage
from lightning_sgmcmc.posterior.predictive import KeptPredictions, kept_of, with_distributions
from lightning_sgmcmc.predictions import ClassPrediction, Members, MultiLabelPrediction, Prediction
from lightning_sgmcmc.predictions.prediction import of_both

WEIGHTS = (0.2, 0.5, 0.3)
IGNORED = -100


def normal(*shape: int, seed: int = 0) -> Tensor:
    return 1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def labels(*shape: int, classes: int, ignored: float = 0.0, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(classes, shape, generator=generator)
    return found.masked_fill(torch.rand(shape, generator=generator) < ignored, IGNORED)


def predicted(likelihood: Likelihood, outputs: Tensor, return_samples: bool = False) -> Prediction:
    """Return what `Posterior.predict` makes of samples with these outputs."""
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    average, kept = WeightedAverage(), KeptPredictions(math.inf)
    with torch.no_grad():
        for output, weight in zip(outputs, weights, strict=True):
            terms = likelihood.terms(output)
            average.add(terms, torch.empty(0), float(weight.log()))
            kept.add(0, kept_of(likelihood, output, terms))
        each = kept.stacked()[likelihood.per_sample_term] if return_samples else None
        return with_distributions(likelihood.prediction(average.terms, each), likelihood, kept, weights)


def averaged(likelihood: Likelihood, outputs: Tensor, target: Tensor) -> dict[str, float]:
    average = WeightedAverage()
    with torch.no_grad():
        for output, weight in zip(outputs, WEIGHTS, strict=True):
            average.add(likelihood.terms(output), likelihood.log_prob(output, target), math.log(weight))
    found = likelihood.metrics(average.terms, average.log_density, target, 1.0)
    assert set(found) == set(likelihood.metric_names)
    return {name: float(value) for name, value in found.items()}


# -- densities --------------------------------------------------------------------------------------------------------


def test_ordinal_probabilities_are_differences_of_sigmoids() -> None:
    likelihood = Ordinal(5).double()
    with torch.no_grad():
        likelihood.first_cut.fill_(-1.3)
        likelihood.log_gaps.copy_(torch.tensor([0.1, -0.7, 0.4]))
    score, target = normal(40, 1), labels(40, classes=5)
    cuts = np.concatenate([[-np.inf], likelihood.cuts.detach().numpy(), [np.inf]])
    expected = np.diff(special.expit(cuts - score.numpy()), axis=1)
    torch.testing.assert_close(likelihood.probabilities(score).detach(), torch.tensor(expected), rtol=1e-9, atol=1e-12)
    found = likelihood.log_prob(score, target).detach()
    assert found.numpy() == pytest.approx(np.log(expected[np.arange(40), target.numpy()]))
    assert torch.equal(likelihood.log_prob(score[:, 0], target[:, None]).detach(), found)
    far = likelihood.log_prob(torch.tensor([800.0, -800.0]).double(), torch.tensor([1, 3]))
    assert far.isfinite().all()
    inputs = (score[:6].clone().requires_grad_(), likelihood.first_cut, likelihood.log_gaps)
    likelihood.forward = likelihood.log_prob  # type: ignore[assignment, method-assign]

    def of(o: Tensor, first: Tensor, gaps: Tensor) -> Any:
        return torch.func.functional_call(likelihood, {"first_cut": first, "log_gaps": gaps}, (o, target[:6]))

    assert torch.autograd.gradcheck(of, inputs)


def test_several_labels_are_independent_given_the_parameters() -> None:
    output, target = normal(30, 4), labels(30, 4, classes=2)
    expected = distributions.Bernoulli(logits=output).log_prob(target.double()).sum(-1)
    for dtype in (torch.int64, torch.float32, torch.bool):
        torch.testing.assert_close(MultiLabelBernoulli().log_prob(output, target.to(dtype)), expected)
    assert MultiLabelBernoulli().log_prob(output[:1], torch.tensor([[0, 1, 2, 0]])).item() == -math.inf


def test_a_datums_density_is_the_sum_over_what_counts() -> None:
    """Pixels (n, K, H, W) and tokens (n, T, K) against `Categorical` on the places that count; bf16 as its float32."""
    logits, target = normal(6, 3, 4, 5), labels(6, 4, 5, classes=3, ignored=0.3)
    target[2] = IGNORED
    pixels, tokens = PixelCategorical(), TokenCategorical()
    found = pixels.log_prob(logits, target)
    assert found[2] == 0
    for datum in range(6):
        counts = target[datum] != IGNORED
        rows = logits[datum].permute(1, 2, 0)[counts]
        expected = Categorical().log_prob(rows, target[datum][counts]).sum()
        torch.testing.assert_close(found[datum], expected)
    as_tokens = logits.flatten(2).transpose(1, 2)
    torch.testing.assert_close(tokens.log_prob(as_tokens, target.flatten(1)), found)
    assert torch.equal(PixelCategorical(255).log_prob(logits, target.where(target >= 0, 255)), found)
    half = logits.bfloat16()
    assert torch.equal(pixels.log_prob(half, target), pixels.log_prob(half.float(), target))
    at_once = torch.vmap(lambda o: pixels.log_prob(o, target))(torch.stack([logits, 2 * logits]))
    torch.testing.assert_close(at_once, torch.stack([found, pixels.log_prob(2 * logits, target)]))
    compiled = torch.compile(tokens.log_prob, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(as_tokens, target.flatten(1)), found)


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_are_of_the_averaged_probabilities_where_labels_count() -> None:
    logits, target = normal(3, 6, 3, 4, 5), labels(6, 4, 5, classes=3, ignored=0.3)
    found = averaged(PixelCategorical(), logits, target)
    mean = torch.einsum("s,snkhw->nhwk", torch.tensor(WEIGHTS).double(), logits.softmax(2))
    counts = target != IGNORED
    p, y = mean[counts], target[counts]
    assert found["accuracy"] == pytest.approx(float((p.argmax(-1) == y).double().mean()))
    assert found["pixel_nll"] == pytest.approx(-float(p[torch.arange(len(y)), y].log().mean()), rel=1e-6)
    iou = [float(((p.argmax(-1) == k) & (y == k)).sum() / ((p.argmax(-1) == k) | (y == k)).sum()) for k in range(3)]
    assert found["iou"] == pytest.approx(np.mean(iou))
    joint = torch.stack([PixelCategorical().log_prob(o, target) for o in logits])
    log_mean = (joint + torch.tensor(WEIGHTS).double().log()[:, None]).logsumexp(0)
    assert found["nll"] == pytest.approx(-float(log_mean.mean()), rel=1e-6)
    tokens = averaged(TokenCategorical(), logits.flatten(3).transpose(2, 3), target.flatten(1))
    assert tokens["token_nll"] == pytest.approx(found["pixel_nll"])
    assert tokens["ece"] == pytest.approx(found["ece"])


def test_metrics_of_several_labels() -> None:
    outputs, target = normal(3, 50, 4), labels(50, 4, classes=2)
    found = averaged(MultiLabelBernoulli(), outputs, target)
    p = torch.einsum("s,snl->nl", torch.tensor(WEIGHTS).double(), outputs.sigmoid())
    right = (p > 0.5) == target.bool()
    assert found["accuracy"] == pytest.approx(float(right.double().mean()))
    assert found["exact"] == pytest.approx(float(right.all(1).double().mean()))
    assert found["brier"] == pytest.approx(2 * float((p - target).square().mean()))
    assert found["label_nll"] == pytest.approx(-float(torch.where(target.bool(), p, 1 - p).log().mean()), rel=1e-6)


def test_chance_is_the_entropy_of_the_labels() -> None:
    """Of what counts only, in nats per example; a constant output has it exactly."""
    target = labels(8, 10, classes=3, ignored=0.2)
    shares = target[target >= 0].unique(return_counts=True)[1].double()
    constant = (shares / shares.sum()).log().expand(8, 10, 3)
    chance = TokenCategorical().chance_nll(target)
    assert chance == pytest.approx(-float(TokenCategorical().log_prob(constant, target).mean()))
    several = labels(40, 3, classes=2).float()
    logits = torch.logit(several.mean(0)).expand(40, 3)
    expected = -float(MultiLabelBernoulli().log_prob(logits, several).mean())
    assert MultiLabelBernoulli().chance_nll(several) == pytest.approx(expected, rel=1e-5)


# -- predictions ------------------------------------------------------------------------------------------------------


def test_quantiles_of_a_class_are_over_the_weighted_samples() -> None:
    outputs = normal(3, 7, 4)
    prediction = predicted(Categorical(), outputs)
    assert isinstance(prediction, ClassPrediction)
    each = outputs.softmax(-1).numpy()
    for q in (0.1, 0.2, 0.21, 0.5, 0.69, 0.9):
        expected = np.quantile(each, q, axis=0, weights=np.array(WEIGHTS), method="inverted_cdf")
        np.testing.assert_allclose(prediction.quantile(q).numpy(), expected, atol=1e-12)
    low, high = prediction.interval(0.5)
    assert ((low <= high) & (low >= 0) & (high <= 1)).all()
    below = prediction.cdf(0.25).numpy()
    np.testing.assert_allclose(below, np.einsum("s,snk->nk", WEIGHTS, each <= 0.25), atol=1e-12)
    torch.testing.assert_close(prediction.total, prediction.epistemic + prediction.aleatoric)
    expected_entropy = np.einsum("s,sn->n", WEIGHTS, special.entr(each).sum(-1))
    assert prediction.aleatoric.numpy() == pytest.approx(expected_entropy, abs=1e-6)
    equal = Members(torch.linspace(0, 1, 10)[:, None, None], torch.full((10,), 0.1))
    assert equal.quantile(0.7).item() == pytest.approx(6 / 9)


def test_draws_of_labels() -> None:
    """5,000 draws: shares within 5 standard errors of the probabilities (false alarm 2e-5 in all)."""
    prediction = predicted(Categorical(), normal(3, 4, 3))
    assert isinstance(prediction, ClassPrediction)
    draws = prediction.sample(5000, seed=4)
    assert draws.shape == (5000, 4)
    shares = torch.stack([(draws == k).double().mean(0) for k in range(3)], 1)
    p = prediction.probabilities
    assert ((shares - p).abs() < 5 * (p * (1 - p) / 5000).sqrt()).all()
    assert torch.equal(draws, prediction.sample(5000, seed=4))


def test_the_places_of_a_datum_are_drawn_from_one_sample() -> None:
    """Samples that are certain of all 0 or all 1: a datum's draws are constant."""
    certain = 50 * torch.stack([torch.eye(2)[k].expand(1, 6, 2) for k in (0, 1, 1)])
    tokens = predicted(TokenCategorical(), certain)
    draws = tokens.sample(100)
    assert draws.shape == (100, 1, 6)
    assert (draws == draws[..., :1]).all()
    assert 0.6 < draws[..., 0].double().mean() < 0.98  # weight 0.8, within 4.5 standard errors
    several = predicted(MultiLabelBernoulli(), certain[..., 1] * 2 - 50)
    assert isinstance(several, MultiLabelPrediction)
    draws = several.sample(100)
    assert (draws == draws[..., :1]).all()
    assert several.mutual_information.min() > 0.4
    with pytest.raises(RuntimeError, match="sample needs the distribution of each sample"):
        tokens.with_kept(None).sample(1)


TEMPERATURES = (0.02, 0.245, 0.5, 0.9, 1.0, 1.5, 3.0, 50.0)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("likelihood", [Categorical(), MultiLabelBernoulli(), TokenCategorical()])
def test_a_calibrated_prediction_is_one_law(likelihood: Any, temperature: float) -> None:
    """Probabilities are the mean of the samples', entropies and quantiles theirs, and epistemic is at most total."""
    outputs = 3 * normal(*((3, 50, 4) if not isinstance(likelihood, TokenCategorical) else (3, 5, 6, 4)))
    before = predicted(likelihood, outputs, return_samples=True)
    after = before.tempered(temperature)  # type: ignore[attr-defined]
    p, each = after.probabilities.double(), after.sample_probabilities.double()
    both = of_both(before.probabilities) if isinstance(likelihood, MultiLabelBernoulli) else before.probabilities
    wanted = special.softmax(both.double().log().numpy() / temperature, -1)
    wanted = wanted[..., 1] if isinstance(likelihood, MultiLabelBernoulli) else wanted
    np.testing.assert_allclose(p.numpy(), wanted, atol=2e-6)
    np.testing.assert_allclose(np.einsum("s,s...->...", WEIGHTS, each.numpy()), p.numpy(), atol=2e-6)
    np.testing.assert_allclose(
        after.quantile(0.4).numpy(),
        np.quantile(each.numpy(), 0.4, axis=0, weights=np.array(WEIGHTS), method="inverted_cdf"),
        atol=1e-7,
    )

    def entropy(q: Any) -> Any:
        return special.entr(of_both(q) if isinstance(likelihood, MultiLabelBernoulli) else q).sum(-1)

    np.testing.assert_allclose(after.total.numpy(), entropy(p), atol=1e-5)
    np.testing.assert_allclose(after.aleatoric.numpy(), np.einsum("s,s...->...", WEIGHTS, entropy(each)), atol=1e-5)
    assert (after.epistemic <= after.total + 1e-6).all()
    if temperature == 1.0:
        torch.testing.assert_close(each.float(), before.sample_probabilities.float(), atol=1e-6, rtol=1e-5)


def test_without_the_samples_a_calibrated_prediction_says_that_they_are_needed() -> None:
    after = predicted(Categorical(), normal(3, 5, 4)).without_distributions().tempered(0.5)  # type: ignore[attr-defined]
    assert after.total.shape == (5,)
    for name in ("epistemic", "aleatoric", "mutual_information"):
        with pytest.raises(AttributeError, match=f"{name} of calibrated predictions needs the distribution"):
            getattr(after, name)


def test_a_table_of_predictions() -> None:
    pandas = pytest.importorskip("pandas")
    frame = predicted(Categorical(), normal(3, 5, 3)).to_pandas(level=0.5)
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns[:4]) == ["label", "probabilities_0", "probabilities_1", "probabilities_2"]
    assert (frame["low_0"] <= frame["high_0"]).all()
    assert len(frame) == 5
    with pytest.raises(ValueError, match="to_pandas needs one row for each datum"):
        predicted(TokenCategorical(), normal(3, 5, 2, 3)).to_pandas()


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "output", "target", "message"),
    [
        (Ordinal(4), torch.zeros(3, 2), torch.zeros(3).long(), r"Ordinal needs an output of shape \(n,\) or \(n, 1\)"),
        (Ordinal(4), torch.zeros(3, 1), torch.zeros(3), "integer labels"),
        (MultiLabelBernoulli(), torch.zeros(3, 2), torch.zeros(3), r"logits and targets of shape \(n, L\)"),
        (PixelCategorical(), torch.zeros(3, 2), torch.zeros(3).long(), r"logits of shape \(n, K, …\)"),
        (PixelCategorical(), torch.zeros(3, 2, 4, 4), torch.zeros(3, 4, 5).long(), r"got \(3, 2, 4, 4\) and"),
        (TokenCategorical(), torch.zeros(3, 2, 4), torch.zeros(3, 2), "of torch.float32"),
    ],
)
def test_wrong_shapes_are_refused(likelihood: Likelihood, output: Tensor, target: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        likelihood.log_prob(output, target)


@pytest.mark.parametrize(
    ("likelihood", "output", "target", "message"),
    [
        (Ordinal(3), torch.zeros(2, 1), torch.tensor([1, 3]), "labels from 1 to 3 for num_classes=3; .* from 0"),
        (MultiLabelBernoulli(), torch.zeros(1, 2), torch.tensor([[0, 2]]), "targets must be 0 or 1, got 2"),
        (
            PixelCategorical(),
            torch.zeros(1, 2, 1, 2),
            torch.tensor([[[0, 255]]]),
            "255 for 2 .* ignore_index=-100",
        ),
    ],
)
def test_labels_out_of_range_are_refused(likelihood: Likelihood, output: Tensor, target: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        likelihood.check_target(output, target)


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="num_classes must be at least 3, got 2: use Bernoulli"):
        Ordinal(2)
    with pytest.raises(TypeError, match="ignore_index must be an object of class int, got 'none'"):
        TokenCategorical("none")  # type: ignore[arg-type]
