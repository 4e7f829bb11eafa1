"""What Windows and macOS do otherwise: open files stay where they are, locks are of bytes, processes run the script."""

import contextlib
import fcntl
import io
import multiprocessing
import os
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import yaml
from torch import nn
from torch.utils.data import DataLoader

from lightning_sgmcmc import Posterior, files
from lightning_sgmcmc.callbacks import BayesianModelAverage, RunSummary, SampleCollector
from lightning_sgmcmc.cli import main
from lightning_sgmcmc.posterior import disk, lock
from lightning_sgmcmc.posterior.lock import InUseError, StoreLock
from tests.support.recorders import Each
from tests.support.small_run import data, every_step, fit_every_step, loader, module
from tests.support.trainers import quiet_trainer

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks for open files in /proc")


class ByteLocks:
    """The locks of `msvcrt`, for files that are open in this process: exclusive, of one byte, by open file."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self) -> None:
        self._held: dict[tuple[int, int, int], int] = {}

    def locking(self, descriptor: int, mode: int, count: int) -> None:
        status = os.fstat(descriptor)
        assert count == 1
        byte = status.st_dev, status.st_ino, os.lseek(descriptor, 0, os.SEEK_CUR)
        if mode == self.LK_UNLCK:
            assert self._held.pop(byte) == descriptor
        elif self._held.setdefault(byte, descriptor) != descriptor:
            raise PermissionError(13, "Permission denied")


def open_files() -> set[str]:
    """The files that this process has opened or mapped."""
    found = {line[line.index("/") :] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    for one in Path("/proc/self/fd").iterdir():
        try:
            found.add(os.readlink(one))
        except OSError:
            continue
    return found


def refusing(change: Callable[..., None], *places: int) -> Callable[..., None]:
    """Return a function of `os` that refuses open files, and folders with an open file."""

    def changed(*paths: Any, **options: Any) -> None:
        for given in (os.path.abspath(os.fspath(paths[i])) for i in places):
            if any(name == given or name.startswith(given + os.sep) for name in open_files()):
                raise PermissionError(13, "the file is used by another process", given)
        change(*paths, **options)

    return changed


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, as far as the library's files go, on Windows."""
    own = types.ModuleType("os")
    vars(own).update({name: value for name, value in vars(os).items() if name != "name"}, name="nt")
    for one in (files, disk, lock):
        monkeypatch.setattr(one, "os", own)
    monkeypatch.setattr(lock, "fcntl", None)
    monkeypatch.setattr(lock, "msvcrt", ByteLocks())
    monkeypatch.setattr(files, "PATIENCE", 0.5)
    for name, places in {"unlink": (0,), "rename": (0,), "replace": (0, 1)}.items():
        changed = refusing(getattr(os, name), *places)
        monkeypatch.setattr(os, name, changed)
        setattr(own, name, changed)


# -- open files ------------------------------------------------------------------------------------------------------


@needs_proc
@pytest.mark.usefixtures("windows")
def test_a_second_run_moves_the_samples_of_the_first(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """`.lock` is open in the folder that is moved; both runs keep their samples, and a loaded posterior its own."""
    fit_every_step(module(), SampleCollector(tmp_path / "samples"))
    first = Posterior.load(tmp_path / "samples")
    weights = [first.store.parameters(i, ["net.weight"]) for i in range(3)]
    fit_every_step(module(), SampleCollector(tmp_path / "samples"))
    del weights
    assert (len(first), len(Posterior.load(tmp_path / "samples"))) == (6, 6)
    assert len(Posterior.load(tmp_path / "samples-1")) == 6
    assert not [one for one in recwarn if "lock" in str(one.message)]


@needs_proc
@pytest.mark.usefixtures("windows")
def test_a_program_with_an_open_sample_is_named_as_the_reason(tmp_path: Path) -> None:
    fit_every_step(module(), SampleCollector(tmp_path / "samples"))
    sample = next((tmp_path / "samples").glob("*.safetensors"))
    with (
        sample.open("rb"),
        pytest.raises(PermissionError, match=r"cannot be moved.*close the programs.*another dirpat"),
    ):
        fit_every_step(module(), SampleCollector(tmp_path / "samples"))
    fit_every_step(module(), SampleCollector(tmp_path / "samples"))
    assert len(Posterior.load(tmp_path / "samples-1")) == 6


@needs_proc
@pytest.mark.usefixtures("windows")
def test_a_sample_that_a_reader_has_open_is_deleted_later(tmp_path: Path) -> None:
    """`max_samples` deletes the oldest samples; the run goes on while a notebook reads one of them."""
    opened: list[Any] = []

    def after(trainer: pl.Trainer, *_: Any) -> int:
        if trainer.global_step == 2:
            opened.append(sorted((tmp_path / "samples").glob("*.safetensors"))[0].open("rb"))
        if trainer.global_step == 5:
            opened[0].close()
        return 0

    callbacks = Each("on_train_batch_end", after), SampleCollector(tmp_path / "samples", max_samples=2)
    fit_every_step(module(), *callbacks)
    assert len(list((tmp_path / "samples").glob("*.safetensors"))) == 2
    assert len(Posterior.load(tmp_path / "samples")) == 2


@needs_proc
@pytest.mark.usefixtures("windows")
def test_a_file_is_replaced_when_its_reader_has_closed_it(tmp_path: Path) -> None:
    path = tmp_path / "manifest"
    path.write_bytes(b"old")
    reader = path.open("rb")
    threading.Timer(0.1, reader.close).start()
    files.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    with path.open("rb"), pytest.raises(PermissionError):
        files.write_atomically(path, b"newer")
    assert path.read_bytes() == b"new"
    assert [one.name for one in tmp_path.iterdir()] == ["manifest"]


def test_a_folder_that_denies_access_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    began = time.monotonic()
    with pytest.raises(PermissionError):
        files.write_atomically(tmp_path / "file", b"")
    assert time.monotonic() - began < files.PATIENCE / 2


# -- locks ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("windows")
def test_bytes_are_locked_where_there_is_no_flock(tmp_path: Path) -> None:
    held = StoreLock(tmp_path / "samples")
    assert lock.is_in_use(tmp_path / "samples")
    with pytest.raises(InUseError, match="another fit of this process"):
        fit_every_step(module(), SampleCollector(tmp_path / "samples"))
    held.release()
    assert not lock.is_in_use(tmp_path / "samples")
    fit_every_step(module(), SampleCollector(tmp_path / "samples"))
    assert not lock.is_in_use(tmp_path / "samples")


def test_what_a_lock_says_of_its_owner_is_read_beside_it(tmp_path: Path) -> None:
    held = StoreLock(tmp_path)
    assert (tmp_path / lock.LOCK).read_text(encoding="ascii") == f"{os.getpid()}\n"
    with open(tmp_path / lock.LOCK, "rb") as file, pytest.raises(OSError, match="unavailable"):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    held.release()


def test_a_fit_that_makes_no_step_leaves_no_lock(tmp_path: Path) -> None:
    """A finished run is resumed, which does nothing, and a new one begins in the same folder."""
    first = quiet_trainer(max_epochs=2, callbacks=[every_step(), SampleCollector(tmp_path / "samples")])
    first.fit(module(), loader())
    first.save_checkpoint(tmp_path / "last.ckpt")
    again = SampleCollector(tmp_path / "samples")
    resumed = quiet_trainer(max_epochs=2, callbacks=[every_step(), again])
    resumed.fit(module(), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert not lock.is_in_use(tmp_path / "samples")
    fit_every_step(module(), SampleCollector(tmp_path / "samples"))
    assert again.posterior is not None
    assert len(again.posterior) == 6


# -- text -------------------------------------------------------------------------------------------------------------


def printed_on_windows(program: Callable[[], Any]) -> str:
    """Return what a program prints to a file on Windows, whose encoding is not UTF-8."""
    content = io.BytesIO()
    output = io.TextIOWrapper(content, encoding="cp1252")
    with contextlib.redirect_stdout(output):
        program()
    output.flush()
    assert output.errors == "strict"
    return content.getvalue().decode("cp1252")


def test_an_example_is_printed_in_any_encoding() -> None:
    config = printed_on_windows(lambda: main(["example", "digits_csghmc_contour"]))
    assert "the scale of ? - 1" in config
    assert yaml.safe_load(config)["model"]["class_path"] == "lightning_sgmcmc.BayesianModule"


def test_a_summary_is_printed_in_any_encoding(tmp_path: Path) -> None:
    """The plan's table has τ."""
    callbacks = SampleCollector(tmp_path / "samples"), BayesianModelAverage(), RunSummary(show="all")
    options: dict[str, Any] = {"val": loader(), "default_root_dir": tmp_path}
    text = printed_on_windows(lambda: fit_every_step(module(), *callbacks, **options))
    assert "Thermal energy ?·d/2" in text
    summary = next(tmp_path.rglob("summary.txt")).read_text(encoding="utf-8")
    assert "Thermal energy τ·d/2" in summary


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_a_configuration_is_read_as_an_editor_or_a_shell_has_written_it(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PowerShell's ">" writes UTF-16, and Notepad UTF-8; the system's own encoding is cp1252."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("locale.getpreferredencoding", lambda *_: "cp1252")
    main(["example", "digits_auto"])
    config = f"# größer\n{capsys.readouterr().out}"
    Path("one.yaml").write_bytes(config.encode(encoding))
    save = ["--trainer.logger.init_args.save_dir", "Läufe"]
    main(["fit", "--config", "one.yaml", "--trainer.max_steps", "100", *save])
    found = next(Path("Läufe").rglob("config.yaml"))
    assert yaml.safe_load(found.read_text(encoding="utf-8"))["trainer"]["max_steps"] == 100


# -- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("C:/runs/a", "C:/runs/a"),
        ("C://runs/a", "C://runs/a"),
        (r"C:\\runs", r"C:\\runs"),
        ("file:///C:/runs/a", "C:/runs/a"),
        ("file:///home/me/a", "/home/me/a"),
        ("s3://bucket/a", None),
        ("hf://owner/name", None),
        ("simplecache::s3://bucket/a", None),
        ("gs+cache://bucket", None),
    ],
)
def test_a_drive_is_no_protocol(path: str, expected: str | None) -> None:
    assert files.is_remote(path) is (expected is None)
    assert expected is None or files.without_scheme(path) == expected


# -- processes --------------------------------------------------------------------------------------------------------


def test_a_process_that_runs_the_script_again_is_told_what_the_script_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python marks a spawned process so while it imports the user's script."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    workers = DataLoader(data(), 8, num_workers=1)
    with pytest.raises(RuntimeError, match=r"below `if __name__ == '__main__':`, or use num_workers=0"):
        fit_every_step(module(net=nn.Linear(2, 2)), SampleCollector(tmp_path / "samples"), val=workers)
    assert not (tmp_path / "samples").exists()
