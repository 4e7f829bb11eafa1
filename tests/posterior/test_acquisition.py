"""Which data to label next: mutual informations by brute force, closed forms of Gaussians, and duplicates."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc import Categorical, Gaussian, Posterior
from lightning_sgmcmc.diagnostics import batch_bald
from tests.support.posteriors import MODULES, in_memory, inputs


def information(p: Tensor, w: Tensor) -> float:
    """Return I(y_1, …, y_k; θ) of probabilities (S, k, K) by a sum over all joint labels."""
    joint = 0.0
    for labels in itertools.product(range(p.shape[2]), repeat=p.shape[1]):
        chance = w.clone()
        for i, label in enumerate(labels):
            chance = chance * p[:, i, label]
        joint += float(torch.special.entr(chance.sum()))
    return joint - float(w @ torch.special.entr(p).sum((1, 2)))


def test_bald_is_the_mutual_information() -> None:
    posterior = in_memory(MODULES["mlp"]())
    chosen = posterior.acquire(inputs(), 5, "bald")
    prediction = posterior.predict(inputs())
    top = prediction.mutual_information.topk(5)
    assert chosen.indices.tolist() == top.indices.tolist()
    torch.testing.assert_close(chosen.scores, top.values.double())
    first = posterior.acquire(inputs(), 1)
    assert first.indices[0] == chosen.indices[0], "a batch of one is the same"
    assert float(first.scores) == pytest.approx(float(chosen.scores[0]), abs=1e-5)


@pytest.mark.parametrize("k", [2, 3])
def test_batchbald_is_greedy_in_the_joint_information(k: int) -> None:
    posterior = in_memory(MODULES["mlp"]())
    p = posterior.predict(inputs(8), return_samples=True).sample_probabilities.double()
    chosen = posterior.acquire([inputs(8)[:5], inputs(8)[5:]], k)
    picked: list[int] = []
    for _ in range(k):
        values = {i: information(p[:, [*picked, i]], posterior.weights) for i in range(8) if i not in picked}
        picked.append(max(values, key=lambda i: values[i]))
    assert chosen.indices.tolist() == picked
    assert float(chosen.scores.sum()) == pytest.approx(information(p[:, picked], posterior.weights), abs=1e-6)


def test_draws_of_joint_labels_approach_the_enumeration() -> None:
    posterior = in_memory(MODULES["mlp"]())
    p = posterior.predict(inputs(12), return_samples=True).sample_probabilities
    found = [
        batch_bald(p, posterior.weights, 4, torch.Generator().manual_seed(0), most_configurations=most)
        for most in (200, 20_000)
    ]
    assert found[1].indices.tolist() == posterior.acquire(inputs(12), 4).indices.tolist()
    many = batch_bald(p, posterior.weights, 12, torch.Generator().manual_seed(0), most_configurations=5000)
    assert sorted(many.indices.tolist()) == list(range(12))
    entropy = float(torch.special.entr(posterior.weights).sum())
    assert float(many.scores.sum()) <= entropy + 0.001, "the labels cannot say more than which sample is right"
    assert float(found[0].scores.sum()) == pytest.approx(float(found[1].scores.sum()), abs=0.1)


def test_drawn_joint_labels_say_no_more_than_the_samples_know() -> None:
    torch.manual_seed(0)
    weights = torch.tensor([0.3, 0.2, 0.2, 0.1, 0.1, 0.1]).double()
    p = (3 * torch.randn(6, 60, 3)).softmax(-1)
    found = batch_bald(p, weights, 30, torch.Generator().manual_seed(0), most_configurations=1000)
    assert float(found.scores.sum()) == pytest.approx(float(torch.special.entr(weights).sum()), abs=0.01)
    assert bool((found.scores.diff() < 1e-3).all()), "no later label says more than an earlier one"
    exact = information(p[:, found.indices[:9]].double(), weights)  # 19,683 joint labels, of which 1,000 are drawn
    assert float(found.scores[:9].sum()) == pytest.approx(exact, abs=0.01)


@pytest.mark.parametrize("method", ["bald", "batchbald"])
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian()], ids=["classes", "numbers"])
def test_a_choice_without_information_is_warned_of(method: Any, likelihood: Any) -> None:
    torch.manual_seed(0)
    one, other, x = nn.Linear(2, 3), nn.Linear(2, 3), torch.randn(30, 2)
    for states, weights in (([one], [1.0]), ([one, one], [0.5, 0.5]), ([one, other], [1.0, 1e-12])):
        posterior = Posterior.from_states(nn.Linear(2, 3), states, likelihood, weights=weights)
        with pytest.warns(UserWarning, match=r"no label of the pool tells the samples apart.*choice is arbitrary"):
            posterior.acquire(x, 3, method)


def test_a_batch_larger_than_the_samples_know_is_warned_of() -> None:
    torch.manual_seed(0)
    states = [nn.Linear(2, 2) for _ in range(4)]
    for state in states:
        state.weight.data *= 20
    posterior = Posterior.from_states(nn.Linear(2, 2), states, Categorical())
    with pytest.warns(UserWarning, match=r"after \d+ of k=40 inputs no other label.*the rest is arbitrary: pass k="):
        chosen = posterior.acquire(3 * torch.randn(60, 2), 40)
    assert float(chosen.scores.sum()) <= math.log(4) + 1e-3


def sure_and_opposed() -> Posterior:
    """Return networks that disagree on the sign of each of two inputs, one more than the other."""
    states = [{"weight": torch.tensor([[a, b], [-a, -b]])} for a in (4.0, -4.0) for b in (3.0, -3.0)]
    return Posterior.from_states(nn.Linear(2, 2, bias=False), states, Categorical())


def test_a_duplicate_is_not_labelled_twice() -> None:
    pool = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    posterior = sure_and_opposed()
    assert sorted(posterior.acquire(pool, 2, "bald").indices.tolist()) == [0, 1]
    chosen = posterior.acquire(pool, 2)
    assert chosen.indices[1] == 2
    assert float(chosen.scores.sum()) == pytest.approx(2 * math.log(2), abs=0.1), "two bits, one for each weight"


def numbers() -> tuple[Posterior, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(40, 2, 2, generator=generator)
    posterior = Posterior.from_states(nn.Linear(2, 2, bias=False), [{"weight": w} for w in weights], Gaussian(0.5))
    pool = torch.randn(9, 2, generator=generator)
    pool[1] = pool[0] = 3 * pool[0]
    means = torch.einsum("nd,skd->snk", pool, weights).double()
    return posterior, pool, means


def gaussian(means: Tensor, chosen: list[int]) -> float:
    flat = (means[:, chosen] - means[:, chosen].mean(0)).flatten(1)
    covariance = flat.T @ flat / len(flat)
    return float(torch.linalg.slogdet(torch.eye(len(covariance)) + covariance / 0.25)[1]) / 2


def test_numbers_have_the_information_of_gaussians() -> None:
    posterior, pool, means = numbers()
    bald = posterior.acquire(pool, 9, "bald")
    for i, score in zip(bald.indices.tolist(), bald.scores.tolist(), strict=True):
        assert score == pytest.approx(gaussian(means, [i]), rel=1e-4)
    assert sorted(bald.indices[:2].tolist()) == [0, 1]
    chosen = posterior.acquire(pool, 4)
    picked: list[int] = []
    for m in range(4):
        values = {i: gaussian(means, [*picked, i]) for i in range(9) if i not in picked}
        picked.append(chosen.indices[m].item())  # type: ignore[arg-type]
        assert values[picked[-1]] == pytest.approx(max(values.values()), rel=1e-4)
        assert float(chosen.scores[: m + 1].sum()) == pytest.approx(values[picked[-1]], rel=1e-4)
    assert sorted(picked[:2]) != [0, 1], "the copy is not worth much"


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        ("mlp", {"k": 24}, ValueError, "k=24"),
        ("mlp", {"k": 0}, ValueError, "k must be at least 1"),
        ("mlp", {"k": 1, "method": "entropy"}, ValueError, "method"),
        ("mlp", {"k": 1, "nan": True}, ValueError, "NaN"),
    ],
)
def test_wrong_input_is_refused(kind: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    x = inputs()
    if options.pop("nan", False):
        x[3] = torch.nan
    with pytest.raises(error, match=message), pytest.warns() if bool(x.isnan().any()) else torch.no_grad():
        in_memory(MODULES[kind]()).acquire(x, **options)
