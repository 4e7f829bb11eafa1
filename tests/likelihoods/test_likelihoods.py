"""Densities, averaged predictives and figures of merit, against direct formulae in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, root_mean_squared_error
from torch import Tensor, distributions

from lightning_sgmcmc import Bernoulli, Categorical, Gaussian, NegativeBinomial, Poisson
from lightning_sgmcmc.diagnostics.scores import brier_score, classification_metrics, predictive_entropy, reliability
from lightning_sgmcmc.evaluation.averages import WeightedAverage
from lightning_sgmcmc.likelihoods import Likelihood

SAMPLES, DATA, CLASSES = 5, 300, 4


def logits(seed: int = 0, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*(shape or (SAMPLES, DATA, CLASSES)), generator=generator)


def labels(seed: int = 1, classes: int = CLASSES) -> Tensor:
    return torch.randint(classes, (DATA,), generator=torch.Generator().manual_seed(seed))


def averaged(likelihood: Likelihood, outputs: Tensor, target: Tensor, log_weights: Any = None) -> WeightedAverage:
    average = WeightedAverage()
    for index, output in enumerate(outputs):
        terms = likelihood.terms(output) | likelihood.target_terms(output, target)
        weight = 0.0 if log_weights is None else float(log_weights[index])
        average.add(terms, likelihood.log_prob(output, target), weight)
    return average


def figures(likelihood: Likelihood, average: WeightedAverage, target: Tensor, scale: float = 1.0) -> dict[str, float]:
    found = likelihood.metrics(average.terms, average.log_density, target, scale)
    assert set(found) == set(likelihood.metric_names)
    return {name: float(value) for name, value in found.items()}


# -- densities --------------------------------------------------------------------------------------------------------


def test_categorical_log_prob() -> None:
    output, target = logits()[0].double(), labels()
    expected = distributions.Categorical(logits=output).log_prob(target)
    torch.testing.assert_close(Categorical().log_prob(output, target), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("output_shape", [(DATA,), (DATA, 1)])
@pytest.mark.parametrize("target_shape", [(DATA,), (DATA, 1)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool, torch.uint8])
def test_bernoulli_log_prob(output_shape: Any, target_shape: Any, dtype: torch.dtype) -> None:
    output, target = logits(0, DATA).double(), labels(1, 2)
    expected = distributions.Bernoulli(logits=output).log_prob(target.double())
    found = Bernoulli().log_prob(output.view(output_shape), target.to(dtype).view(target_shape))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(DATA,), (DATA, 1), (DATA, 3)])
@pytest.mark.parametrize("learned", [False, True])
def test_gaussian_log_prob(shape: tuple[int, ...], learned: bool) -> None:
    output, target = logits(0, *shape).double(), logits(1, *shape).double()
    found = Gaussian(0.7, learned=learned).double().log_prob(output, target)
    assert found.shape == (DATA,)
    expected = distributions.Normal(output.view(DATA, -1), 0.7).log_prob(target.view(DATA, -1)).sum(-1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # log(std) is kept in float32


def test_learned_std_has_the_gradient_of_its_density() -> None:
    likelihood = Gaussian(0.7, learned=True).double()
    output, target = logits(0, 20).double(), logits(1, 20).double()
    (found,) = torch.autograd.grad(likelihood.log_prob(output, target).sum(), likelihood.log_std)
    std = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(distributions.Normal(output, std).log_prob(target).sum(), std)
    torch.testing.assert_close(found, expected * 0.7, rtol=1e-6, atol=1e-6)
    assert [name for name, _ in Gaussian(0.7).named_parameters()] == []


def test_extreme_logits_stay_finite() -> None:
    output = torch.tensor([[1000.0, -1000.0], [-500.0, 500.0]])
    assert torch.equal(Categorical().log_prob(output, torch.tensor([1, 0])), torch.tensor([-2000.0, -1000.0]))
    assert torch.equal(
        Bernoulli().log_prob(torch.tensor([-800.0, 800.0]), torch.tensor([1, 1])), -torch.tensor([800.0, 0])
    )


def test_half_precision_outputs_are_scored_in_float32() -> None:
    output, target = logits()[0], labels()
    for dtype in (torch.float16, torch.bfloat16):
        low = output.to(dtype)
        assert Categorical().log_prob(low, target).dtype == torch.float32
        torch.testing.assert_close(Categorical().terms(low)["probabilities"], low.float().softmax(-1))
        torch.testing.assert_close(
            Gaussian().log_prob(low[:, 0], output[:, 1]), Gaussian().log_prob(low[:, 0].float(), output[:, 1])
        )


# -- shapes that would broadcast --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "output", "target", "message"),
    [
        (
            Categorical(),
            torch.zeros(4, 3),
            torch.zeros(4, 1).long(),
            r"labels of shape \(n,\).* got \(4, 3\) and \(4, 1\)",
        ),
        (Categorical(), torch.zeros(4), torch.zeros(4).long(), r"logits of shape \(n, K\)"),
        (Categorical(), torch.zeros(4, 3), torch.zeros(5).long(), r"got \(4, 3\) and \(5,\)"),
        (Categorical(), torch.zeros(4, 3), torch.zeros(4), r"integer labels .* of torch.float32"),
        (Categorical(), torch.zeros(4, 3), torch.zeros(4, 2), r"integer labels .* or probabilities \(n, K\)"),
        (Categorical(), torch.zeros(4, 3), torch.zeros(4, 3).long(), r"integer labels"),
        (Categorical(), torch.zeros(4, 3, 2), torch.zeros(4, 2).long(), r"logits of shape \(n, K\)"),
        (Bernoulli(), torch.zeros(4, 2), torch.zeros(4), r"an output of shape \(n,\) or \(n, 1\), got \(4, 2\)"),
        (Bernoulli(), torch.zeros(4), torch.zeros(4, 4), r"an target of shape|a target of shape"),
        (Bernoulli(), torch.zeros(4), torch.zeros(1), r"4 outputs for 1 targets"),
        (Bernoulli(), torch.zeros(()), torch.zeros(()), r"an output of shape"),
        (Gaussian(), torch.zeros(4, 2), torch.zeros(4), r"outputs of shape \(4, 2\) for targets of shape \(4, 1\)"),
        (Gaussian(), torch.zeros(4, 1), torch.zeros(1, 4), r"outputs of shape \(4, 1\) for targets of shape \(1, 4\)"),
        (Gaussian(), torch.zeros(4), torch.zeros(1), r"outputs of shape \(4, 1\) for targets of shape \(1, 1\)"),
        (Gaussian(), torch.zeros(4, 1, 2, 2), torch.zeros(4, 2, 2), r"\(4, 1, 2, 2\) for targets of shape \(4, 2, 2\)"),
        (Gaussian(), torch.zeros(()), torch.zeros(()), r"shape \(n, …\), got a single number"),
    ],
)
def test_wrong_shapes_are_refused(likelihood: Likelihood, output: Tensor, target: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        likelihood.log_prob(output, target)


@pytest.mark.parametrize("likelihood", [Gaussian(0.8), Bernoulli()])
def test_a_column_and_a_vector_are_the_same(likelihood: Likelihood) -> None:
    """(n, 1) against (n,) must give n numbers, not n², in the density and in every figure."""
    outputs = logits(0, SAMPLES, DATA)
    target = labels(1, 2).float()
    expected = averaged(likelihood, outputs, target)
    assert expected.log_density.shape == (DATA,)
    wanted = figures(likelihood, expected, target)
    for column_output, column_target in ((True, False), (False, True), (True, True)):
        o = outputs[..., None] if column_output else outputs
        t = target[:, None] if column_target else target
        average = averaged(likelihood, o, t)
        assert torch.equal(average.log_density, expected.log_density)
        assert figures(likelihood, average, t) == wanted


def test_a_label_that_cross_entropy_ignores_is_not_certain() -> None:
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        Categorical().log_prob(torch.zeros(2, 3), torch.tensor([1, -100]))


def test_a_label_out_of_range_is_refused() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        Categorical().log_prob(torch.zeros(2, 3), torch.tensor([1, 3]))


@pytest.mark.parametrize("std", [0.0, -1.0, math.nan, math.inf])
def test_bad_std_is_refused(std: float) -> None:
    with pytest.raises(ValueError, match=r"std must be in \(0, inf\), got"):
        Gaussian(std)


# -- classification ---------------------------------------------------------------------------------------------------


def expected_calibration_error(probabilities: np.ndarray, target: np.ndarray, bins: int = 15) -> float:
    """Σ_b |B_b|/n·|accuracy - confidence| by the definition (Guo et al. 2017, eq. (5))."""
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == target
    total = 0.0
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        if inside.any():
            total += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    return float(total)


@pytest.mark.parametrize("log_weights", [None, [0.0, 1.0, -2.0, 0.5, 0.1]])
def test_class_figures_are_those_of_the_averaged_probabilities(log_weights: Any) -> None:
    outputs, target = logits(), labels()
    found = figures(Categorical(), averaged(Categorical(), outputs, target, log_weights), target)
    weights = torch.tensor(log_weights or [0.0] * SAMPLES, dtype=torch.float64).softmax(0)
    each = outputs.double().softmax(-1)
    mean = (weights[:, None, None] * each).sum(0).numpy()
    y = target.numpy()
    assert found["accuracy"] == pytest.approx(accuracy_score(y, mean.argmax(1)), abs=1e-6)
    assert found["nll"] == pytest.approx(log_loss(y, mean, labels=range(CLASSES)), rel=1e-6)
    one_hot = np.eye(CLASSES)[y]
    assert found["brier"] == pytest.approx(((mean - one_hot) ** 2).sum(1).mean(), rel=1e-5)
    assert found["ece"] == pytest.approx(expected_calibration_error(mean, y), abs=1e-5)
    assert found["entropy"] == pytest.approx(-(mean * np.log(mean)).sum(1).mean(), rel=1e-5)
    mean_of_logs = -(weights[:, None] * each[:, torch.arange(DATA), target].log()).sum(0).mean().item()
    assert found["nll"] < mean_of_logs - 0.05, "the log of a mean, not the mean of logs"


def test_bernoulli_figures() -> None:
    outputs, target = logits(0, SAMPLES, DATA), labels(1, 2)
    average = averaged(Bernoulli(), outputs, target.float()[:, None])
    found = figures(Bernoulli(), average, target.float()[:, None])
    p = outputs.double().sigmoid().mean(0).numpy()
    y = target.numpy()
    assert found["accuracy"] == pytest.approx(accuracy_score(y, p > 0.5), abs=1e-6)
    assert found["nll"] == pytest.approx(log_loss(y, p), rel=1e-6)
    assert found["brier"] == pytest.approx(2 * brier_score_loss(y, p), rel=1e-5)  # summed over both classes
    assert found["ece"] == pytest.approx(expected_calibration_error(np.stack([1 - p, p], 1), y), abs=1e-5)
    probabilities = average.terms["probabilities"]
    torch.testing.assert_close(probabilities[:, 1].double(), torch.tensor(p), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(DATA))


def test_nll_of_a_certain_mistake_is_not_cut_off() -> None:
    """The metrics of plain probabilities clamp at the smallest number; the average's densities need not."""
    output, target = torch.tensor([[0.0, 500.0]]), torch.tensor([0])
    assert figures(Categorical(), averaged(Categorical(), output[None], target), target)["nll"] == pytest.approx(500.0)
    clamped = classification_metrics(output.softmax(-1), target)["nll"]
    assert 80 < clamped < 500


def test_mutual_information() -> None:
    likelihood, target = Categorical(), labels()
    same = logits()[:1].expand(SAMPLES, -1, -1)
    prediction = likelihood.prediction(averaged(likelihood, same, target).terms, None)
    assert prediction.mutual_information is not None
    assert prediction.mutual_information.max() < 1e-5
    outputs = logits()
    prediction = likelihood.prediction(averaged(likelihood, outputs, target).terms, None)
    each = outputs.double().softmax(-1)
    mean = each.mean(0)
    entropy = -(mean * mean.log()).sum(-1)
    information = (each * (each.log() - mean.log())).sum(-1).mean(0)  # the mean divergence from the average
    assert information.min() > 1e-3
    torch.testing.assert_close(prediction.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    assert prediction.mutual_information is not None
    torch.testing.assert_close(prediction.mutual_information.double(), information, rtol=1e-4, atol=1e-5)


def test_mutual_information_of_opposite_certainties_is_log_2() -> None:
    outputs = torch.tensor([[[200.0, -200.0]], [[-200.0, 200.0]]])
    prediction = Categorical().prediction(averaged(Categorical(), outputs, torch.tensor([0])).terms, None)
    assert prediction.mutual_information is not None
    assert prediction.mutual_information.item() == pytest.approx(math.log(2))


def test_entropy_and_brier_at_the_corners() -> None:
    one_hot = torch.eye(3)
    assert torch.equal(predictive_entropy(one_hot), torch.zeros(3))
    torch.testing.assert_close(predictive_entropy(torch.full((1, 7), 1 / 7)), torch.tensor([math.log(7)]))
    target = torch.tensor([0, 1, 2])
    assert brier_score(one_hot, target).item() == 0.0
    assert brier_score(one_hot, target.roll(1)).item() == 2.0
    assert brier_score(torch.full((3, 3), 1 / 3), target).item() == pytest.approx(2 / 3)


def test_reliability_curve_gives_the_calibration_error() -> None:
    probabilities, target = logits()[0].double().softmax(-1), labels()
    confidence, accuracy, count = reliability(probabilities, target, bins=10)
    assert count.sum() == DATA
    error = (count / DATA * (confidence - accuracy).abs()).sum().item()
    assert error == pytest.approx(expected_calibration_error(probabilities.numpy(), target.numpy(), 10), abs=1e-12)


# -- regression -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 12.5])
@pytest.mark.parametrize("log_weights", [None, [0.0, 1.0, -2.0, 0.5, 0.1]])
@pytest.mark.parametrize("shape", [(DATA,), (DATA, 2)])
def test_regression_figures_are_those_of_the_mixture(shape: tuple[int, ...], log_weights: Any, scale: float) -> None:
    """RMSE, NLL and coverage of Σ_j w_j·N(f_j, σ²), in the units of the target before it was divided by `scale`."""
    likelihood = Gaussian(0.6)
    outputs, target = logits(0, SAMPLES, *shape), logits(1, *shape)
    found = figures(likelihood, averaged(likelihood, outputs, target, log_weights), target, scale)
    weights = torch.tensor(log_weights or [0.0] * SAMPLES, dtype=torch.float64).softmax(0)
    means = scale * outputs.double().view(SAMPLES, DATA, -1)
    y = scale * target.double().view(DATA, -1)
    components = distributions.Normal(means, 0.6 * scale)
    mean = (weights[:, None, None] * means).sum(0)
    assert found["rmse"] == pytest.approx(root_mean_squared_error(y.numpy().ravel(), mean.numpy().ravel()), rel=1e-5)
    density = (weights[:, None] * components.log_prob(y).sum(-1).exp()).sum(0)
    assert found["nll"] == pytest.approx(-density.log().mean().item(), rel=1e-5)
    cdf = (weights[:, None, None] * components.cdf(y)).sum(0)
    for level in (0.5, 0.9):
        inside = (cdf > (1 - level) / 2) & (cdf < (1 + level) / 2)
        assert 0.05 < inside.double().mean() < 0.95
        assert found[f"coverage_{level * 100:.0f}"] == pytest.approx(inside.double().mean().item(), abs=1e-6)


def test_coverage_of_a_true_model_is_nominal() -> None:
    """20,000 targets from the mixture itself: within 5 standard errors of 50 % and 90 % (false alarm 1e-6)."""
    generator = torch.Generator().manual_seed(0)
    count = 20_000
    outputs = torch.tensor([-1.0, 0.5, 2.0])[:, None].expand(3, count)
    chosen = torch.randint(3, (count,), generator=generator)
    target = outputs[chosen, torch.arange(count)] + 0.4 * torch.randn(count, generator=generator)
    found = figures(Gaussian(0.4), averaged(Gaussian(0.4), outputs, target), target)
    for level in (0.5, 0.9):
        error = math.sqrt(level * (1 - level) / count)
        assert abs(found[f"coverage_{level * 100:.0f}"] - level) < 5 * error


@pytest.mark.parametrize("learned", [False, True])
def test_regression_prediction_is_the_mixtures_moments(learned: bool) -> None:
    likelihood = Gaussian(0.6, learned=learned)
    outputs, target = logits(0, SAMPLES, DATA, 2), logits(1, DATA, 2)
    with torch.no_grad():
        prediction = likelihood.prediction(averaged(likelihood, outputs, target).terms, outputs)
    means = outputs.double()
    torch.testing.assert_close(prediction.mean.double(), means.mean(0), rtol=1e-5, atol=1e-5)
    epistemic = means.var(0, correction=0)
    torch.testing.assert_close(prediction.epistemic_std.double(), epistemic.sqrt(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(prediction.std.double(), (epistemic + 0.36).sqrt(), rtol=1e-4, atol=1e-4)
    with pytest.raises(AttributeError, match="a RegressionPrediction has no 'probabilities': it has mean, std"):
        _ = prediction.probabilities
    assert prediction.sample_means is outputs


def test_epistemic_std_of_targets_far_from_zero() -> None:
    """Years, say: means about 2000 that disagree by 0.1."""
    outputs = 2000 + 0.1 * logits(0, SAMPLES, DATA)
    average = averaged(Gaussian(0.1), outputs, outputs[0])
    found = Gaussian(0.1).prediction(average.terms, None).epistemic_std
    expected = outputs.double().std(0, correction=0)
    torch.testing.assert_close(found.squeeze(-1).double(), expected, rtol=0.01, atol=0)  # type: ignore[union-attr]


@pytest.mark.parametrize("r", [0.3, 2.0])
def test_the_guess_of_counts_is_the_most_likely_negative_binomial(r: float) -> None:
    y = np.random.default_rng(0).negative_binomial(r, 0.3, size=(400, 1))

    def nll(point: Any) -> float:
        size = np.exp(point[1])
        return float(-stats.nbinom.logpmf(y, size, size / (size + np.exp(point[0]))).mean())

    best = optimize.minimize(nll, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-10})
    target = torch.as_tensor(y)
    assert NegativeBinomial(learned=True).chance_nll(target) == pytest.approx(best.fun, abs=1e-7)
    fixed = optimize.minimize_scalar(lambda log_mean: nll([log_mean, 0.0]))
    assert NegativeBinomial(1.0).chance_nll(target) == pytest.approx(fixed.fun, abs=1e-7)


def test_the_guess_of_counts_without_more_spread_than_poissons_is_his() -> None:
    """Counts 0 to 3 in equal shares have less variance than their mean; and counts that are all 0 are certain."""
    for counts in (torch.arange(40)[:, None] % 4, torch.zeros(9, 1)):
        poisson = Poisson().chance_nll(counts)
        assert NegativeBinomial(learned=True).chance_nll(counts) == pytest.approx(poisson, abs=1e-5)
