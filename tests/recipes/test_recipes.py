"""The recipes' runner, and what a recipe leaves."""

import importlib
import json
import os
from pathlib import Path

import pytest

from lightning_sgmcmc.cli import main as sgmcmc
from lightning_sgmcmc.cli.commands import examples
from lightning_sgmcmc.recipes import __main__ as runner
from lightning_sgmcmc.recipes import mnist_ood
from lightning_sgmcmc.recipes.shared.listing import descriptions
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, markdown, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings

ROOT = Path(os.environ.get("SGMCMC_DATA_ROOT", "no data here"))


def test_the_list_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    runner.main([])
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines.keys() >= {"digits_csghmc", "mnist_ood"}
    assert lines["digits_csghmc"].startswith("Cyclical SGHMC on scikit-learn's handwritten digits")
    assert all(len(line) > 20 for line in lines.values())


def test_mistakes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        runner.main(["nothing"])
    said = capsys.readouterr().err
    assert "got 'nothing'" in said
    assert ", digits_csghmc, " in said
    with pytest.raises(SystemExit, match="2"):
        runner.main(["mnist_ood", "--data-root", str(tmp_path), "--out", str(tmp_path / "out")])
    assert "MNIST is not at" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_configuration_runs_into_the_folder_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_command = runner.run_command
    short = ["--trainer.max_epochs=32", "--trainer.enable_progress_bar=false"]
    monkeypatch.setattr(runner, "run_command", lambda arguments: run_command([*arguments, *short]))
    out = tmp_path / "somewhere" / "out"
    sgmcmc(["recipe", "digits_csghmc", "--quick", "--out", str(out), "--seed", "3"])
    results = json.loads((out / "results.json").read_text())
    assert (results["recipe"], results["scale"], results["seed"]) == ("digits_csghmc", "quick", 3)
    assert results.keys() >= {"recipe", "scale", "seed", "stage", "samples", "rows", "seconds", "kind", "sentences"}
    assert {frozenset(row) for row in results["rows"]} == {
        frozenset({"method", "metric", "value", "error", "paper", "paper_error"})
    }
    assert (out / "table.md").exists()
    assert (out / "samples" / "manifest.jsonl").exists()
    assert list(out.glob("*.png"))


@pytest.mark.parametrize(("name", "flags"), [("digits_auto", ["--baselines"]), ("digits_posterior", [])])
def test_a_configuration_runs_with_the_flags_that_its_head_names(
    name: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def run_command(arguments: list[str]) -> None:
        given.extend(arguments)
        (tmp_path / "results.json").write_text("{}")

    monkeypatch.setattr(runner, "run_command", run_command)
    sgmcmc(["recipe", name, "--out", str(tmp_path)])
    assert given[0] == "fit"
    assert [word for word in given if word.startswith("--") and "=" not in word] == flags


def test_ctrl_c_ends_a_recipe_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, options: Options) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", run)
    for name in ("distillation", "all"):
        with pytest.raises(SystemExit, match="1"):
            sgmcmc(["recipe", name, "--out", str(tmp_path)])
        assert "sgmcmc recipe: interrupted; the same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(descriptions().keys() - examples().keys()))
def test_settings_of_both_scales_are_complete(name: str, tmp_path: Path) -> None:
    """The paper's setting takes at least the work of the quick one."""
    kind = importlib.import_module(f"lightning_sgmcmc.recipes.{name}").Settings
    quick, full = (read_settings(kind, Options(tmp_path, tmp_path, scale)).work for scale in (False, True))
    assert 0 < quick <= full


def test_results_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [mean_row("SGLD", "ess", [1.0, 2.0, 3.0], paper=1676), Row("SGLD", "rmse", 0.5, None, 0.72, 0.07)]
    assert rows[0].value == 2
    assert rows[0].error == pytest.approx(1 / 3**0.5)
    assert "| SGLD | ess | 2 ± 0.58 | 1676 |" in markdown(rows)
    assert "| SGLD | rmse | 0.5 | 0.72 ± 0.07 |" in markdown(rows)
    monkeypatch.setattr(mnist_ood, "run", lambda options: rows)
    runner.main(["mnist_ood", "--full", "--out", str(tmp_path / "o")])
    results = json.loads((tmp_path / "o" / "results.json").read_text())
    assert (results["recipe"], results["scale"], len(results["rows"])) == ("mnist_ood", "full", 2)
    assert "| SGLD | ess |" in capsys.readouterr().out
