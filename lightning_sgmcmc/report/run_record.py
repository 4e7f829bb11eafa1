"""A finished run, read from its folder without pickle; any part may be missing."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from lightning_sgmcmc.chains.samples import SampleRecord
from lightning_sgmcmc.files import is_regular, local_path, parse_json, plain_path, read_regular, text_without_secrets
from lightning_sgmcmc.fit.folder import has_samples
from lightning_sgmcmc.fit.results import (
    BASELINES,
    CHOICES,
    RESULTS,
    STAGE_NAMES,
    STAGES,
    HistoryFile,
    StoredEvaluation,
    evaluation_file,
    read_evaluation,
)
from lightning_sgmcmc.health.report import HEALTH, HealthReport
from lightning_sgmcmc.plain import from_plain
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.manifest import MANIFEST

HISTORY = "history.json"
MARKS = (RESULTS, HISTORY, HEALTH, f"samples/{MANIFEST}")
"""Files that identify a run's folder."""
CONFIG = "config.yaml"
TEXTS = (CONFIG, CHOICES, "hparams.yaml", "table.md")
NOT_NEGATIVE = ("sampler/lr", "sampler/temperature")
LARGEST_JSON, LARGEST_PICTURE, LARGEST_TEXT = 2**28, 2**26, 2**22
"""Largest sizes of files, in bytes."""
LARGEST_PICTURES = 2**26
"""Bytes of all pictures of a report together."""
LONGEST_CHOICES = 2**18
"""Characters of `auto.yaml` that are read."""
MOST_STEPS = 200_000
"""Largest number of steps in a history: runs of this library write at most 20,000."""
LARGEST_NUMBER = 1e100
"""Finite numbers above it, which no run writes, have no place on an axis."""

T = TypeVar("T")


class RunError(ValueError):
    """Raised if a folder holds no run, or a damaged one; the message is for the user."""


@dataclass(frozen=True)
class ResultRow:
    """A row of `results.json`: the value of a metric by a method, with that of a paper."""

    method: Any
    metric: Any
    value: float | None
    error: float | None = None
    paper: float | None = None
    paper_error: float | None = None


@dataclass
class RunRecord:
    """The contents of a run's folder; parts that are missing are empty or None.

    Attributes:
        results, rows: the contents of `results.json`, and its rows.
        other_rows: rows of the run's other results, by what they are called ("on the validation data", …).
        evaluations: the results for each datum of the run (""), and of the baselines in its folder, by their names.
        steps, scalars, traces: of the history: optimizer steps, and values at these by name ("sampler/energy").
        records: the record of each sample, from the store, else from the history.
        pictures: the readable PNG files, by name without the suffix; `damaged` are the names of the others.
        unread: names of links, pipes and other files that are not read.
    """

    folder: Path
    results: dict[str, Any] = field(default_factory=dict)
    rows: list[ResultRow] = field(default_factory=list)
    other_rows: dict[str, list[ResultRow]] = field(default_factory=dict)
    evaluations: dict[str, StoredEvaluation] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    scalars: dict[str, list[float]] = field(default_factory=dict)
    traces: dict[str, list[float]] = field(default_factory=dict)
    health: HealthReport | None = None
    records: list[SampleRecord] = field(default_factory=list)
    store: DiskStore | None = None
    pictures: dict[str, bytes] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)

    @property
    def prior_scales(self) -> list[list[float]]:
        """The standard deviations of each chain's prior in their order, by `auto.yaml`; none without it."""
        import yaml

        try:
            content = yaml.safe_load(self.texts[CHOICES][:LONGEST_CHOICES])
            entries = content["trainer"]["callbacks"] if "trainer" in content else [content]
            given = next(scales for one in entries if (scales := one.get("init_args", {}).get("prior_scales")))
            return [[float(std) for _, std in chain] for chain in given if chain]
        except Exception:  # no such file, or another's content: YAML's tags raise anything
            return []

    @property
    def has_several_scales(self) -> bool:
        """Whether the prior's scale changed during the run, so that energies have several constants."""
        return any(len(set(chain)) > 1 for chain in self.prior_scales)

    @property
    def name(self) -> str:
        """The last two parts of the folder's path."""
        return "/".join(self.folder.resolve().parts[-2:])


def find_run(path: str | Path) -> tuple[Path, int]:
    """Return a run's folder and the number of candidates: `path` itself, or the newest run within it, of those with
    samples if there are any."""
    try:
        local_path(path, "path", "copy the folder to one first")
    except ValueError as error:
        raise RunError(str(error)) from None
    path = plain_path(path)  # as it was given, for messages
    if not path.exists():
        raise RunError(f"there is no folder {path}: pass a run's folder")
    if not path.is_dir():
        raise RunError(f"{path} is a file, not a run's folder")
    if path.name == "samples" and any(is_regular(path.parent / name) for name in (RESULTS, HISTORY, HEALTH)):
        return path.parent, 1
    if _written(path) is not None:
        return path, 1
    inside = [f for f in path.glob("*/") if not f.is_symlink()]
    below = [*inside, *(f for one in inside for f in one.glob("*/") if not f.is_symlink())]
    found = [(time, f) for f in below if not f.name.startswith("samples") and (time := _written(f))]
    if not found:
        raise RunError(
            f"{path} holds no run: neither it nor a subfolder has {RESULTS}, {HISTORY}, {HEALTH} or samples/{MANIFEST}"
        )
    sampled = [run for run in found if has_samples(run[1] / "samples")]
    return max(sampled or found)[1], len(found)


def _written(folder: Path) -> float | None:
    """Return the time of the last write to a run's folder, or None if it is not one."""
    marks = (folder / name for name in (*MARKS, MANIFEST))
    return max((mark.stat().st_mtime for mark in marks if is_regular(mark)), default=None)


def read_run(folder: Path) -> RunRecord:
    """Read the run's files; any may be missing, but none that the report needs may be damaged (`RunError`)."""
    run = RunRecord(folder)
    run.results = _read_json(folder / RESULTS) or {}
    run.rows = _rows(run.results, folder / RESULTS)
    others = ("results-*.json", f"validate*/{RESULTS}", f"test*/{RESULTS}")
    for path in sorted(path for pattern in others for path in folder.glob(pattern)):
        results = _read_json(path) or {}
        rows = _rows(results, path)
        if rows and rows != run.rows:
            stage = STAGE_NAMES.get(str(results.get("stage")), "data of " + path.relative_to(folder).as_posix())
            later = "" if path.parent == folder else f" ({path.parent.name})"
            run.other_rows[f"on the {stage}{later}"] = rows
    run.evaluations = _evaluations(folder, run.results.get("stage"))
    history = _history(folder / HISTORY)
    run.steps, run.scalars, run.traces = history.steps, history.scalars, history.traces
    health = _read_json(folder / HEALTH)
    run.health = None if health is None else _sound(HealthReport.from_json, health, folder / HEALTH)
    store = next((p for p in (folder / "samples", folder) if os.path.lexists(p / MANIFEST)), None)
    if store is not None and store != folder and store.is_symlink():
        run.unread.append(store.name)
        store = None
    try:
        run.store = DiskStore(store) if store is not None else None
        if run.store is not None:
            run.store.hold()
    except (OSError, ValueError) as error:
        raise RunError(str(error)) from None
    if run.store is None:
        run.records = [SampleRecord(**vars(sample)) for sample in history.samples]
    else:
        run.records = [replace(record, file="", checksum="", bin=None, draw=0) for record in run.store.records]
    _check_energies(run.records, folder / HISTORY if run.store is None else run.store.path / MANIFEST)
    room = LARGEST_PICTURES
    for path in sorted(folder.glob("*.png")):
        if (picture := _read(path, min(LARGEST_PICTURE, room), run)) is None:
            continue
        room -= len(picture)
        if picture.startswith(b"\x89PNG\r\n\x1a\n") and b"IEND" in picture[-12:]:
            run.pictures[path.stem] = picture
        else:
            run.damaged.append(path.name)
    for name in TEXTS:
        if (content := _read(folder / name, LARGEST_TEXT, run)) is not None:
            run.texts[name] = text_without_secrets(content.decode(errors="replace"))
    return run


def _evaluations(folder: Path, stage: Any) -> dict[str, StoredEvaluation]:
    """Return the results for each datum of one stage: the run's, and its baselines' on the same data."""
    found: dict[str, StoredEvaluation] = {}
    for name in ("", *BASELINES) if stage in STAGES else ():
        place = evaluation_file(folder / "baselines" / name if name else folder, stage)
        try:
            own = read_evaluation(place)
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise RunError(str(error)) from None
        if not name or ("" in found and _same_data(own, found[""])):
            found[name] = own
    return found


def _same_data(one: StoredEvaluation, other: StoredEvaluation) -> bool:
    return one.data == other.data and len(one.columns["nll"]) == len(other.columns["nll"])


def _read(path: Path, limit: int, run: RunRecord) -> bytes | None:
    """Return a file's content; None if it is missing, or not read and then noted."""
    try:
        return read_regular(path, limit)
    except FileNotFoundError:
        return None
    except OSError as error:
        run.unread.append(f"{path.name} ({error.strerror})")
        return None


def _read_json(path: Path) -> dict[str, Any] | None:
    if not os.path.lexists(path):
        return None
    try:
        content = parse_json(read_regular(path, LARGEST_JSON).decode())
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: it should hold a dictionary, not a {type(content).__name__}")
    return content


def _sound(read: Callable[[Any], T], content: Any, path: Path) -> T:
    """Return what a file's content is read as."""
    try:
        return read(content)
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from None


def _rows(results: dict[str, Any], path: Path) -> list[ResultRow]:
    return _sound(lambda rows: from_plain(list[ResultRow], rows, "its rows"), results.get("rows", []), path)


def _history(path: Path) -> HistoryFile:
    content = _read_json(path) or {}
    count = len(content["steps"]) if isinstance(content.get("steps"), list) else 0
    if count > MOST_STEPS:
        raise RunError(f"{path} has {count:,} steps, and a report reads at most {MOST_STEPS:,}: thin it")
    found: HistoryFile = _sound(lambda content: from_plain(HistoryFile, content), content, path)
    if not all(0 <= step < 2**62 for step in found.steps):
        raise RunError(f"{path} is damaged: its steps should be 0 or larger")
    for name, values in [*found.scalars.items(), *found.traces.items()]:
        if len(values) != count:
            raise RunError(f"{path} is damaged: {name[:80]} should have one number for each of its steps")
        for value in values:
            if _is_too_large(value) or (value < 0 and name in NOT_NEGATIVE):
                raise RunError(f"{path} is damaged: {name[:80]} cannot be {value:.6g}")
    return found


def _check_energies(records: list[SampleRecord], path: Path) -> None:
    for number in (number for record in records for number in (record.energy, record.log_weight)):
        if _is_too_large(number):
            raise RunError(f"{path} is damaged: a sample's energy or log_weight cannot be {number:.6g}")


def _is_too_large(value: float) -> bool:
    return math.isfinite(value) and abs(value) > LARGEST_NUMBER
