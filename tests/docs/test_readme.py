"""README: its twelve lines run and leave nothing to complain of; it stays short, and its commands are literal."""

import json
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl

from lightning_sgmcmc import Posterior
from tests.docs.markdown import code_blocks
from tests.support.paths import REPOSITORY

README = REPOSITORY / "README.md"
QUIET = 'accelerator="cpu", enable_progress_bar=False, enable_model_summary=False'


def lines_of_readme() -> str:
    (code,) = (block.code for block in code_blocks(README) if block.language == "python")
    return code


def run(epochs: int) -> dict[str, Any]:
    """Run the lines in the working folder, and return their names."""
    code = lines_of_readme()
    shorter = code.replace("max_epochs=60", f"max_epochs={epochs}, {QUIET}")
    assert shorter != code
    names: dict[str, Any] = {}
    pl.seed_everything(0, verbose=False)
    exec(compile(shorter, "README", "exec"), names)
    return names


@pytest.mark.filterwarnings("ignore")
def test_the_lines_run(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(epochs=8)
    assert isinstance(names["posterior"], Posterior)
    assert len(names["posterior"]) > 10
    printed = capsys.readouterr().out
    assert "The average of" in printed
    low, high = names["prediction"].interval(0.9)
    assert bool((low <= high).all())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_its_own_summary_has_no_complaint() -> None:
    run(epochs=60)
    (results,) = Path().rglob("results.json")
    said = json.loads(results.read_text())
    assert said["sentences"]["next"].startswith("Next: predict with these samples")
    assert "within chance" in said["sentences"]["calibration"]
    assert "is better than its mean single sample" in said["sentences"]["gain"]


def test_readme_fits_on_a_screen_and_a_half() -> None:
    assert len(README.read_text().splitlines()) <= 130
    assert len([line for line in lines_of_readme().splitlines() if line.strip()]) == 12


def test_the_line_that_runs_the_tests_is_the_one_that_ci_runs() -> None:
    """`.ci/run` reads it from README."""
    lines = [line for line in README.read_text().splitlines() if line.startswith("pip install uv && uv run pytest")]
    assert lines == ["pip install uv && uv run pytest"]
    assert "grep -m1 '^pip install uv && uv run pytest' README.md" in (REPOSITORY / ".ci" / "run").read_text()


def test_the_main_job_needs_no_tools_of_developers() -> None:
    (line,) = (line for line in README.read_text().splitlines() if line.startswith("pip install uv && uv run --no-dev"))
    assert line.endswith("sgmcmc fit --config recipes/digits_auto.yaml --baselines")
