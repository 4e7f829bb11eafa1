"""Decisions on predictions, fitted on held data: calibration, conformal sets, abstention, stacking, agreement."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from scipy import special
from torch import Tensor

from lightning_sgmcmc.checks import check_within
from lightning_sgmcmc.diagnostics.scores import whole_labels
from lightning_sgmcmc.predictions.mixture import FLOOR
from lightning_sgmcmc.tensors import widest

FARTHEST = 5.5
"""Of a normal score: beyond, float32 does not tell a probability from 1."""
SMALLEST, LARGEST = 1e-2, 1e2
"""Bounds of a fitted temperature; data that are all right, or all wrong, have no finite optimum."""


def fit_temperature(probabilities: Tensor, labels: Tensor) -> float:
    """Return the temperature at which the tempered probabilities (n, K) have the lowest mean NLL of labels (n,), or of
    soft labels (n, K).

    The NLL is convex in 1/T, so the root of its derivative, mean(E_T[log p] - log p_y), is bisected.

    Source: Guo et al. 2017, section 4.2.
    """
    logs = widest(probabilities).clamp_min(FLOOR).log()
    chosen = _of_labels(logs, labels)
    low, high = math.log(1 / LARGEST), math.log(1 / SMALLEST)  # of 1/T
    for _ in range(50):
        middle = (low + high) / 2
        expected = ((math.exp(middle) * logs).softmax(-1) * logs).sum(-1)
        low, high = (low, middle) if float((expected - chosen).mean()) > 0 else (middle, high)
    return math.exp(-(low + high) / 2)


def fit_std_factor(mean: Tensor, std: Tensor, target: Tensor) -> float:
    """Return the factor of the standard deviations (n, D) with the lowest mean NLL of a Gaussian; NaN is left out.

    factor² = mean((target - mean)²/std²)
    """
    return float(((widest(target) - widest(mean)) / widest(std)).square().nanmean().sqrt())


def class_nll(probabilities: Tensor, labels: Tensor) -> float:
    """Return the mean of -log p_y for labels (n,), of -Σ_k q_k·log p_k for soft ones (n, K), in nats per example."""
    return -float(_of_labels(widest(probabilities).clamp_min(FLOOR).log(), labels).mean())


def _of_labels(logs: Tensor, labels: Tensor) -> Tensor:
    return logs.gather(1, labels[:, None])[:, 0] if labels.dim() == 1 else (labels.to(logs) * logs).sum(1)


def gaussian_nll(mean: Tensor, std: Tensor, target: Tensor) -> float:
    """Return the mean of -Σ_d log N(target_d; mean_d, std_d²), in nats per example; NaN targets have no term."""
    standardised = (widest(target) - widest(mean)) / widest(std)
    each = standardised.square() / 2 + widest(std).log() + math.log(2 * math.pi) / 2
    return float(each.flatten(1).nansum(-1).mean())


def stretched_nll(cdf: Tensor, below: Tensor, factor: float) -> float:
    """Return the mean NLL of numbers in nats, up to a constant, where their normal scores are N(0, factor²).

    The score of a number is z = Φ⁻¹(cdf); one that is known to lie between two, as a count or a bound does, has the
    probability between their scores. NaN has no term, and a score is at most 5.5 from 0.

    Args:
        cdf: P(Y ≤ y) of each number, any shape.
        below: P(Y < y), equal to cdf for a number of which the density is known.
        factor: above 1 for overconfident predictions.
    """
    high, low = (widest(part)[~cdf.isnan()] for part in (cdf, below))
    point = torch.special.ndtri(high).clamp(-FARTHEST, FARTHEST) / factor
    between = torch.special.ndtr(torch.special.ndtri(high) / factor) - torch.special.ndtr(
        torch.special.ndtri(low) / factor
    )
    nll = torch.where(high == low, point.square() / 2 + math.log(factor), -between.clamp_min(FLOOR).log())
    return float(nll.mean())


# -- conformal ---------------------------------------------------------------------------------------------------------


def conformal_threshold(scores: Tensor, level: float) -> Tensor:
    """Return the ⌈(n + 1)·level⌉-th smallest score, +∞ if n is too small for it; columns are separate.

    A new datum, exchangeable with the n, has a score of at most this with probability at least `level`, and at most
    level + 1/(n + 1) if no scores are equal.

    Args:
        scores: nonconformity of the calibration data, shape (n, …).
        level: in (0, 1).

    Raises:
        ValueError: for a level outside of (0, 1), or no scores.

    Source: Vovk et al. 2005; Lei et al. 2018, algorithm 2.
    """
    check_within("level", level, "(0, 1)")
    if not len(scores):
        raise ValueError("conformal prediction needs calibration data, and there are none")
    rank = math.ceil((len(scores) + 1) * level - 1e-9)
    if rank > len(scores):
        return torch.full_like(scores[0], torch.inf)
    return scores.sort(0).values[rank - 1]


def class_scores(probabilities: Tensor, adaptive: bool, uniform: Tensor | None = None) -> Tensor:
    """Return each class's nonconformity, shape (n, K).

        1 - p_k,   or adaptive: Σ_j p_j·1{p_j > p_k} + u·p_k

    Args:
        probabilities: shape (n, K).
        adaptive: whether sets grow with the datum's difficulty, for coverage that is more even over data.
        uniform: u in [0, 1] for each datum, shape (n,), which makes the coverage exact; None is 1.

    Source: Sadinle et al. 2019 (least ambiguous sets); Romano et al. 2020 (adaptive sets).
    """
    if not adaptive:
        return 1 - probabilities
    ordered, places = probabilities.sort(-1, descending=True)
    above = torch.zeros_like(probabilities).scatter(-1, places, ordered.cumsum(-1) - ordered)
    share = torch.ones_like(probabilities[:, :1]) if uniform is None else uniform[:, None].to(probabilities)
    return above + share * probabilities


# -- selective ---------------------------------------------------------------------------------------------------------


def risk_coverage(uncertainty: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coverages k/n and the risks, the mean loss of the k surest predictions, k = 1 … n, each of shape (n,).

    Predictions of equal uncertainty count alike: each has the mean loss of all that are equal.

    Args:
        uncertainty: of each prediction, shape (n,); larger is less sure.
        loss: of each prediction, shape (n,), such as 1 for a wrong class and 0 for a right one.

    Source: Geifman & El-Yaniv 2017; El-Yaniv & Wiener 2010.
    """
    if uncertainty.shape != loss.shape or uncertainty.dim() != 1 or not len(loss):
        raise ValueError(
            f"uncertainty and loss should both have the shape (n,), n > 0, got {tuple(uncertainty.shape)} and "
            f"{tuple(loss.shape)}"
        )
    values, group = uncertainty.unique(return_inverse=True)
    count = widest(torch.bincount(group, minlength=len(values)))
    mean = torch.zeros_like(count).index_add_(0, group, widest(loss)) / count
    shared = mean[group[uncertainty.argsort()]]
    steps = torch.arange(1, len(loss) + 1, dtype=count.dtype, device=loss.device)
    return steps / len(loss), shared.cumsum(0) / steps


def aurc(probabilities: Tensor, target: Tensor) -> Tensor:
    """Return the area under the risk-coverage curve of class predictions by their largest probability, in [0, 1].

    It is the mean over coverages of the error rate of the surest predictions: smaller is better, and 0 needs no errors.

    Args:
        probabilities: shape (n, K).
        target: labels in 0..K-1, shape (n,).

    Source: Geifman et al. 2019 (Bias-reduced uncertainty estimation).

    >>> p = torch.tensor([[0.9, 0.1], [0.4, 0.6]])  # the second, less sure, is wrong
    >>> aurc(p, torch.tensor([0, 0]))
    tensor(0.2500)
    """
    return risk_coverage(*_errors(probabilities, target))[1].mean().float()


def risk_at_coverage(probabilities: Tensor, target: Tensor, coverage: float = 0.8) -> Tensor:
    """Return the error rate of the surest predictions, those with the largest probabilities.

    Args:
        probabilities: shape (n, K).
        target: labels in 0..K-1, shape (n,).
        coverage: share of the data that are predicted, in (0, 1].
    """
    check_within("coverage", coverage, "(0, 1]")
    risks = risk_coverage(*_errors(probabilities, target))[1]
    return risks[max(round(coverage * len(risks)), 1) - 1].float()


def _errors(probabilities: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    largest, predicted = probabilities.max(-1)
    return -largest, (predicted != whole_labels(target)).float()


class SelectiveThreshold(NamedTuple):
    """Predictions of an uncertainty below the threshold have a risk of at most `bound`, with a stated confidence.

    Attributes:
        threshold: of the uncertainty; +∞ answers all.
        bound: the upper confidence bound of the risk of the answered.
        coverage: the share of the calibration data that is answered.
    """

    threshold: float
    bound: float
    coverage: float


COVERAGE_STEPS = 20
"""Coverages among which a threshold is chosen, each of which is a test."""


def selective_threshold(
    uncertainty: Tensor, wrong: Tensor, risk: float, confidence: float = 0.95
) -> SelectiveThreshold | None:
    """Return the threshold that answers the largest share of inputs at a stated risk; None if no share has it.

        P(P(wrong | uncertainty < threshold) ≤ risk) ≥ confidence   for data drawn independently from one law

    The shares 5 %, 10 %, …, 100 % are tested, each by the exact binomial bound (Clopper & Pearson 1934) of the error
    rate of the data below that quantile of the uncertainties, at the confidence 1 - (1 - confidence)/20.

    Args:
        uncertainty: of calibration data, shape (n,).
        wrong: whether each prediction is wrong, shape (n,).
        risk: the largest probability that an answered prediction is wrong, in (0, 1).
        confidence: the probability, over calibration data, that the risk is at most this, in (0, 1).

    Source: Geifman & El-Yaniv 2017, algorithm 1; Angelopoulos et al. 2021 (Learn then test).

    >>> u = torch.linspace(0, 1, 1000)
    >>> selective_threshold(u, u > 0.8, risk=0.05).coverage
    0.8
    """
    check_within("risk", risk, "(0, 1)")
    check_within("confidence", confidence, "(0, 1)")
    values, wrong = widest(uncertainty), wrong.bool()
    ordered = values.sort().values
    for step in range(COVERAGE_STEPS, 0, -1):
        # Given a quantile, the data below it are independent draws from the law below it, which makes the bound exact.
        rank = len(values) * step // COVERAGE_STEPS
        threshold = math.inf if step == COVERAGE_STEPS else float(ordered[rank])
        below = values < threshold
        bound = error_bound(int((below & wrong).sum()), int(below.sum()), 1 - (1 - confidence) / COVERAGE_STEPS)
        if bound <= risk:
            return SelectiveThreshold(threshold, bound, float(widest(below).mean()))
    return None


def error_bound(errors: int, count: int, confidence: float) -> float:
    """Return the upper confidence bound of a probability that has occurred `errors` times in `count` trials.

    Source: Clopper & Pearson 1934.

    >>> round(error_bound(0, 59, 0.95), 4)
    0.0495
    """
    return 1.0 if errors == count else float(special.betaincinv(errors + 1, count - errors, confidence))


# -- stacking ----------------------------------------------------------------------------------------------------------


def stacking_weights(
    log_densities: Tensor, start: Tensor | None = None, pseudo_count: float = 20.0, iterations: int = 80
) -> Tensor:
    """Return the weights at which the mixture of the samples predicts held-out data best, shape (S,), float64.

        maximize Σ_i log Σ_j w_j·p_j(y_i) + c·Σ_j v_j·log w_j   over w ≥ 0, Σ_j w_j = 1

    v is `start`, which counts as much as c = `pseudo_count` data. Each iteration of expectation maximization from v
    raises the objective, given log p_j(y_i), shape (S, n).

    Source: Yao et al. 2018 (Using stacking to average Bayesian predictive distributions), section 3.

    >>> stacking_weights(torch.tensor([[-1.0, -1.0], [-9.0, -9.0]]), pseudo_count=0.0).round(decimals=3).tolist()
    [1.0, 0.0]
    """
    logs = widest(log_densities)
    samples, data = logs.shape
    start = logs.new_full((samples,), 1 / samples) if start is None else start.to(logs)
    weights = start
    for _ in range(iterations):
        shares = (logs + weights.clamp_min(1e-300).log()[:, None]).softmax(0)
        weights = (shares.sum(1) + pseudo_count * start) / (data + pseudo_count)
    return weights


def window_weights(log_densities: Tensor, steps: Sequence[int]) -> Tensor:
    """Return the samples' even weights within windows, averaged by the windows' likelihood, shape (S,), float64.

        w_j = Σ_m P_m·1[j in window m]/|window m|,   P_m ∝ Π_i Σ_(j in window m) p_j(y_i)/|window m|

    The windows are the last 1, 2, 4, … steps of drawing, and all, M together. Many data choose one of them; few data
    hardly tell windows apart, and then several have a part. On these data the weights lose at most log M nats in all
    to the best window.

    Args:
        log_densities: log p_j(y_i) of held-out data, shape (S, n).
        steps: at which each sample was drawn; samples of one step are in the same windows.
    """
    logs = widest(log_densities)
    places = {step: place for place, step in enumerate(sorted(set(steps), reverse=True))}
    age = torch.tensor([places[step] for step in steps], device=logs.device)
    sizes = [2**power for power in range(32) if 2**power < len(places)] + [len(places)]
    windows = torch.stack([(age < size).to(logs) / int((age < size).sum()) for size in sizes])
    found = torch.stack([(logs + window.log()[:, None]).logsumexp(0).sum() for window in windows])
    return found.softmax(0) @ windows


def leave_one_out_nll(log_densities: Tensor) -> float:
    """Return the mean NLL of the data of a fit, each as predicted without it, by the posterior's samples.

        p(y_i|D without i) = 1 / (Σ_j 1/p_j(y_i) / S)

    It holds for samples at temperature 1, and is too low if they are few.

    Args:
        log_densities: log p_j(y_i) of the data that were sampled, shape (S, n).

    Source: Gelfand, Dey & Chang 1992 (conditional predictive ordinates).
    """
    logs = widest(log_densities)
    return float((logs.neg().logsumexp(0) - math.log(len(logs))).mean())


def shrunk_factor(nll: Tensor, factors: Tensor, count: int, prior_std: float) -> float:
    """Return the factor f with the least Σ_i NLL_i(f) + (log f)²/(2·s²), by the mean NLL at each factor (F,)."""
    penalty = widest(factors).log().square() / (2 * prior_std**2)
    return float(factors[int((count * widest(nll) + penalty).argmin())])


# -- agreement ---------------------------------------------------------------------------------------------------------


def agreement(probabilities: Tensor, reference: Tensor) -> Tensor:
    """Return the share of data for which both predict the same class; 1 is best.

    Args:
        probabilities: shape (n, K).
        reference: shape (n, K), rows in the same order.

    Source: Izmailov et al. 2021 (What are Bayesian neural network posteriors really like?), section 4.
    """
    _check(probabilities, reference)
    return (probabilities.argmax(-1) == reference.argmax(-1)).float().mean()


def total_variation(probabilities: Tensor, reference: Tensor) -> Tensor:
    """Return the mean over data of ½·Σ_k |p_k - q_k|, in [0, 1]; 0 is best.

    Args:
        probabilities: shape (n, K).
        reference: shape (n, K), rows in the same order.

    Source: Izmailov et al. 2021, section 4.
    """
    _check(probabilities, reference)
    return (widest(probabilities) - widest(reference)).abs().sum(-1).mean().float() / 2


def _check(probabilities: Tensor, reference: Tensor) -> None:
    if probabilities.shape != reference.shape:
        raise ValueError(
            f"the reference has the shape {tuple(reference.shape)} and the predictions {tuple(probabilities.shape)}: "
            "both need a row for each datum, in the same order, and the same classes"
        )
