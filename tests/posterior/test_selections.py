"""Thinned and merged posteriors, the table of parameters, and the figures."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, Posterior
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.store import MemoryStore, TargetScaling
from tests.support.posteriors import classifier, filled, in_memory, inputs


def drawn(values: np.ndarray, log_weights: np.ndarray | None = None) -> Posterior:
    """Return a posterior of parameters `w`, values of shape (draw, chain, …), in the order of drawing."""
    store = MemoryStore()
    for step in range(values.shape[0]):
        for chain in range(values.shape[1]):
            weight = 0.0 if log_weights is None else float(log_weights[step, chain])
            value = torch.as_tensor(values[step, chain])
            store.append(PosteriorSample(step, 0, chain, float(value.sum()), weight, {"a.w": value}, {}))
    return Posterior(store)


# -- thinning ---------------------------------------------------------------------------------------------------------


def test_thinning_keeps_each_chains_newest_and_the_weights() -> None:
    weights = np.random.default_rng(0).normal(size=(7, 3))
    posterior = drawn(np.zeros((7, 3, 1)), weights)
    kept = posterior.thin(every=3)
    assert [(r.step, r.chain) for r in kept.records] == [(s, c) for s in (0, 3, 6) for c in range(3)]
    assert [r.log_weight for r in kept.records] == weights[[0, 3, 6]].reshape(-1).tolist()
    assert len(posterior) == 21, "the other posterior is unchanged"


@pytest.mark.parametrize("count", [1, 2, 3, 10, 21])
def test_thinning_to_a_count_takes_equal_shares(count: int) -> None:
    kept = drawn(np.zeros((7, 3, 1))).thin(count=count)
    shares = [sum(r.chain == chain for r in kept.records) for chain in range(3)]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1
    assert any(r.step == 6 for r in kept.records)
    places = [(r.step, r.chain) for r in kept.records]
    assert places == sorted(set(places))


@pytest.mark.parametrize("wrong", [{}, {"every": 2, "count": 2}, {"count": 22}, {"every": 0}, {"count": 0}])
def test_a_thinning_that_means_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"every|count"):
        drawn(np.zeros((7, 3, 1))).thin(**wrong)


# -- merging ----------------------------------------------------------------------------------------------------------


def test_merged_posteriors_count_by_their_samples() -> None:
    """Each posterior's own weights are kept within it, and constants of log-weights do not matter."""
    module = classifier()
    first, second = in_memory(module), in_memory(module, (7.0, 7.0, 8.0, 9.0))[:3]
    x = inputs()
    both = Posterior.merge(first, second)
    assert len(both) == 7
    mean = (4 * first.predict(x).probabilities + 3 * second.predict(x).probabilities) / 7
    torch.testing.assert_close(both.predict(x).probabilities, mean)
    torch.testing.assert_close(both.weights[:4], first.weights * 4 / 7)
    assert {r.chain for r in both.records} == {0, 1}, "two runs' chains are not one chain"
    assert both[5].chain == 1
    apart = first.merge(second, masses=(1, 3))
    mean = (first.predict(x).probabilities + 3 * second.predict(x).probabilities) / 4
    torch.testing.assert_close(apart.predict(x).probabilities, mean)
    assert len(both.thin(count=2).in_memory()) == 2


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    posterior = in_memory(classifier())
    with pytest.raises(ValueError, match="given twice"):
        posterior.merge(posterior)
    other = classifier(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)))
    with pytest.raises(ValueError, match="another network than the first"):
        posterior.merge(in_memory(other))
    with pytest.raises(ValueError, match="no samples"):
        posterior.merge(Posterior(MemoryStore()))
    linear = [BayesianModule(net=nn.Linear(5, 2), likelihood=Gaussian(std)) for std in (0.5, 0.7)]
    with pytest.raises(ValueError, match=r"std is 0\.5 in the first and 0\.7 in the model"):
        in_memory(linear[0]).merge(in_memory(linear[1]))
    scaled = in_memory(linear[0])
    scaled.store.scaling = TargetScaling((0.0,), (2.0,))
    with pytest.raises(ValueError, match="another scaling"):
        in_memory(linear[0]).merge(scaled)
    with pytest.raises(ValueError, match="masses must be 2 positive numbers"):
        posterior.merge(in_memory(classifier()), masses=(1, 0))
    filled(DiskStore.create(tmp_path / "a"), classifier())
    one, same = (Posterior.load(tmp_path / "a", classifier()) for _ in range(2))
    with pytest.raises(ValueError, match="given twice"):
        one.merge(same)
    for whole in (one, posterior):
        for part in (whole.thin(count=2), whole[1:], whole.resample(9), whole[:1].merge(whole[2:])):
            with pytest.raises(ValueError, match="given twice"):
                whole.merge(part)
        torch.testing.assert_close(whole[:2].merge(whole[2:], masses=(1, 1)).weights.sum(), torch.tensor(1.0).double())
    with pytest.raises(ValueError, match=r"float64 and the first in torch.float32.*merge runs of one precision"):
        posterior.merge(in_memory(classifier().double()))


# -- the table --------------------------------------------------------------------------------------------------------


def test_the_table_has_the_moments_of_the_draws() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, size=(50, 4, 2, 3))
    weights = np.random.default_rng(2).normal(size=(50, 4))
    weighted, plain = drawn(values, weights), drawn(values)
    share = torch.softmax(torch.as_tensor(weights).reshape(-1), 0).numpy()
    flat = values.reshape(200, -1)
    mean = share @ flat
    rows = weighted.summary(by="element").rows
    assert [row.name for row in rows][:3] == ["energy", "a.w[0, 0]", "a.w[0, 1]"]
    np.testing.assert_allclose([row.mean for row in rows[1:]], mean)
    np.testing.assert_allclose([row.sd for row in rows[1:]], np.sqrt(share @ (flat - mean) ** 2))
    assert "are not" in str(weighted.summary())
    (energy, row) = plain.summary()
    np.testing.assert_allclose([row.mean, row.sd], [flat.mean(), np.sqrt(flat.var(0).mean())])
    assert row.rhat < 1.1
    assert 100 < row.ess < 400
    np.testing.assert_allclose(energy.mean, flat.sum(1).mean())
    apart = drawn(values + np.arange(4)[:, None, None] * 10)
    assert apart.summary().rows[1].rhat > 1.5


def test_few_draws_have_no_diagnostics() -> None:
    table = drawn(np.random.default_rng(1).normal(size=(3, 2, 1))).summary()
    assert math.isnan(table.rows[1].rhat)
    assert "a.w" in str(table)
    assert "<table>" in table._repr_html_()
    with pytest.raises(ValueError, match="no parameter matches"):
        drawn(np.zeros((3, 2, 1))).summary(["b.*"])


def test_layers_join_their_tensors() -> None:
    rows = in_memory(classifier()).summary(by="layer").rows
    assert [(row.name, row.shape) for row in rows[1:]] == [("net.0", (48,)), ("net.1", (16,)), ("net.4", (27,))]


# -- figures ----------------------------------------------------------------------------------------------------------


def test_the_figures() -> None:
    posterior = drawn(np.random.default_rng(1).normal(size=(9, 2, 3)))
    assert len(posterior.plot_trace().axes[0].lines) == 2
    panels = posterior.plot_trace(["a.w"]).axes
    assert [len(axes.lines) for axes in panels] == [2, 2, 2]
    values = [float(posterior[i].parameters["a.w"][1]) for i in range(0, 18, 2)]
    np.testing.assert_allclose(panels[1].lines[0].get_ydata(), values)
    with pytest.raises(ValueError, match="at most 12 panels"):
        drawn(np.zeros((2, 2, 13))).plot_trace(["*"])
    regression = in_memory(BayesianModule(net=nn.Linear(5, 1), likelihood=Gaussian(0.5)))
    x, y = inputs(), torch.randn(23, 1)
    assert regression.plot_predictions(x, y).axes[0].get_xlabel() == "observed"
    with pytest.raises(ValueError, match=r"pass y="):
        regression.plot_predictions(x)
    curve = in_memory(BayesianModule(net=nn.Sequential(nn.Linear(1, 1)), likelihood=Gaussian(0.5)))
    line = curve.plot_predictions(torch.arange(4.0)[:, None]).axes[0].lines[0]
    np.testing.assert_allclose(line.get_ydata(), curve.predict(torch.arange(4.0)[:, None]).mean[:, 0].numpy())
    classes = in_memory(BayesianModule(net=nn.Linear(5, 3), likelihood=Categorical()))
    assert len(classes.plot_reliability(x, torch.randint(0, 3, (23,))).axes) == 2
    with pytest.raises(TypeError, match="plot_reliability"):
        classes.plot_predictions(x)
    with pytest.raises(TypeError, match="plot_predictions"):
        regression.plot_reliability(x, y)
