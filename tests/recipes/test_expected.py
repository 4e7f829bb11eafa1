"""What is kept of the recipes: it is complete, new runs are compared with it, and it predicts times."""

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sgmcmc.recipes.shared import expected
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.pages import write_pages
from lightning_sgmcmc.recipes.shared.results import Row, mean_row, write_results


def written(folder: Path, values: list[float]) -> dict[str, Any]:
    rows = [mean_row("SGLD", "nll", values), mean_row("SGLD", "seconds of a fit", values)]
    write_results("uci_regression", Options(folder, folder), rows, 12.0, {"epochs": 3}, 2.0, {"table": "0123"})
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def test_results_are_complete_and_compared_with_the_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The means 2 and 6 of (1, 2, 3) and (5, 6, 7) have standard errors 1/√3, so 4·√(2/3) = 3.27 is allowed."""
    monkeypatch.setattr(expected, "FOLDER", tmp_path)
    (tmp_path / "uci_regression.json").write_text('{"runs": {}}')
    results = written(tmp_path, [1.0, 2.0, 3.0])
    assert expected.compare("uci_regression", results).lines == ["no results of scale quick are kept"]
    assert (results["schema"], results["settings"], results["data"]) == (2, {"epochs": 3}, {"table": "0123"})
    assert (results["seconds"], results["work"]) == (12.0, 2.0)
    assert results["error"].startswith("standard error")
    assert (results["rows"][0]["n"], results["rows"][0]["values"]) == (3, [1.0, 2.0, 3.0])
    assert results["hardware"]["cores"] >= 1
    assert results["hardware"]["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert results["origin"]["versions"]["torch"]
    results["rows"][0]["paper"] = 1 / 3
    expected.keep(results, None)
    assert expected.compare("uci_regression", results).lines == []
    text = (tmp_path / "uci_regression.json").read_text()
    assert '"paper": 0.333333333,' in next(line for line in text.splitlines() if '"nll"' in line)
    assert expected.kept("uci_regression")["runs"]["quick"]["settings"] == {"epochs": 3}
    assert expected.compare("uci_regression", written(tmp_path, [4.0, 5.0, 6.0])).lines == []
    (line,) = expected.compare("uci_regression", written(tmp_path, [5.0, 6.0, 7.0])).lines
    assert line == "SGLD nll is 6, kept 2, allowed ± 3.3"
    results["settings"] = {"epochs": 4}
    assert "other settings" in expected.compare("uci_regression", results).lines[0]


def with_n(row: Row) -> dict[str, Any]:
    """Return what `results.json` has of a row."""
    return {**asdict(row), "n": len(row.values) or None}


def compared(folder: Path, kept: list[Row], found: list[Row], **entry: Any) -> expected.Comparison:
    """Return how rows compare with kept ones."""
    run = {"scale": "quick", "rows": [with_n(row) for row in kept]}
    (folder / "uci_regression.json").write_text(json.dumps({"runs": {"quick": run}, **entry}))
    return expected.compare("uci_regression", {"scale": "quick", "rows": [with_n(row) for row in found]})


def with_interval(value: float, low: float, high: float) -> list[Row]:
    ends = (Row("a", "loss - b, 95 % from", low), Row("a", "loss - b, 95 % to", high))
    return [Row("a", "loss - b", value), *ends]


def test_what_a_new_run_may_differ_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "FOLDER", tmp_path)
    compare = functools.partial(compared, tmp_path)
    one = [mean_row("a", "nll", [1.0])]
    assert compare(one, [mean_row("a", "nll", [3.0])]) == expected.Comparison([], 0, 1), "one repeat has no error"
    (line,) = compare(one, [mean_row("a", "nll", [3.0])], tolerances={"nll": 1.5}).lines
    assert line == "a nll is 3, kept 1, allowed ± 1.5"
    equal = [mean_row("a", "accuracy", [0.98, 0.98])]
    assert compare(equal, [mean_row("a", "accuracy", [0.985, 0.985])]) == expected.Comparison([], 1, 0)
    assert len(compare(equal, [mean_row("a", "accuracy", [0.96, 0.96])]).lines) == 1
    interval = with_interval(0.0, -1.96, 1.96)  # a standard error of 1, so 4·√2 = 5.7 is allowed
    assert compare(interval, with_interval(5.6, 3.64, 7.56)) == expected.Comparison([], 1, 0)
    (line,) = compare(interval, with_interval(5.7, 3.74, 7.66)).lines
    assert line == "a loss - b is 5.7, kept 0, allowed ± 5.7"
    times = [Row("a", "ms for 1,000 images", 1.0)], [Row("a", "ms for 1,000 images", 2.0)]
    assert compare(*times) == expected.Comparison([])
    assert compare(one, []).lines == ["a nll is only in the kept run"]


def test_time_is_predicted_from_the_kept_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "FOLDER", tmp_path)
    (tmp_path / "uci_regression.json").write_text('{"runs": {"quick": {"seconds": 100, "work": 4.0}}}')
    assert expected.predicted_seconds("uci_regression", "full", 40.0) == 1000
    assert expected.predicted_seconds("uci_regression", "quick", None) == 100
    assert expected.predicted_seconds("uci_regression", "full", None) is None


def test_pages_of_own_runs(tmp_path: Path) -> None:
    written(tmp_path, [1.0, 2.0, 3.0, 4.0])
    folder = write_pages(tmp_path / "pages", {"uci_regression": tmp_path, "airfoil": tmp_path / "nothing"})
    page = (folder / "uci_regression.md").read_text()
    assert "| SGLD | nll | 2.5 [0.4, 4.6] |" in page, "standard error 1.291/2, half width 3.182 times that"
    assert "n = 4" in page
    assert "[uci_regression](uci_regression.md)" in (folder / "index.md").read_text()
    assert not (folder / "airfoil.md").exists()
