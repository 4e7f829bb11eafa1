"""Predictions that would be wrong without a word: what the user does | the sentence that is raised, or shown once."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import Bernoulli, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.likelihoods import (
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    LogNormal,
    MixtureOfGaussians,
    MultiLabelBernoulli,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
)
from lightning_sgmcmc.predictions import ClassPrediction, RegressionPrediction
from tests.support.small_run import loader, module, tensors
from tests.support.trainers import quiet_trainer

X = tensors()[0]


def network(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), layer, nn.Linear(3, 2))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples") / "s"
    trainer = quiet_trainer(max_epochs=1, callbacks=[SamplingSchedule(every_n_steps=1), SampleCollector(folder)])
    trainer.fit(module(net=network(nn.ReLU())), loader())
    return folder


@contextmanager
def shown(count: int, sentence: str) -> Iterator[None]:
    """Count the warnings that hold a sentence."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert sum(sentence in str(warning.message) for warning in caught) == count


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        ((X, tensors()[1]), "x is a tuple of 2, which could be a batch (x, y) or several batches: pass the inputs"),
        ((X, X), "x is a tuple of 2, which could be a batch (x, y) or several batches: pass the inputs alone"),
        ((X,), "x is a tuple of 1, which could be a batch (x, y) or several batches"),
    ],
)
def test_a_batch_instead_of_inputs(store: Path, x: Any, sentence: str) -> None:
    """24 inputs never get 48 predictions."""
    with pytest.raises(TypeError) as caught:
        Posterior.load(store).predict(x)
    assert sentence in str(caught.value)
    probabilities = Posterior.load(store).predict([X[:8], X[8:]]).probabilities
    assert probabilities is not None
    assert len(probabilities) == 24


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: module(net=network(nn.Tanh())), "model.net.1 is ReLU in the samples and Tanh in the model"),
        (
            lambda: module(net=network(nn.ReLU()), likelihood=Bernoulli()),
            "model.likelihood is Categorical in the samples and Bernoulli in the model",
        ),
    ],
)
def test_another_network_with_the_same_shapes(store: Path, make: Any, sentence: str) -> None:
    with shown(1, f"The model differs from the network of the samples: {sentence}"):
        Posterior.load(store, model=make())


def test_the_same_network_is_not_suspected(store: Path) -> None:
    with shown(0, "differs"):
        Posterior.load(store, model=module(net=network(nn.ReLU(inplace=True)), temperature=0.5))
    with shown(0, "differs"):
        Posterior.load(store)


@pytest.mark.parametrize("x", [X[:5] * 1e39, torch.cat([X[:4], torch.full((1, 2), torch.nan)])])
def test_predictions_that_overflow(store: Path, x: torch.Tensor) -> None:
    posterior = Posterior.load(store)
    probabilities = posterior.predict(x).probabilities
    assert probabilities is not None
    bad = int((~probabilities.isfinite()).any(1).sum())
    assert bad > 0
    with shown(1, f"{bad} of 5 predictions are NaN or infinite, because the network's output overflows or its inputs"):
        posterior.predict(x)
    with shown(0, "NaN"):
        posterior.predict(X)


LAWS: dict[str, tuple[Any, int]] = {
    "Gaussian": (Gaussian(0.3), 2),
    "HeteroscedasticGaussian": (HeteroscedasticGaussian(), 4),
    "MixtureOfGaussians": (MixtureOfGaussians(2), 12),
    "StudentT": (StudentT(), 2),
    "LogNormal": (LogNormal(0.5), 2),
    "Poisson": (Poisson(), 2),
    "NegativeBinomial": (NegativeBinomial(), 2),
    "Categorical": (Categorical(), 3),
    "Ordinal": (Ordinal(3), 1),
    "MultiLabelBernoulli": (MultiLabelBernoulli(), 2),
}


def of_linear(likelihood: Any, outputs: int, count: int = 3) -> Posterior:
    torch.manual_seed(0)
    return Posterior.from_states(nn.Linear(2, outputs), [nn.Linear(2, outputs) for _ in range(count)], likelihood)


@pytest.mark.filterwarnings("ignore:1 of 5 predictions are NaN")
@pytest.mark.parametrize("name", LAWS)
def test_what_is_nan_stays_nan(name: str) -> None:
    """An input that is NaN has no interval, no distribution function, no draws and no label; the others keep theirs."""
    posterior, x = of_linear(*LAWS[name]), X[:5].clone()
    known = posterior.predict(x[[0, 1, 3, 4]])
    x[2] = torch.nan
    prediction = posterior.predict(x)
    for ours, theirs in zip(
        (*prediction.interval(0.9), prediction.cdf(0.4)), (*known.interval(0.9), known.cdf(0.4)), strict=True
    ):
        assert ours[2].isnan().all()
        torch.testing.assert_close(ours[[0, 1, 3, 4]], theirs)
    if isinstance(prediction, RegressionPrediction):
        drawn = prediction.sample(7)
        assert drawn[:, 2].isnan().all()
        assert drawn[:, [0, 1, 3, 4]].isfinite().all()
        return
    with pytest.raises(ValueError, match="NaN"):
        prediction.sample(7)
    if isinstance(prediction, ClassPrediction):
        assert prediction.to_pandas()["label"].isna().tolist() == [False, False, True, False, False]


def test_one_sample_that_is_nan_makes_the_interval_nan() -> None:
    posterior = of_linear(Categorical(), 3)
    members = [net.state_dict() for net in posterior.networks()]
    members[1]["weight"] = torch.full((3, 2), 3e38)  # the sum of two overflows, and ∞ - ∞ is NaN
    posterior = Posterior.from_states(nn.Linear(2, 3), members, Categorical())
    with shown(1, "1 of 2 predictions are NaN"):
        prediction = posterior.predict(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    for part in (prediction.probabilities, prediction.quantile(0.1), prediction.cdf(0.5)):
        assert part.isnan().all(1).tolist() == [False, True]


@pytest.mark.parametrize("name", ["Gaussian", "MultiLabelBernoulli", "Categorical"])
def test_a_data_set_is_not_read_as_batches(name: str) -> None:
    """Each of its examples would be a batch, whose outputs count as data."""
    posterior = of_linear(*LAWS[name])
    data = TensorDataset(X[:5], torch.zeros(5))
    with pytest.raises(TypeError, match=r"x is a TensorDataset: .*DataLoader"):
        posterior.predict(data)
    found = posterior.predict(DataLoader(data, batch_size=2))
    for part, own in found.parts.items():
        torch.testing.assert_close(own, posterior.predict(X[:5]).parts[part])


@pytest.mark.parametrize("name", ["Gaussian", "MultiLabelBernoulli", "Poisson"])
def test_one_input_without_the_axis_of_inputs(name: str) -> None:
    posterior = of_linear(LAWS[name][0], 3)
    with shown(1, r"x has the shape (2,), so 2 inputs along its first axis, and the network predicts 3"):
        posterior.predict(X[0])
    with shown(0, "first axis"):
        posterior.predict(X[:1])


@pytest.mark.parametrize("thing", [None, [], "samples"])
def test_a_posterior_of_something_else(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"store must be a sample store, got a .*: open a folder by Posterior.load"):
        Posterior(thing)


def test_a_relative_folder_is_not_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the working folder itself is refused."""
    monkeypatch.chdir(tmp_path)
    trainer = quiet_trainer(max_epochs=1, callbacks=[SamplingSchedule(every_n_steps=1), SampleCollector("./s")])
    trainer.fit(module(), loader())
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
