"""RunSummary through the trainer: five sentences, rows of single samples and cycles, and the name of the run."""

import html
import json
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import rich.console
import rich.jupyter
import torch
import torchmetrics
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, Posterior
from lightning_sgmcmc.callbacks import (
    AutoSampling,
    BayesianModelAverage,
    ChainHealth,
    CyclicalSchedule,
    PosteriorDashboard,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
    recommended,
)
from lightning_sgmcmc.evaluation.sentences import NAMES
from lightning_sgmcmc.health.report import advise
from lightning_sgmcmc.report.page import write_report
from tests.support.problems import classifier, loaders
from tests.support.trainers import quiet_trainer


def results(folder: str = "sgmcmc") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "results.json").read_text())
    return found


def test_a_fit_a_test_in_another_process_and_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    train, val = loaders()
    folder = "sgmcmc/samples"
    callbacks: list[pl.Callback] = [CyclicalSchedule(3, 0.5, 2), SampleCollector(folder), BayesianModelAverage()]
    module = classifier(num_chains=2)
    quiet_trainer(max_epochs=15, callbacks=[*callbacks, ChainHealth(every_n_steps=1), RunSummary()]).fit(
        module, train, val
    )
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    found = results()
    assert tuple(found["sentences"]) == NAMES
    assert printed.startswith("Accuracy ")
    rows = {(row["method"], row["metric"]): row["value"] for row in found["rows"]}
    evaluation = module.evaluations["val"]
    assert rows["best_single", "nll"] == min(member["nll"] for member in evaluation.members)
    assert rows["first_cycle", "nll"] == evaluation.running[3]["nll"], "two samples of each of two chains"
    assert module.health is not None
    assert found["kind"] == module.health.kind
    assert found["verdict"].keys() == {"level", "verdict", "next"}
    assert found["sentences"]["next"] == f"Next: {found['verdict']['next']}."
    text = Path("sgmcmc/summary.txt").read_text()
    assert all(sentence in text for sentence in found["sentences"].values())
    assert "best" not in printed, "the best single sample is chosen on the same data"
    assert all(finding.sentence in text for finding in module.health.findings)
    assert "ess" not in {row["metric"] for row in found["rows"]}, "all weights are equal"
    page = write_report("sgmcmc").read_text()
    assert page.index("In five sentences") < page.index("Optimizer steps")
    assert f"What next: {found['verdict']['next']}." in html.unescape(page)

    test = quiet_trainer(callbacks=[SampleCollector(folder), BayesianModelAverage(), RunSummary()])
    test.test(classifier(), val, verbose=False)
    again = results()
    assert again["stage"] == "test"
    assert again["kind"] == found["kind"], "read from the run's health.json"
    assert again["sentences"]["gain"] == found["sentences"]["gain"]


def test_a_finished_run_that_is_resumed_says_so_and_reports_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Its checkpoint was written before the samples had their weights: a summary would be of other predictions."""

    def fit(ckpt_path: str | None = None) -> None:
        stop = EarlyStopping("val/bma_nll", patience=100)
        checkpoints = ModelCheckpoint("checkpoints", save_last=True)
        callbacks = [*recommended("samples"), checkpoints, stop]
        quiet_trainer(max_epochs=30, enable_checkpointing=True, callbacks=callbacks).fit(
            classifier(), *loaders(), ckpt_path=ckpt_path
        )

    with pytest.warns(UserWarning, match=r"and the newest draws, .*, would be missing: omit EarlyStopping\."):
        fit()
    before, weights = results(), Posterior.load("samples").weights
    assert float(weights.max()) > float(weights.min())
    capsys.readouterr()
    with pytest.warns(UserWarning, match=r"checkpoint's run has made its \d+ steps in 30 epochs, so the fit makes"):
        fit("last")
    assert capsys.readouterr().out == ""
    assert results() == before
    assert torch.equal(Posterior.load("samples").weights, weights)
    # The samples' folder is not in the run's, and has the report of health for another process.
    again = quiet_trainer(callbacks=[SampleCollector("samples"), BayesianModelAverage(), RunSummary()])
    again.test(classifier(), loaders()[1], verbose=False)
    assert "no ChainHealth" not in results()["sentences"]["sampled"]


def test_one_sample_of_an_optimization_without_health(capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [SamplingSchedule(burn_in_steps=3, every_n_steps=1), BayesianModelAverage(), RunSummary()]
    with pytest.warns(UserWarning, match="temperature=0 is optimization"):
        quiet_trainer(max_epochs=1, callbacks=callbacks).fit(classifier(temperature=0.0), *loaders())
    said = results()["sentences"]
    assert said["gain"] == "There is one sample, so the model average is that sample."
    assert said["sampled"].startswith("Sampled the posterior? No, this is a snapshot ensemble")
    assert said["next"].startswith("Next: calibrate the predictions"), "one epoch leaves an underconfident network"


def test_a_notebook_has_the_table_once_and_the_file_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel rich shows below the cell what it is to write to a file."""
    shown: list[str] = []
    module = types.ModuleType("IPython.display")
    vars(module)["display"] = lambda html: shown.append(str(html))
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(rich.jupyter.JupyterRenderable, "__str__", lambda self: self.text, raising=False)
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    callbacks = [SamplingSchedule(every_n_steps=4), SampleCollector(), BayesianModelAverage(), RunSummary()]
    quiet_trainer(max_epochs=2, callbacks=callbacks).fit(classifier(), *loaders())
    assert sum("single sample" in text and "brier" in text for text in shown) == 1
    assert "brier" in Path("sgmcmc/summary.txt").read_text()


NAMES_LIKE_MARKUP = (
    "a[/b]c",
    "top1[/5]",
    "[red]",
    "[link=x]y",
    ":fire:",
    "$\\frac$",
    "a$b$",
    "[bold",
    "\\[a]",
    "%s {0}",
)


@pytest.mark.parametrize("folder", ["run", "a[/b]c", "[red]x", "$\\frac$"])
def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    """Rich would read brackets and colons as markup, and matplotlib dollars as formulas."""
    names = NAMES_LIKE_MARKUP if folder == "run" else ()
    metrics = {name: torchmetrics.Accuracy("multiclass", num_classes=2) for name in names}
    train, val = loaders()
    trainer = quiet_trainer(
        max_epochs=2,
        callbacks=[
            SamplingSchedule(every_n_steps=4),
            SampleCollector(),
            BayesianModelAverage(metrics=metrics),
            PosteriorDashboard(every="end", figures=["running"]),
            RunSummary(name=folder),
        ],
        logger=CSVLogger(".", name=folder),
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(classifier(), train, val)
    assert not [str(w.message) for w in said if "could not draw" in str(w.message)]
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    assert folder in "".join(line.strip() for line in printed.splitlines())
    assert Path(folder, "version_0", "results.json").exists()


def test_a_plain_loader_with_an_odd_last_batch_resumes_within_an_epoch() -> None:
    """It starts anew, so a whole batch comes where the epoch's short one was."""

    def fit(stop: int, ckpt_path: str | None = None) -> int:
        data = TensorDataset(torch.ones(50, 20), torch.arange(50) % 2)
        net = torch.nn.Linear(20, 2)
        saves = ModelCheckpoint("odd", "{step}", every_n_train_steps=6)
        trainer = quiet_trainer(
            max_epochs=stop, enable_checkpointing=True, callbacks=[SamplingSchedule(every_n_steps=2), saves]
        )
        module = BayesianModule(net, Categorical(), seed=0)
        trainer.fit(module, DataLoader(data, 16, shuffle=True), ckpt_path=ckpt_path)
        return trainer.global_step

    fit(2)
    assert fit(2, "odd/step=6.ckpt") == 8


def test_samples_below_temperature_one_are_a_cold_ensemble_in_a_later_test_too() -> None:
    """Also where the run was too short for its temperatures to be measured, and nothing is planned."""
    train, val = loaders()
    kept = [SampleCollector("sgmcmc/samples"), BayesianModelAverage(), RunSummary(show="none")]
    quiet_trainer(max_epochs=20, callbacks=[AutoSampling(num_draws=5), ChainHealth(), *kept]).fit(
        classifier(), train, val
    )
    quiet_trainer(callbacks=kept).test(classifier(), val)
    found = results()
    assert found["stage"] == "test"
    assert (found["kind"], found["samples"]) == ("cold ensemble", "samples of a cold ensemble")


def test_a_run_at_temperature_one_that_was_too_short_is_not_advised_to_sample_at_it() -> None:
    module = classifier(lr=1e-4)
    callbacks = [SamplingSchedule(every_n_epochs=1), SampleCollector(in_memory=True), ChainHealth()]
    quiet_trainer(max_epochs=4, callbacks=callbacks).fit(module, loaders()[0])
    health = module.health
    assert health is not None
    assert (health.kind, health.findings) == ("cold ensemble", ())
    assert advise(health, health.kind).next.endswith("sample longer (`sgmcmc plan` says how long)")
