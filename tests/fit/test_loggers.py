"""What the loggers got, read back from what they wrote."""

import csv
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml

from lightning_sgmcmc import SGHMC, BayesianModule, Contour, EnergyPartition, LearnedContour
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    CyclicalSchedule,
    PosteriorDashboard,
    RunSummary,
    SampleCollector,
    SamplerCallback,
)
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.evaluation.averages import WeightedAverage
from lightning_sgmcmc.health.report import HealthReport, Temperatures
from tests.support.problems import classifier, loaders
from tests.support.trainers import quiet_trainer
from tests.support.wandb_records import contained, finished_records, wandb_row

SCALARS = {
    "sampler/lr",
    "sampler/temperature",
    "sampler/energy",
    "sampler/log_posterior",
    "sampler/prior_norm",
    "sampler/cycle",
    "sampler/gradient_multiplier",
    "samples/count",
}
METRICS = ("accuracy", "nll", "brier", "ece", "entropy")
FIT_FIGURES = {
    *(f"posterior/{name}" for name in ("schedule", "energy", "traces", "geometry", "temperatures")),
    *(f"posterior/{name}" for name in ("reliability", "entropy", "segments", "contour", "multiplier")),
    "posterior/running",
}
TEST_FIGURES = {
    *(f"posterior/test_{name}" for name in ("reliability", "entropy", "segments", "running")),
}
FIGURES = FIT_FIGURES | TEST_FIGURES
HISTOGRAMS = {
    *(f"posterior/{name}_histogram" for name in ("energy", "entropy")),
    "posterior/entropy_histogram_noise",
    "posterior/test_entropy_histogram",
}
TABLES = {f"posterior/{prefix}{name}_table" for prefix in ("", "test_") for name in ("sample", "metric")}
TABLES |= {"posterior/plan_table"}


SETTINGS = {
    "sampler": "SGHMC",
    "sampler.friction": 0.05,
    "prior": "GaussianPrior(std=1.0)",
    "likelihood": "Categorical()",
    "schedule": "CyclicalSchedule",
    "schedule.num_cycles": 2,
    "schedule.exploration": 0.5,
    "lr": 0.05,
    "temperature": 1.0,
    "num_data": 96,
    "num_chains": 1,
    "num_parameters": 58,
    "seed": 7,
    "batch_size": 24,
    "max_steps": 20,
    "version.torch": torch.__version__.partition("+")[0],
}


def check_settings(logged: dict[str, Any]) -> None:
    assert {name: logged.get(f"run.{name}") for name in SETTINGS} == SETTINGS
    versions = {"lightning-sgmcmc", "pytorch-lightning", "python"}
    assert {f"run.version.{name}" for name in versions} <= logged.keys()


class Extras(SamplerCallback):
    """What other callbacks add: a gradient multiplier, a learned contour, the chain's health, and data out of the
    distribution."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.sampler.set_control("gradient_multiplier", 0.5)
        measured = Temperatures(configurational=1.1, configurational_interval=(0.9, 1.3))
        rules = Contour(EnergyPartition(0.0, 10.0, 20))
        state = rules.initial_state()
        state.visits[3:6] = 7
        pl_module.contour = LearnedContour(rules, state)
        pl_module.health = HealthReport(tensors={"net.0.weight": measured})

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: BayesianModule, sample: PosteriorSample) -> None:
        noise = WeightedAverage()
        noise.add({"probabilities": torch.full((20, 2), 0.5)}, torch.zeros(20), 0.0)
        pl_module.evaluations["val"].ood = {"noise": noise}


def fit_with(logger: Any, figures: list[str] | None = None) -> None:
    trainer = quiet_trainer(
        max_epochs=5,
        logger=logger,
        log_every_n_steps=4,
        callbacks=[
            CyclicalSchedule(2, 0.5, 2),
            PosteriorDashboard(figures=figures),
            SampleCollector(in_memory=True),
            BayesianModelAverage(),
            Extras(),
            RunSummary(),
        ],
    )
    module = classifier(sampler=partial(SGHMC, friction=0.05), seed=7)
    train, val = loaders()
    trainer.fit(module, train, val)
    trainer.test(module, val, verbose=False)


def numbers(history: list[dict[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in history if row.get(name) not in (None, "")]


def check(history: list[dict[str, Any]]) -> None:
    assert set().union(*history) >= SCALARS | {"val/bma_accuracy", "val/single_nll"}
    steps = [1, 4, 8, 10, 12, 16, 18, 20]  # of two cycles of ten, of which five explore; samples are logged too
    assert numbers(history, "sampler/temperature") == [0, 0, 1, 1, 0, 1, 1, 1]
    assert numbers(history, "sampler/cycle") == [0, 0, 0, 1, 1, 1]
    lr = [0.025 * (1 + torch.cos(torch.tensor(torch.pi * ((k - 1) % 10) / 10)).item()) for k in steps]
    assert numbers(history, "sampler/lr") == pytest.approx(lr)
    assert numbers(history, "samples/count") == [1, 2, 3, 4]
    assert numbers(history, "samples/weight_efficiency") == [], "all weights are equal"
    assert len(numbers(history, "sampler/energy")) == 6
    assert all(energy == energy for energy in numbers(history, "sampler/energy"))
    assert numbers(history, "sampler/gradient_multiplier") == [0.5] * 6


def check_files(folder: Path) -> None:
    """The newest of everything lies in the run's folder."""
    for name in FIGURES | HISTOGRAMS:
        assert (folder / f"{name.partition('/')[2]}.png").read_bytes().startswith(b"\x89PNG")
    with open(folder / "sample_table.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [8, 10, 18, 20]
    assert [int(row["cycle"]) for row in rows] == [0, 0, 1, 1]
    assert all(0 <= float(row["accuracy"]) <= 1 for row in rows)
    with open(folder / "metric_table.csv") as file:
        assert [row["metric"] for row in csv.DictReader(file)] == list(METRICS)
    history = json.loads((folder / "history.json").read_text())
    assert history["steps"] == [1, 4, 8, 12, 16, 20]
    assert [sample["step"] for sample in history["samples"]] == [8, 10, 18, 20]
    assert {len(values) for values in history["scalars"].values()} == {6}
    assert not list(folder.glob("*.tmp"))


def test_the_documentation_names_everything() -> None:
    documentation = PosteriorDashboard.__doc__ or ""
    named = set(re.findall(r"`((?:sampler|samples|posterior)/\w+…?)`", documentation))
    logged = SCALARS | FIGURES | HISTOGRAMS | TABLES
    for name in logged:
        assert any(name == n or (n.endswith("…") and name.startswith(n[:-1])) for n in named), name
    only_without_a_fit = {"posterior/test_weights", "posterior/test_geometry"}
    only_with_several_chains = {"posterior/chains", "posterior/chain_table", "sampler/energy_chain_0"}
    only_with_weights = {"posterior/weights", "posterior/weight_histogram", "samples/weight_efficiency"}
    for name in named - only_without_a_fit - only_with_several_chains - only_with_weights:
        assert any(name == n or (name.endswith("…") and n.startswith(name[:-1])) for n in logged), name


def test_csv(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    fit_with(logger, ["tables"])
    folder = Path(logger.log_dir)
    with open(folder / "metrics.csv") as file:
        check(list(csv.DictReader(file)))
    check_settings(yaml.safe_load((folder / "hparams.yaml").read_text()))
    assert (folder / "sample_table.csv").exists()
    results = json.loads((folder / "results.json").read_text())
    assert {(row["method"], row["metric"]) for row in results["rows"]} == {
        (method, metric) for method in ("single", "best_single", "first_cycle", "bma") for metric in METRICS
    } | {("guessing", metric) for metric in ("accuracy", "nll", "brier")}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[pl.loggers.CSVLogger, Path, Path]]:
    """One fit with three loggers; yield the first one, TensorBoard's folder and W&B's records."""
    pytest.importorskip("tensorboard")
    wandb = pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("logged")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        contained(patch, folder)
        csv_logger, board = pl.loggers.CSVLogger(folder / "csv"), pl.loggers.TensorBoardLogger(folder)
        fit_with([pl.loggers.WandbLogger(save_dir=str(folder), offline=True, name="test"), csv_logger, board])
        board.finalize("success")
        wandb.finish()
        (path,) = folder.glob("**/*.wandb")
        yield csv_logger, Path(board.log_dir), path
        wandb.teardown()


def test_tensorboard(logged: tuple[pl.loggers.CSVLogger, Path, Path]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, folder, _ = logged
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0, "scalars": 0, "histograms": 0})
    events.Reload()
    check([{name: event.value} for name in events.Tags()["scalars"] for event in events.Scalars(name)])
    assert set(events.Tags()["images"]) == FIGURES
    for name in FIGURES:
        drawn = events.Images(name)
        assert all(picture.encoded_image_string.startswith(b"\x89PNG") for picture in drawn)
        assert all(picture.width > 200 and picture.height > 130 for picture in drawn)  # at 100 dots per inch
    # The first cycle's pictures have the step of its end, the last ones the fit's.
    assert [picture.step for picture in events.Images("posterior/energy")] == [10, 20]
    assert set(events.Tags()["histograms"]) == HISTOGRAMS
    assert [h.histogram_value.num for h in events.Histograms("posterior/energy_histogram")] == [2, 4]
    assert set(events.Tags()["tensors"]) == {f"{name}/text_summary" for name in (*TABLES, "run", "plan")}
    text = events.Tensors("posterior/sample_table/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert text.splitlines()[0].startswith("| step | chain | cycle | energy | log_weight | accuracy |")
    assert len(text.splitlines()) == 6
    check_settings(yaml.safe_load((folder / "hparams.yaml").read_text()))
    settings = events.Tensors("run/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert all(f"| {name} | {value} |" in settings for name, value in SETTINGS.items())


@pytest.mark.slow
def test_no_logger(tmp_path: Path) -> None:
    fit_with(False)
    check_files(tmp_path / "sgmcmc")


def test_wandb_offline(logged: tuple[pl.loggers.CSVLogger, Path, Path]) -> None:
    """Every scalar, figure, histogram and table is there, of W&B's own types, with its file on the disk."""
    csv_logger, _, path = logged
    records = finished_records(path)
    history = [wandb_row(record) for record in records if record.HasField("history")]
    check(history)
    config = [item for record in records if record.HasField("config") for item in record.config.update]
    check_settings({item.key or item.nested_key[0]: json.loads(item.value_json) for item in config})
    typed: dict[str, list[dict[str, Any]]] = {}
    for row in history:
        for name, value in row.items():
            if isinstance(value, dict) and "_type" in value:
                typed.setdefault(name, []).append(value | {"step": row["trainer/global_step"]})
    kinds = {name: {value["_type"] for value in values} for name, values in typed.items()}
    assert {name for name, kind in kinds.items() if kind == {"image-file"}} == FIGURES
    assert {name for name, kind in kinds.items() if kind == {"histogram"}} == HISTOGRAMS
    assert {name for name, kind in kinds.items() if kind == {"table-file"}} == TABLES
    files = path.parent / "files"
    for name in FIGURES:
        assert all((files / value["path"]).read_bytes().startswith(b"\x89PNG") for value in typed[name])
    assert [value["step"] for value in typed["posterior/energy"]] == [10, 20]
    assert [sum(value["values"]) for value in typed["posterior/energy_histogram"]] == [2, 4]
    tables = [json.loads((files / value["path"]).read_text()) for value in typed["posterior/sample_table"]]
    assert tables[0]["columns"] == ["step", "chain", "cycle", "energy", "log_weight", *METRICS]
    assert [[row[0] for row in table["data"]] for table in tables] == [[8, 10], [8, 10, 18, 20]]
    # The x-axis is the trainer's step, by W&B's own definition of it.
    assert all("trainer/global_step" in row for row in history)
    metrics = [record.metric for record in records if record.HasField("metric")]
    assert any(metric.glob_name == "*" and metric.step_metric == "trainer/global_step" for metric in metrics)
    # Of several loggers each gets everything, and the files go into the first one's folder.
    with open(Path(csv_logger.log_dir) / "metrics.csv") as file:
        check(list(csv.DictReader(file)))
    (results,) = path.parents[2].glob("**/results.json")
    check_files(results.parent)


@pytest.mark.parametrize("login", [None, "key", "mode", "offline argument"])
def test_wandb_stays_offline_unless_somebody_is_logged_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, login: str | None
) -> None:
    """A plain WandbLogger() on a machine without a login neither asks for one nor waits for a network."""
    from lightning_sgmcmc.fit.loggers import stay_offline_without_login

    wandb = pytest.importorskip("wandb")
    contained(monkeypatch, tmp_path)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.teardown()
    if login == "key":
        monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    elif login == "mode":
        monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = pl.loggers.WandbLogger(save_dir=str(tmp_path), offline=login == "offline argument")
    if login is not None:
        stay_offline_without_login([logger])
        assert "mode" not in logger._wandb_init
    else:
        module = classifier()
        trainer = quiet_trainer(max_epochs=1, logger=logger, callbacks=[CyclicalSchedule(1, 0.5, 1)])
        trainer.fit(module, *loaders())
        assert logger.experiment.offline
        wandb.finish()
        assert list(tmp_path.glob("**/offline-run-*/*.wandb"))
    wandb.teardown()
