"""Few samples for many: exact cases, what is reported, the way to a served posterior, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc import Categorical, Gaussian, Posterior
from lightning_sgmcmc.posterior.distillation import chosen_samples

INPUTS = 3


def data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, INPUTS, generator=generator)
    return x, x @ torch.tensor([[1.0], [-1.0], [0.5]]) + 0.5 * torch.randn(count, 1, generator=generator)


def regression(modes: int = 3, each: int = 10, weights: list[float] | None = None) -> Posterior:
    """Networks of a few modes: copies of as many weight vectors."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([1.0, -1.0, 0.5]) + 0.5 * torch.randn(modes, 1, INPUTS, generator=generator)
    states = [{"weight": centres[place % modes]} for place in range(modes * each)]
    return Posterior.from_states(nn.Linear(INPUTS, 1, bias=False), states, Gaussian(0.5), weights)


def classifier(count: int = 40, spread: float = 1.0) -> Posterior:
    generator = torch.Generator().manual_seed(3)
    states = [{"weight": 2 + spread * torch.randn(4, INPUTS, generator=generator)} for _ in range(count)]
    return Posterior.from_states(nn.Linear(INPUTS, 4, bias=False), states, Categorical())


def labelled(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, INPUTS, generator=generator)
    return x, torch.randint(4, (count,), generator=generator)


def nll(posterior: Posterior, x: Tensor, y: Tensor) -> float:
    return posterior.evaluate([(x, y)]).bma["nll"]


def test_copies_count_as_one_and_their_weights_add_up() -> None:
    """Three modes with shares ½, ⅓, ⅙ in thirty samples: three samples lose nothing, and have the shares."""
    whole = regression(weights=[3.0, 2.0, 1.0] * 10)
    few = whole.compress(3, [data(200, 1)])
    assert sorted(record.chain % 3 for record in few.records) == [0, 1, 2]
    assert sorted(few.weights.tolist()) == pytest.approx([1 / 6, 1 / 3, 1 / 2], abs=1e-4)
    x = data(500, 2)[0]
    torch.testing.assert_close(few.predict(x).std, whole.predict(x).std, atol=1e-4, rtol=1e-4)
    assert few.compression is not None
    assert few.compression.nll_loss == pytest.approx(0, abs=1e-5)
    assert few.compression.whole["nll"] == pytest.approx(nll(whole, *data(200, 1)), abs=1e-6)


def test_all_samples_lose_nothing() -> None:
    whole = classifier(8)
    few = whole.compress(8, [labelled(300, 1)])
    assert few.compression is not None
    assert few.compression.nll_loss == pytest.approx(0, abs=1e-4)
    x, _ = labelled(200, 2)
    assert float((few.predict(x).probabilities - whole.predict(x).probabilities).abs().max()) < 0.01


def test_it_loses_less_than_thinning_and_says_how_much() -> None:
    """On new data: the reported loss holds within 4 standard errors, and evenly spaced samples lose more."""
    whole, new = classifier(), labelled(4_000, 5)
    few = whole.compress(4, [labelled(600, 1)])
    assert few.compression is not None
    base = nll(whole, *new)
    loss = nll(few, *new) - base
    assert loss < 0.6 * (nll(whole.thin(count=4), *new) - base)
    assert abs(loss - few.compression.nll_loss) < 4 * few.compression.standard_error
    assert few.compression.of == 40
    assert str(few.compression).encode("cp1252").startswith(b"4 of 40 samples: NLL ")  # the encoding of Windows


def test_inputs_from_elsewhere_are_scored() -> None:
    whole, known = classifier(), labelled(200, 1)
    few = whole.compress(5, [known], unknown=5 * labelled(100, 7)[0])
    assert few.compression is not None
    for selection, metrics in ((whole, few.compression.whole), (few, few.compression.chosen)):
        found = selection.detect(known[0], 5 * labelled(100, 7)[0]).metrics["entropy"]["auroc"]
        assert metrics["auroc"] == pytest.approx(found, abs=1e-6)


def test_it_is_a_posterior_like_any(tmp_path: Path) -> None:
    """It is saved, loaded, exported and merged with its weights."""
    few = classifier().compress(5, [labelled(200, 1)])
    x, _ = labelled(20, 2)
    expected = few.predict(x).probabilities
    few.save(tmp_path / "few")
    again = Posterior.load(tmp_path / "few", net=nn.Linear(INPUTS, 4, bias=False))
    torch.testing.assert_close(again.predict(x).probabilities, expected)
    torch.testing.assert_close(again.weights, few.weights)
    torch.testing.assert_close(few.ensemble()(x), expected)
    assert len(few.merge(classifier(3))) == len(few) + 3


def test_a_sample_of_weight_zero_is_never_chosen() -> None:
    logs = torch.randn(5, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0], dtype=torch.float64)
    indices, parts = chosen_samples(logs, weights, 4)
    assert indices == [1, 3]
    torch.testing.assert_close(parts, torch.tensor([0.5, 0.5], dtype=torch.float64), atol=1e-6, rtol=0)


def test_refusals() -> None:
    whole, known = classifier(6), labelled(100, 1)
    with pytest.raises(ValueError, match="k=7 is more than the 6 samples"):
        whole.compress(7, [known])
    with pytest.raises(ValueError, match="k must be"):
        whole.compress(0, [known])
    with pytest.raises(TypeError, match=r"a batch should be a pair \(x, y\)"):
        whole.compress(2, [known[0]])
    with pytest.raises(TypeError, match="compress needs validation data with targets"):
        whole.compress(2, known[0])
    whole.store.records = [replace(record, comparable=False) for record in whole.records]
    with pytest.raises(ValueError, match="each chain of these samples has a π of its own"):
        whole.compress(2, [known])


def test_few_data_are_said_to_be_few() -> None:
    with pytest.warns(UserWarning, match="compress chooses on 10 data, which is mostly chance"):
        classifier(6).compress(2, [labelled(10, 1)])
