"""Metrics of a posterior on any data, and by group."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import pytorch_lightning as pl
import torch
from sklearn.metrics import average_precision_score, log_loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    BayesianModule,
    Categorical,
    Gaussian,
    MultiLabelBernoulli,
    PixelCategorical,
    Posterior,
    TokenCategorical,
)
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import TableDataModule
from tests.support.trainers import quiet_trainer

GENERATOR = torch.Generator().manual_seed(0)
x = torch.randn(61, 3, generator=GENERATOR)
y = (x[:, 0] + torch.randn(61, generator=GENERATOR) > 0.8).long()


@pytest.fixture
def posterior() -> Posterior:
    torch.manual_seed(0)
    return Posterior.from_states(nn.Linear(3, 2), [nn.Linear(3, 2) for _ in range(3)], Categorical())


def area(probabilities: torch.Tensor, labels: torch.Tensor) -> float:
    return float(average_precision_score(labels, probabilities[:, 1]))


def test_the_metrics_of_all_data_and_of_groups(posterior: Posterior) -> None:
    group = np.where(x[:, 1] > 0, "young", "old")
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    found = posterior.evaluate(loader, metrics={"auprc": area}, group=group)
    probabilities = posterior.predict(x).probabilities
    assert found.bma["nll"] == pytest.approx(log_loss(y, probabilities), rel=1e-5)
    assert found.bma["auprc"] == pytest.approx(area(probabilities, y))
    assert set(found.groups) == {"young", "old"}
    for label, values in found.groups.items():
        rows = torch.as_tensor(group == label)
        assert values["count"] == int(rows.sum())
        assert values["nll"] == pytest.approx(log_loss(y[rows], probabilities[rows], labels=[0, 1]), rel=1e-5)
        assert values["auprc"] == pytest.approx(area(probabilities[rows], y[rows]))
        share = float(y[rows].float().mean())
        assert values["guessing accuracy"] == pytest.approx(max(share, 1 - share))
    assert "old" in found._repr_html_()
    with pytest.raises(ValueError, match=r"group.*61"):
        posterior.evaluate(loader, group=group[:-1])
    with pytest.raises(TypeError, match="targets"):
        posterior.evaluate(x)


@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA])
def test_a_missing_label_is_a_group(posterior: Posterior, missing: Any) -> None:
    group = pd.Series([missing if i % 5 == 0 else "a" for i in range(61)], dtype=object)
    found = posterior.evaluate([(x, y)], group=group).groups
    probabilities = posterior.predict(x[::5]).probabilities
    assert {label: values["count"] for label, values in found.items()} == {str(missing): 13, "a": 48}
    assert found[str(missing)]["nll"] == pytest.approx(log_loss(y[::5], probabilities, labels=[0, 1]), rel=1e-5)


def test_a_loader_that_shuffles_does_not_mix_up_the_data(posterior: Posterior) -> None:
    loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)
    group = (x[:, 1] > 0).tolist()
    with pytest.raises(ValueError, match=r"shuffles.*shuffle=False"):
        posterior.evaluate(loader, group=group)
    assert posterior.evaluate(loader).bma["nll"] == pytest.approx(posterior.evaluate([(x, y)]).bma["nll"], rel=1e-5)
    for results in (posterior.log_likelihood, lambda given: list(posterior.predict_batches(given)), posterior.predict):
        with pytest.warns(UserWarning, match="order of this one pass"):
            results(loader)


def test_rows_in_two_orders_and_no_rows_are_errors(posterior: Posterior) -> None:
    frame, labels = pd.DataFrame(x.numpy()), pd.Series(y.numpy())
    assert posterior.evaluate([(frame, labels)]).bma["nll"] == posterior.evaluate([(x, y)]).bma["nll"]
    with pytest.raises(ValueError, match=r"another order.*y.loc\[x.index\]"):
        posterior.evaluate([(frame, labels[::-1])])
    for ask in (posterior.evaluate, posterior.log_likelihood):
        with pytest.raises(ValueError, match="no data"):
            ask([(x[:0], y[:0])])
    with pytest.raises(ValueError, match="no inputs"):
        posterior.predict(x[:0])


def test_it_is_the_test_of_a_trainer_in_the_datas_units() -> None:
    frame = pd.DataFrame({"a": x[:, 0].numpy(), "b": x[:, 1].numpy()})
    frame["price"] = 100 + 20 * frame["a"] + 5 * torch.randn(61, generator=GENERATOR).numpy()
    frame.loc[3, "price"] = np.nan
    data = TableDataModule(frame, target="price", val_fraction=0.3, test_fraction=0.0)
    module = BayesianModule(nn.Linear(2, 1), Gaussian(std=0.3), lr=0.05, seed=0)
    callbacks: list[pl.Callback] = [SamplingSchedule(every_n_epochs=2), SampleCollector(in_memory=True)]
    trainer = quiet_trainer(max_epochs=8, callbacks=[*callbacks, BayesianModelAverage()])
    trainer.fit(module, datamodule=data)
    assert module.posterior is not None
    found: Any = module.posterior.evaluate(data)
    for name in ("bma", "single", "guessing"):
        assert getattr(found, name) == pytest.approx(getattr(module.evaluations["val"], name), rel=1e-5)
    inputs, targets = frame[["a", "b"]], frame["price"]
    group = frame["a"] > 0
    by_frame = module.posterior.evaluate([(inputs, targets)], group=group)
    assert sum(values["count"] for values in by_frame.groups.values()) == 60  # one target is not observed
    errors = module.posterior.predict(inputs).mean[:, 0].numpy() - targets.to_numpy()
    for label, values in by_frame.groups.items():
        own = errors[(group.astype(str) == label).to_numpy()]
        assert values["rmse"] == pytest.approx(np.sqrt(np.nanmean(own**2)), rel=1e-4)


def test_a_calibrated_posterior_has_the_metrics_of_its_predictions() -> None:
    """By scikit-learn on its own probabilities; a regression's by its own intervals."""
    torch.manual_seed(0)
    sharp = [nn.Linear(3, 2) for _ in range(3)]
    for net in sharp:
        nn.init.normal_(net.weight, std=8.0)
    raw = Posterior.from_states(nn.Linear(3, 2), sharp, Categorical())
    calibrated = raw.calibrate([(x[:30], y[:30])])
    found = calibrated.evaluate(iter([(x[30:], y[30:])]))
    probabilities = calibrated.predict(x[30:]).probabilities
    assert found.calibrated["nll"] == pytest.approx(log_loss(y[30:], probabilities.double()), rel=1e-5)
    assert found.calibrated["nll"] < 0.9 * found.bma["nll"]
    assert found.calibrated["brier"] == pytest.approx(
        float((probabilities - nn.functional.one_hot(y[30:])).square().sum(1).mean()), rel=1e-5
    )
    assert found.bma == raw.evaluate([(x[30:], y[30:])]).bma
    assert f"calibrated {found.calibrated['nll']:.4g}" in repr(found)
    assert "calibrated average" in found._repr_html_()

    targets = torch.randn(61, 2, generator=GENERATOR)
    lines = Posterior.from_states(nn.Linear(3, 2), [nn.Linear(3, 2)], Gaussian(std=0.2)).calibrate([(x, targets)])
    low, high = lines.predict(x).interval(0.9)
    inside = ((targets >= low) & (targets <= high)).double().mean()
    assert lines.evaluate([(x, targets)]).calibrated["coverage_90"] == pytest.approx(float(inside))
    assert float(inside) > lines.evaluate([(x, targets)]).bma["coverage_90"] + 0.2


@pytest.mark.parametrize("name", ["label_nll", "token_nll", "pixel_nll"])
def test_a_calibration_of_several_labels_is_compared_label_by_label(name: str) -> None:
    """The average's `nll` is of a datum's labels together, which a calibrated probability of each does not tell.

    The labels have the law of a network, and the samples are about three times as sure.
    """
    torch.manual_seed(0)
    likelihood: Any = {"label": MultiLabelBernoulli(), "token": TokenCategorical()}.get(name[:5], PixelCategorical())
    net = nn.Conv2d(3, 2, 1) if name == "pixel_nll" else nn.Linear(3, 4 if name == "label_nll" else 2)
    inputs = torch.randn(61, *{"label": (3,), "token": (5, 3)}.get(name[:5], (3, 2, 2)))
    with torch.no_grad():
        nn.init.normal_(net.weight)
        true = Posterior.from_states(net, [net], likelihood).predict(inputs).probabilities
    targets = torch.bernoulli(true if name == "label_nll" else true[..., 1])
    counts = torch.rand(targets.shape) > 0.1
    targets = targets.where(counts, torch.nan) if name == "label_nll" else targets.long().where(counts, -100)

    states = [
        {key: 3 * value + 0.3 * torch.randn_like(value) for key, value in net.state_dict().items()} for _ in "abc"
    ]
    calibrated = Posterior.from_states(net, states, likelihood).calibrate([(inputs, targets)])
    found, probabilities = calibrated.evaluate([(inputs, targets)]), calibrated.predict(inputs).probabilities
    ones = probabilities if name == "label_nll" else probabilities[..., 1]
    expected = log_loss(targets[counts], ones[counts].double())
    assert found.calibrated[name] == pytest.approx(expected, rel=1e-5)
    assert found.calibrated[name] < 0.9 * found.bma[name]
    assert "nll" not in found.calibrated
    if name == "label_nll":
        shares = targets.nanmean(0).expand(targets.shape)
        assert found.guessing[name] == pytest.approx(log_loss(targets[counts], shares[counts].double()), rel=1e-5)
    assert calibrated.calibration is not None
    assert found.calibrated[name] == pytest.approx(calibrated.calibration.nll_after, rel=1e-5)
