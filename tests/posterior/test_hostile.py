"""Run folders from anywhere: no import, no deletion, no link followed, no endless read, and one sentence as answer.

While a case is used these are allowed: errors `ValueError`, `RuntimeError` and `OSError` that this library raises with
one sentence; files of the run's folder and of the installed packages; `MOST_MEMORY` more memory than before.
"""

import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.cli.commands import compare, report
from lightning_sgmcmc.fit.checkpoints import AtomicCheckpointIO
from lightning_sgmcmc.fit.results import StoredEvaluation, write_evaluation
from lightning_sgmcmc.posterior.disk import DiskStore
from tests.support import small_run
from tests.support.corpus import CHECKPOINT, make_case, module, sound_run, trainer, untouched
from tests.support.paths import REPOSITORY

LIMIT = 60
"""Seconds for one case."""
OWN = tuple(str(REPOSITORY / folder) for folder in ("lightning_sgmcmc", "callbacks", "datamodules"))


MOST_MEMORY = 700_000
"""Kilobytes by which the process may grow over all cases of a test: pictures and a resumed run take most."""
NAMED = ("samples", "payload", "run.samples", "unittest.__main__", "a.B")
"""Beginnings of the modules that changed files name."""
PLACES = (
    sys.prefix,
    sys.base_prefix,
    str(REPOSITORY),
    "/usr",
    "/etc/fonts",
    "/proc",
    "/sys",
    "/dev/null",
    f"{tempfile.gettempdir()}/tmp",
    "/dev/urandom",
)
"""Where the program itself may open files."""


class Watch:
    """Notes what is imported and opened while it is on; Python keeps the hook until the process ends."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self.note)

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "import" and f"{arguments[0]}.".startswith(tuple(f"{name}." for name in NAMED)):
            self.seen.append(f"import {arguments[0]}")
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            mine = path.startswith((f"{self.folder}/run/", *PLACES, str(Path(matplotlib.get_configdir()).parent)))
            of_arviz = path.endswith("/arviz/daily_warning")  # it notes when it has warned
            if not (mine or of_arviz) and path not in (f"{self.folder}/run", matplotlib.get_cachedir()):
                self.seen.append(f"open {path}")


WATCH: list[Watch] = []


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Raise AssertionError if a module that a file names is imported, or a file outside the run's folder is opened."""
    if not WATCH:
        WATCH.append(Watch())
    watch = WATCH[0]
    watch.folder, watch.seen = folder.resolve(), []
    try:
        yield
    finally:
        watch.folder = None
    assert not watch.seen, watch.seen[:3]


class Late(BaseException):
    """No handler of exceptions catches it."""


@contextmanager
def limited_time() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Late(f"it takes more than {LIMIT} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def answer(call: Callable[[], Any]) -> Any:
    """Return a call's result, or None if it raised a sentence of this library."""
    raised: Exception | None = None
    try:
        return call()
    except (ValueError, RuntimeError, OSError) as error:
        raised = error
    place = traceback.extract_tb(raised.__traceback__)[-1].filename
    assert place.startswith(OWN), f"raised outside this library, in {place}: {raised!r}"
    assert "\n" not in str(raised).strip(), raised
    assert len(str(raised).split()) > 4, raised
    return None


def use_posterior(run: Path) -> None:
    x = torch.zeros(3, 2)
    for options in ({}, {"skip_damaged": True}):
        posterior = answer(lambda options=options: Posterior.load(run / "samples", **options))  # type: ignore[misc]
        if posterior is None:
            continue
        for use in (
            lambda p: p.weights,
            lambda p: p.weight_efficiency,
            list,
            lambda p: p.store.shapes(0) if len(p) else None,
            lambda p: p.predict(x),
            lambda p: p.contour,
            lambda p: p.reweighted("final"),
            lambda p: p.resample(3),
        ):
            answer(lambda use=use, posterior=posterior: use(posterior))  # type: ignore[misc]


def use_store(run: Path) -> None:
    """What a resumed run does to it."""
    store = answer(lambda: DiskStore(run / "samples", skip_damaged=True))
    if store is None:
        return
    records = list(store.records)
    sample = next((s for s in (answer(lambda i=i: store[i]) for i in range(len(store))) if s is not None), None)
    if sample is not None:
        answer(lambda: store.append(sample))
    answer(lambda: store.set_aside(records[1:]))
    answer(lambda: store.discard(store.keep_newest(1)))
    answer(lambda: store.keep([]))


def use_report(run: Path) -> None:
    code = 0
    try:
        report([str(run)])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code in (0, 2)
    page = run / "report.html"
    assert not page.is_file() or "secret of the victim" not in page.read_text()


def use_checkpoint(run: Path) -> None:
    answer(lambda: AtomicCheckpointIO().load_checkpoint(run / CHECKPOINT))


def use_comparison(run: Path) -> None:
    other = run.parent / "run" / "other"
    other.mkdir()
    (other / "results.json").write_text("{}")
    columns = {"nll": torch.ones(6), "error": torch.zeros(6)}
    write_evaluation(other, StoredEvaluation("val", "samples", 6, 2, 48, 1.5, "6-0", {"nll": 1.0}, columns))
    code = 2
    try:
        compare([str(other), str(run), "--output", str(run / "page.html")])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2


def use_resume(run: Path) -> None:
    """A fit from the checkpoint; an error within torch or Lightning names what the file lacks."""
    answer(lambda: trainer(run, 8).fit(module(), small_run.loader(), ckpt_path=run / CHECKPOINT))


USES: dict[str, list[Callable[[Path], None]]] = {
    "manifest": [use_posterior, use_store],
    "store": [use_posterior, use_store],
    "report": [use_report],
    "settings": [use_report],
    "calibration": [use_posterior],
    "evaluation": [use_comparison],
    "checkpoint": [use_checkpoint],
    "resume": [use_resume],
}
CASES = {
    "manifest": 30,
    "store": 30,
    "report": 6,
    "settings": 6,
    "calibration": 20,
    "evaluation": 20,
    "checkpoint": 30,
    "resume": 6,
}
MANY = {
    "manifest": 1300,
    "store": 1000,
    "report": 400,
    "settings": 300,
    "calibration": 600,
    "evaluation": 500,
    "checkpoint": 700,
    "resume": 300,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound_run(tmp_path_factory.mktemp("corpus") / "run")


def try_case(sound: Path, folder: Path, kind: str, seed: int) -> None:
    run = make_case(sound, folder, kind, seed)
    with untouched(folder), watched(folder), limited_time():
        for use in USES[kind]:
            use(run)


@pytest.mark.by_default("manifest", "store", "calibration", "evaluation", "checkpoint", "resume")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CASES)
def test_damaged_folders(
    kind: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sample of the corpus; each case differs by its seed only, which the failure names."""
    _try_all(kind, range(CASES[kind]), sound, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MANY)
def test_many_damaged_folders(
    kind: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """5,100 cases: `pytest -n 0 -m slow tests/posterior/test_hostile.py -k many`."""
    _try_all(kind, range(1000, 1000 + MANY[kind]), sound, tmp_path, monkeypatch)


def _try_all(kind: str, seeds: range, sound: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = folder / "case" / "run"
    monkeypatch.syspath_prepend(run)  # the store's folder could be imported, as from a working directory
    monkeypatch.syspath_prepend(run / "samples")
    failures = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in seeds:
        try:
            try_case(sound, folder / "case", kind, seed)
        except (Exception, Late) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            failures.append(
                f"{kind} {seed}: {type(error).__name__} in {frame.filename}:{frame.lineno}: {str(error)[:300]}"
            )
    assert not failures, f"{len(failures)} of {len(seeds)}:\n" + "\n".join(failures[:40])
    assert "samples.payload" not in sys.modules
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEMORY
