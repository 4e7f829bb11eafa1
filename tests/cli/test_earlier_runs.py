"""Which run `test`, `predict` and `--resume` read: of a configuration, of a run's own, of a logger that names runs."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.cli import main
from lightning_sgmcmc.datamodules import DigitsDataModule

CONFIGURATION = """\
model:
  class_path: lightning_sgmcmc.BayesianModule
  init_args:
    net: {class_path: torch.nn.Linear, init_args: {in_features: 64, out_features: 10}}
    likelihood: lightning_sgmcmc.Categorical
data: lightning_sgmcmc.datamodules.DigitsDataModule
trainer:
  accelerator: cpu
  max_epochs: 10
  enable_progress_bar: false
  enable_model_summary: false
  logger: {class_path: pytorch_lightning.loggers.LOGGER, init_args: {save_dir: runs, PLACE: table}}
"""

HOUSES = """\
import pandas
from lightning_sgmcmc.datamodules import TableDataModule


class Houses(TableDataModule):
    def __init__(self):
        frame = pandas.read_csv("houses.csv").dropna().astype({"zone": "category"})
        super().__init__(frame, target="price", task="regression", batch_size=50)
"""


def configured(logger: str = "CSVLogger", place: str = "name") -> list[str]:
    Path("run.yaml").write_text(CONFIGURATION.replace("LOGGER", logger).replace("PLACE", place))
    return ["--config", "run.yaml"]


def test_the_configuration_of_a_fit_by_auto_is_that_of_what_follows() -> None:
    """It names no callback; and the `config.yaml` of a run, with its options of a fit, means this run."""
    given = configured()
    main(["fit", *given, "--auto", "--resume"])
    main(["fit", *given, "--auto", "--seed_everything=1"])
    first, second = (Path("runs/table") / name for name in ("version_0", "version_1"))
    main(["predict", *given])
    assert (second / "predict/predictions.safetensors").exists(), "the newest run"
    main(["predict", "--config", str(first / "config.yaml")])
    data = DigitsDataModule()
    data.setup("test")
    found = load_file(first / "predict/predictions.safetensors")["probabilities"]
    torch.testing.assert_close(found, Posterior.load(first).predict(data.splits[2].inputs).probabilities)
    main(["test", "--config", str(first / "auto.yaml")])
    rows = [json.loads((first / name).read_text())["rows"] for name in ("results.json", "test/results.json")]
    assert rows[0] == rows[1]
    main(["test", *given, "--trainer.logger.init_args.version=0"])
    assert (first / "test-1").exists(), "a version that is named"


def test_predictions_of_a_table_name_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """Joined to the file by `row`, they have the error that the test of the fit reports; some rows were left out.

    The table of a target in large units has whole names of metrics.
    """
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"size": rng.uniform(20, 200, 300).round(1), "zone": rng.choice(["a", "b"], 300)})
    frame["price"] = 1e5 + 4e3 * frame["size"] + 2e5 * (frame["zone"] == "b") + rng.normal(0, 2e4, 300)
    frame.loc[::7, "size"] = np.nan
    frame.to_csv("houses.csv", index=False)
    Path("houses.py").write_text(HOUSES)
    given = [*configured(), "--data=houses.Houses", "--model.net.in_features=3", "--model.net.out_features=1"]
    given += ["--model.likelihood={class_path: lightning_sgmcmc.Gaussian, init_args: {learned: true}}"]
    main(["fit", *given, "--auto", "--trainer.max_epochs=60", "--baselines"])
    assert {"coverage_50", "coverage_90"} <= set(capsys.readouterr().out.split())
    main(["predict", *given])
    run = Path("runs/table/version_0")
    found = pd.read_csv(run / "predict/predictions.csv", index_col="row")
    wrong = found["mean"] - frame.loc[found.index, "price"]
    rows = {
        (row["method"], row["metric"]): row["value"] for row in json.loads((run / "results.json").read_text())["rows"]
    }
    assert len(found) == 26
    assert rows["bma", "rmse"] == pytest.approx(float(np.sqrt((wrong**2).mean())), rel=1e-4)
    assert rows["bma", "rmse"] < 0.5 * rows["guessing", "rmse"]


@pytest.mark.slow
def test_runs_that_weights_and_biases_names_are_found() -> None:
    wandb = pytest.importorskip("wandb")
    given = [*configured("WandbLogger", "project"), "--trainer.logger.init_args.offline=true"]
    try:
        main(["fit", *given, "--auto", "--trainer.max_epochs=8"])
        wandb.finish()
        (run,) = Path("runs/table").iterdir()
        main(["predict", *given])
        assert (run / "predict/predictions.safetensors").exists()
        wandb.finish()
        before = (run / "samples/manifest.jsonl").read_text()
        main(["fit", *given, "--auto", "--trainer.max_epochs=8", "--resume"])
        assert [path.name for path in Path("runs/table").iterdir()] == [run.name]
        assert (run / "samples/manifest.jsonl").read_text() == before
    finally:
        wandb.teardown()


def test_a_run_of_mlflow_is_found_and_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more packages
    given = [*configured("MLFlowLogger", "experiment_name"), "--auto", "--resume"]
    main(["fit", *given])
    (experiment,) = (path for path in Path("runs").iterdir() if list(path.glob("*/samples")))
    (run,) = (path.parent for path in experiment.glob("*/samples"))
    draws = (run / "samples/manifest.jsonl").read_text()
    main(["fit", *given, "--trainer.max_epochs=12"])
    assert [path.parent for path in experiment.glob("*/samples")] == [run]
    client = mlflow.MlflowClient(f"file:{Path('runs').resolve()}")
    assert [found.info.run_id for found in client.search_runs([experiment.name])] == [run.name]
    steps = [metric.step for metric in client.get_metric_history(run.name, "val/nll")]
    assert len(steps) == len(set(steps)) == 12
    assert (run / "samples/manifest.jsonl").read_text() != draws
    main(["predict", *given[:2]])
    assert (run / "predict/predictions.safetensors").exists()
