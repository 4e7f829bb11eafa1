"""What the loggers got, read back from what they wrote."""

import csv
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl

from lightning_sgmcmc.callbacks import BayesianModelAverage, CyclicalSchedule, RunSummary, SampleCollector
from tests.conjugate import quiet_trainer
from tests.test_training import classifier, loaders

KEYS = {
    "sampler/lr",
    "sampler/temperature",
    "sampler/energy",
    "samples/count",
    "samples/ess",
    "val/bma_accuracy",
    "val/single_nll",
}


def fit_with(logger: Any) -> None:
    trainer = quiet_trainer(
        max_epochs=5,
        logger=logger,
        log_every_n_steps=4,
        callbacks=[
            CyclicalSchedule(1, 0.5, 2),
            SampleCollector(in_memory=True),
            BayesianModelAverage(),
            RunSummary(),
        ],
    )
    trainer.fit(classifier(), *loaders())


def check(history: list[dict[str, Any]]) -> None:
    assert set().union(*history) >= KEYS
    rows = [row for row in history if row.get("sampler/lr") not in (None, "")]
    assert [float(row["sampler/temperature"]) for row in rows] == [0, 0, 0, 1, 1, 1]  # steps 1, 4, 8, 12, 16, 20
    counts = [row for row in history if row.get("samples/count") not in (None, "")]
    assert [int(float(row["samples/count"])) for row in counts] == [1, 2]
    assert [float(row["samples/ess"]) for row in counts] == [1, 2]
    energies = [float(row["sampler/energy"]) for row in rows]
    assert all(energy == energy for energy in energies)


def test_csv(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    fit_with(logger)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        check(list(csv.DictReader(file)))
    results = json.loads((Path(logger.log_dir) / "results.json").read_text())
    assert {(row["method"], row["metric"]) for row in results["rows"]} >= {
        (method, metric) for method in ("single", "bma") for metric in ("accuracy", "nll", "ece")
    }
    for picture in ("schedule", "energy", "running_accuracy", "running_nll", "reliability"):
        assert (Path(logger.log_dir) / f"{picture}.png").read_bytes().startswith(b"\x89PNG")


def wandb_records(path: Path) -> list[Any]:
    """Read an offline `.wandb` file: LevelDB log blocks of 32 KiB behind a 7-byte header, holding protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, joined, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        joined += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            record = Record()
            record.ParseFromString(joined)
            records.append(record)
            joined = b""
    return records


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    logger = pl.loggers.WandbLogger(save_dir=str(tmp_path), offline=True, name="test")
    fit_with(logger)
    wandb.finish()
    (path,) = tmp_path.glob("**/*.wandb")
    records = wandb_records(path)
    history = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    check(history)
    # The run's files went into a folder of the run's own, and the x-axis is the trainer's step.
    assert list(tmp_path.glob("**/results.json"))
    assert all("trainer/global_step" in row for row in history)
    wandb.teardown()
