"""Results, histories, settings and evaluations from elsewhere: sentences with file and value, and bounds."""

import csv
import json
import os
import shutil
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.cli.commands import main
from lightning_sgmcmc.figures.logging import log_table
from lightning_sgmcmc.fit.results import keep_earlier_results
from lightning_sgmcmc.plain import markdown_table
from lightning_sgmcmc.report.page import write_report
from lightning_sgmcmc.report.run_record import LARGEST_PICTURES, RunError, read_run
from tests.support import corpus

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus.sound_run(tmp_path_factory.mktemp("sound") / "run")


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run"))


HUGE = "1" + "0" * 400


def with_number(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("results.json", '"seconds": 12.5', f'"seconds": {HUGE}', r"results\.json is damaged: .* 401 digits"),
        ("results.json", '"value": 0.5', f'"value": {HUGE}', r"results\.json is damaged: .* 401 digits"),
        ("history.json", "[3.0, 2.0, 1.0]", "[3.0, 1e308, 1.0]", r"history\.json.*sampler/energy cannot be 1e\+308"),
        ("history.json", '"sampler/lr": [3.0', '"sampler/lr": [-3.0', r"history\.json.*sampler/lr cannot be -3"),
        ("history.json", '"steps": [2', f'"steps": [{HUGE}', r"history\.json is damaged"),
        ("health.json", '"mean": 20.0', f'"mean": {HUGE}', r"health\.json is damaged"),
        ("samples/manifest.jsonl", '"energy": ', '"energy": 1e308, "x": ', r"manifest\.jsonl"),
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_named(
    file: str, old: str, new: str, message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / file).write_text(with_number((run / file).read_text(), old, new))
    with pytest.raises(SystemExit) as end:
        main(["report", str(run)])
    assert end.value.code == 2
    with pytest.raises(RunError, match=message):
        read_run(run)


def test_an_energy_out_of_range_in_a_manifest(run: Path) -> None:
    path = run / "samples" / "manifest.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {"energy": 1e308})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(
        RunError, match=r"manifest\.jsonl is damaged: a sample's energy or log_weight cannot be 1e\+308"
    ):
        write_report(run)


@pytest.mark.parametrize("value", ["!!timestamp x", "!!int x", "!!float x", "!!binary '@'", "!!bool x", "2001-99-99"])
def test_settings_with_odd_tags_are_left_out(value: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sgmcmc.report.pictures._drawn", lambda run: {})
    (run / "hparams.yaml").write_text(f"lr: {value}\n")
    assert write_report(run).exists()


def test_a_calibration_out_of_range_is_not_used(run: Path) -> None:
    whole = {"kind": "temperature", "value": 0, "count": 3, "nll_before": 1.0, "nll_after": 1.0, "samples": ""}
    for value in (HUGE, "1e999", "NaN", "-1", '"2"', "[2]", "true"):
        text = json.dumps(whole).replace('"value": 0', f'"value": {value}')
        (run / "samples" / "calibration.json").write_text(text)
        with pytest.warns(UserWarning, match=r"calibration\.json is not used"):
            posterior = Posterior.load(run / "samples")
        assert len(posterior) == 6


def evaluation(run: Path, count: int = 4, **changes: Any) -> None:
    run.mkdir(exist_ok=True)
    (run / "results.json").write_text(json.dumps(corpus.RESULTS))
    numbers = {
        "stage": "test",
        "kind": "posterior samples",
        "samples": 2,
        "chains": 1,
        "gradient_evaluations": 10,
        "seconds": 1.0,
        "data": "x",
        "metrics": {"nll": 1.0},
        "columns": None,
    } | changes
    text = json.dumps(numbers).replace('"HUGE"', HUGE)
    save_file({"nll": torch.rand(count)}, run / "evaluation-test.safetensors", {"evaluation": text})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_evaluations": "HUGE"}, "a number of 401 digits"),
        ({"seconds": "HUGE"}, "a number of 401 digits"),
        ({"seconds": -1.0}, "finite and not negative"),
        ({"seconds": float("inf")}, "finite and not negative"),
        ({"count": 0}, "it has no data"),
        ({"stage": "../x"}, "its stage is '../x'"),
        ({"metrics": {"nll": [1]}}, "numbers by name"),
    ],
)
def test_an_evaluation_out_of_range_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation(tmp_path / "a")
    evaluation(tmp_path / "b", **changes)
    with pytest.raises(SystemExit) as end:
        main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "page.html")])
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert message in said
    assert "evaluation-test.safetensors is damaged" in said


@pytest.mark.skipif(os.name != "posix", reason="names are Unicode elsewhere")
def test_a_folder_whose_name_is_no_utf8(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = Path(os.fsdecode(bytes(tmp_path) + b"/run-\xff-\x1b[31m"))
    run.rename(odd)
    posterior = Posterior.load(odd / "samples")
    assert posterior.predict(torch.zeros(2, 2)).probabilities.shape == (2, 2)
    evaluation(odd)
    evaluation(tmp_path / "b")
    for suffix in ("html", "md"):
        page = tmp_path / f"page.{suffix}"
        main(["compare", str(odd), str(tmp_path / "b"), "--output", str(page)])
        assert page.exists()
    main(["report", str(odd)])
    assert (odd / "report.html").exists()
    assert "\x1b" not in capsys.readouterr().out


def test_no_escape_sequence_reaches_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a folder's name, in a report, in an error of a command, and of the kind that a file gives."""
    folder = tmp_path / "a\x1b[2J\u202eb\x07"
    for place in (folder, tmp_path / "c"):
        evaluation(place, kind="\x1b]0;title\x07", gradient_evaluations=1)
    main(["report", str(folder)])
    main(["compare", str(folder), str(tmp_path / "c"), "--output", str(tmp_path / "page.html")])
    with pytest.raises(SystemExit):
        main(["report", str(folder / "missing")])
    said = capsys.readouterr()
    assert not {"\x1b", "\x07", "\u202e"} & set(said.out + said.err)
    assert "Report: " in said.out


# -- bounds -----------------------------------------------------------------------------------------------------------


def sparse_picture(path: Path, size: int) -> None:
    """Write a PNG whose file takes no room on the disk."""
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.truncate(size - 12)
        file.seek(size - 12)
        file.write(struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND")))


def test_pictures_of_a_report_are_bounded_together(run: Path) -> None:
    for name in "abcdefgh":
        sparse_picture(run / f"{name}.png", 2**24)
    record = read_run(run)
    assert sum(map(len, record.pictures.values())) <= LARGEST_PICTURES
    assert len([name for name in record.unread if "more than" in name]) >= 5
    assert "energy" not in record.pictures or len(record.pictures) == 4


def test_a_long_history_is_refused_at_once(run: Path) -> None:
    count = 400_000
    history = {"steps": list(range(count)), "scalars": {"sampler/energy": [1.0] * count}}
    (run / "history.json").write_text(json.dumps(history))
    start = time.process_time()
    with pytest.raises(RunError, match=r"history\.json has 400,000 steps, and a report reads at most 200,000"):
        write_report(run)
    assert time.process_time() - start < 5


# -- tables -----------------------------------------------------------------------------------------------------------


def test_names_break_no_table() -> None:
    table = markdown_table(["metric", "a|b"], [["x\ny", "1"], ["|", "\\"], ["\u2028z", "2"]])
    lines = table.splitlines()
    assert len(lines) == 5
    assert all(line.replace("\\|", "").count("|") == 3 for line in lines)


@pytest.mark.parametrize("name", ["=1+1", "+1", "-x", "@SUM(A1)", "\t=1", "\r=1"])
def test_names_are_no_formulas_of_a_spreadsheet(name: str, tmp_path: Path) -> None:
    class Trainer:
        is_global_zero, loggers = True, ()

    log_table(Trainer(), "metric_table", ["metric", "value"], [[name, -1.5]], 0, tmp_path)  # type: ignore[arg-type]
    (file,) = tmp_path.glob("*.csv")
    with open(file, newline="") as content:
        rows = list(csv.reader(content))
    assert rows[1] == [f"'{name.strip()}", "-1.5"]


@pytest.mark.parametrize("stage", ["a/b", "../x", None, 3, "\x00", "val"])
def test_a_stage_from_a_file_is_no_path(stage: Any, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"stage": stage, "rows": []}))
    keep_earlier_results(tmp_path, {"stage": "test", "rows": []})
    assert [path.name for path in tmp_path.iterdir()] == [f"results-{'val' if stage == 'val' else 'run'}.json"]


@pytest.mark.parametrize("kind", ["pipe", "device", "loop"])
def test_results_that_are_no_file_are_not_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path.name)
    keep_earlier_results(tmp_path, {"stage": "test", "rows": []})
    assert os.path.lexists(path)
