"""Scores of predictive distributions of classes and numbers, with confidence intervals: pure functions."""

import math

import torch
from torch import Tensor
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    binary_specificity_at_sensitivity,
    multiclass_accuracy,
)

from lightning_sgmcmc.checks import check_count, check_within
from lightning_sgmcmc.diagnostics.draws import CONFIDENCE, percentile_interval, resampled_means
from lightning_sgmcmc.tensors import widest


def gaussian_mixture_crps(weights: Tensor, means: Tensor, stds: Tensor, y: Tensor) -> Tensor:
    """Return the continuous ranked probability score of mixtures of Gaussians, in the units of y; smaller is better.

        E|Y - y| - E|Y - Y'|/2 = Σ_s w_s·A(y - μ_s, σ_s²) - Σ_st w_s·w_t·A(μ_s - μ_t, σ_s² + σ_t²)/2

    with A(m, v) = E|N(m, v)| = m·(2Φ(m/√v) - 1) + 2·√v·φ(m/√v).

    Args:
        weights: shape (S,), summing to 1.
        means: shape (S, …).
        stds: shape (S, …).
        y: observed numbers, shape (…).

    Returns:
        shape (…).

    Source: Grimit et al. 2006 (mixtures of normal distributions).

    >>> one = torch.ones(1)  # of a standard Gaussian at its mean: (√2 - 1)/√π
    >>> gaussian_mixture_crps(one, torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1))
    tensor([0.2337])
    """
    shaped = weights.reshape(-1, *[1] * y.dim())
    own = (shaped * _mean_absolute(y - means, stds.square())).sum(0)
    between = torch.zeros_like(own)
    for weight, mean, std in zip(weights, means, stds, strict=True):
        between += weight * (shaped * _mean_absolute(mean - means, std.square() + stds.square())).sum(0)
    return own - between / 2


def _mean_absolute(mean: Tensor, variance: Tensor) -> Tensor:
    std = variance.sqrt()
    z = mean / std
    return mean * torch.erf(z / math.sqrt(2)) + std * math.sqrt(2 / math.pi) * (-z.square() / 2).exp()


def sample_crps(draws: Tensor, y: Tensor) -> Tensor:
    """Return the CRPS estimated from draws of the predictive: unbiased, for any distribution of numbers.

        S⁻¹·Σ_s |Y_s - y| - [2·S·(S - 1)]⁻¹·Σ_st |Y_s - Y_t|

    Args:
        draws: independent draws, shape (S, …), S ≥ 2.
        y: observed numbers, shape (…).

    Raises:
        ValueError: for fewer than two draws.

    Source: Gneiting & Raftery 2007, eq. (20); Zamo & Naveau 2018 (the fair estimator).
    """
    count = len(draws)
    if count < 2:
        raise ValueError(f"sample_crps needs at least 2 draws of each datum, got {count}")
    # Σ_st |Y_s - Y_t| = 2·Σ_s (2s - S + 1)·Y_(s) of the ordered draws, s from 0
    ordered = draws.sort(0).values
    ranks = torch.arange(count, dtype=draws.dtype, device=draws.device).reshape(-1, *[1] * y.dim())
    spread = 2 * ((2 * ranks - count + 1) * ordered).sum(0)
    return (draws - y).abs().mean(0) - spread / (2 * count * (count - 1))


def interval_score(low: Tensor, high: Tensor, y: Tensor, level: float) -> Tensor:
    """Return the interval score of central intervals, in the units of y: their width and a penalty for misses.

        (u - l) + (2/α)·max(l - y, 0) + (2/α)·max(y - u, 0),   α = 1 - level

    Smaller is better; the true quantiles have the smallest expectation.

    Args:
        low: lower ends of the intervals, shape (…).
        high: upper ends, shape (…).
        y: observed numbers, shape (…).
        level: their nominal coverage, in (0, 1).

    Source: Gneiting & Raftery 2007, eq. (43).

    >>> low, high, y = torch.zeros(2), torch.ones(2), torch.tensor([0.5, 1.1])
    >>> interval_score(low, high, y, 0.9)
    tensor([1.0000, 3.0000])
    """
    check_within("level", level, "(0, 1)")
    missed = (low - y).clamp_min(0) + (y - high).clamp_min(0)
    return high - low + 2 / (1 - level) * missed


def pit_histogram(cdf: Tensor | tuple[Tensor, Tensor], bins: int = 10) -> Tensor:
    """Return the share of data in equal bins of the probability integral transform F_i(y_i), shape (bins,).

    It is flat for a calibrated predictive, has a hump in the middle for one that is too wide, and is high at both ends
    for an overconfident one. A count is spread evenly between P(Y < y) and P(Y ≤ y), which makes it flat for counts.

    Args:
        cdf: the predictive distribution function at each observed number, in [0, 1], any shape; of counts or ordered
            classes the pair P(Y < y) and P(Y ≤ y). `Evaluation.pit` is either.
        bins: number of bins.

    Raises:
        ValueError: for fewer than one bin, or a NaN.

    Source: Gneiting et al. 2007 (Probabilistic forecasts, calibration and sharpness); Czado, Gneiting & Held 2009,
    eq. (2) (counts).

    >>> pit_histogram(torch.tensor([0.05, 0.45, 0.55, 1.0]), bins=2)
    tensor([0.5000, 0.5000])
    >>> pit_histogram((torch.tensor([0.0, 0.4]), torch.tensor([0.4, 1.0])), bins=2)  # a calibrated Bernoulli(0.6)
    tensor([0.5833, 0.4167])
    """
    check_count("bins", bins)
    below, up_to = (part.reshape(-1) for part in (cdf if isinstance(cdf, tuple) else (cdf, cdf)))
    if bool((below.isnan() | up_to.isnan()).any()):
        raise ValueError("cdf must be in [0, 1], got NaN: leave out data without a prediction")
    edges = torch.arange(bins + 1, dtype=torch.float64).div(bins).to(up_to)
    # A mass at one place, and a number of a continuous law, belong to the bin that begins there.
    place = torch.bucketize(up_to.contiguous(), edges[1:-1], right=True)
    whole = widest(torch.nn.functional.one_hot(place, bins))
    width = widest(up_to - below)
    reached = ((edges[:, None] - below) / width.clamp_min(1e-300)).clamp(0, 1)
    share = torch.where(width[:, None] > 0, reached.diff(dim=0).T, whole)
    return share.sum(0).div(max(len(up_to), 1)).float()


def concordance_index(score: Tensor, bounds: Tensor) -> Tensor:
    """Return the share of ordered pairs of numbers that a score puts in their order, a scalar in [0, 1].

        C = Σ_{(i,j)} (1[s_i < s_j] + ½·1[s_i = s_j]) / number of (i,j),   over all (i,j) with Y_i < Y_j for certain

    A pair is ordered for certain if upper_i < lower_j, or if they are equal and Y_j, being censored, is above its lower
    bound. Two known numbers that are equal are no pair. 1/2 is guessing. Of right-censored targets it is Harrell's. It
    costs n² comparisons.

    Args:
        score: larger where a larger number is predicted, such as `prediction.mean`: shape (n,) or (n, 1).
        bounds: lower and upper of each number, shape (n, 2), as `Censored` takes them; NaN is not observed.

    Raises:
        ValueError: for other shapes, a score that is NaN, or no pair that is ordered for certain.

    Source: Harrell et al. 1982.

    >>> times = torch.tensor([[1.0, 1.0], [2.0, torch.inf], [3.0, 3.0]])  # the second has not ended at 2
    >>> concordance_index(torch.tensor([0.0, 5.0, 4.0]), times)
    tensor(1.)
    """
    score = score.reshape(-1)
    if bounds.shape != (len(score), 2):
        raise ValueError(
            f"bounds should have shape (n, 2) for n = {len(score)} scores, got {tuple(bounds.shape)}: "
            "right_censored(time, event) makes them"
        )
    if bool(score.isnan().any()):
        raise ValueError("score is NaN for some data: leave out data without a prediction")
    low, high = bounds.unbind(-1)
    ordered, agreeing = 0, 0.0
    for rows in torch.arange(len(score), device=score.device).split(1024):
        above = (high[rows, None] < low) | ((high[rows, None] == low) & (low < high))
        ordered += int(above.sum())
        smaller, equal = score[rows, None] < score, score[rows, None] == score
        agreeing += float((smaller & above).sum()) + 0.5 * float((equal & above).sum())
    if not ordered:
        raise ValueError("no pair of targets is ordered for certain, so there is no concordance: pass more data")
    return torch.tensor(agreeing / ordered)


# -- metrics -----------------------------------------------------------------------------------------------------------

CALIBRATION_BINS = 15


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """Return -Σ_k p_k·log p_k for each row, in nats; (n, K) to (n,).

    >>> predictive_entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    tensor([0.0000, 0.6931])
    """
    return torch.special.entr(probabilities).sum(-1)


def brier_score(probabilities: Tensor, target: Tensor) -> Tensor:
    """Return the mean over the data of Σ_k (p_k - 1{k=y})².

    Args:
        probabilities: shape (n, K).
        target: labels in 0..K-1, shape (n,).

    >>> brier_score(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([0, 1]))
    tensor(0.2500)
    """
    p_true = probabilities.gather(-1, whole_labels(target)[:, None]).squeeze(-1)
    return (probabilities.square().sum(-1) - 2 * p_true + 1).mean()


def classification_metrics(probabilities: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return accuracy, nll (nats per example), brier, ece (15 bins, L1) and the mean predictive entropy.

    Args:
        probabilities: shape (n, K).
        target: labels in 0..K-1, shape (n,).
    """
    num_classes, target = probabilities.shape[-1], whole_labels(target)
    p_true = probabilities.gather(-1, target[:, None]).squeeze(-1)
    return {
        "accuracy": multiclass_accuracy(probabilities, target, num_classes, average="micro"),
        "nll": -p_true.clamp_min(torch.finfo(p_true.dtype).tiny).log().mean(),
        "brier": brier_score(probabilities, target),
        "ece": calibration_error(probabilities, target),
        "entropy": predictive_entropy(probabilities).mean(),
    }


def expected_classification_metrics(probabilities: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return the expectations of `classification_metrics` over labels that are drawn from the targets.

    With predictions p and targets q, and y(p) the most probable class: accuracy mean(q_y(p)), nll mean(-Σ_k q_k·log
    p_k), brier mean(Σ_k p_k² - 2·Σ_k q_k·p_k + 1), and an ece of this accuracy.

    Args:
        probabilities: shape (n, K).
        target: probabilities of the labels, shape (n, K).

    >>> half = torch.tensor([[0.5, 0.5]])
    >>> expected_classification_metrics(torch.tensor([[0.75, 0.25]]), half)["brier"]
    tensor(0.6250)
    """
    nll, brier, right = expected_scores(probabilities, target)
    confidence = probabilities.max(-1).values
    gaps = torch.zeros(CALIBRATION_BINS, dtype=confidence.dtype, device=confidence.device)
    return {
        "accuracy": right.mean(),
        "nll": nll.mean(),
        "brier": brier.mean(),
        "ece": gaps.index_add(0, confidence_bin(confidence), confidence - right).abs().sum() / len(right),
        "entropy": predictive_entropy(probabilities).mean(),
    }


def expected_scores(probabilities: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return NLL, Brier score and probability of a right label of each datum, each (n,), for targets (n, K)."""
    p, q = probabilities, target.to(probabilities)
    nll = -torch.special.xlogy(q, p.clamp_min(torch.finfo(p.dtype).tiny)).sum(-1)
    brier = p.square().sum(-1) - 2 * (p * q).sum(-1) + 1
    return nll, brier, q.gather(-1, p.argmax(-1, keepdim=True))[:, 0]


def detection_metrics(known: Tensor, unknown: Tensor) -> dict[str, Tensor]:
    """Return how well a score separates out-of-distribution inputs (unknown), which should have the larger score.

    `auroc`: the probability that an unknown input has the larger score (ties count half). `aupr_out`, `aupr_in`: the
    average precision of finding the unknown inputs, and of finding the known ones, which depend on how many there are
    of each. `fpr95`: the share of unknown inputs below a threshold that 95 % of the known ones are below.

    Args:
        known: scores of inputs like the training data, shape (n,).
        unknown: scores of out-of-distribution inputs, shape (m,).

    Raises:
        ValueError: if there are none of one of them. With a score that is NaN, all are NaN.

    Source: Hendrycks & Gimpel 2017; Liang et al. 2018 (ODIN), for the false positive rate at 95 % true positives.

    >>> {name: float(value) for name, value in detection_metrics(torch.tensor([0.1, 0.2]), torch.tensor([0.3])).items()}
    {'auroc': 1.0, 'aupr_out': 1.0, 'aupr_in': 1.0, 'fpr95': 0.0}
    """
    scores = torch.cat([known, unknown]).cpu()
    if not len(known) or not len(unknown):
        raise ValueError(f"detection needs scores of both kinds, got {len(known)} known and {len(unknown)} unknown")
    if bool(scores.isnan().any()):
        return dict.fromkeys(("auroc", "aupr_out", "aupr_in", "fpr95"), scores.new_tensor(math.nan))
    is_unknown = torch.arange(len(scores)) >= len(known)
    # Torchmetrics takes numbers in [0, 1]; the order of the scores is all that counts.
    places = widest(scores.unique(return_inverse=True)[1]) / len(scores)
    specificity, _ = binary_specificity_at_sensitivity(1 - places, (~is_unknown).long(), min_sensitivity=0.95)
    return {
        "auroc": binary_auroc(places, is_unknown.long()),
        "aupr_out": binary_average_precision(places, is_unknown.long()),
        "aupr_in": binary_average_precision(1 - places, (~is_unknown).long()),
        "fpr95": 1 - specificity,
    }


def out_of_distribution_metrics(
    known: Tensor, unknown: Tensor, sample_entropies: tuple[Tensor, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return how well predictions detect inputs from another distribution, for which every class is wrong.

    `auroc`, `aupr_out`, `aupr_in`, `fpr95`: for detection by predictive entropy, see `detection_metrics`.
    `max_probability_auroc`: by the largest probability. `mutual_information_auroc`: by the mutual information, if
    sample_entropies are given. `entropy`: the mean predictive entropy of the unknown in nats. `brier`: the mean over
    inputs and classes of the squared probability, 1/n·Σ_i 1/K·Σ_k p_ik², between 1/K² (uniform) and 1/K (certain).

    Args:
        known: probabilities of the evaluation data, shape (n, K).
        unknown: probabilities of the out-of-distribution data, shape (m, K).
        sample_entropies: the mean over samples of their entropies, of both, shapes (n,) and (m,).

    Source: Deng et al. 2022 (ICSGLD), section 5.3; the Brier score as in the authors' code.
    """
    entropies = [predictive_entropy(known), predictive_entropy(unknown)]
    found = detection_metrics(*entropies)
    found["max_probability_auroc"] = detection_metrics(*(-p.max(-1).values for p in (known, unknown)))["auroc"]
    if sample_entropies is not None:
        information = ((own - each).clamp_min(0) for own, each in zip(entropies, sample_entropies, strict=True))
        found["mutual_information_auroc"] = detection_metrics(*information)["auroc"]
    return found | {"entropy": entropies[1].mean(), "brier": unknown.square().mean()}


def calibration_error(probabilities: Tensor, target: Tensor, bins: int = CALIBRATION_BINS) -> Tensor:
    """Return the expected calibration error, Σ_b n_b/n·|accuracy_b - confidence_b| over the bins of `reliability`.

    >>> certain = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    >>> calibration_error(certain, torch.tensor([0, 1]))
    tensor(0.5000)
    """
    confidence, predicted = probabilities.max(-1)
    gap = confidence - (predicted == whole_labels(target)).to(confidence.dtype)
    total = torch.zeros(bins, dtype=gap.dtype, device=gap.device)
    return total.index_add(0, confidence_bin(confidence, bins), gap).abs().sum() / len(gap)


def confidence_bin(confidence: Tensor, bins: int = CALIBRATION_BINS) -> Tensor:
    """Return each confidence's bin, from 0, among the equal bins [0, 1/B], (1/B, 2/B], …, ((B-1)/B, 1].

    >>> confidence_bin(torch.tensor([0.0, 0.6, 0.61, 1.0]), 10)
    tensor([0, 5, 6, 9])
    """
    # The edges in the confidences' own precision, so that k/B is the upper edge of its bin in each of them.
    edges = (torch.arange(1, bins, dtype=torch.float64) / bins).to(confidence)
    return torch.bucketize(confidence.contiguous(), edges)


def whole_labels(target: Tensor) -> Tensor:
    """Return labels of any integer dtype as int64, which torch's indexing needs."""
    if target.is_floating_point() or target.is_complex():
        raise ValueError(f"labels must be integers, got {target.dtype}: convert them by .long()")
    return target.long()


def reliability(probabilities: Tensor, target: Tensor, bins: int = CALIBRATION_BINS) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean confidence, accuracy and number of data per confidence bin, each of shape (bins,).

    Args:
        probabilities: shape (n, K).
        target: labels in 0..K-1, shape (n,).
        bins: number of equal bins of [0, 1]; an edge belongs to the bin below it.
    """
    confidence, predicted = probabilities.max(-1)
    index = confidence_bin(confidence, bins)
    count = torch.zeros(bins, dtype=torch.float64)
    total_confidence, total_correct = count.clone(), count.clone()
    correct = (predicted == whole_labels(target)).cpu().double()
    index, confidence = index.cpu(), confidence.cpu().double()
    count.index_add_(0, index, torch.ones_like(confidence))
    total_confidence.index_add_(0, index, confidence)
    total_correct.index_add_(0, index, correct)
    filled = count.clamp_min(1)
    return total_confidence / filled, total_correct / filled, count


# -- intervals ---------------------------------------------------------------------------------------------------------

MOST_SIMULATED = 20_000
"""For more data than this, the sums of correct predictions in a bin are drawn from their normal law."""


def mean_interval(values: Tensor, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the bootstrap percentile interval of a mean of numbers (n,); NaN for fewer than two.

    For the paired difference of two predictions pass the difference of each datum. The resamples have a fixed seed.

    >>> low, high = mean_interval(torch.arange(100.0))
    >>> 43 < low < 45 and 54 < high < 56
    True
    """
    if len(values) < 2:
        return math.nan, math.nan
    return percentile_interval(resampled_means(values.detach().cpu().double().numpy()[None])[0], confidence)


def share_interval(share: float, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's interval of a share of independent data.

    >>> [round(end, 3) for end in share_interval(0.9, 100)]
    [0.826, 0.945]
    """
    from scipy.special import ndtri

    z = float(ndtri((1 + confidence) / 2))
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    width = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(centre - width, 0.0), min(centre + width, 1.0)


def calibration_error_by_chance(
    confidence: Tensor, bins: int = CALIBRATION_BINS, draws: int = 400
) -> tuple[float, float]:
    """Return the mean and the 95 % quantile of the calibration error of a calibrated model with confidences (n,).

    Each prediction is correct with the probability that it states (Vaicenavicius et al. 2019, consistency resampling).
    """
    place = confidence_bin(confidence.detach(), bins).cpu()
    confidence = confidence.detach().cpu().double()
    count = len(confidence)
    generator = torch.Generator().manual_seed(0)
    if count <= MOST_SIMULATED:
        errors = []
        member = widest(torch.nn.functional.one_hot(place, bins))
        for size in (draws // 8,) * 8:
            correct = torch.rand(size, count, generator=generator, dtype=torch.float64) < confidence
            errors.append(((widest(correct) - confidence) @ member).abs().sum(1) / count)
        found = torch.cat(errors)
    else:
        variance = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, confidence * (1 - confidence))
        noise = torch.randn(draws, bins, generator=generator, dtype=torch.float64)
        found = (noise * variance.sqrt()).abs().sum(1) / count
    return float(found.mean()), float(found.quantile(0.95))
