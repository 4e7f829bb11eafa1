"""The collected posterior: predictions against direct averages, and a model that stays as it was."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Posterior
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.diagnostics.draws import normalised_weights, weight_efficiency
from lightning_sgmcmc.posterior import predictive
from lightning_sgmcmc.posterior.description import describe
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.store import MemoryStore
from tests.support.posteriors import (
    CLASSES,
    FEATURES,
    LOG_WEIGHTS,
    MODULES,
    Subclass,
    Tied,
    classifier,
    convolutional,
    filled,
    in_memory,
    inputs,
    normed,
    states,
    untouched,
)


@pytest.mark.parametrize("name", [n for n in MODULES if n != "regression"])
def test_prediction_is_the_weighted_average_of_probabilities(name: str) -> None:
    """... not the softmax of averaged logits, and without dropout."""
    torch.manual_seed(0)
    module = MODULES[name]()
    x = inputs()
    with untouched(module):
        prediction = in_memory(module).predict(x, return_samples=True)
    weights = torch.tensor(LOG_WEIGHTS, dtype=torch.float64).softmax(0)
    with torch.no_grad():
        outputs = torch.stack([twin(x) for twin in states(module)]).double()
    each = outputs.softmax(-1)
    mean = (weights[:, None, None] * each).sum(0)
    torch.testing.assert_close(prediction.sample_probabilities.double(), each, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(prediction.probabilities.double(), mean, rtol=1e-5, atol=1e-6)
    of_logits = (weights[:, None, None] * outputs).sum(0).softmax(-1)
    assert (of_logits - mean).abs().max() > 1e-3
    torch.testing.assert_close(prediction.entropy.double(), -(mean * mean.log()).sum(-1), rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]
    own = -(each * each.log()).sum(-1)
    information = -(mean * mean.log()).sum(-1) - (weights[:, None] * own).sum(0)
    torch.testing.assert_close(prediction.mutual_information.double(), information, rtol=1e-3, atol=1e-5)  # type: ignore[union-attr]
    assert not prediction.probabilities.requires_grad


def test_regression_prediction_has_the_samples_own_noise() -> None:
    module = MODULES["regression"]()
    x = inputs()
    prediction = in_memory(module).predict(x)
    weights = torch.tensor(LOG_WEIGHTS, dtype=torch.float64).softmax(0)[:, None, None]
    with torch.no_grad():
        twins = list(states(module))
        means = torch.stack([twin(x) for twin in twins]).double()
        variances = torch.stack([(2 * twin.likelihood.log_std).exp() for twin in twins]).double()  # type: ignore[operator, union-attr]
    mean = (weights * means).sum(0)
    variance = (weights * (means - mean) ** 2).sum(0) + (weights.view(-1) * variances).sum()
    torch.testing.assert_close(prediction.mean.double(), mean, rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]
    torch.testing.assert_close(prediction.std.double(), variance.sqrt(), rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]
    assert variances.std() > 0.05


@pytest.mark.parametrize("name", MODULES)
def test_a_store_is_loaded_without_a_model(name: str, tmp_path: Path) -> None:
    """The network built from the description predicts the same bits as the one that was trained."""
    module = MODULES[name]()
    filled(DiskStore.create(tmp_path / "s", describe(module)), module)
    x = inputs()
    with_model = Posterior.load(tmp_path / "s", model=module).predict(x)
    torch.manual_seed(99)
    without = Posterior.load(tmp_path / "s").predict(x)
    from_memory = in_memory(module).predict(x)
    for part, value in vars(with_model).items():
        for other in (without, from_memory):
            if value is None:
                assert getattr(other, part) is None
            else:
                assert torch.equal(value, getattr(other, part)), part


def test_a_dominating_weight_and_a_zero_weight() -> None:
    module = classifier()
    x = inputs()
    posterior = in_memory(module, (-1e6, 3.0, -math.inf, -1e6))
    twin = list(states(module))[1]
    with torch.no_grad():
        expected = twin(x).softmax(-1)
    torch.testing.assert_close(posterior.predict(x).probabilities, expected)
    assert posterior.weight_efficiency == pytest.approx(1 / 4)
    assert posterior.weights.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_tied_weights_follow_the_sample(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = classifier(Tied())
    filled(DiskStore.create(tmp_path / "s"), module)
    x = inputs()
    each = Posterior.load(tmp_path / "s", model=module).predict(x, return_samples=True).sample_probabilities
    with torch.no_grad():
        expected = torch.stack([twin(x).softmax(-1) for twin in states(module)])
    torch.testing.assert_close(each, expected)


@pytest.mark.parametrize("batch_size", [1, 10, 23, 50])
def test_batches_predict_what_one_tensor_does(batch_size: int) -> None:
    posterior = in_memory(classifier())
    x = inputs()
    whole = posterior.predict(x, return_samples=True)
    pairs = TensorDataset(x, torch.zeros(len(x)))
    for batches in (
        DataLoader(pairs, batch_size),
        DataLoader(TensorDataset(x), batch_size),
        DataLoader(x, batch_size),  # type: ignore[arg-type]
        list(x.split(batch_size)),
        [(part, None, "more") for part in x.split(batch_size)],
    ):
        found = posterior.predict(batches, return_samples=True)
        assert found.parts.keys() == whole.parts.keys()
        for part, value in whole.parts.items():
            torch.testing.assert_close(found.parts[part], value, rtol=1e-5, atol=1e-6)
    without = posterior.predict(x)
    with pytest.raises(AttributeError, match="sample_probabilities was not requested: pass return_samples=True"):
        _ = without.sample_probabilities
    assert torch.equal(without.probabilities, whole.probabilities)


def _shuffled(x: Tensor) -> dict[str, Any]:
    data = TensorDataset(x)
    order = torch.utils.data.RandomSampler(data)
    return {
        "shuffle": DataLoader(data, 10, shuffle=True),
        "subset": DataLoader(data, 10, sampler=torch.utils.data.SubsetRandomSampler(range(len(x)))),
        "batches": DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(order, 10, False)),
        "training": ResumableLoader(data, 10),
        "iterator": iter([part.numpy() for part in x.split(10)]),
    }


@pytest.mark.parametrize("kind", ["shuffle", "subset", "batches", "training", "iterator"])
def test_every_sample_predicts_the_inputs_of_one_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows come in the order of the pass, and each is the average prediction of one input."""
    monkeypatch.setattr(predictive, "CHUNK", 600)  # bytes of two batches: the samples are read several times
    posterior = in_memory(classifier())
    x = inputs()
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = posterior.predict(_shuffled(x)[kind], return_samples=True)
    assert found.sample_probabilities.shape == (4, *found.probabilities.shape)
    distance = torch.cdist(found.probabilities, posterior.predict(x).probabilities)
    assert distance.min(1).values.max() < 1e-5
    assert sorted(distance.argmin(1).tolist()) == list(range(len(x)))
    assert any("The loader shuffles" in str(one.message) for one in caught) == (kind != "iterator")


def test_iterating_and_weights() -> None:
    posterior = in_memory(classifier())
    assert len(posterior) == 4
    assert [s.step for s in posterior] == [0, 1, 2, 3] == [r.step for r in posterior.records]
    assert posterior[2].log_weight == -0.7
    expected = torch.tensor(LOG_WEIGHTS, dtype=torch.float64).softmax(0)
    torch.testing.assert_close(posterior.weights, expected)
    assert posterior.weight_efficiency == pytest.approx(1 / expected.square().sum().item() / 4)


# -- diagnostics of weights -------------------------------------------------------------------------------------------


def test_weight_efficiency() -> None:
    assert weight_efficiency(torch.zeros(7)) == pytest.approx(1)
    assert weight_efficiency(torch.full((7,), 1e6)) == pytest.approx(1)
    assert weight_efficiency(torch.tensor([0.0, -math.inf, 0.0])) == pytest.approx(2 / 3)
    assert weight_efficiency(torch.tensor([0.0, math.log(3)])) == pytest.approx(8 / 10)
    assert weight_efficiency(torch.tensor([-1e6, 1e6])) == 1 / 2


@pytest.mark.parametrize(
    ("log_weights", "message"),
    [
        ([], "no samples to weight"),
        ([0.0, math.nan], "NaN or infinite"),
        ([0.0, math.inf], "NaN or infinite"),
        ([-math.inf, -math.inf], "all samples have weight 0"),
    ],
)
def test_weights_without_meaning_are_refused(log_weights: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        normalised_weights(torch.tensor(log_weights))


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: classifier(nn.Sequential(nn.Linear(FEATURES, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))),
            r"another network than the model: 'net\.0\.bias' has shape \(8,\) in the samples and \(9,\) in the model",
        ),
        (Subclass, r"'body\.bias' has shape none in the samples and \(6,\) in the model"),
    ],
)
def test_another_network_is_refused(other: Any, message: str, tmp_path: Path) -> None:
    module = classifier()
    filled(DiskStore.create(tmp_path / "s", describe(module)), module)
    with pytest.raises(ValueError, match=message):
        Posterior.load(tmp_path / "s", model=other())


def test_no_description_and_no_model(tmp_path: Path) -> None:
    filled(DiskStore.create(tmp_path / "s"), classifier())
    posterior = Posterior.load(tmp_path / "s")
    assert len(list(posterior)) == 4
    with pytest.raises(RuntimeError, match=r"no description of its network; use Posterior\.load\(path, net=…\)"):
        posterior.predict(inputs())


def test_a_description_that_cannot_be_built_leaves_the_samples(tmp_path: Path) -> None:
    filled(DiskStore.create(tmp_path / "s", {"class": "gone_away:Net", "arguments": {}}), classifier())
    posterior = Posterior.load(tmp_path / "s")
    assert len(list(posterior)) == 4
    with pytest.raises(RuntimeError, match=r"gone_away is not imported.*import gone_away first"):
        posterior.predict(inputs())


def test_no_samples(tmp_path: Path) -> None:
    module = classifier()
    DiskStore.create(tmp_path / "s", describe(module))
    for posterior in (Posterior.load(tmp_path / "s"), Posterior(MemoryStore(), module)):
        with pytest.raises(RuntimeError, match="has no samples to predict with"):
            posterior.predict(inputs())


def test_no_inputs() -> None:
    with pytest.raises(ValueError, match="no inputs to predict"):
        in_memory(classifier()).predict([])


def test_no_likelihood() -> None:
    module = BayesianModule(net=nn.Linear(FEATURES, 1))
    with pytest.raises(RuntimeError, match="no likelihood object"):
        in_memory(module).predict(inputs())


def test_all_weights_zero_is_refused_with_a_sentence() -> None:
    with pytest.raises((ValueError, RuntimeError), match="weight"):
        in_memory(classifier(), (-math.inf,) * 4).predict(inputs())


def test_prediction_restores_the_model_after_a_failure() -> None:
    module = classifier()
    module.train()
    with untouched(module), pytest.raises(RuntimeError):
        in_memory(module).predict(torch.zeros(2, FEATURES + 1))


# -- BatchNorm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", [normed, convolutional])
def test_batch_norm_statistics_are_those_of_torch(make: Any, training: bool, momentum: Any, tmp_path: Path) -> None:
    """Each sample in a network of its own, through `torch.optim.swa_utils.update_bn`."""
    module = classifier(make()).train(training)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.momentum = momentum
    loader = DataLoader(TensorDataset(inputs(40, seed=2), torch.zeros(40)), 16)
    filled(DiskStore.create(tmp_path / "s"), module)
    posterior = Posterior.load(tmp_path / "s", model=module)
    with untouched(module):
        updated = posterior.update_batch_norm(loader)
    assert len(updated) == len(posterior) == 4
    x = inputs()
    found = updated.predict(x, return_samples=True).sample_probabilities
    for index, twin in enumerate(states(module)):
        update_bn(loader, twin)
        for name, buffer in twin.named_buffers():
            torch.testing.assert_close(updated[index].buffers[name], buffer)
        assert all(torch.equal(updated[index].parameters[name], p) for name, p in twin.named_parameters())
        with torch.no_grad():
            torch.testing.assert_close(found[index], twin.eval()(x).softmax(-1))  # type: ignore[index]
    assert updated.records[1].log_weight == 1.5
    changed = [
        not torch.equal(a, b) for a, b in zip(updated[0].buffers.values(), posterior[0].buffers.values(), strict=True)
    ]
    assert all(changed)


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_the_posterior_before_keeps_its_statistics(kind: str, tmp_path: Path) -> None:
    module = classifier()
    store = DiskStore.create(tmp_path / "s") if kind == "disk" else MemoryStore()
    posterior = Posterior(filled(store, module), module)
    before = posterior.predict(inputs()).probabilities
    updated = posterior.update_batch_norm([inputs(40, seed=2)])
    assert not torch.equal(updated.predict(inputs()).probabilities, before)  # type: ignore[arg-type]
    assert torch.equal(posterior.predict(inputs()).probabilities, before)  # type: ignore[arg-type]


def test_dropout_stays_off_while_statistics_are_estimated() -> None:
    """BatchNorm behind dropout: the statistics are those of the plain network, twice the same."""
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))
    module = classifier(net).train()
    x = inputs(40)
    (updated,) = list(in_memory(module, (0.0,) * 4).update_batch_norm([x]))[:1]
    twin = next(states(module))
    with torch.no_grad():
        hidden = twin.net[1](x)  # type: ignore[index, operator]
    torch.testing.assert_close(updated.buffers["net.2.running_mean"], hidden.mean(0))
    torch.testing.assert_close(updated.buffers["net.2.running_var"], hidden.var(0))


def test_without_batch_norm_nothing_changes() -> None:
    posterior = in_memory(Subclass())
    updated = posterior.update_batch_norm([inputs()])
    assert torch.equal(updated.predict(inputs()).probabilities, posterior.predict(inputs()).probabilities)  # type: ignore[arg-type]


def test_batch_norm_update_restores_the_model_after_a_failure() -> None:
    module = classifier().train()
    module.net[1].eval()  # type: ignore[index, union-attr]
    with untouched(module), pytest.raises(RuntimeError):
        in_memory(module).update_batch_norm([torch.zeros(4, FEATURES + 1)])


def test_in_memory_predicts_the_same_without_the_files(tmp_path: Path) -> None:
    module = classifier()
    filled(DiskStore.create(tmp_path / "s"), module)
    posterior = Posterior.load(tmp_path / "s", model=module)
    expected = posterior.predict(inputs()).probabilities
    resident = posterior.in_memory()
    for file in (tmp_path / "s").iterdir():
        file.unlink()
    assert torch.equal(resident.predict(inputs()).probabilities, expected)  # type: ignore[arg-type]
    assert resident.in_memory() is resident
