"""Few samples that predict as the whole posterior does: which, with what weights, and what is lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.namespace import rank_zero_warn
from lightning_sgmcmc.posterior.calibration import batches_of, tensors_of
from lightning_sgmcmc.posterior.densities import log_densities
from lightning_sgmcmc.tensors import widest

FOLDS = 2
"""Parts of the data: the loss on each is that of samples chosen on the other."""
FEW = 20
"""Data in a part, below which a choice is mostly chance."""
UNIT = 10.0
"""How much the sum of the weights counts beside the data, where it should be 1."""


@dataclass(frozen=True)
class Compression:
    """What few samples lose against the whole posterior.

    Attributes:
        count: number of samples chosen.
        of: number of samples of the whole.
        nll_loss: mean NLL of data with samples that were chosen on other data, minus the whole's, in nats per datum;
            the data take part in turn. Above 0 is a loss.
        standard_error: of `nll_loss`, over the data.
        whole: metrics of the whole on the data, as `evaluate` has them (NLL, accuracy, in regression coverage, …), and
            `auroc` of the given inputs from elsewhere.
        chosen: likewise of the chosen samples; the data chose them, so its NLL is a little too low.
    """

    count: int
    of: int
    nll_loss: float
    standard_error: float
    whole: Mapping[str, float]
    chosen: Mapping[str, float]

    def __str__(self) -> str:
        parts = [f"NLL {self.nll_loss:+.4f} ± {self.standard_error:.4f}"]
        parts += [
            f"{name} {self.whole[name]:.3f} → {self.chosen[name]:.3f}"
            for name in self.whole
            if name.startswith(("coverage", "accuracy", "auroc"))
        ]
        return f"{self.count} of {self.of} samples: {', '.join(parts)}"


def compress(
    posterior: Any, model: EnergyModel, k: int, data: Any, unknown: Any
) -> tuple[list[int], Tensor, Compression]:
    """Return the chosen samples in their order, their weights and the loss; see `Posterior.compress`."""
    check_count("k", k, optional=False)
    store = posterior.store
    if k > len(store):
        raise ValueError(f"k={k} is more than the {len(store)} samples: pass at most {len(store)}")
    if not all(record.comparable for record in store.records):
        raise ValueError(
            "compress needs weights that compare across chains, and each chain of these samples has a π of its own: "
            "compress one chain's samples, or posterior.resample() first"
        )
    weights = posterior.weights
    batches = tensors_of(batches_of(data, store.columns, "compress"), model, store)
    logs = log_densities(model, store, batches, "compress").values
    if logs.shape[1] < 2 * FEW:
        rank_zero_warn(f"compress chooses on {logs.shape[1]} data, which is mostly chance: pass {2 * FEW} at least")
    indices, own = chosen_samples(logs, weights, k)
    loss = held_out_loss(logs, weights, k)
    metrics: list[dict[str, float]] = []
    for selection in (posterior, posterior._selected(indices, own.log().tolist(), True)):
        metrics.append(dict(selection.evaluate(batches).bma))
        if unknown is not None:
            metrics[-1]["auroc"] = next(iter(selection.detect(batches, unknown).metrics.values()))["auroc"]
    error = float(loss.std() / len(loss) ** 0.5)
    return indices, own, Compression(len(indices), len(store), float(loss.mean()), error, *metrics)


def chosen_samples(logs: Tensor, weights: Tensor, k: int) -> tuple[list[int], Tensor]:
    """Return k samples and their weights, at which their mixture's densities are nearest to the whole's.

        minimize Σ_i (Σ_j w_j·p_j(y_i)/p(y_i) - 1)²   over w ≥ 0, Σ_j w_j = 1, of k samples j,   p the whole's mixture

    Samples come in one after another, each where a step from the mixture to it leaves the least; weights are fitted
    anew after each. Samples whose weight is 0 then are left out.

    Args:
        logs: log p_j(y_i), shape (S, n).
        weights: of the whole, shape (S,), summing to 1.
        k: number of samples.

    Source: Pati et al. 1993 (orthogonal matching pursuit), with weights ≥ 0; Lawson & Hanson 1974 (their fit).

    >>> logs = torch.tensor([[0.0, -9.0], [-9.0, 0.0], [0.0, -9.0]])
    >>> indices, weights = chosen_samples(logs, torch.tensor([0.25, 0.5, 0.25]), 2)
    >>> indices, weights.round(decimals=3).tolist()
    ([0, 1], [0.5, 0.5])
    """
    logs, weights = widest(logs), widest(weights)
    whole = (logs + weights.log()[:, None]).logsumexp(0)
    ratios = (logs - whole).exp().numpy().T
    data, ones = len(ratios), np.ones(len(ratios))
    left, found, share = (weights > 0).numpy().copy(), list[int](), np.zeros(0)
    for _ in range(min(k, int(left.sum()))):
        mixture = ratios[:, found] @ share
        # A first sample is the mixture; a later one takes the best part of it.
        toward, rest = ratios - mixture[:, None], ones - mixture
        part = np.clip(toward.T @ rest / np.maximum((toward**2).sum(0), 1e-300), 0, 1) if found else 1.0
        remains = ((rest[:, None] - part * toward) ** 2).sum(0)
        remains[~left] = np.inf
        found.append(int(remains.argmin()))
        left[found[-1]] = False
        system = np.vstack([ratios[:, found], np.full(len(found), UNIT * data**0.5)])
        share = optimize.nnls(system, np.append(ones, UNIT * data**0.5))[0]
        share /= share.sum()
    kept = sorted((index, part) for index, part in zip(found, share.tolist(), strict=True) if part > 0)
    return [index for index, _ in kept], torch.tensor([part for _, part in kept], dtype=torch.float64)


def held_out_loss(logs: Tensor, weights: Tensor, k: int) -> Tensor:
    """Return each datum's NLL by samples that were chosen on the other half of the data, minus the whole's, (n,)."""
    halves: Sequence[Tensor] = [torch.arange(first, logs.shape[1], FOLDS) for first in range(FOLDS)]
    loss = torch.zeros(logs.shape[1], dtype=torch.float64)
    if logs.shape[1] < FOLDS:
        return loss.fill_(torch.nan)
    whole = (logs + weights.log()[:, None]).logsumexp(0)
    for own, other in zip(halves, reversed(halves), strict=True):
        indices, parts = chosen_samples(logs[:, other], weights, k)
        loss[own] = whole[own] - (logs[indices][:, own] + parts.log()[:, None]).logsumexp(0)
    return loss
