"""Predictions of one batch after another."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sgmcmc.posterior.predictive import ReadySamples
from lightning_sgmcmc.predictions import Prediction


def streamed(
    predict: Callable[[Any, bool], Prediction],
    batches: Iterable[Any],
    return_samples: bool,
    ready: Callable[[], ReadySamples | None],
) -> Iterator[Prediction]:
    """Yield the prediction of each batch; see `Posterior.predict_batches`.

    Args:
        predict: predicts a list of batches.
        batches: the batches.
        return_samples: passed to `predict`.
        ready: returns the samples that the last prediction has used.

    Raises:
        TypeError: if batches is one array.
    """
    if isinstance(batches, Tensor | np.ndarray | tuple) or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches should be an iterable of batches, got a {type(batches).__name__}: pass a DataLoader, or use "
            "predict(x) for one array"
        )
    return _streamed(predict, batches, return_samples, ready)


def _streamed(
    predict: Callable[[Any, bool], Prediction],
    batches: Iterable[Any],
    return_samples: bool,
    ready: Callable[[], ReadySamples | None],
) -> Iterator[Prediction]:
    for number, batch in enumerate(batches):
        samples = ready()
        if number == 1 and samples is not None and not samples.are_kept:
            rank_zero_warn(
                "predict_batches reads all samples from the store again for every batch, since they take more memory "
                "than is kept: use larger batches, or fewer samples by posterior.thin(count=…)."
            )
        yield predict([batch], return_samples)
