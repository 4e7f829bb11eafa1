"""Joint scores and pointwise log-likelihoods: closed forms of Gaussian linear regression, limits, invariances."""

import math
from typing import Any

import arviz
import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from lightning_sgmcmc import Categorical, Gaussian, Posterior
from lightning_sgmcmc.diagnostics import joint_nll
from lightning_sgmcmc.posterior.store import TargetScaling
from tests.support.posteriors import MODULES, in_memory, inputs

NOISE = 0.5


def drawn(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, generator=generator)
    return x, x @ torch.tensor([[1.0], [-2.0]]) + NOISE * torch.randn(count, 1, generator=generator)


def exact(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the weights under a prior N(0, 1), noise of a known size."""
    covariance = torch.linalg.inv(torch.eye(2) + x.T @ x / NOISE**2).double()
    return covariance @ (x.T @ y).double()[:, 0] / NOISE**2, covariance


def regression(count: int = 800) -> Posterior:
    """Return draws of the exact posterior of a few data."""
    mean, covariance = exact(*drawn(5, 0))
    noise = torch.randn(count, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = mean + noise @ torch.linalg.cholesky(covariance).T
    net = nn.Linear(2, 1, bias=False)
    return Posterior.from_states(net, [{"weight": w[None].float()} for w in weights], Gaussian(NOISE))


def test_a_calibration_is_left_out_and_this_is_said(caplog: pytest.LogCaptureFixture) -> None:
    posterior, batch = regression(20), [drawn(30, 3)]
    before = posterior.joint_nll(batch, tau=3), posterior.log_likelihood(batch)
    posterior = posterior.calibrate([drawn(30, 4)])
    with caplog.at_level("INFO", "pytorch_lightning"):
        assert posterior.joint_nll(batch, tau=3) == before[0]
        torch.testing.assert_close(posterior.log_likelihood(batch), before[1])
    assert [text.split(" leaves out")[0] for text in caplog.messages] == ["joint_nll", "log_likelihood"]


def test_it_approaches_the_closed_form_of_linear_regression() -> None:
    """Four data are one group, whose density is N(X·m, X·C·Xᵀ + σ²·I)."""
    posterior, (x, y) = regression(), drawn(4, 2)
    near = 1 + 0.1 * x  # one another, so that the errors of the four means are one error
    x, y = near, y + (near - x) @ torch.tensor([[1.0], [-2.0]])
    mean, covariance = exact(*drawn(5, 0))
    xs = x.double()
    law = stats.multivariate_normal((xs @ mean).numpy(), (xs @ covariance @ xs.T + NOISE**2 * torch.eye(4)).numpy())
    score = posterior.joint_nll([(x[:3], y[:3]), (x[3:], y[3:])], tau=4)
    each = posterior.log_likelihood([(x, y)]).sum(1).exp()
    error = float(each.std() / each.mean()) / math.sqrt(len(each)) / 4
    assert error < 0.02
    assert score.nll == pytest.approx(-law.logpdf(y[:, 0].numpy()) / 4, abs=4 * error)
    assert score.groups == 1
    assert math.isnan(score.standard_error)
    assert abs(score.nll - score.marginal_nll) > 5 * error, "the errors go together"


@pytest.mark.parametrize("kind", ["mlp", "regression"])
def test_for_one_input_it_is_the_ordinary_nll_at_every_sampling(kind: str) -> None:
    posterior, x = in_memory(MODULES[kind]()), inputs()
    y = torch.arange(23) % 3 if kind == "mlp" else torch.randn(23, 2, generator=torch.Generator().manual_seed(0))
    prediction = posterior.predict(x, return_samples=True)
    logs = prediction.probabilities[torch.arange(23), y].log() if kind == "mlp" else prediction.log_prob(y)
    expected = -float(logs.mean())
    for sampling in ("dyadic", "nearest", "random", None):
        score = posterior.joint_nll([(x[:9], y[:9]), (x[9:], y[9:])], tau=1, sampling=sampling)  # type: ignore[arg-type]
        assert score.nll == pytest.approx(expected, abs=1e-5)
        assert score.marginal_nll == pytest.approx(expected, abs=1e-5)
        assert score.standard_error == pytest.approx(float(logs.std()) / math.sqrt(23), abs=1e-5)


@pytest.mark.parametrize("sampling", ["dyadic", "nearest", "random"])
def test_one_sample_has_nothing_to_know_jointly(sampling: Any) -> None:
    posterior = in_memory(MODULES["mlp"](), [0.0, -math.inf, -math.inf, -math.inf])
    score = posterior.joint_nll([(inputs(), torch.arange(23) % 3)], tau=4, sampling=sampling)
    assert score.nll == pytest.approx(score.marginal_nll, abs=1e-6)
    assert score.effective_samples == pytest.approx(1)


def test_order_and_repetition_of_samples_do_not_matter_and_weights_do() -> None:
    generator = torch.Generator().manual_seed(3)
    logs = -torch.rand(3, 8, generator=generator).double()
    groups = torch.tensor([[0, 1, 1], [2, 5, 7]])
    score = joint_nll(logs, groups, torch.tensor([1.0, 2.0, 1.0]))
    assert joint_nll(logs[[1, 0, 2, 1]], groups).nll == pytest.approx(score.nll, abs=1e-12)
    by_hand = [torch.tensor([0.25, 0.5, 0.25]).double() @ logs[:, group].sum(1).exp() for group in groups]
    assert score.nll == pytest.approx(-float(torch.stack(by_hand).log().mean()) / 3, abs=1e-12)
    assert joint_nll(logs, groups).nll != pytest.approx(score.nll, abs=1e-6)


def test_samples_that_know_what_goes_together_win_jointly_alone() -> None:
    """Two ensembles with the same probabilities for each datum: in one each network is sure, in the other unsure."""
    sure = [{"weight": torch.tensor([[s], [-s]])} for s in (5.0, -5.0)]
    unsure = [{"weight": torch.zeros(2, 1)}] * 2
    x, y = torch.ones(20, 1), torch.zeros(20).long()
    scores = [
        Posterior.from_states(nn.Linear(1, 2, bias=False), states, Categorical()).joint_nll([(x, y)], tau=5)
        for states in (sure, unsure)
    ]
    assert scores[0].marginal_nll == pytest.approx(scores[1].marginal_nll, abs=1e-4)
    assert scores[1].nll == pytest.approx(math.log(2), abs=1e-6)
    assert scores[0].nll == pytest.approx(math.log(2) / 5, abs=1e-3), "-log(1/2)/5"


def test_groups_hold_near_data_once() -> None:
    """Four far clusters of five data: half of every group is one cluster's, so its samples' errors are shared."""
    from lightning_sgmcmc.diagnostics.joint import dyadic_groups, nearest_groups, random_groups

    place = torch.arange(20) % 4
    x = 100.0 * place[:, None] + torch.rand(20, 1, generator=torch.Generator().manual_seed(0))
    groups = nearest_groups(x, 10, torch.Generator().manual_seed(0))
    assert groups.flatten().sort().values.tolist() == list(range(20))
    assert [len(place[half].unique()) for group in groups for half in group.split(5)] == [1] * 4
    assert random_groups(23, 5, torch.Generator().manual_seed(0)).flatten().unique().numel() == 20
    pairs = dyadic_groups(21, 30, torch.Generator().manual_seed(0))
    assert [len(pair.unique()) for pair in pairs] == [2] * 10
    assert pairs.unique().numel() == 20


def test_densities_are_in_the_datas_units_and_of_observed_targets() -> None:
    posterior, x = in_memory(MODULES["regression"]()), inputs()
    y = torch.randn(23, 2, generator=torch.Generator().manual_seed(0))
    plain = posterior.log_likelihood([(x, y)])
    assert plain.shape == (4, 23)
    posterior.store.scaling = TargetScaling((1.0, 5.0), (10.0, 0.1))
    scaled = posterior.log_likelihood([(x, y)])
    torch.testing.assert_close(scaled, plain - math.log(10 * 0.1))
    mixed = scaled.add(posterior.weights.log()[:, None]).logsumexp(0)
    prediction = posterior.predict(x)
    units = torch.tensor([1.0, 5.0]) + torch.tensor([10.0, 0.1]) * y
    torch.testing.assert_close(mixed, prediction.log_prob(units), atol=1e-5, rtol=1e-5)
    y[3], y[4, 0] = torch.nan, torch.nan
    some = posterior.log_likelihood([(x, y)])
    assert some.shape == (4, 22), "a datum without a target is no datum"
    torch.testing.assert_close(some[:, 4:], scaled[:, 5:])
    posterior.store.scaling = TargetScaling()
    alone = posterior.log_likelihood([(x, y)])[:, 3]
    torch.testing.assert_close(some[:, 3] + math.log(0.1), alone)  # of its second number
    assert posterior.joint_nll([(x, y)], tau=7).groups == 3


@pytest.mark.filterwarnings("ignore:More chains", "ignore:Estimated shape parameter")
def test_arviz_leaves_one_out_as_the_closed_form_does() -> None:
    """The elpd of leave-one-out of the regression is Σ_i log p(y_i | the others), within its Monte-Carlo error."""
    posterior, (x, y) = regression(), drawn(5, 0)
    exported = posterior.to_arviz(log_likelihood=posterior.log_likelihood([(x, y)]))
    found = arviz.loo(exported, reff=1.0)
    elpd = 0.0
    for i in range(5):
        rest = torch.arange(5) != i
        mean, covariance = exact(x[rest], y[rest])
        row = x[i].double()
        scale = float(row @ covariance @ row + NOISE**2) ** 0.5
        elpd += stats.norm.logpdf(float(y[i]), float(row @ mean), scale)
    assert float(getattr(found, "elpd_loo", getattr(found, "elpd", np.nan))) == pytest.approx(elpd, abs=0.25)
    with pytest.raises(ValueError, match=r"log_likelihood.*first axis"):
        posterior.to_arviz(log_likelihood=torch.zeros(5, 800))


def test_wrong_input_is_refused_and_few_samples_are_noticed() -> None:
    posterior, y = in_memory(MODULES["mlp"](), [0.0] * 4), torch.zeros(23).long()
    with pytest.raises(ValueError, match="tau=24"):
        posterior.joint_nll([(inputs(), y)], tau=24, sampling="random")
    with pytest.raises(ValueError, match="tau must be at least 1"):
        posterior.joint_nll([(inputs(), y)], tau=0)
    with pytest.raises(ValueError, match="sampling"):
        posterior.joint_nll([(inputs(), y)], sampling="polyadic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has none"):
        posterior.log_likelihood([])
    with pytest.warns(UserWarning, match=r"rests on .* of 4 samples"):
        posterior.joint_nll([(inputs(), y)], tau=23, sampling="random")
