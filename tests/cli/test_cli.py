"""The command line, as a user calls it."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.cli.fit import main
from tests.support.paths import RECIPE

SHORT = ["--trainer.max_epochs=32", "--trainer.enable_progress_bar=false"]


def test_fit_test_and_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "--config", RECIPE, *SHORT])
    run = Path("runs/digits_csghmc/version_0")
    printed = capsys.readouterr().out
    assert "mean single sample" in printed
    assert "model average" in printed
    results = json.loads((run / "results.json").read_text())
    assert results["recipe"] == "digits_csghmc"
    assert results["stage"] == "test"
    assert results["seed"] == 0
    values = {(row["method"], row["metric"]): row["value"] for row in results["rows"]}
    for method in ("single", "bma"):
        assert 0.8 < values[method, "accuracy"] <= 1
        assert 0 < values[method, "nll"] < 1
        assert 0 <= values[method, "ece"] < 0.5
    pictures = {path.stem for path in run.glob("*.png")}
    assert pictures >= {"schedule", "energy", "running_accuracy", "reliability", "geometry", "segments", "test_entropy"}
    assert (run / "history.json").exists()
    posterior = Posterior.load(run / "samples")
    assert len(posterior) == 24
    assert posterior.model is not None, "the store of a configured network describes it"

    main(["test", "--config", RECIPE, *SHORT])
    again = json.loads(Path("runs/digits_csghmc/version_1/results.json").read_text())
    assert again["rows"] == results["rows"], "another process finds the same samples and figures"

    main(["predict", "--config", RECIPE, *SHORT])
    (file,) = Path("runs/digits_csghmc").glob("*/predictions.safetensors")
    predictions = load_file(file)
    assert predictions["probabilities"].shape == (359, 10)
    assert predictions["mutual_information"].shape == (359,)


def test_configuration_mistakes_say_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"exploration must be in \[0, 1\), got 2"):
        main(
            [
                "fit",
                "--config",
                RECIPE,
                "--trainer.callbacks=lightning_sgmcmc.callbacks.CyclicalSchedule",
                "--trainer.callbacks.exploration=2",
            ]
        )
    with pytest.raises(SystemExit):
        main(["fit", "--config", RECIPE, "--model.init_args.learning_rate=1"])
    assert "learning_rate" in capsys.readouterr().err


def test_resume_continues_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that lost its last two thirds is continued in its own folder, bit for bit; without one a new run starts."""
    saver = ["--trainer.callbacks+=pytorch_lightning.callbacks.ModelCheckpoint"]
    saver += [f"--trainer.callbacks.{name}" for name in ("every_n_train_steps=50", "save_top_k=-1")]
    folders = [tmp_path / "whole", tmp_path / "stopped", tmp_path / "new"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.chdir(folders[0])
    main(["fit", "--config", RECIPE, *SHORT, *saver])
    shutil.copytree("runs", folders[1] / "runs")
    run = Path("runs/digits_csghmc/version_0")
    for checkpoint in (folders[1] / run / "checkpoints").glob("*.ckpt"):
        if "step=150" not in checkpoint.name:
            checkpoint.unlink()
    os.truncate(shutil.copy(checkpoint_of(folders[1] / run, 150), folders[1] / run / "checkpoints" / "cut.ckpt"), 1000)

    monkeypatch.chdir(folders[1])
    main(["fit", "--config", RECIPE, *SHORT, *saver, "--resume"])
    assert [path.name for path in Path("runs/digits_csghmc").iterdir()] == ["version_0"]
    assert (run / "metrics-1.csv").exists(), "what the run wrote before is kept"
    whole, resumed = (Posterior.load(folder / run / "samples") for folder in folders[:2])
    assert len(whole) == 24
    assert whole.records == resumed.records
    for a, b in zip(whole, resumed, strict=True):
        assert all(torch.equal(a.state[name], b.state[name]) for name in a.state)
    results = [json.loads((folder / run / "results.json").read_text())["rows"] for folder in folders[:2]]
    assert results[0] == results[1]

    monkeypatch.chdir(folders[2])
    main(["fit", "--config", RECIPE, *SHORT, "--trainer.max_epochs=8", "--resume"])  # no checkpoint: a run starts
    assert (run / "results.json").exists()


def checkpoint_of(run: Path, step: int) -> Path:
    (path,) = (run / "checkpoints").glob(f"*step={step}.ckpt")
    return path


def test_resume_has_no_meaning_elsewhere() -> None:
    with pytest.raises(ValueError, match="--resume continues a fit, so it has no effect in test: omit it"):
        main(["test", "--config", RECIPE, "--resume"])
    with pytest.raises(ValueError, match="finds the checkpoint itself: pass either --ckpt_path or --resume"):
        main(["fit", "--config", RECIPE, "--resume", "--ckpt_path=last"])
