"""Abstention: the stated risk holds over calibration sets, units do not matter, and what cannot be shown is refused."""

import copy
import math

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, Posterior
from lightning_sgmcmc.diagnostics import selective_threshold
from lightning_sgmcmc.diagnostics.decisions import error_bound
from lightning_sgmcmc.posterior.store import MemoryStore, TargetScaling
from tests.support.posteriors import MODULES, filled, in_memory, inputs


def classes(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs whose label is the sign with probability sigmoid(3·|x|)."""
    x = torch.randn(count, 1, generator=generator)
    right = torch.rand(count, generator=generator) < torch.sigmoid(3 * x[:, 0].abs())
    return x, ((x[:, 0] > 0) == right).long()


def risk_below(uncertainty_limit: float) -> float:
    """Return P(wrong | 1 - max p < limit) of `classes` by integration, p = sigmoid(a·|x|)."""
    x = torch.linspace(1e-6, 8, 40_000, dtype=torch.float64)
    mass = (-x.square() / 2).exp() * (-torch.sigmoid(0.7 * x) < uncertainty_limit)
    return float((mass * torch.sigmoid(-3 * x)).sum() / mass.sum().clamp_min(1e-300))


def test_the_risk_exceeds_the_stated_one_as_rarely_as_stated() -> None:
    """The predictive is miscalibrated, since its weight is 0.7 and the truth's is 3: the guarantee does not mind.

    Over 200 calibration sets at most 20 % ± three standard errors exceed the risk.
    """
    net = nn.Linear(1, 2, bias=False)
    posterior = Posterior.from_states(net, [{"weight": torch.tensor([[-0.35], [0.35]])}], Categorical())
    exceeded, coverages = [], []
    x, y = classes(200 * 1000, torch.Generator().manual_seed(0))
    probabilities = posterior.predict(x).probabilities
    wrong = probabilities.argmax(1) != y
    for own, errors in zip((-probabilities.max(1).values).split(1000), wrong.split(1000), strict=True):
        found = selective_threshold(own, errors, risk=0.05, confidence=0.8)
        exceeded.append(found is not None and risk_below(found.threshold) > 0.05)
        if found is not None:
            coverages.append(found.coverage)
            assert found.bound <= 0.05
    assert sum(exceeded) / 200 <= 0.2 + 3 * math.sqrt(0.2 * 0.8 / 200)
    assert len(coverages) > 150, "it is of use"
    assert sum(coverages) / len(coverages) > 0.3


def test_it_answers_what_is_below_the_threshold_and_the_bound_is_the_binomial_one() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = classes(2000, generator)
    states = [{"weight": torch.tensor([[-a], [a]])} for a in (1.0, 2.0)]
    posterior = Posterior.from_states(nn.Linear(1, 2, bias=False), states, Categorical())
    for score in ("max_probability", "entropy"):
        found = posterior.selective([(x, y)], 0.1, score=score)  # type: ignore[arg-type]
        accepted = found.accepts(posterior.predict(x))
        assert float(accepted.double().mean()) == found.coverage
        errors = int((posterior.predict(x).probabilities.argmax(1) != y)[accepted].sum())
        count = int(accepted.sum())
        assert found.bound == pytest.approx(stats.binomtest(errors, count).proportion_ci(1 - 0.05 / 10).high, abs=1e-9)
        assert errors / count < found.bound <= 0.1
        assert float(x[accepted].abs().min()) > 0.1, "the least sure are left"
    loose = posterior.selective([(x, y)], 0.5)
    assert (loose.coverage, loose.threshold) == (1.0, math.inf)
    assert bool(loose.accepts(posterior.predict(torch.zeros(1, 1))).all())


def test_equal_uncertainties_are_answered_together_or_not_at_all() -> None:
    u, wrong = torch.repeat_interleave(torch.arange(4.0), 500), torch.arange(2000) >= 1500
    found = selective_threshold(u, wrong, 0.05)
    assert found is not None
    assert (found.threshold, found.coverage) == (3.0, 0.75)
    assert selective_threshold(torch.zeros(2000), wrong, 0.05) is None
    assert error_bound(4, 4, 0.95) == 1


def test_numbers_are_right_within_a_tolerance_in_the_datas_units() -> None:
    module = BayesianModule(net=nn.Linear(5, 1), likelihood=Gaussian(0.5))
    posterior = Posterior(filled(MemoryStore(), module), module)
    x = 3 * inputs(3000)
    noise = torch.randn(3000, 1, generator=torch.Generator().manual_seed(0))
    prediction = posterior.predict(x)
    y = prediction.mean + 0.5 * prediction.std * noise
    plain = posterior.selective([(x, y)], 0.15, tolerance=1.0)
    assert 0 < plain.coverage < 1
    posterior.store.scaling = TargetScaling((3.0,), (10.0,))
    scaled = posterior.selective([(x, y)], 0.15, tolerance=10.0)
    assert scaled.coverage == plain.coverage
    assert scaled.bound == plain.bound
    y[:1000] = torch.nan
    assert posterior.selective([(x, y)], 0.5, tolerance=10.0).count == 2000


@pytest.mark.parametrize(("net", "shape"), [(nn.Conv2d(2, 1, 1), (2, 4, 4)), (nn.Linear(5, 2), (2, 5))])
def test_a_field_or_sequence_is_one_datum(net: nn.Module, shape: tuple[int, ...]) -> None:
    """It is right if all of its numbers are, and as sure as the least sure of them."""
    torch.manual_seed(0)
    posterior = Posterior.from_states(net, [copy.deepcopy(net) for _ in range(2)], Gaussian(0.5))
    x = torch.randn(400, *shape)
    mean = posterior.predict(x).mean
    y = mean + 0.5 * torch.randn(mean.shape)
    y[:100].reshape(100, -1)[:, 3] = torch.nan
    found = posterior.selective([(x[:70], y[:70]), (x[70:], y[70:])], 0.9, tolerance=1.2)
    wrong = ((y - mean).abs() > 1.2).flatten(1).any(1)[100:]
    assert (found.count, found.coverage) == (300, 1.0)
    assert found.bound == error_bound(int(wrong.sum()), 300, 1 - 0.05 / 20)
    assert found.accepts(posterior.predict(x)).shape == (400,)
    with pytest.raises(ValueError, match="tolerance has 2 numbers"):
        posterior.selective([(x, y)], 0.9, tolerance=[1.0, 2.0])
    with pytest.raises(TypeError, match=r"numbers \(n, D\)"):
        posterior.acquire(x, 2)


def test_what_cannot_be_shown_or_has_no_meaning_is_refused() -> None:
    posterior, y = in_memory(MODULES["mlp"]()), torch.arange(23) % 3
    data = [(inputs(), y)]
    with pytest.raises(ValueError, match=r"risk=0.05 is not shown .* of the 23 data.*117 answered"):
        posterior.selective(data)
    some = in_memory(BayesianModule(net=nn.Linear(5, 3), likelihood=Categorical(missing=-1)))
    right = some.predict(inputs()).probabilities.argmax(1)
    labels = torch.where(torch.arange(23) < 8, -1, right)
    assert some.selective([(inputs(), labels)], 0.9).count == 15, "labels that are known"
    with pytest.raises(ValueError, match=r"risk must be in \(0, 1\)"):
        posterior.selective(data, risk=0)
    with pytest.raises(ValueError, match="score='std' is not for a ClassPrediction"):
        posterior.selective(data, score="std")
    with pytest.raises(ValueError, match="tolerance"):
        in_memory(MODULES["regression"]()).selective([(inputs(), torch.zeros(23, 2))])
    with pytest.raises(ValueError, match="tolerance has 3 numbers"):
        in_memory(MODULES["regression"]()).selective([(inputs(), torch.zeros(23, 2))], tolerance=[1, 2, 3])
