"""What the methods' predictions are worth: metrics, and each test datum's loss for paired comparisons."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.diagnostics.decisions import class_scores, risk_at_coverage
from lightning_sgmcmc.diagnostics.joint import dyadic_groups, nearest_groups
from lightning_sgmcmc.diagnostics.scores import (
    classification_metrics,
    gaussian_mixture_crps,
    out_of_distribution_metrics,
)
from lightning_sgmcmc.evaluation.scoring import evaluate
from lightning_sgmcmc.predictions import ClassPrediction, RegressionPrediction
from lightning_sgmcmc.recipes.equal_cost.problems import Problem
from lightning_sgmcmc.seeding import derive_seed

LEVEL = 0.95
SET_LEVEL = 0.9
"""Of a set of classes: the most probable ones, until they have this probability."""
TAU = 10
"""Test data of a group, whose errors the joint NLL scores together."""


class Scores(NamedTuple):
    """Scores of one method on one data set.

    Attributes:
        metrics: by name.
        nll: of each test datum, in nats, shape (n,).
        loss: 1 for a wrong class, or the squared error in the target's units, shape (n,).
        joint: of each group of τ test data the joint NLL, in nats per input, shape (G,); empty for a calibrated
            posterior, since a calibration is of the average.
    """

    metrics: dict[str, float]
    nll: Tensor
    loss: Tensor
    joint: Tensor = torch.empty(0)


def score(posterior: Posterior, problem: Problem) -> Scores:
    """Score a posterior's average on the test data, and on data of another distribution.

    Args:
        posterior: its samples; if it is calibrated, so are the scores.
        problem: the data.
    """
    test = problem.splits[2]
    if problem.kind == "classification":
        known, unknown = (_probabilities(posterior, x) for x in (test.inputs, problem.unknown))
        found = _class_scores(known, test.targets, unknown)
    else:
        known_mixture = mixture(posterior, test.inputs, test.targets)
        unknown_mixture = mixture(posterior, problem.unknown, torch.zeros(len(problem.unknown), 1))
        found = _regression_scores(known_mixture, test.targets[:, 0].double(), unknown_mixture, problem.scale)
    found.metrics.update(cost_of_prediction(posterior))
    if posterior.calibration is not None:
        return found
    joint = joint_of_groups(posterior, problem)
    return found._replace(metrics={**found.metrics, "joint_nll": float(joint.mean())}, joint=joint)


def cost_of_prediction(posterior: Posterior) -> dict[str, float]:
    """Return the networks that a prediction evaluates, and the megabytes of their tensors, equal ones counted once."""
    used = [sample for sample, weight in zip(posterior, posterior.weights.tolist(), strict=True) if weight > 0]
    sizes = {
        (name, tensor.cpu().numpy().tobytes()): tensor.nbytes
        for sample in used
        for name, tensor in sample.state.items()
    }
    return {"passes": float(len(used)), "megabytes": sum(sizes.values()) / 1e6}


def joint_of_groups(posterior: Posterior, problem: Problem) -> Tensor:
    """Return the joint NLL of each group of τ test data, in nats per input, as `Posterior.joint_nll` averages it.

    Groups are the same for all methods, and for all seeds with the same test data: dyadic for classes, of near data
    for numbers.
    """
    test, generator = problem.splits[2], torch.Generator().manual_seed(derive_seed(0, "joint nll"))
    if problem.kind == "classification":
        groups = dyadic_groups(len(test.targets), TAU, generator)
    else:
        groups = nearest_groups(test.inputs, TAU, generator)
    logs = posterior.log_likelihood([(test.inputs, test.targets)]) + posterior.weights.log()[:, None] / TAU
    return -logs[:, groups].sum(2).logsumexp(0) / TAU


def _probabilities(posterior: Posterior, x: Tensor) -> Tensor:
    prediction = posterior.predict(x)
    assert isinstance(prediction, ClassPrediction)
    return prediction.probabilities


def _class_scores(known: Tensor, labels: Tensor, unknown: Tensor) -> Scores:
    found = classification_metrics(known, labels)
    metrics = {name: float(found[name]) for name in ("accuracy", "nll", "ece", "brier")}
    metrics["risk_80"] = float(risk_at_coverage(known, labels))
    before = class_scores(known, adaptive=True, uniform=torch.zeros(len(known)))  # the mass of more probable classes
    metrics["coverage_90"] = float((before.gather(1, labels[:, None]) < SET_LEVEL).double().mean())
    metrics["set_size_90"] = float((before < SET_LEVEL).sum(1).double().mean())
    metrics["ood_auroc"] = float(out_of_distribution_metrics(known, unknown)["auroc"])
    chosen = known.gather(1, labels[:, None])[:, 0].double()
    wrong = (known.argmax(1) != labels).double()
    return Scores(metrics, -chosen.clamp_min(torch.finfo(torch.float32).tiny).log(), wrong)


# -- regression -------------------------------------------------------------------------------------------------------


class Mixture(NamedTuple):
    """A mixture of Gaussians for each of n data: weights (S,), means and standard deviations (S, n), in float64."""

    weights: Tensor
    means: Tensor
    stds: Tensor


def mixture(posterior: Posterior, x: Tensor, y: Tensor) -> Mixture:
    """Return the predictive in standardised units: a Gaussian for each sample, or a calibrated posterior's one."""
    if posterior.calibration is not None:
        prediction = posterior.standardised().predict(x)
        assert isinstance(prediction, RegressionPrediction)
        return Mixture(torch.ones(1).double(), prediction.mean.double().T, prediction.std.double().T)
    assert posterior.model is not None
    posterior.model.eval()
    terms = [evaluate(posterior.model, sample.state, [(x, y)])[0] for sample in posterior]
    means, variances = (torch.stack([term[name][:, 0].double() for term in terms]) for name in ("mean", "variance"))
    return Mixture(posterior.weights, means, variances.sqrt())


def cdf(of: Mixture, y: Tensor) -> Tensor:
    """Return P(Y ≤ y_i) for each datum, shape (n,)."""
    return of.weights @ torch.special.ndtr((y - of.means) / of.stds)


def log_density(of: Mixture, y: Tensor) -> Tensor:
    """Return log p(y_i) for each datum, shape (n,)."""
    each = -((y - of.means) / of.stds).square() / 2 - of.stds.log() - math.log(2 * math.pi) / 2
    return (each + of.weights.log()[:, None]).logsumexp(0)


def quantile(of: Mixture, level: float) -> Tensor:
    """Return each datum's quantile by bisection, shape (n,)."""
    low, high = (of.means - 10 * of.stds).min(0).values, (of.means + 10 * of.stds).max(0).values
    for _ in range(50):
        middle = (low + high) / 2
        below = cdf(of, middle) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def predictive_std(of: Mixture) -> Tensor:
    """Return each datum's predictive standard deviation, shape (n,)."""
    mean = of.weights @ of.means
    return (of.weights @ (of.stds.square() + (of.means - mean).square())).sqrt()


def _regression_scores(known: Mixture, y: Tensor, unknown: Mixture, scale: float) -> Scores:
    from torchmetrics.functional.classification import binary_auroc

    nll = -log_density(known, y) + math.log(scale)
    loss = (known.weights @ known.means - y).square() * scale**2
    low, high = quantile(known, (1 - LEVEL) / 2), quantile(known, (1 + LEVEL) / 2)
    stds = torch.cat([predictive_std(known), predictive_std(unknown)])
    labels = torch.cat([torch.zeros(known.means.shape[1]), torch.ones(unknown.means.shape[1])]).long()
    metrics = {
        "nll": nll.mean(),
        "rmse": loss.mean().sqrt(),
        "crps": gaussian_mixture_crps(known.weights, known.means, known.stds, y).mean() * scale,
        "coverage_95": ((low <= y) & (y <= high)).double().mean(),
        "width_95": (high - low).mean() * scale,
        "ood_auroc": binary_auroc(stds / (1 + stds), labels),  # which takes numbers in [0, 1]
    }
    return Scores({name: float(value) for name, value in metrics.items()}, nll, loss)
