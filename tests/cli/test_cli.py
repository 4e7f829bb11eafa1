"""The command line, as a user calls it."""

import json
import os
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from safetensors.torch import load_file

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.chains import layout as seeds
from lightning_sgmcmc.cli import main
from lightning_sgmcmc.cli.exits import NO_SAMPLES
from lightning_sgmcmc.datamodules import DigitsDataModule
from lightning_sgmcmc.fit import ranks as interruption
from tests.support.paths import RECIPE

SHORT = ["--trainer.max_epochs=32", "--trainer.enable_progress_bar=false"]
SHORTER = ["--trainer.max_epochs=16", "--trainer.enable_progress_bar=false"]


@pytest.fixture
def without_pictures(tmp_path: Path) -> str:
    """The recipe with tables alone: drawing takes two thirds of a short run."""
    text = Path(RECIPE).read_text()
    changed = tmp_path / "digits_csghmc.yaml"
    changed.write_text(text.replace("{every: end}", "{every: end, figures: [tables]}"))
    assert changed.read_text() != text
    return str(changed)


def test_fit_test_and_predict(
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
    without_pictures: str,
) -> None:
    """The run draws its pictures, and what follows it none."""
    monkeypatch.setattr(seeds, "RUNS", seeds.ProcessRuns())  # as in a new process
    main(["fit", "--config", RECIPE, *SHORT])
    assert not [w for w in recwarn if "LightningCLI's args" in str(w.message)], "it would print the configuration"
    run = Path("runs/digits_csghmc/version_0")
    printed = capsys.readouterr().out
    assert "single sample" in printed
    assert "samples of a cold ensemble" in printed
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
    assert pictures >= {"schedule", "energy", "running", "reliability", "geometry", "segments", "test_entropy"}
    assert (run / "history.json").exists()
    posterior = Posterior.load(run / "samples")
    assert len(posterior) == 24
    assert posterior.model is not None, "the store of a configured network describes it"

    validation = json.loads((run / "results-val.json").read_text())
    assert (validation["stage"], len(validation["rows"])) == ("val", len(results["rows"]))
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["init_args"]["lr"] == 0.2
    packages = {entry["class_path"].rpartition(".")[0] for entry in config["trainer"]["callbacks"]}
    assert packages == {"lightning_sgmcmc.callbacks"}

    later = fail(["fit", "--config", without_pictures, *SHORT, "--trainer.max_time=00:00:00:00"], NO_SAMPLES, capsys)
    assert later == (
        "sgmcmc fit: the run ended without a posterior sample: it made no step; raise max_epochs or max_time\n"
    )
    assert [path.name for path in sorted(run.parent.iterdir())] == ["version_0", "version_1"]
    before = contents(run)
    for number in range(2):
        main(["test", "--config", without_pictures, *SHORT])
        again = json.loads((run / ("test", "test-1")[number] / "results.json").read_text())
        assert again["rows"] == results["rows"], "another process finds the same samples and figures"
    main(["predict", "--config", without_pictures, *SHORT])
    predictions = load_file(run / "predict" / "predictions.safetensors")
    assert predictions["probabilities"].shape == (359, 10)
    assert predictions["mutual_information"].shape == (359,)
    assert {path: content for path, content in contents(run).items() if path in before} == before, "nothing is replaced"
    assert [path.name for path in sorted(run.parent.iterdir())] == ["version_0", "version_1"]
    main(["report", "runs/digits_csghmc"])
    page = (run / "report.html").read_text()
    assert "Results on the validation data" in page
    assert page.count("<caption>Results on the test data</caption>") == 1, "the later test has those of results.json"
    assert "No posterior samples" not in page


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fail(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that fails with an exit code; return its own last words on stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == code
    said = capsys.readouterr().err
    return said[said.index("sgmcmc ") :]


@pytest.mark.slow
def test_predict_takes_the_runs_network_as_test_does(without_pictures: str) -> None:
    """The configuration has another width than the run had by an option of its own."""
    narrow = "--model.init_args.net.init_args.hidden_channels=[24, 24, 10]"
    main(["fit", "--config", without_pictures, *SHORT, narrow])
    run = Path("runs/digits_csghmc/version_0")
    main(["test", "--config", without_pictures, *SHORT])
    main(["predict", "--config", without_pictures, *SHORT])
    data = DigitsDataModule()
    data.setup("test")
    expected = Posterior.load(run / "samples").predict(data.splits[2].inputs).probabilities
    torch.testing.assert_close(load_file(run / "predict" / "predictions.safetensors")["probabilities"], expected)


def test_resume_continues_the_newest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_pictures: str
) -> None:
    """A run that lost its last two thirds is continued in its own folder, bit for bit."""
    saver = ["--trainer.callbacks+=pytorch_lightning.callbacks.ModelCheckpoint"]
    saver += [f"--trainer.callbacks.{name}" for name in ("every_n_train_steps=25", "save_top_k=-1")]
    folders = [tmp_path / "whole", tmp_path / "stopped"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.chdir(folders[0])
    main(["fit", "--config", without_pictures, *SHORTER, *saver])
    shutil.copytree("runs", folders[1] / "runs")
    run = Path("runs/digits_csghmc/version_0")
    for checkpoint in (folders[1] / run / "checkpoints").glob("*.ckpt"):
        if "step=75" not in checkpoint.name:
            checkpoint.unlink()
    os.truncate(shutil.copy(checkpoint_of(folders[1] / run, 75), folders[1] / run / "checkpoints" / "cut.ckpt"), 1000)

    monkeypatch.chdir(folders[1])
    main(["fit", "--config", without_pictures, *SHORTER, *saver, "--resume"])
    assert [path.name for path in Path("runs/digits_csghmc").iterdir()] == ["version_0"]
    assert (run / "metrics-1.csv").exists(), "what the run wrote before is kept"
    whole, resumed = (Posterior.load(folder / run / "samples") for folder in folders)
    assert len(whole) == 24
    assert whole.records == resumed.records
    for a, b in zip(whole, resumed, strict=True):
        assert all(torch.equal(a.state[name], b.state[name]) for name in a.state)
    results = [json.loads((folder / run / "results.json").read_text())["rows"] for folder in folders]
    assert results[0] == results[1]


def test_a_fit_continues_from_a_checkpoint_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_pictures: str
) -> None:
    """The model is the configuration's, with network and prior, which a checkpoint's hyperparameters leave out."""
    monkeypatch.chdir(tmp_path)
    main(["fit", "--config", without_pictures, *SHORT])
    run = Path("runs/digits_csghmc/version_0")
    (checkpoint,) = (run / "checkpoints").glob("*.ckpt")
    samples = [path.name for path in sorted((run / "samples").glob("*.safetensors"))]
    main(["fit", "--config", without_pictures, *SHORT, "--ckpt_path", str(checkpoint)])
    assert len(Posterior.load(run / "samples")) == len(samples)
    assert json.loads((run / "results.json").read_text())["rows"]


class TerminatedSoon(pl.Callback):
    """Sends this process SIGTERM in its fifth step."""

    steps = 0

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.steps += 1
        if self.steps == 5:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_terminated_command_names_the_one_that_continues_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is run as it is written; the continued run is terminated in its fifth step too."""
    said: list[str] = []
    monkeypatch.setattr(interruption, "rank_zero_info", said.append)
    stop = [f"--trainer.callbacks+={__name__}.TerminatedSoon"]
    command = ["fit", "--config", RECIPE, *SHORT, *stop, "--trainer.logger.init_args.save_dir=with a space"]
    for step in (5, 10):
        with pytest.raises(SystemExit) as end:
            main(command)
        assert end.value.code == 143
        assert f"Interrupted at step {step}: " in said[-1]
        assert "trainer.fit" not in said[-1]
        program, *command = shlex.split(said[-1].partition("resume with ")[2].removesuffix("."))
        assert (program, command[-1], command.count("--resume")) == ("sgmcmc", "--resume", 1)


@pytest.mark.slow
def test_resume_without_a_checkpoint_starts_a_run() -> None:
    main(["fit", "--config", RECIPE, *SHORT, "--trainer.max_epochs=8", "--resume"])
    assert Path("runs/digits_csghmc/version_0/results.json").exists()


def checkpoint_of(run: Path, step: int) -> Path:
    (path,) = (run / "checkpoints").glob(f"*step={step}.ckpt")
    return path
