"""Categorical with probabilities as targets: densities, gradients, metrics as expectations, refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGLD, BayesianModule, Bernoulli, Categorical, PixelCategorical, Posterior
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.diagnostics.scores import classification_metrics, expected_classification_metrics
from lightning_sgmcmc.estimators import BayesianClassifier
from lightning_sgmcmc.fit.results import per_datum
from lightning_sgmcmc.tables import TargetScaling
from tests.support.trainers import quiet_trainer

N, K, VOTES = 23, 3, 7
generator = torch.Generator().manual_seed(0)
X = torch.randn(N, 4, generator=generator)
COUNTS = torch.multinomial(torch.rand(N, K, generator=generator), VOTES, replacement=True, generator=generator)
SHARES = F.one_hot(COUNTS, K).sum(1) / VOTES


def logits() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_votes_have_the_multinomial_density_up_to_its_constant() -> None:
    """m votes of shares q weigh as one datum: log p = (log Multinomial(m·q; m, p) - constant)/m."""
    output, votes = logits(), (SHARES * VOTES).round()
    p, q = output.softmax(1), votes.double() / VOTES
    constant = stats.multinomial.logpmf(votes.numpy(), VOTES, q.numpy()) + VOTES * stats.entropy(q.numpy(), axis=1)
    expected = (stats.multinomial.logpmf(votes.numpy(), VOTES, p.numpy()) - constant) / VOTES
    found = Categorical().log_prob(output, SHARES.double())
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_certain_labels_are_labels() -> None:
    output, labels = logits(), SHARES.argmax(1)
    certain, likelihood = F.one_hot(labels, K).double(), Categorical()
    torch.testing.assert_close(likelihood.log_prob(output, certain), likelihood.log_prob(output, labels))
    p = output.softmax(1)
    found, expected = expected_classification_metrics(p, certain), classification_metrics(p, labels)
    torch.testing.assert_close(found, expected, check_dtype=False)
    forbidden = output.clone()
    forbidden[:, 2] = -torch.inf  # a class that the network excludes, and no target has
    only = torch.tensor([[0.5, 0.5, 0.0]]).double().expand(N, K)
    assert likelihood.log_prob(forbidden, only).isfinite().all()


def test_gradients_and_chains_at_once() -> None:
    output, target = logits().requires_grad_(), SHARES.double()
    likelihood = Categorical()
    assert torch.autograd.gradcheck(lambda o: likelihood.log_prob(o, target), (output,))
    both = torch.stack([output.detach(), -output.detach()])
    each = torch.stack([likelihood.log_prob(one, target) for one in both])
    torch.testing.assert_close(torch.vmap(likelihood.log_prob, in_dims=(0, None))(both, target), each)


def test_metrics_are_means_over_drawn_labels() -> None:
    p = logits().softmax(1)
    draws = torch.multinomial(SHARES, 4000, replacement=True, generator=torch.Generator().manual_seed(2)).T
    each = [classification_metrics(p, labels) for labels in draws]
    found = Categorical().metrics({"probabilities": p}, torch.empty(N), SHARES, 1.0)
    for name in ("accuracy", "nll", "brier"):
        values = torch.stack([one[name] for one in each]).double()
        assert abs(float(found[name] - values.mean())) < 5 * float(values.std()) / len(each) ** 0.5, name


@pytest.mark.parametrize("chains", [1, 2])
def test_from_fit_to_prediction(chains: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = SHARES.clone()
    target[4] = torch.nan  # not observed
    module = BayesianModule(nn.Linear(4, K), Categorical(), sampler=SGLD, lr=0.01, num_chains=chains)
    loader, average = DataLoader(TensorDataset(X, target), 5), BayesianModelAverage(scores=True)
    callbacks = [SamplingSchedule(10, every_n_steps=5), SampleCollector(tmp_path / "s"), average]
    quiet_trainer(max_steps=30, callbacks=callbacks).fit(module, loader, loader)
    known = torch.arange(N) != 4
    p = Posterior.load(tmp_path / "s").predict(X).probabilities[known]
    q, metrics = SHARES[known], module.evaluations["val"].bma
    assert metrics["nll"] == pytest.approx(-float((q * p.log()).sum(1).mean()), rel=1e-4)
    assert metrics["accuracy"] == pytest.approx(float(q.gather(1, p.argmax(1, keepdim=True)).mean()), rel=1e-5)
    columns, _ = per_datum(module.evaluations["val"], TargetScaling())
    assert float(columns["nll"].mean()) == pytest.approx(metrics["nll"], rel=1e-5)
    assert float(columns["error"].mean()) == pytest.approx(1 - metrics["accuracy"], rel=1e-5)
    assert float(columns["brier"].mean()) == pytest.approx(metrics["brier"], rel=1e-5)
    for needs_labels in (module.posterior.conformal, module.posterior.joint_nll):
        with pytest.raises(ValueError, match=r"argmax\(1\)"):
            needs_labels(loader)
    calibrated = module.posterior.calibrate([(X, SHARES.argmax(1))])
    tempered = calibrated.predict(X).probabilities[known]
    expected = -float((q * tempered.log()).sum(1).mean())
    assert calibrated.evaluate(loader).calibrated["nll"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (SHARES * VOTES, "divide counts of votes"),
        (SHARES - 0.5, "sum to 1"),
        (torch.where(torch.eye(N, K) > 0, torch.nan, SHARES), "sum to 1"),
    ],
)
def test_what_is_no_probability_is_refused_in_the_first_step(target: Tensor, message: str) -> None:
    module = BayesianModule(nn.Linear(4, K), Categorical(), sampler=SGLD, lr=0.01)
    with pytest.raises(ValueError, match=message):
        quiet_trainer(max_steps=3).fit(module, DataLoader(TensorDataset(X, target), 5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Categorical(weight=torch.ones(3)), "Categorical: weight.*cost.*docs/howto/decisions.md"),
        (lambda: Categorical(label_smoothing=0.1), "label_smoothing.*soft labels"),
        (lambda: Bernoulli(pos_weight=torch.ones(1)), "Bernoulli: pos_weight.*cost"),
        (lambda: PixelCategorical(weight=torch.ones(3)), "PixelCategorical: weight.*cost"),
        (lambda: BayesianClassifier(class_weight="balanced"), "class_weight.*cost"),
        (
            lambda: BayesianModule(nn.Linear(4, K), nn.CrossEntropyLoss(weight=torch.ones(K))),
            r"likelihood=Categorical\(\); weights have none",
        ),
        (lambda: BayesianModule(nn.Linear(4, 1), nn.MSELoss()), r"MSELoss.*likelihood=Gaussian\(learned=True\)$"),
        (lambda: BayesianModule(nn.Linear(4, 1), nn.HuberLoss()), "docs/howto/targets.md"),
    ],
)
def test_what_no_density_has_is_refused_with_the_remedy(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()
