"""README: both sides of its diff run, and what follows uses the new side; it stays short."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from lightning_sgmcmc import Posterior
from tests.docs.markdown import code_blocks
from tests.support.paths import REPOSITORY

README = REPOSITORY / "README.md"
SHORTER = ("max_epochs=50", 'max_epochs=10, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False')


def program(diff: str, sign: str) -> str:
    """Return one side of a diff: the lines that begin with a space or with `sign`."""
    kept = [line[1:] for line in diff.splitlines() if line[:1] in ("", " ", sign)]
    shorter = "\n".join(kept).replace(*SHORTER)
    assert SHORTER[1] in shorter
    return shorter


@pytest.mark.filterwarnings("ignore")
def test_the_diff_and_what_follows_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    diff, *_ = (block.code for block in code_blocks(README) if block.language == "diff")
    added = [line for line in diff.splitlines() if line.startswith("+")]
    assert len(added) <= 6, "README says six"
    monkeypatch.syspath_prepend(tmp_path)
    for name, sign in (("readme_before", "-"), ("readme_after", "+")):
        Path(f"{name}.py").write_text(program(diff, sign))
        names: dict[str, Any] = vars(importlib.import_module(name))
    later = [block.code for block in code_blocks(README) if block.language == "python"]
    assert later
    for code in later:
        exec(compile(code, "README", "exec"), names)
    posterior = names["posterior"]
    assert isinstance(posterior, Posterior)
    assert len(posterior) > 10
    right = (names["prediction"].probabilities.argmax(1) == names["y"]).float().mean()
    assert right > 0.85, "the posterior is that of the digits"
    assert "The average of" in capsys.readouterr().out


def test_readme_fits_on_a_screen_and_a_half() -> None:
    assert len(README.read_text().splitlines()) <= 130


def test_the_line_that_runs_the_tests_is_the_one_that_ci_runs() -> None:
    """`.ci/run` reads it from README."""
    lines = [line for line in README.read_text().splitlines() if line.startswith("pip install uv && uv run pytest")]
    assert lines == ["pip install uv && uv run pytest"]
    assert "grep -m1 '^pip install uv && uv run pytest' README.md" in (REPOSITORY / ".ci" / "run").read_text()
