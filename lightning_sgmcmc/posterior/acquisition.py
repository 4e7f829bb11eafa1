"""Which data of a pool to label next, by a posterior's predictions of them."""

from typing import Any, Literal

import torch

from lightning_sgmcmc.checks import check_choice, check_count
from lightning_sgmcmc.diagnostics.acquisition import (
    Acquisition,
    batch_bald,
    batch_of_numbers,
    information_of_numbers,
)
from lightning_sgmcmc.posterior.calibration import check_predictions
from lightning_sgmcmc.predictions import ClassPrediction, Members, Mixture, Prediction
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.tensors import widest

Method = Literal["bald", "batchbald"]


def chosen_of(prediction: Prediction, count: int, method: Method, seed: int) -> Acquisition:
    """Return the data of predictions to label next; see `Posterior.acquire`.

    Args:
        prediction: of the pool, with the distribution of each sample.
        count: data to choose.
        method: "bald" or "batchbald".
        seed: of the draws of joint labels.
    """
    check_choice("method", method, ("bald", "batchbald"))
    check_count("k", count, optional=False)
    if count > len(prediction):
        raise ValueError(f"k={count} is more than the {len(prediction)} inputs of the pool: pass at most these")
    check_predictions(prediction, "acquire")
    kept: Any = prediction._kept
    if isinstance(prediction, ClassPrediction) and isinstance(kept, Members) and kept.probabilities.dim() == 3:
        if method == "bald":
            return _top(prediction.mutual_information, count)
        generator = torch.Generator().manual_seed(derive_seed(seed, "acquire"))
        return batch_bald(kept.probabilities, kept.weights, count, generator)
    if not isinstance(kept, Mixture):
        raise TypeError(
            f"acquire compares inputs by their class or their numbers, and these predictions are a "
            f"{type(prediction).__name__} without either for each input: choose by a score of your own"
        )
    law = kept.components
    if not bool(law.variance.isfinite().all()):
        raise ValueError(
            f"acquire needs the variance of the noise, and {kept.law.__name__} has none here: choose by "
            "prediction.epistemic"
        )
    if method == "batchbald":
        return batch_of_numbers(law.mean, law.variance, kept.weights, count)
    return _top(information_of_numbers(law.mean, law.variance, kept.weights), count)


def _top(scores: torch.Tensor, count: int) -> Acquisition:
    values, indices = scores.topk(count)
    return Acquisition(indices.cpu(), widest(values).cpu())
