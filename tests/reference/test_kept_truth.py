"""NUTS of `reference.sample` beside the kept truth of small networks, which another program's HMC has drawn."""

import pytest

from lightning_sgmcmc.recipes.shared.network_truth import data_of, scores, truth
from lightning_sgmcmc.recipes.shared.small_networks import NETWORKS
from lightning_sgmcmc.reference import sample

WARM_UP, DRAWS = 150, 150


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smallest", "classification"])
def test_four_chains_are_nearer_to_the_kept_truth_than_two_of_its_chains_to_each_other(name: str) -> None:
    """Four chains beside four should be half as far apart as one beside one, so the limit is twice what is expected.

    W₁ of the functions' laws over the truth's standard deviation, the mean over inputs, and the NLL within 2 %.
    """
    data = data_of(name, 0)
    module = NETWORKS[name].module(chain_execution="vmap")
    posterior = sample(module, (data.x, data.y), chains=4, warmup=WARM_UP, draws=DRAWS, seed=1)
    found, known = scores(name, posterior, data), truth(name)
    assert posterior.report is not None
    print(name, found, {key: float(known[key]) for key in ("between", "nll")}, posterior.report)
    assert found["distance"] < float(known["between"])
    assert found["nll"] == pytest.approx(float(known["nll"]), rel=0.02)
