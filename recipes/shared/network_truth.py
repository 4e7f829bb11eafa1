"""The truth on small networks: quantiles of the functions of Hamiltonian Monte Carlo draws.

`python -m tests.benchmarks.network_truth` in a clone makes the file `network_truth.json`, which keeps them.
"""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from lightning_sgmcmc.recipes.shared.small_networks import Array, curve, three_classes

FILE = Path(__file__).parent / "network_truth.json"
LEVELS = (np.arange(50) + 0.5) / 50
TEST_DATA, TEST_SEED = 500, 100


@functools.cache
def truth(name: str) -> dict[str, Any]:
    """Return a network's truth: "quantiles" (levels, columns), "std" (columns,), "between" and "nll".

    "between" is the mean distance of two chains of the reference, "nll" that of its average on the test data.
    """
    return {key: np.array(value) for key, value in json.loads(FILE.read_text())[name].items()}


def distance(values: Array, weights: Array, name: str) -> float:
    """Return W₁ between weighted functions and the truth's over the truth's standard deviation, the mean over columns.

    Args:
        values: shape (S, columns).
        weights: shape (S,), of sum 1.
        name: of the network.
    """
    known = truth(name)
    found = weighted_quantiles(values, weights, LEVELS)
    return float((np.abs(found - known["quantiles"]).mean(0) / known["std"]).mean())


def weighted_quantiles(values: Array, weights: Array, levels: Array) -> Array:
    """Return quantiles of each column, shape (levels, columns), linear between the middles of the draws' weights.

    >>> weighted_quantiles(np.array([[0.0], [1.0], [5.0]]), np.array([0.5, 0.5, 0.0]), np.array([0.5]))
    array([[0.5]])
    """
    order = np.argsort(values, 0)
    sorted_values, sorted_weights = np.take_along_axis(values, order, 0), weights[order]
    middles = sorted_weights.cumsum(0) - sorted_weights / 2
    columns = zip(middles.T, sorted_values.T, strict=True)
    found: Array = np.stack([np.interp(levels, middle, column) for middle, column in columns], 1)
    return found


def test_data(name: str) -> tuple[Array, Any]:
    """Return data of the same law as a network's, drawn by another seed."""
    if name == "classification":
        return three_classes(TEST_DATA, TEST_SEED)
    return curve(TEST_DATA, 0.3 if name == "smallest" else 0.1, TEST_SEED)
