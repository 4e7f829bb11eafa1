"""What both progress bars show, read from what they printed."""

import io
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint, ProgressBar, RichProgressBar, TQDMProgressBar

from lightning_sgmcmc.callbacks import BayesianModelAverage, CyclicalSchedule, SampleCollector, SamplingSchedule
from lightning_sgmcmc.chains.state import ObservedEnergy
from lightning_sgmcmc.fit import loggers as progress
from lightning_sgmcmc.fit.loggers import SamplingProgress, mean_nll, short_number
from tests.support import small_run
from tests.support.problems import classifier, loaders
from tests.support.recorders import Each
from tests.support.trainers import quiet_trainer

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STEPS, CYCLES, SAMPLES = 24, 3, 2  # epochs of 4 steps, cycles of 8


def nll_of_each_step() -> Each:
    return Each("on_train_batch_end", lambda trainer, module, *args: mean_nll(module.chains.observed))


def rich_bar(width: int = 200) -> tuple[RichProgressBar, io.StringIO]:
    file = io.StringIO()
    options = {"file": file, "force_terminal": True, "width": width, "force_interactive": False}
    return RichProgressBar(console_kwargs=options), file


def fit(bar: ProgressBar | None, callbacks: tuple[pl.Callback, ...] = (), **options: Any) -> pl.Trainer:
    trainer = quiet_trainer(
        **({"max_epochs": STEPS // 4, "enable_progress_bar": True} | options),
        callbacks=[CyclicalSchedule(CYCLES, 0.5, SAMPLES), *([bar] if bar is not None else []), *callbacks],
    )
    trainer.fit(classifier(), *loaders())
    return trainer


def shown(printed: str) -> list[dict[str, str]]:
    """Return the items of every state that the bar was printed in; one that stood cut short is left out."""
    pattern = (
        r"nll[=:] ?(\S+?),? (?:val_nll[=:] ?\S+?,? )?temperature[=:] ?(\S+?),? cycle[=:] ?(\S+?),? stage[=:] ?(\S+?),? "
        r"samples[=:] ?(\d+)"
    )
    names = ("nll", "temperature", "cycle", "stage", "samples")
    return [dict(zip(names, found, strict=True)) for found in re.findall(pattern, ANSI.sub("", printed))]


@pytest.fixture
def _every_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_READINGS", 0.0)


@pytest.mark.usefixtures("_every_reading")
def test_tqdm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    nlls = nll_of_each_step()
    fit(TQDMProgressBar(), (nlls,), logger=pl.loggers.CSVLogger("."))
    printed = capsys.readouterr().out
    items = shown(printed)
    assert [i["nll"] for i in items if i["nll"] == short_number(nlls.seen[0])], "the first step's"
    assert {i["nll"] for i in items} == {short_number(value) for value in nlls.seen}
    assert {i["cycle"] for i in items} == {"1/3", "2/3", "3/3"}
    assert {(i["stage"], i["temperature"]) for i in items} == {("exploration", "0"), ("sampling", "1")}
    assert items[0]["samples"] == "0"
    assert items[-1] == {
        "nll": short_number(nlls.seen[-1]),
        "temperature": "1",
        "cycle": "3/3",
        "stage": "sampling",
        "samples": str(CYCLES * SAMPLES),
    }
    assert "v_num" not in printed


@pytest.mark.usefixtures("_every_reading")
@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_one_line_of_eighty_columns(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole entries within 80 columns, in a run of three-digit epochs that has drawn samples."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(progress, "get_terminal_size", lambda: os.terminal_size((80, 24)))
    bar, file = (TQDMProgressBar(), io.StringIO()) if kind == "tqdm" else rich_bar(80)
    fit(bar, (BayesianModelAverage(),), max_epochs=120, max_steps=STEPS)
    printed = ANSI.sub("", file.getvalue() or capsys.readouterr().out)
    last = [line.rstrip() for line in re.split(r"[\r\n]", printed) if "Epoch" in line and "nll" in line][-1]
    assert re.search(r"val_nll[=:] ?[\d.]+,? samples[=:] ?6\b", last), last
    assert len(re.sub("█+", "█", last)) <= 80, "tqdm shortens the bar on a terminal"


@pytest.mark.usefixtures("_every_reading")
def test_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    bar, file = rich_bar()
    nlls = nll_of_each_step()
    fit(bar, (nlls,), logger=pl.loggers.CSVLogger("."))
    items = shown(file.getvalue())
    assert items[-1]["cycle"] == "3/3"
    assert items[-1]["samples"] == str(CYCLES * SAMPLES)
    assert items[-1]["stage"] == "sampling"
    assert items[-1]["nll"] == short_number(nlls.seen[-1])
    assert "v_num" not in file.getvalue()


def test_a_run_that_steps_end_names_no_last_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning has -1 for epochs without a limit, and its Rich bar shows the number before it."""
    monkeypatch.setenv("COLUMNS", "200")
    bar, file = rich_bar()
    fit(bar, max_epochs=-1, max_steps=STEPS)
    printed = ANSI.sub("", file.getvalue())
    assert re.search(rf"Epoch {STEPS // 4 - 1} ", printed)
    assert "/-2" not in printed
    assert "_get_train_description" not in vars(bar), "the bar is given back as it was"


def test_without_configuration(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own default bar, a schedule without cycles, and metrics of the user's beside ours."""
    monkeypatch.setenv("COLUMNS", "250")

    class Accuracy(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            pl_module.log("mine", 0.125, prog_bar=True)

    trainer = quiet_trainer(
        max_epochs=2, enable_progress_bar=True, callbacks=[SamplingSchedule(4, every_n_steps=1), Accuracy()]
    )
    assert trainer.progress_bar_callback is not None
    trainer.fit(classifier(), loaders()[0])
    assert isinstance(trainer.progress_bar_callback, TQDMProgressBar | RichProgressBar)
    printed = ANSI.sub("", capsys.readouterr().out)
    assert re.search(r"nll.*temperature.*stage[=:] ?sampling.*samples[=:] ?4.*mine", printed)
    assert "cycle" not in printed
    assert "get_metrics" not in vars(trainer.progress_bar_callback), "the bar is given back as it was"


def test_a_fit_without_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fit(None, enable_progress_bar=False)
    assert trainer.progress_bar_callback is None
    assert not any(isinstance(c, SamplingProgress) for c in trainer.callbacks)  # type: ignore[attr-defined]
    assert "nll" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_entries_are_made_at_readings_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the clock standing still: once at the start, and at each epoch's last batch; Lightning's entries too."""
    readings: list[int] = []
    made: list[int] = []
    nll = progress.mean_nll

    def read(state: ObservedEnergy) -> float:
        readings.append(1)
        return nll(state)

    monkeypatch.setattr(progress, "mean_nll", read)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 100.0)
    bar = TQDMProgressBar() if kind == "tqdm" else rich_bar()[0]
    own = type(bar).get_metrics
    monkeypatch.setattr(type(bar), "get_metrics", lambda *given: made.append(1) or own(*given))  # type: ignore[func-returns-value]
    trainer = quiet_trainer(max_steps=8, enable_progress_bar=True, callbacks=[bar], limit_val_batches=0)
    trainer.fit(classifier(), loaders()[0])
    # The first step; then the last batch of each of two epochs, where a bar may ask twice.
    assert 3 <= len(readings) <= 5
    assert len(made) <= len(readings) + 1  # and one before the first step


@pytest.mark.filterwarnings("ignore:.*(ckpt_path|not resumable).*")
@pytest.mark.usefixtures("_every_reading")
def test_resume_counts_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    checkpoint = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=18, filename="{step}")
    fit(TQDMProgressBar(), (SampleCollector(in_memory=True), checkpoint), enable_checkpointing=True)
    before = shown(capsys.readouterr().out)
    trainer = quiet_trainer(
        max_epochs=STEPS // 4,
        enable_progress_bar=True,
        callbacks=[CyclicalSchedule(CYCLES, 0.5, SAMPLES), TQDMProgressBar(), SampleCollector(in_memory=True)],
    )
    trainer.fit(classifier(), *loaders(), ckpt_path=tmp_path / "step=18.ckpt")
    after = shown(capsys.readouterr().out)
    assert after[0]["cycle"] == "3/3"
    assert after[0]["samples"] == "4"
    assert after[-1] | {"nll": ""} == before[-1] | {"nll": ""}


def test_a_second_fit_begins_anew(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    module = classifier()
    for _ in range(2):
        schedule = CyclicalSchedule(CYCLES, 0.5, SAMPLES)
        trainer = quiet_trainer(
            max_epochs=STEPS // 4, enable_progress_bar=True, callbacks=[schedule, TQDMProgressBar()]
        )
        trainer.fit(module, *loaders())
        assert shown(capsys.readouterr().out)[-1]["samples"] == str(CYCLES * SAMPLES)
    trainer = quiet_trainer(max_epochs=1, callbacks=[SamplingSchedule(every_n_steps=1)])
    trainer.fit(module, *loaders())
    assert (module.chains.progress.cycle, module.chains.progress.num_cycles) == (0, None)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.123"),
        (12.3456, "12.3"),
        (123456.78, "123457"),
        (-1234567.0, "-1.235e+06"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_stay_short(value: float, text: str) -> None:
    assert short_number(value) == text
    assert len(text.lstrip("-")) <= 9


def test_the_speed_is_that_of_the_run_where_epochs_are_not_seen() -> None:
    """Rich knows the speed of what it is shown of an epoch, and a block of steps has many epochs."""
    bar, file = rich_bar()
    begun = time.monotonic()
    trainer = quiet_trainer(
        max_epochs=4000, enable_progress_bar=True, callbacks=[SamplingSchedule(every_n_epochs=1000), bar]
    )
    trainer.fit(small_run.module(), small_run.loader(shuffle=True))
    speed = trainer.global_step / (time.monotonic() - begun)
    found = [float(one) for one in re.findall(r"([0-9.]+)it/s", ANSI.sub("", file.getvalue()))]
    late = found[len(found) // 2 :]
    assert min(late) > speed / 5
    assert max(late) < 20 * speed
