"""A small network's truth is that of the project's other reference, which shares no code with it: `-m slow`."""

import numpy as np
import pytest
import torch

from lightning_sgmcmc import reference
from lightning_sgmcmc.recipes.contour_pays.truth import distance, truth
from lightning_sgmcmc.recipes.shared.small_networks import NETWORKS
from tests.support.hmc import between_chains


@pytest.mark.slow
def test_nuts_is_as_near_to_the_kept_truth_as_its_chains_are_to_one_another() -> None:
    """W₁ of the functions over the posterior's standard deviation. The kept truth is of four chains of many draws; 1.5
    is the project's limit for fits, and the seed is fixed."""
    known = NETWORKS["smallest"]
    module = known.module(chain_execution="vmap")
    data = torch.tensor(known.x), torch.tensor(known.y)
    found = reference.sample(module, data, chains=4, warmup=300, draws=400, dtype=torch.float64)
    assert found.report is not None
    assert found.report.rhat < 1.1
    values = found.predict(torch.tensor(known.grid), return_samples=True).sample_means[..., 0].double().numpy()
    chain = np.array([record.chain for record in found.records])
    own = between_chains([values[chain == c] for c in range(4)], truth("smallest")["std"])
    far = distance(values, np.full(len(values), 1 / len(values)), "smallest")
    print(f"to the kept truth {far:.3f}, chain to chain {own:.3f}, kept {truth('smallest')['between']}")
    assert far < 1.5 * max(own, float(truth("smallest")["between"]))
