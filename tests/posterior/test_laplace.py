"""The last-layer Laplace approximation; it needs the optional package laplace-torch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_sgmcmc import Bernoulli, Posterior, PosteriorSample
from lightning_sgmcmc.callbacks import DeepEnsemble, SampleCollector
from lightning_sgmcmc.posterior.laplace import last_layer_laplace
from lightning_sgmcmc.posterior.store import MemoryStore
from tests.support.problems import PROBLEM, Data, Plain
from tests.support.small_run import loader, module
from tests.support.trainers import quiet_trainer


def at_the_mode() -> Posterior:
    model = PROBLEM.module()  # its weights are the posterior's mean
    store = MemoryStore()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    store.append(PosteriorSample(7, 0, 0, 0.0, 0.0, parameters, dict(model.named_buffers())))
    return Posterior(store, model)


def test_on_a_linear_model_the_draws_have_the_exact_posterior() -> None:
    """500 draws of 20 regressions: the pooled covariance within 4 % (standard error 1.4 %), means within 5 errors."""
    pytest.importorskip("laplace")
    data = DataLoader(PROBLEM.dataset(), 50)
    drawn = last_layer_laplace(at_the_mode(), data, 500, hessian="full", prior_precision=1.0)
    weights = np.stack([sample.parameters["net.weight"].numpy() for sample in drawn]).astype(float)
    assert [(r.step, r.draw) for r in drawn.records[:2]] == [(7, 0), (7, 1)]
    errors = np.sqrt(np.diag(PROBLEM.covariance) / 500)
    assert (np.abs(weights.mean(0) - PROBLEM.mean) / errors).max() < 5
    centred = weights - PROBLEM.mean
    covariance = np.einsum("soi,soj->ij", centred, centred) / (500 * PROBLEM.outputs)
    scale = np.sqrt(np.outer(np.diag(PROBLEM.covariance), np.diag(PROBLEM.covariance)))
    assert np.abs((covariance - PROBLEM.covariance) / scale).max() < 0.05


def test_around_each_member_of_an_ensemble_in_a_store_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("laplace")
    torch.manual_seed(0)
    data = Data()
    quiet_trainer(max_epochs=2, callbacks=[DeepEnsemble(), SampleCollector(tmp_path / "members")]).fit(Plain(2), data)
    members = Posterior.load(tmp_path / "members", model=Plain())
    train = DataLoader(torch.utils.data.TensorDataset(*vars(data.splits[0]).values()), 20)
    drawn = last_layer_laplace(members, train, 3, path=tmp_path / "draws")
    loaded = Posterior.load(tmp_path / "draws", model=Plain())
    assert [(r.chain, r.draw) for r in loaded.records] == [(chain, draw) for chain in (0, 1) for draw in range(3)]
    x = torch.randn(4, 5)
    torch.testing.assert_close(loaded.predict(x).probabilities, drawn.predict(x).probabilities)
    assert torch.equal(loaded[4].parameters["net.0.weight"], members[1].parameters["net.0.weight"])
    assert not torch.equal(loaded[4].parameters["net.2.weight"], loaded[5].parameters["net.2.weight"])
    again = last_layer_laplace(members, train, 3)
    torch.testing.assert_close(again[5].parameters, loaded[5].parameters)


def test_misuse() -> None:
    binary = Posterior(MemoryStore(), module(likelihood=Bernoulli()))
    with pytest.raises(RuntimeError, match="no samples"):
        last_layer_laplace(binary, loader())
    mode = at_the_mode()
    assert mode.model is not None
    with pytest.raises(ValueError, match="num_draws must be"):
        last_layer_laplace(mode, loader(), 0)
    mode.model.likelihood = Bernoulli()
    with pytest.raises(ValueError, match="knows Categorical and Gaussian likelihoods, got Bernoulli"):
        last_layer_laplace(mode, loader())
