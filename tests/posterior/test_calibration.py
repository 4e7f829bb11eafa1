"""Post-hoc calibration: it recovers known numbers, respects weights, and stays with its samples."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule, Bernoulli, Categorical, Gaussian, Likelihood, Posterior, PosteriorSample
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.posterior.store import MemoryStore, TargetScaling
from tests.support.problems import Data, Plain
from tests.support.small_run import loader, module
from tests.support.trainers import quiet_trainer


def posterior(likelihood: Likelihood, *weights: Tensor, log_weights: tuple[float, ...] = ()) -> Posterior:
    """Return the posterior of linear networks without bias, with these weights."""
    store = MemoryStore()
    net = nn.Linear(weights[0].shape[1], weights[0].shape[0], bias=False)
    model = BayesianModule(net=net, likelihood=likelihood)
    for index, weight in enumerate(weights):
        own = log_weights[index] if log_weights else 0.0
        store.append(PosteriorSample(index, 0, 0, 0.0, own, {"net.weight": weight}, dict(model.named_buffers())))
    return Posterior(store, model)


def classes(logits: Tensor, seed: int = 0) -> Tensor:
    return torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(seed))[:, 0]


X = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.tensor([[1.0, -0.5, 0.0], [0.0, 1.0, 0.3], [-1.0, 0.0, 0.6]])


def test_a_known_temperature_is_recovered() -> None:
    """Logits that are twice the true ones: T = 2, that is logits times 0.5 (standard error 0.01; 5 are allowed)."""
    labels = classes(X @ WEIGHT.T)
    sure = posterior(Categorical(), 2 * WEIGHT)
    calibrated = sure.calibrate(list(zip(X.split(5_000), labels.split(5_000), strict=True)))
    found = calibrated.calibration
    assert found is not None
    assert found.value == pytest.approx(2.0, abs=0.05)
    probabilities = calibrated.predict(X[:50]).probabilities
    torch.testing.assert_close(probabilities, (2 / found.value * X[:50] @ WEIGHT.T).softmax(-1))
    nll = -calibrated.predict(X).probabilities.log().gather(1, labels[:, None]).mean().item()
    assert found.nll_after == pytest.approx(nll, rel=1e-5)
    assert found.nll_after < found.nll_before
    assert sure.calibration is None
    assert re.search(r"calibrated: temperature (2\.0|1\.9)", repr(calibrated))
    right = posterior(Categorical(), WEIGHT).calibrate([(X, labels)]).calibration
    assert right is not None
    assert right.value == pytest.approx(1.0, abs=0.025)


def test_the_weighted_average_is_scaled() -> None:
    """The NLL is that of the weighted mixture, and no temperature on a fine grid has a lower one."""
    labels = classes(X[:300] @ WEIGHT.T)
    calibrated = posterior(Categorical(), 3 * WEIGHT, -WEIGHT, log_weights=(math.log(3.0), 0.0)).calibrate(
        [(X[:100], labels[:100]), (X[100:300], labels[100:])]
    )
    mixture = 0.75 * (3 * X[:300] @ WEIGHT.T).softmax(-1) + 0.25 * (-X[:300] @ WEIGHT.T).softmax(-1)
    found = calibrated.calibration
    assert found is not None
    assert found.nll_before == pytest.approx(-mixture.log().gather(1, labels[:, None]).mean().item(), rel=1e-5)
    for temperature in torch.linspace(0.2, 5, 200).tolist():
        log_p = (mixture.log() / temperature).log_softmax(-1)
        assert -log_p.gather(1, labels[:, None]).mean().item() > found.nll_after - 1e-6
    torch.testing.assert_close(
        calibrated.predict(X[:300]).probabilities, (mixture.log() / found.value).softmax(-1), rtol=1e-4, atol=1e-6
    )


def test_two_classes_with_one_logit() -> None:
    logits = X @ WEIGHT[:1].T
    labels = (torch.rand(len(X), 1, generator=torch.Generator().manual_seed(0)) < logits.sigmoid()).float()
    found = posterior(Bernoulli(), 2 * WEIGHT[:1]).calibrate([(X, labels)]).calibration
    assert found is not None
    assert found.value == pytest.approx(2.0, abs=0.15)


def test_the_standard_deviation_of_a_regression_in_the_datas_units() -> None:
    """Noise of three times the likelihood's: factor 3 (standard error 0.015); means are unchanged, units are kept."""
    noise = torch.randn(len(X), 1, generator=torch.Generator().manual_seed(0))
    target = X @ WEIGHT[:1].T + 3 * noise
    plain = posterior(Gaussian(std=1.0), WEIGHT[:1])
    plain.store.scaling = TargetScaling((5.0,), (10.0,))
    calibrated = plain.calibrate([(X, target[:, 0])])
    found = calibrated.calibration
    assert found is not None
    assert found.kind == "std factor"
    assert found.value == pytest.approx(3.0, abs=0.075)
    before, after = plain.predict(X[:5]), calibrated.predict(X[:5])
    torch.testing.assert_close(after.mean, before.mean)
    torch.testing.assert_close(after.std, before.std * found.value)
    torch.testing.assert_close(after.std, torch.full((5, 1), 10 * found.value))
    torch.testing.assert_close(calibrated.standardised().predict(X[:5]).std, torch.full((5, 1), found.value))
    density = torch.distributions.Normal(X @ WEIGHT[:1].T, found.value).log_prob(target)
    assert found.nll_after == pytest.approx(-density.mean().item(), rel=1e-4)


def stored(folder: Path, steps: int = 4) -> Posterior:
    torch.manual_seed(0)
    callbacks: list[pl.Callback] = [SamplingSchedule(every_n_steps=2), SampleCollector(folder)]
    quiet_trainer(max_steps=steps, callbacks=callbacks).fit(Plain(), datamodule=Data())
    return Posterior.load(folder, model=Plain())


def test_a_saved_calibration_stays_with_its_samples(tmp_path: Path) -> None:
    x = torch.randn(6, 5)
    calibrated = stored(tmp_path / "samples").calibrate(Data(), save=True)
    found = calibrated.calibration
    loaded = Posterior.load(tmp_path, model=Plain())
    assert loaded.calibration == found
    for same in (loaded, loaded.in_memory(), loaded.standardised()):
        torch.testing.assert_close(same.predict(x).probabilities, calibrated.predict(x).probabilities)
    assert loaded[:1].calibration is None
    assert loaded.reweighted("sample", exponent=0.5).calibration is None
    again = stored(tmp_path / "samples", steps=6)  # the earlier samples, with their calibration, are moved aside
    assert again.calibration is None
    assert Posterior.load(tmp_path / "samples-1", model=Plain()).calibration == found
    (tmp_path / "samples-1" / "calibration.json").rename(tmp_path / "samples" / "calibration.json")
    with pytest.warns(UserWarning, match=r"calibration.json is not used, since it was fitted for other samples"):
        assert Posterior.load(tmp_path, model=Plain()).calibration is None
    (tmp_path / "samples" / "calibration.json").write_text('{"value": "2"}')
    with pytest.warns(UserWarning, match=r"calibration.json is not used, since it cannot be read"):
        assert Posterior.load(tmp_path, model=Plain()).calibration is None


class WithoutValidation(Data):
    def val_dataloader(self) -> Any:
        return []


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: None, TypeError, r"calibrate needs validation data with targets, got a NoneType.*\[\(x, y\)\]"),
    (lambda: X, TypeError, "got a Tensor: pass a loader"),
    (lambda: (X, X), TypeError, "got a tuple: pass a loader"),
    (lambda: [], ValueError, "the loader has none"),
    (WithoutValidation, ValueError, "calibrate needs validation data, and WithoutValidation has none"),
]


@pytest.mark.parametrize(("make", "kind", "sentence"), REFUSED)
def test_refused(make: Callable[[], Any], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        posterior(Categorical(), WEIGHT).calibrate(make())


def test_doubtful_data() -> None:
    train, model = loader(), module()
    collector = SampleCollector(in_memory=True)
    quiet_trainer(max_epochs=1, callbacks=[SamplingSchedule(every_n_steps=1), collector]).fit(model, train)
    assert collector.posterior is not None
    with pytest.warns(UserWarning, match="seems to get training data"):
        collector.posterior.calibrate(train)
    with pytest.warns(UserWarning, match="seems to get training data"):
        collector.posterior.calibrate(loader(shuffle=True))
    with pytest.raises(ValueError, match="save=True needs samples in a folder"):
        collector.posterior.calibrate(loader(), save=True)
    right = torch.tensor([[10.0, 0.0, 0.0], [0.0, 10.0, 0.0]])
    with pytest.warns(UserWarning, match="All 2 predictions .* are right, so they set no calibration temperature"):
        same = posterior(Categorical(), torch.eye(3)).calibrate([(right, torch.tensor([0, 1]))])
    plain = posterior(Categorical(), torch.eye(3)).predict(right).probabilities
    torch.testing.assert_close(same.predict(right).probabilities, plain)
    with pytest.warns(UserWarning, match="temperature 100 is at its bound"):
        posterior(Categorical(), torch.eye(3)).calibrate([(right, torch.tensor([1, 0]))])
