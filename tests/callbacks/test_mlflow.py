"""Figures and tables in MLflow's store, read back by its client."""

import csv
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
from PIL import Image

from lightning_sgmcmc.callbacks import CyclicalSchedule, PosteriorDashboard, SampleCollector
from tests.support.problems import classifier, loaders
from tests.support.trainers import quiet_trainer

mlflow = pytest.importorskip("mlflow")


def test_figures_and_tables_are_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more packages
    logger = pl.loggers.MLFlowLogger("posteriors", tracking_uri=f"file:{tmp_path / 'mlruns'}")
    dashboard = PosteriorDashboard(figures=["schedule", "histograms", "tables"])
    callbacks = [CyclicalSchedule(2, 0.6, 2), SampleCollector(tmp_path / "samples"), dashboard]
    trainer = quiet_trainer(max_epochs=4, callbacks=callbacks, logger=logger)
    trainer.fit(classifier(), *loaders())
    client, run = mlflow.MlflowClient(f"file:{tmp_path / 'mlruns'}"), logger.run_id
    (tmp_path / "read").mkdir()
    folder = Path(client.download_artifacts(run, "", str(tmp_path / "read")))
    pictures = sorted(path for path in folder.rglob("*.png") if "schedule" in path.name)
    steps = [int(path.name.split("step+")[1].split("+")[0]) for path in pictures]
    assert len(set(steps)) == 2  # one of each cycle
    assert max(steps) == trainer.global_step
    for path in pictures:
        pixels = np.asarray(Image.open(path))
        assert pixels.std() > 1  # something is drawn
    assert any("energy_histogram" in path.name for path in folder.rglob("*.png"))
    rows = list(csv.reader((folder / "posterior" / "sample_table.csv").read_text().splitlines()))
    assert len(rows) == 1 + len(list((tmp_path / "samples").glob("sample-*.safetensors")))
    assert "sampler/lr" in client.get_run(run).data.metrics
