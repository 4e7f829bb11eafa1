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


def covered(posterior: Posterior, draw: Any, draws: int = DRAWS, **options: Any) -> tuple[float, float]:
    """Return the mean coverage over draws of the calibration data, and its standard error."""
    found = []
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        x, y = draw(CALIBRATION + NEW, generator)
        data = [(x[:CALIBRATION], y[:CALIBRATION])]
        conformal = posterior.conformal(data, LEVEL, **options)
        found.append(conformal.predict(x[CALIBRATION:]).contains(y[CALIBRATION:]).double().mean())
    return float(torch.stack(found).mean()), float(torch.stack(found).std()) / math.sqrt(draws)


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


def test_every_class_is_covered_alike_by_class() -> None:
    """The second class is rare and hard: sets of one threshold miss it more often than they state."""
    net = nn.Linear(1, 2)
    state = {"weight": torch.tensor([[-1.0], [1.0]]), "bias": torch.tensor([2.0, -2.0])}
    posterior = Posterior.from_states(net, [state], Categorical())

    def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        y = (torch.rand(count, generator=generator) < 0.15).long()
        return 2.0 * y[:, None] + torch.randn(count, 1, generator=generator), y

    found: dict[str, list[list[float]]] = {"threshold": [], "class-conditional": []}
    for seed in range(DRAWS):
        x, y = draw(600, seed)
        for method, rates in found.items():
            inside = posterior.conformal([(x[:300], y[:300])], LEVEL, method=method).predict(x[300:])  # type: ignore[arg-type]
            rates.append([float(inside.contains(y[300:])[y[300:] == k].double().mean()) for k in (0, 1)])
    rates = torch.tensor(found["class-conditional"])
    error = rates.std(0) / math.sqrt(DRAWS)
    assert bool((rates.mean(0) > LEVEL - 4 * error).all())
    assert bool((rates.mean(0) < LEVEL + 0.03 + 4 * error).all()), "up to 1/(n_k + 1) above, n_1 is about 45"
    assert float(torch.tensor(found["threshold"]).mean(0)[1]) < LEVEL - 0.1


def test_a_class_with_too_few_data_is_in_every_set() -> None:
    posterior = in_memory(BayesianModule(net=nn.Linear(5, 3), likelihood=Categorical()))
    x = torch.randn(50, 5, generator=torch.Generator().manual_seed(0))
    y = (torch.arange(50) < 25).long()
    y[0] = 2
    with pytest.warns(UserWarning, match=r"Classes 2 \(1\) have fewer than the 9 calibration data"):
        sets = posterior.conformal([(x, y)], method="class-conditional").predict(x).sets
    assert sets is not None
    assert bool(sets[:, 2].all())
    assert not bool(sets[:, :2].all())


def test_quantile_intervals_cover_and_move_the_predictives_own() -> None:
    """The likelihood's noise is wrong by a factor of ten: the ends of its own intervals move by one number."""
    module = BayesianModule(net=nn.Linear(5, 1), likelihood=Gaussian(0.1))
    store = filled(MemoryStore(), module)
    posterior = Posterior(store, module)

    def numbers(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 5, generator=generator)
        return x, x[:, :1].exp() + torch.randn(count, 1, generator=generator)

    mean, error = covered(posterior, numbers, 15, method="quantile")
    assert abs(mean - LEVEL) < 4 * error
    x, y = numbers(449, torch.Generator().manual_seed(1))
    plain = posterior.conformal([(x[:49], y[:49])], method="quantile").predict(x[49:])
    own = posterior.predict(x[49:]).interval(0.9)
    assert plain.low is not None
    assert plain.high is not None
    margins = torch.cat([own[0] - plain.low, plain.high - own[1]])
    torch.testing.assert_close(margins, margins[:1].expand_as(margins))
    store.scaling = TargetScaling((3.0,), (10.0,))
    scaled = Posterior(store, module).conformal([(x[:49], y[:49])], method="quantile").predict(x[49:])
    torch.testing.assert_close(scaled.low, 10 * plain.low + 3, rtol=1e-4, atol=1e-3)


def test_a_predictive_that_is_too_wide_has_narrower_intervals() -> None:
    module = BayesianModule(net=nn.Linear(5, 1), likelihood=Gaussian(10.0))
    posterior, x = in_memory(module), torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    y = posterior.predict(x).mean + torch.randn(200, 1, generator=torch.Generator().manual_seed(1))
    found = posterior.conformal([(x, y)], method="quantile").predict(x)
    own = posterior.predict(x).interval(0.9)
    assert found.low is not None
    assert found.high is not None
    assert float((found.high - found.low).mean()) < 0.5 * float((own[1] - own[0]).mean())
    assert float(found.contains(y).double().mean()) >= 0.9


def test_a_method_is_for_its_kind() -> None:
    x = torch.zeros(20, 5)
    with pytest.raises(ValueError, match="'quantile' is not for a ClassPrediction"):
        in_memory(BayesianModule(net=nn.Linear(5, 3), likelihood=Categorical())).conformal(
            [(x, torch.zeros(20).long())], method="quantile"
        )
    with pytest.raises(ValueError, match="'class-conditional' is not for a RegressionPrediction"):
        in_memory(BayesianModule(net=nn.Linear(5, 1), likelihood=Gaussian())).conformal(
            [(x, torch.zeros(20))], method="class-conditional"
        )


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


@pytest.mark.parametrize("method", ["threshold", "adaptive", "quantile"])
def test_too_few_calibration_data_are_told(method: Any) -> None:
    """The guarantee then takes all classes, or the whole line, which says nothing of the data."""
    likelihood = Gaussian() if method == "quantile" else Categorical()
    posterior = in_memory(BayesianModule(net=nn.Linear(5, 3), likelihood=likelihood))
    x = torch.randn(8, 5)
    y = torch.randn(8, 3) if method == "quantile" else torch.arange(8) % 3
    what = "intervals are infinite" if method == "quantile" else "sets have all classes"
    with pytest.warns(UserWarning, match=f"conformal has 8 calibration data, fewer than the 9 .* so {what}"):
        posterior.conformal([(x, y)], LEVEL, method)
