"""The reference's functions for recipes on small networks: `python -m tests.benchmarks.network_truth`, ten minutes.

It writes `recipes/shared/network_truth.json`, by Hamiltonian Monte Carlo with the full gradient
(`tests/support/hmc.py`).
"""

import json
from typing import Any

import numpy as np

from lightning_sgmcmc.recipes.shared.network_truth import FILE, LEVELS, test_data
from lightning_sgmcmc.recipes.shared.small_networks import NETWORKS, Array
from tests.benchmarks.truth import PROBLEMS
from tests.support.hmc import between_chains, hmc

CHAINS, WARM_UP = 4, 300
DRAWS = {"smallest": 1200, "classification": 800, "regression": 300}


def probabilities(logits: Array) -> Array:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    found: Array = shifted / shifted.sum(-1, keepdims=True)
    return found


def summary(name: str, states: Array) -> dict[str, Any]:
    """Return the entry of a network from the reference's draws, shape (chains, draws, d)."""
    network, target = NETWORKS[name], PROBLEMS[name].target
    inputs, labels = test_data(name)
    flat = states.reshape(-1, states.shape[-1])
    at_grid, at_test = target.outputs(flat, network.grid), target.outputs(flat, inputs)
    if network.noise_std is None:
        at_grid = probabilities(at_grid)
        density = probabilities(at_test).mean(0)[np.arange(len(labels)), labels]
    else:
        scale = network.noise_std
        density = (np.exp(-(((labels - at_test) / scale) ** 2) / 2) / scale / (2 * np.pi) ** 0.5).mean(0)[:, 0]
    values = at_grid.reshape(len(flat), -1)
    std = values.std(0)
    chains = list(values.reshape(*states.shape[:2], -1))
    return {
        "quantiles": [[float(f"{v:.5g}") for v in row] for row in np.quantile(values, LEVELS, axis=0)],
        "std": [float(f"{v:.5g}") for v in std],
        "between": between_chains(chains, std),
        "nll": float(-np.log(density).mean()),
    }


def main() -> None:
    entries = {
        name: summary(name, hmc(PROBLEMS[name].target, CHAINS, WARM_UP, draws)[0]) for name, draws in DRAWS.items()
    }
    FILE.write_text(json.dumps(entries) + "\n")


if __name__ == "__main__":
    main()
