"""Conformal sets and intervals cover as guaranteed, whatever the predictive is worth."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, Posterior
from lightning_sgmcmc.posterior.store import MemoryStore, TargetScaling
from tests.support.posteriors import filled, in_memory

DRAWS, CALIBRATION, NEW, LEVEL = 60, 49, 400, 0.9


def covered(posterior: Posterior, draw: Any, **options: Any) -> tuple[float, float]:
    """Return the mean coverage over draws of the calibration data, and its standard error."""
    found = []
    for seed in range(DRAWS):
        generator = torch.Generator().manual_seed(seed)
        x, y = draw(CALIBRATION + NEW, generator)
        data = [(x[:CALIBRATION], y[:CALIBRATION])]
        conformal = posterior.conformal(data, LEVEL, **options)
        found.append(conformal.predict(x[CALIBRATION:]).contains(y[CALIBRATION:]).double().mean())
    return float(torch.stack(found).mean()), float(torch.stack(found).std()) / math.sqrt(DRAWS)


def labels(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 5, generator=generator)
    return x, (x[:, 0].abs() + 0.3 * torch.randn(count, generator=generator)).long().clamp(0, 2)


@pytest.mark.parametrize("method", ["threshold", "adaptive"])
def test_class_sets_cover_the_truth(method: Any) -> None:
    """45/50 = 0.9 exactly, since no scores are equal: within four standard errors, a false alarm in 16,000 seeds."""
    posterior = in_memory(BayesianModule(net=nn.Linear(5, 3), likelihood=Categorical()))  # knows nothing of the data
    mean, error = covered(posterior, labels, method=method)
    assert error < 0.02
    assert abs(mean - LEVEL) < 4 * error


def test_intervals_cover_each_number_in_the_datas_units() -> None:
    """The likelihood's noise is wrong by a factor of ten, and the targets were standardised: as above."""
    module = BayesianModule(net=nn.Linear(5, 1), likelihood=Gaussian(0.1))
    store = filled(MemoryStore(), module)
    posterior = Posterior(store, module)

    def numbers(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 5, generator=generator)
        return x, x[:, :1].exp() + torch.randn(count, 1, generator=generator)

    mean, error = covered(posterior, numbers)
    assert abs(mean - LEVEL) < 4 * error
    x, y = numbers(449, torch.Generator().manual_seed(1))
    plain = posterior.conformal([(x[:49], y[:49])]).predict(x[49:])
    store.scaling = TargetScaling((3.0,), (10.0,))
    scaled = Posterior(store, module).conformal([(x[:49], y[:49])]).predict(x[49:])
    assert torch.equal(scaled.contains(10 * y[49:] + 3), plain.contains(y[49:]))


def test_few_data_have_the_whole_set_and_what_is_wrong_is_refused() -> None:
    posterior = in_memory(BayesianModule(net=nn.Linear(5, 3), likelihood=Categorical()))
    x, y = labels(8, torch.Generator().manual_seed(0))
    sets = posterior.conformal([(x, y)]).predict(x).sets
    assert sets is not None
    assert bool(sets.all()), "8 data cannot show 90 %"
    with pytest.raises(ValueError, match="level"):
        posterior.conformal([(x, y)], 1.0)
    with pytest.raises(ValueError, match="has none"):
        posterior.conformal([])
    with pytest.raises(TypeError, match="conformal needs validation data with targets"):
        posterior.conformal(x)
