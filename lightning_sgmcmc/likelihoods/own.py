"""The predictive of a module with its own log_likelihood, from the tensors that it returns itself."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sgmcmc.predictions import ClassPrediction, Prediction, RegressionPrediction
from lightning_sgmcmc.tensors import widest


def completed(terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a sample's own terms with those that a prediction's parts need besides.

    Args:
        terms: tensors by name, first axis n.
    """
    found = dict(terms)
    if "probabilities" in found:
        found["sample_entropy"] = torch.special.entr(found["probabilities"]).sum(-1)
    elif {"mean", "variance"} <= found.keys():
        mean = found["mean"]
        found["mean"] = widest(mean)
        found["square"] = found["mean"].square()
    return found


def per_sample_term_of(terms: Mapping[str, Tensor]) -> str:
    """Return the name of the term that is kept for each sample: the first of the module's own."""
    return next((name for name in ("probabilities", "mean") if name in terms), next(iter(terms)))


def prediction_of(terms: Mapping[str, Tensor], per_sample: Tensor | None) -> Prediction:
    """Return the prediction that averages of `completed` terms describe.

    Args:
        terms: the averages.
        per_sample: the term of each sample that `per_sample_term_of` names, None without.
    """
    if "probabilities" in terms:
        entropy = torch.special.entr(terms["probabilities"]).sum(-1)
        information = (entropy - terms["sample_entropy"]).clamp_min(0)
        return ClassPrediction(terms["probabilities"], entropy, information, per_sample)
    if "square" in terms:
        dtype = terms["variance"].dtype
        epistemic = (terms["square"] - terms["mean"].square()).clamp_min(0).to(dtype)
        std = (epistemic + terms["variance"]).sqrt()
        means = None if per_sample is None else per_sample.to(dtype)
        return RegressionPrediction(terms["mean"].to(dtype), std, epistemic.sqrt(), means)
    samples = {} if per_sample is None else {f"sample_{per_sample_term_of(terms)}": per_sample}
    return Prediction(**terms, **samples)
