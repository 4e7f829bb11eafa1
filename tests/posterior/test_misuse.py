"""Predictions that would be wrong without a word: what the user does | the sentence that is raised, or shown once."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sgmcmc import Bernoulli, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
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
