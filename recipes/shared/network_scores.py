"""The data of small networks, and the figures of a posterior of one: distance to the truth and NLL of test data."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.recipes.shared.network_truth import distance, test_data
from lightning_sgmcmc.recipes.shared.small_networks import NETWORKS


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
