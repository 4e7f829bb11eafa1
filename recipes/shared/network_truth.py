"""The truth on small networks: quantiles of the functions of Hamiltonian Monte Carlo draws; scores of a posterior.

`python -m tests.benchmarks.network_truth` in a clone makes the file `network_truth.json`, which keeps them.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.recipes.shared.small_networks import NETWORKS, Array, curve, three_classes

FILE = Path(__file__).parent / "network_truth.json"
LEVELS = (np.arange(50) + 0.5) / 50
TEST_DATA, TEST_SEED = 500, 100


@functools.cache
def truth(name: str) -> dict[str, Any]:
    """Return a network's truth: "quantiles" (levels, columns), "std" (columns,), "between" and "nll".

    "between" is the mean distance of two chains of the reference, "nll" that of its average on the test data.
    """
    return {key: np.array(value) for key, value in json.loads(FILE.read_bytes())[name].items()}


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


# -- scores of a posterior --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Training and test data."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def data_of(name: str, seed: int) -> Data:
    """Return a problem's data; Digits are split by the seed."""
    if name == "digits":
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        inputs, labels = torch.tensor(x / 16).float()[order], torch.tensor(y).long()[order]
        return Data(inputs[:1100], labels[:1100], inputs[1350:], labels[1350:])
    network, (test_x, test_y) = NETWORKS[name], test_data(name)
    parts = [torch.tensor(part) for part in (network.x, network.y, test_x, test_y)]
    return Data(*(part if part.dtype == torch.int64 else part.float() for part in parts))


def scores(name: str, posterior: Posterior, data: Data) -> dict[str, float]:
    """Return the distance to the truth, where it is known, and the NLL of the test data."""
    weights = posterior.weights.double()
    at_test: Any = posterior.predict(data.test_x, return_samples=True)
    if name in ("digits", "classification"):
        average = (weights[:, None, None] * at_test.sample_probabilities.double()).sum(0)
        figures = {"nll": -float(average[torch.arange(len(data.test_y)), data.test_y].log().mean())}
    else:
        law = torch.distributions.Normal(at_test.sample_means.double(), NETWORKS[name].noise_std or 1.0)
        density = law.log_prob(data.test_y.double()).flatten(1) + weights.log()[:, None]
        figures = {"nll": -float(density.logsumexp(0).mean())}
    if name == "digits":
        return figures
    at_grid: Any = posterior.predict(torch.tensor(NETWORKS[name].grid).float(), return_samples=True)
    values = at_grid.sample_probabilities if name == "classification" else at_grid.sample_means
    functions = np.asarray(values.double().flatten(1))
    return {"distance": distance(functions, np.asarray(weights), name)} | figures
