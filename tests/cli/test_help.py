"""The help, the version, and the examples."""

import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import pytorch_lightning as pl
import yaml

import lightning_sgmcmc
from lightning_sgmcmc import BayesianModule
from lightning_sgmcmc.cli import main
from lightning_sgmcmc.cli.commands import COMMANDS
from tests.support.paths import RECIPE


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main([*arguments])
    return capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert lightning_sgmcmc.__version__ == version("lightning-sgmcmc")
    assert printed(capsys, "--version") == f"lightning-sgmcmc {lightning_sgmcmc.__version__}\n"


def test_the_overview_lists_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--help")
    for command in ("fit", "validate", "test", "predict", "tune", "report", "compare", "example", "recipe"):
        assert f"\n  {command} " in text
        assert command in COMMANDS
    for code in (0, 1, 2, 3, 143):
        assert f"\n  {code} " in text


def test_the_help_of_fit_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "fit", "--help")
    lines = text.splitlines()
    assert len(lines) < 120
    assert max(map(len, lines)) <= 100
    first = [line.split()[0] for line in lines[lines.index("model (--model.init_args.NAME VALUE):") + 1 :] if line]
    arguments = [name for name in inspect.signature(BayesianModule).parameters]
    assert [word for word in first if word in arguments] == arguments, "BayesianModule's arguments, all in their order"
    for name in lightning_sgmcmc.callbacks.__all__:
        found = getattr(lightning_sgmcmc.callbacks, name)
        is_callback = isinstance(found, type) and issubclass(found, pl.Callback) and name != "SamplerCallback"
        assert (f"\n  {name} " in text) == is_callback
    for internal in ("Safeguards", "SamplingProgress", "ConfigFile", "LambdaCallback"):
        assert internal not in text


def test_the_full_help_is_jsonargparses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["fit", "--help_full"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "--trainer.gradient_clip_algorithm" in text
    assert "--model.help" in text


def test_an_example_is_a_configuration_that_runs_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "example")
    assert text == Path(RECIPE).with_name("digits_auto.yaml").read_text()
    assert "digits_csghmc_contour" in printed(capsys, "example", "digits_csghmc_contour")
    Path("example.yaml").write_text(text)
    settings = ["--trainer.max_steps=2", "--trainer.fast_dev_run=2", "--trainer.enable_progress_bar=false"]
    main(["fit", "--config", "example.yaml", *settings])
    assert yaml.safe_load(text)["data"]["class_path"] == "lightning_sgmcmc.datamodules.DigitsDataModule"


@pytest.mark.slow
def test_the_entry_point() -> None:
    command = Path(sys.executable).with_name("sgmcmc")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"lightning-sgmcmc {version('lightning-sgmcmc')}\n"
    assert subprocess.run([command, "no"], capture_output=True).returncode == 2
