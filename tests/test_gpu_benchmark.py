"""`python -m tests.benchmarks.gpu`: what decides, stages that die, and every stage on a CPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.gpu.__main__ import main
from tests.benchmarks.gpu.correctness import CASES
from tests.benchmarks.gpu.setting import Setting
from tests.benchmarks.gpu.table import decisions, page
from tests.benchmarks.gpu.worker import CORRECTNESS, STAGES, Apart, Stage
from tests.support.paths import REPOSITORY


def headline(case: str, stream: float, launches: float = 0.0) -> dict[str, Any]:
    return {"stage": "headline", "case": case, "stream_ms": stream, "launches": launches, "copies": 1.0}


def test_the_numbers_that_decide() -> None:
    """Ratios are to the mean of both runs of plain SGD; a number at its limit holds; nothing is made up."""
    findings = [
        headline("plain", 9.0),
        headline("plain again", 11.0),
        headline("4, interacting", 4.0, launches=29.0),
        headline("16", 17.0, launches=35.0),
        {"stage": "headline", "case": "4", "error": "not done after 100 s", "said": "a trace"},
        {"stage": "correctness", "case": "vmap", "difference": 2e-3},
        {"stage": "correctness", "case": "resume, deterministic", "difference": 1e-9},
    ]
    found = {decision.what: (decision.value, decision.verdict) for decision in decisions(findings)}
    assert found == {
        "step of 4, interacting chains / step of plain SGD": (0.4, "holds"),
        "step of 4 chains / step of plain SGD": (None, "not measured"),
        "step of 16 chains / step of plain SGD": (1.7, "FAILS"),
        "launches of 4 chains beside the graphs": (None, "not measured"),
        "launches of 4, interacting chains beside the graphs": (30.0, "holds"),
        "launches of 16 chains beside the graphs": (36.0, "FAILS"),
        "waits of an ordinary step": (None, "not measured"),
        "waits of a step that draws samples": (None, "not measured"),
        "difference: vmap": (2e-3, "FAILS"),
        "difference: resume, deterministic": (1e-9, "FAILS"),
    }
    assert "**not done after 100 s**" in page(findings)
    assert "| 16 | 17 | 35 | 1 |" in page(findings)


def test_the_cases_of_correctness_are_stages() -> None:
    assert tuple(CASES) == CORRECTNESS


def test_a_stage_that_dies_or_hangs_is_recorded(tmp_path: Path) -> None:
    dead = Apart(Stage("unknown"), True, None, tmp_path).finish(60)
    assert (dead[0]["error"], "ModuleNotFoundError" in dead[0]["said"]) == ("ended with exit code 1", True)
    late = Apart(Stage("headline", "plain"), True, None, tmp_path).finish(0.05)
    assert any(finding.get("error", "").startswith("not done after") for finding in late)


def test_one_stage_writes_table_and_json(tmp_path: Path) -> None:
    assert main(["environment", "headline plain", "--tiny", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())["findings"]
    assert [finding["stage"] for finding in found] == ["environment", "seconds", "headline", "seconds"]
    assert (found[0]["device"], found[0]["torch"].split("+")[0]) == (
        Setting(tiny=True).device,
        torch.__version__.split("+")[0],
    )
    assert found[2]["wall_ms"] > 0
    assert "its numbers mean nothing" in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
def test_every_stage_runs_where_only_torch_and_lightning_are_installed(tmp_path: Path) -> None:
    """The checkout is used as it lies there: no installed package of ours, no wandb, jsonargparse or arviz."""
    packages = tmp_path / "packages"
    packages.mkdir()
    lacking = ("lightning_sgmcmc", "__editable__", "wandb", "jsonargparse", "arviz")
    for path in Path(torch.__file__).parents[1].iterdir():
        if not any(name in path.name for name in lacking):
            (packages / path.name).symlink_to(path)
    command = [sys.executable, "-S", "-m", "tests.benchmarks.gpu", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={"PYTHONPATH": str(packages)}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [f["case"] for f in found["findings"] if f["stage"] == "seconds"] == [str(stage) for stage in STAGES]
    differences = {f["case"]: f["difference"] for f in found["findings"] if f["stage"] == "correctness"}
    assert max(differences.values()) < 1e-6
    assert all(decision["value"] is not None for decision in found["decisions"])
