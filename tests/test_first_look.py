"""What a new user sees: a posterior in one line, a slice of it, a notebook, metrics of their own, a wrong import."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torchmetrics.classification import MulticlassF1Score

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, Posterior
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    CyclicalSchedule,
    PosteriorDashboard,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
)
from lightning_sgmcmc.datamodules import TableDataModule
from tests.support.problems import blobs, classifier, loaders
from tests.support.trainers import quiet_trainer


def top(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction.argmax(1) == target).float().mean()


def test_a_posterior_at_a_glance(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Fit two chains with metrics of the user's own, and look at everything from the run's folder."""
    monkeypatch.setenv("COLUMNS", "80")
    f1 = MulticlassF1Score(2)
    average = BayesianModelAverage(
        metrics={"f1": f1, "top": top}, ood={"far": torch.utils.data.DataLoader(blobs(40, 5))}
    )
    module = classifier(num_chains=2, seed=1)
    callbacks = [CyclicalSchedule(2, 0.5, 2), SampleCollector(tmp_path / "run" / "samples"), average, RunSummary()]
    quiet_trainer(max_epochs=5, callbacks=callbacks).fit(module, *loaders())
    posterior = Posterior.load(tmp_path / "run", model=classifier())
    assert repr(posterior) == f"Posterior(8 samples of 2 chains, from step 8 to 20, {tmp_path / 'run' / 'samples'})"
    assert len(repr(posterior[0])) < 200
    assert repr(posterior[0]).startswith("PosteriorSample(step=8, chain=0, cycle=0, energy=")
    first, last = posterior[:2], posterior[-3:]
    assert [r.step for r in first.records] == [8, 8]
    assert [s.step for s in last] == [r.step for r in posterior.records[-3:]]
    assert repr(last) == "Posterior(3 samples of 2 chains, from step 18 to 20)"
    x, y = (torch.cat(parts) for parts in zip(*loaders()[1], strict=True))
    each = posterior.predict(x, return_samples=True).sample_probabilities
    torch.testing.assert_close(first.predict(x).probabilities, each[:2].mean(0))

    bma = module.evaluations["val"].bma
    assert bma["f1"] == pytest.approx(float(MulticlassF1Score(2)(each.mean(0), y)))
    assert bma["top"] == pytest.approx(bma["accuracy"])
    assert module.evaluations["val"].single["f1"] == pytest.approx(
        sum(float(MulticlassF1Score(2)(p, y)) for p in each) / len(each)
    )
    assert repr(module.evaluations["val"]).startswith("Evaluation(8 samples, accuracy ")
    for shown in (posterior._repr_html_(), module.evaluations["val"]._repr_html_()):
        assert shown.startswith("<table>")
        assert "tensor(" not in shown
    assert repr(callbacks[0]) == "CyclicalSchedule(num_cycles=2, exploration=0.5, samples_per_cycle=2)"
    assert repr(average) == "BayesianModelAverage(ood=['far'], metrics=['f1', 'top'])"
    table = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert max(map(len, table)) <= 80
    assert any(line.split()[1:2] == ["ood_far_auroc"] for line in table), "no name is cut"


def test_metrics_of_a_regression_are_in_the_targets_units() -> None:
    """Targets about 1000: the mean absolute percentage error depends on their mean as well as on their scale."""
    x = torch.randn(60, 1, generator=torch.Generator().manual_seed(0))
    data = TableDataModule(x, 1000 + 100 * x[:, 0], batch_size=20)
    seen: list[Tensor] = []

    def percentage(prediction: Tensor, target: Tensor) -> Tensor:
        seen.append(target)
        return ((prediction - target) / target).abs().mean()

    module = BayesianModule(net=torch.nn.Linear(1, 1), likelihood=Gaussian(std=0.1), lr=0.01, seed=0)
    callbacks = [SamplingSchedule(every_n_epochs=2), BayesianModelAverage(metrics={"mape": percentage})]
    quiet_trainer(max_epochs=2, callbacks=callbacks).fit(module, datamodule=data)
    nearest = (torch.cat(seen).double() - data.y).abs().min(1).values
    assert nearest.max() < 1e-2, "every target is one of the table's"


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (MulticlassF1Score(2), r"metrics must be a dictionary of metrics by name, got a MulticlassF1Score"),
        ({"f1": 3}, "metrics: 'f1' should be a metric or a function, got a int"),
    ],
)
def test_wrong_metrics_are_named(metrics: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        BayesianModelAverage(metrics=metrics)


def test_a_metric_with_a_name_of_the_likelihoods_is_refused() -> None:
    callbacks = [SamplingSchedule(every_n_steps=1), BayesianModelAverage(metrics={"accuracy": top})]
    with pytest.raises(ValueError, match="metrics has a 'accuracy', as the likelihood itself: give it another name"):
        quiet_trainer(max_epochs=1, callbacks=callbacks).fit(classifier(), *loaders())


@pytest.mark.parametrize("kind", ["notebook", "terminal"])
def test_figures_are_shown_in_a_notebook(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for IPython: each figure is displayed once, and then updated in place."""
    calls: list[tuple[str, str, bytes]] = []

    def record(name: str) -> Any:
        return lambda image, display_id: calls.append((name, display_id.rpartition("/")[2], image[:4]))

    shell = types.SimpleNamespace(events=types.SimpleNamespace(register=lambda *args: None))  # which matplotlib uses
    if kind == "notebook":
        shell.kernel = None
    ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    vars(ipython).update(get_ipython=lambda: shell, version_info=(9, 0))
    vars(display).update(Image=lambda data: data, display=record("display"), update_display=record("update"))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    callbacks = [CyclicalSchedule(2, 0.5, 1), PosteriorDashboard(figures=["schedule"])]
    quiet_trainer(max_epochs=4, callbacks=callbacks).fit(classifier(), loaders()[0])
    expected = [("display", "schedule", b"\x89PNG"), ("update", "schedule", b"\x89PNG")]
    assert calls == (expected if kind == "notebook" else [])


@pytest.mark.parametrize(
    ("names", "warns"),
    [
        ({"L": "lightning"}, True),
        ({"L": "lightning.pytorch"}, True),
        ({"Trainer": "lightning.pytorch.Trainer"}, True),
        ({"L": "lightning", "pl": "pytorch_lightning"}, False),
        ({}, False),
    ],
)
@pytest.mark.filterwarnings("error")
def test_lightnings_other_package_is_named(names: dict[str, str], warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's file with these imports, while some other library has imported `lightning`."""
    user, other, other_pytorch = (types.ModuleType(n) for n in ("user_code", "lightning", "lightning.pytorch"))
    trainer = type("Trainer", (), {"__module__": "lightning.pytorch.trainer.trainer"})
    things = {"lightning": other, "lightning.pytorch": other_pytorch, "pytorch_lightning": pl}
    things["lightning.pytorch.Trainer"] = trainer  # type: ignore[assignment]
    vars(user).update({name: things[thing] for name, thing in names.items()})
    for module in (user, other, other_pytorch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    kind = type("Own", (BayesianModule,), {"__module__": "user_code"})
    if not warns:
        kind(net=torch.nn.Linear(1, 1), likelihood=Categorical())
        return
    with pytest.warns(UserWarning, match="write `import lightning` before `import lightning_sgmcmc`"):
        kind(net=torch.nn.Linear(1, 1), likelihood=Categorical())
