"""Several runs on the same data, beside one another: quality with intervals, paired differences, and cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_sgmcmc.diagnostics.draws import Array, percentile_interval, resampled_means
from lightning_sgmcmc.files import write_output
from lightning_sgmcmc.fit.results import STAGE_NAMES, STAGES, StoredEvaluation, evaluation_file, read_evaluation
from lightning_sgmcmc.plain import markdown_table
from lightning_sgmcmc.report import html
from lightning_sgmcmc.report.html import Cell, Table
from lightning_sgmcmc.report.run_record import RunError, find_run

WIDTH = 80
"""Columns of the printed table."""
NAMES = {"nll": "NLL", "error": "error", "brier": "Brier", "square_error": "RMSE"}
"""The columns of per-datum results, and what their means are called."""


@dataclass(frozen=True)
class Interval:
    """A number with its 95 % bootstrap interval over the data."""

    value: float
    low: float
    high: float

    @property
    def is_off_zero(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class ComparedRun:
    """A run among others, named by the part of its folder's path that differs from theirs.

    Attributes:
        gradient_evaluations, seconds: cost of the fit, 0 if unknown.
        metrics: intervals of NLL, error and so on; lower is better.
        differences: paired intervals of the same, this run minus the first; empty for the first.
    """

    name: str
    evaluation: StoredEvaluation
    kind: str
    gradient_evaluations: int
    seconds: float
    metrics: dict[str, Interval]
    differences: dict[str, Interval]


def compare_runs(runs: Sequence[str | Path]) -> list[ComparedRun]:
    """Return runs with intervals over resampled data, which all runs share, and paired differences from the first."""
    folders = [find_run(run)[0].resolve() for run in runs]
    if len(folders) < 2:
        raise RunError(f"a comparison needs two runs or more, got {len(folders)}: pass another folder")
    twice = next((folder for index, folder in enumerate(folders) if folder in folders[:index]), None)
    if twice is not None:
        raise RunError(f"{twice} is given twice: pass different runs")
    found = _evaluations(folders)
    _check_data(folders, found)
    names = [name for name in NAMES if all(name in one.columns for one in found)]
    labels, compared = _labels(folders), []
    for index, (folder, evaluation) in enumerate(zip(folders, found, strict=True)):
        origin = _origin(folder, evaluation)
        metrics, differences = {}, {}
        for name in names:
            metrics[name] = interval_of(evaluation, name)
            if index:
                differences[name] = paired_difference(evaluation, found[0], name)
        cost = (origin.gradient_evaluations, origin.seconds)
        compared.append(ComparedRun(labels[index], evaluation, origin.kind, *cost, metrics, differences))
    return compared


def interval_of(evaluation: StoredEvaluation, name: str) -> Interval:
    """Return the mean of one of its columns with its interval."""
    (value,), resampled = _means(name, [evaluation.columns[name].double().numpy()])
    return Interval(value, *percentile_interval(resampled[0]))


def paired_difference(one: StoredEvaluation, other: StoredEvaluation, name: str) -> Interval:
    """Return the difference of two means of a column over the same data, with its paired interval."""
    values, resampled = _means(name, [part.columns[name].double().numpy() for part in (one, other)])
    return Interval(values[0] - values[1], *percentile_interval(resampled[0] - resampled[1]))


def _means(name: str, columns: list[Array]) -> tuple[list[float], Array]:
    """Return each run's mean and its resampled means; of square errors their roots."""
    values = np.stack(columns)
    means, resampled = values.mean(1), resampled_means(values)
    if name == "square_error":
        means, resampled = np.sqrt(means), np.sqrt(resampled)
    return means.tolist(), resampled


def _evaluations(folders: Sequence[Path]) -> list[StoredEvaluation]:
    """Return the runs' evaluations on the test data if all have them, else on the validation data."""
    lacking = {}
    for stage in reversed(STAGES):
        paths = [_newest(folder, stage) for folder in folders]
        missing = next((folder for folder, path in zip(folders, paths, strict=True) if path is None), None)
        if missing is None:
            return [_read(path) for path in paths if path is not None]
        lacking[stage] = missing
    raise RunError(
        f"{lacking['test']} has no per-datum evaluation on the test data and {lacking['val']} none on the validation "
        "data: evaluate it by `sgmcmc test`, with BayesianModelAverage and RunSummary among its callbacks"
    )


def _newest(folder: Path, stage: str) -> Path | None:
    """Return the newest file of an evaluation in a run's folder, or in those of its later tests."""
    paths = [evaluation_file(place, stage) for place in (folder, *folder.glob("test*/"), *folder.glob("validate*/"))]
    return max((path for path in paths if path.exists()), key=lambda path: path.stat().st_mtime, default=None)


def _read(path: Path) -> StoredEvaluation:
    try:
        return read_evaluation(path)
    except (OSError, ValueError) as error:
        raise RunError(str(error)) from None


def _origin(folder: Path, evaluation: StoredEvaluation) -> StoredEvaluation:
    """Return the evaluation that the process of the fit wrote, which knows the cost, else the given one."""
    own = [_read(path) for stage in STAGES if (path := evaluation_file(folder, stage)).exists()]
    return max([evaluation, *own], key=lambda one: one.gradient_evaluations)


def _check_data(folders: Sequence[Path], found: Sequence[StoredEvaluation]) -> None:
    first = found[0]
    for folder, other in zip(folders, found, strict=True):
        counts = len(first.columns["nll"]), len(other.columns["nll"])
        if other.data != first.data or counts[0] != counts[1]:
            raise RunError(
                f"{folders[0]} and {folder} were evaluated on different {STAGE_NAMES[first.stage]} ({counts[0]} and "
                f"{counts[1]} data, with other targets or units), so they cannot be compared: pass runs on the same "
                "data"
            )


def _labels(folders: Sequence[Path]) -> list[str]:
    """Return the shortest parts of the folders' paths that differ, without the end that they share."""
    parts = [folder.parts for folder in folders]
    while len({one[-1] for one in parts}) == 1:
        parts = [one[:-1] for one in parts]
    for length in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(one[-length:]) for one in parts]
        if len(set(ends)) == len(ends):
            return ends
    return [str(folder) for folder in folders]


# -- pages ------------------------------------------------------------------------------------------------------------


def write_comparison(runs: Sequence[ComparedRun], path: Path) -> None:
    """Write the comparison: an HTML page, or Markdown if the file's name ends in `.md`."""
    write_output(path, (markdown(runs) if path.suffix == ".md" else page(runs)).encode(errors="replace"))


def quality_rows(runs: Sequence[ComparedRun], short: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return the table of metrics with half-widths of their intervals, and cost; if short, of two metrics."""
    names = list(runs[0].metrics)[: 2 if short else None]
    header = ["run", "kind", *(NAMES[name] for name in names), "gradients", "seconds"]
    rows = []
    for run in runs:
        metrics = [run.metrics[name] for name in names]
        cells = [f"{metric.value:.4g} ± {(metric.high - metric.low) / 2:.2g}" for metric in metrics]
        rows.append([run.name, run.kind, *cells, _short(run.gradient_evaluations), _short(run.seconds)])
    return header, rows


def difference_rows(runs: Sequence[ComparedRun]) -> tuple[list[str], list[list[str]]]:
    """Return the table of paired differences from the first run; a star marks intervals off zero."""
    names = list(runs[0].metrics)
    header = ["run", *(f"Δ{NAMES[name]}" for name in names)]
    return header, [[run.name, *(difference_text(run.differences[name]) for name in names)] for run in runs[1:]]


def text(runs: Sequence[ComparedRun]) -> str:
    """Return the comparison as text of at most 80 columns."""
    first = runs[0]
    title = f"{len(runs)} runs on the same {len(first.evaluation.columns['nll'])} {STAGE_NAMES[first.evaluation.stage]}"
    lines = [
        title,
        "",
        *_columns(*quality_rows(runs, short=True)),
        "",
        "Each minus the first (95 % paired bootstrap over the data; * off zero):",
    ]
    header, rows = difference_rows(runs)
    while len(header) > 2 and _width(header, rows) > WIDTH:  # the page has them all
        header, rows = header[:-1], [row[:-1] for row in rows]
    return "\n".join([*lines, *_columns(header, rows)]) + "\n"


def markdown(runs: Sequence[ComparedRun]) -> str:
    """Return the comparison in Markdown."""
    return f"{markdown_table(*quality_rows(runs))}\n{_note(runs)}\n\n{markdown_table(*difference_rows(runs))}"


def page(runs: Sequence[ComparedRun]) -> str:
    """Return the comparison as one self-contained HTML page."""
    first, names = runs[0].evaluation, list(runs[0].metrics)
    changes = [[run.name, *(_cell(run.differences[name]) for name in names)] for run in runs[1:]]
    known = dict.fromkeys(name for run in runs for name in run.evaluation.metrics)
    others = [[run.name, *(run.evaluation.metrics.get(name) for name in known)] for run in runs]
    return html.render(
        "comparison.html",
        title="Comparison",
        subtitle=f"{len(runs)} runs on {len(first.columns['nll'])} {STAGE_NAMES[first.stage]}",
        quality=Table(*quality_rows(runs), "Metrics of the averages, and cost"),
        differences=Table(difference_rows(runs)[0], changes, f"Differences from {runs[0].name}"),
        metrics=Table(["run", *known], others, "Metrics of the averages"),
        note=_note(runs),
    )


def _note(runs: Sequence[ComparedRun]) -> str:
    return (
        f"Differences are each run minus {runs[0].name}, over the same data; below 0 is better. Intervals are 95 % "
        "paired bootstrap intervals over the data: of these trained networks, not of other seeds. Gradients are "
        "per-datum gradients of all chains."
    )


def _cell(change: Interval) -> Cell | str:
    shown = difference_text(change)
    return Cell(shown, "good" if change.high < 0 else "bad") if change.is_off_zero else shown


def difference_text(change: Interval) -> str:
    """Return a difference with its interval, and a star if that excludes 0."""
    star = "*" if change.is_off_zero else ""
    return f"{change.value:+.4f} [{change.low:+.4f}, {change.high:+.4f}]{star}".replace("-", "−")


def _short(number: float) -> str:
    if not math.isfinite(number) or number <= 0:
        return "–"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{number:.3g}"


def _width(header: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    return sum(max(len(line[i]) for line in (header, *rows)) + 2 for i in range(len(header))) - 2


def _columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned lines of at most 80 columns: the names, in the first column, are shortened at their beginning."""
    surplus = _width(header, rows) - WIDTH
    if surplus > 0:
        room = max(max(len(row[0]) for row in rows) - surplus, 8)
        rows = [[row[0] if len(row[0]) <= room else f"…{row[0][1 - room :]}", *row[1:]] for row in rows]
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (header, *rows)
    ]
