"""Export of samples to ArviZ, with the dimensions (chain, draw)."""

import math
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.chains.sample import SampleRecord, comparable_log_weights
from lightning_sgmcmc.diagnostics.chains import ChainGrid, import_arviz
from lightning_sgmcmc.posterior.store import SampleStore

SMALL = 10
"""Default size limit of exported parameters, if no names are given."""


def to_inference_data(
    store: SampleStore,
    parameters: Sequence[str] | None = None,
    predictions: Mapping[str, Tensor] | None = None,
    max_elements: int = SMALL,
) -> Any:
    """Return the samples as ArviZ's container: an `InferenceData` (ArviZ 0.x) or a `DataTree` (from 1.0).

    Every variable has the dimensions (chain, draw, …); the coordinate `chain` is the chain's global index. If chains
    have unequal numbers of draws, the oldest draws of longer chains are dropped, with a warning.

    The groups: `posterior` holds the chosen parameters by their names in the network. `sample_stats` holds `energy`
    (the mini-batch estimate Ũ, in nats), `lp` = -Ũ (ArviZ's name for the log density at temperature 1, up to a
    constant), `step`, `cycle` and `log_weight`. `posterior_predictive` holds the predictions. ArviZ weights all draws
    equally: it ignores importance weights.

    Args:
        store: the samples.
        parameters: names, or shell patterns ("net.0.*"); None exports small ones (see `max_elements`). Parameters of a
            deep network are not identified (its units can be permuted), so they reveal less about mixing than
            energies and predictions do.
        predictions: each sample's predictions by name, shape (S, …) in the order of the samples
            (`posterior.predict(x, return_samples=True).sample_probabilities`, or `.sample_means`).
        max_elements: without `parameters`, the largest number of elements of an exported parameter.

    Raises:
        ValueError: if there are no samples, a pattern matches no parameter, or the number of predictions is not the
            number of samples.
    """
    arviz = import_arviz()
    if len(store) == 0:
        raise ValueError("the store has no posterior samples to export")
    grid = ChainGrid.of_chains([record.chain for record in store.records])
    if grid.dropped:
        warnings.warn(
            f"the chains have unequal numbers of draws, so {grid.dropped} of the {len(store)} samples, the oldest of "
            f"the longer chains, are dropped: {grid.draws} of each chain remain",
            stacklevel=2,
        )
    stats = {name: grid.arrange(values) for name, values in _statistics(store.records).items()}
    groups = {
        "posterior": parameter_draws(store, grid, choose_parameters(store.shapes(0), parameters, max_elements)),
        "sample_stats": stats,
        "posterior_predictive": _predictions(predictions or {}, len(store), grid),
    }
    groups = {name: group for name, group in groups.items() if group}
    made_by = {"inference_library": "lightning-sgmcmc", "inference_library_version": version("lightning-sgmcmc")}
    coords = {"chain": grid.chains}
    if arviz.__version__.startswith("0."):
        return arviz.from_dict(**groups, coords=coords, attrs=made_by)
    return arviz.from_dict(groups, coords=coords, attrs={"/": made_by})


def choose_parameters(
    shapes: Mapping[str, tuple[int, ...]], patterns: Sequence[str] | None, max_elements: int = SMALL
) -> list[str]:
    """Return the names that match a pattern, or without patterns those of small parameters, in the network's order.

    Raises:
        ValueError: if a pattern matches no name.
    """
    if patterns is None:
        return [name for name, shape in shapes.items() if math.prod(shape) <= max_elements]
    patterns = [patterns] if isinstance(patterns, str) else patterns
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in shapes):
            raise ValueError(f"no parameter matches {pattern!r}: choose from {', '.join(shapes)}")
    return [name for name in shapes if any(fnmatchcase(name, pattern) for pattern in patterns)]


def parameter_draws(store: SampleStore, grid: ChainGrid, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the named parameters of all samples, each of shape (chain, draw, …)."""
    if not names:
        return {}
    drawn = [store.parameters(position, names) for position in grid.positions.ravel()]
    leading = grid.positions.shape
    return {name: np.stack([d[name].numpy() for d in drawn]).reshape(*leading, *drawn[0][name].shape) for name in names}


def _statistics(records: Sequence[SampleRecord]) -> dict[str, list[float] | list[int]]:
    return {
        "energy": [r.energy for r in records],
        "lp": [-r.energy for r in records],
        "step": [r.step for r in records],
        "cycle": [r.cycle for r in records],
        "log_weight": comparable_log_weights(records).tolist(),
    }


def _predictions(predictions: Mapping[str, Tensor], count: int, grid: ChainGrid) -> dict[str, np.ndarray]:
    for name, values in predictions.items():
        if values.dim() == 0 or len(values) != count:
            raise ValueError(
                f"predictions[{name!r}] has shape {tuple(values.shape)}, but its first axis should be the "
                f"{count} samples: pass those of posterior.predict(x, return_samples=True)"
            )
    plain = {name: values.detach().cpu() for name, values in predictions.items()}
    return {name: grid.arrange(v.float() if v.dtype == torch.bfloat16 else v) for name, v in plain.items()}
