"""The tables of results, and of the run's facts."""

import math
import time
from typing import Any

from lightning_sgmcmc.report import html_page
from lightning_sgmcmc.report.html_page import Cell, is_finite, number, paragraph, table
from lightning_sgmcmc.report.run_record import MARKS, RunRecord
from lightning_sgmcmc.run.results import METHODS

EARLIER_NAMES = {"ess": "Kish's number of the weights"}
"""Metrics of earlier versions, under other names."""
HIGHER_IS_BETTER = ("accuracy", "auroc", "log_likelihood")
LOWER_IS_BETTER = ("nll", "brier", "ece", "rmse", "mae", "error")
LONGEST_SETTINGS = 2**16
"""Characters of `hparams.yaml` that are read."""
OF_RUN = "run."
"""What the names of the run's settings begin with in `hparams.yaml`; earlier versions wrote them without it."""
PLAIN_NAMES = {"lr": "Step size lr", "temperature": "Temperature τ", "num_chains": None, "seed": None}
"""Labels of hyperparameters; None omits one."""


def facts(run: RunRecord) -> str:
    """Return the facts about the run."""
    results, records = run.results, run.records
    known = {name: results.get(name) for name in ("recipe", "scale", "seed")}
    cycles = len({r.cycle for r in records})
    steps = max([*run.steps, *(r.step for r in records)], default=None)
    pairs: list[tuple[str, Any]] = [
        ("Recipe", known["recipe"]),
        ("Scale", known["scale"]),
        ("Seed", known["seed"] if known["seed"] is None else str(known["seed"])),
        ("Duration", _duration(results.get("seconds"))),
        ("Optimizer steps", steps),
        ("Samples", len(records)),
        ("Samples are", results.get("samples")),
        ("Chains", len({r.chain for r in records}) or None),
        ("Cycles", cycles if cycles > 1 else None),
        *_hyperparameters(run),
        ("Finished", time.strftime("%Y-%m-%d %H:%M", time.localtime(_finished(run)))),
    ]
    return html_page.facts(pairs)


def _hyperparameters(run: RunRecord) -> list[tuple[str, str]]:
    """Return the plain values of `hparams.yaml` by their labels."""
    named = [(PLAIN_NAMES.get(k, k.replace("_", " ").capitalize()), v) for k, v in plain_settings(run).items()]
    elsewhere = ("version.", "plan.")  # in the parts on repeating the run and on its plan
    return [(k, v) for k, v in named if k is not None and v != "None" and not k.lower().startswith(elsewhere)]


def plain_settings(run: RunRecord) -> dict[str, str]:
    """Return the plain values of `hparams.yaml` as short texts; the run's own, `run.…`, replace the user's."""
    import yaml

    try:
        content = yaml.safe_load(run.texts.get("hparams.yaml", "")[:LONGEST_SETTINGS])
    except Exception:  # tags of dates and numbers raise anything: AttributeError, OverflowError, …
        return {}
    plain = content if isinstance(content, dict) else {}
    named = {
        str(k): str(v)
        for k, v in plain.items()
        if _is_flat(k) and (_is_flat(v) or (isinstance(v, list) and all(map(_is_flat, v))))
    }
    short = {name: value for name, value in named.items() if len(value) < 80}
    of_run = {name.removeprefix(OF_RUN): value for name, value in short.items() if name.startswith(OF_RUN)}
    return {name: value for name, value in short.items() if not name.startswith(OF_RUN)} | of_run


def _is_flat(value: Any) -> bool:
    """Return whether a value is no container: YAML's references can make those of any size."""
    return value is None or isinstance(value, bool | int | float | str)


def _finished(run: RunRecord) -> float:
    marks = [run.folder / name for name in MARKS]
    return max((m.stat().st_mtime for m in marks if m.is_file()), default=run.folder.stat().st_mtime)


def _duration(seconds: Any) -> str | None:
    if not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds <= 0:
        return None  # 0 for a run that only evaluated
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def results(run: RunRecord) -> str:
    """Return the table of `results.json`, and those of the run's other results."""
    if run.rows:
        parts = [_results(run.rows, "Results")]
    else:
        text = run.texts.get("table.md")
        parts = [html_page.preformatted(text)] if text else []
    parts += [_results(rows, f"Results in {name}") for name, rows in run.other_rows.items()]
    return "".join(parts)


def _results(rows_of_file: list[dict[str, Any]], title: str) -> str:
    """Return a table of results: the metrics of each method, and the paper's if it names them."""
    by_place = {(str(row["method"]), str(row["metric"])): row for row in rows_of_file}
    methods, metrics = (list(dict.fromkeys(names)) for names in zip(*by_place, strict=True))
    if any(is_finite(row.get("paper")) for row in rows_of_file):
        return _beside_the_paper(by_place, methods, metrics)
    if {"single", "bma"} <= set(methods) <= set(METHODS):
        rows = []
        for metric in metrics:
            found = [by_place.get((method, metric), {}) for method in methods]
            single, bma = by_place.get(("single", metric), {}), by_place.get(("bma", metric), {})
            name = EARLIER_NAMES.get(metric, metric)
            rows.append([name, *map(_with_error, found), _change(metric, single, bma)])
        note = "The number after ± is the standard deviation over the samples. " if _has_errors(rows_of_file) else ""
        if "best_single" in methods:
            note += "The best single sample is the one with the lowest NLL on these data. "
        return table(
            ["metric", *(METHODS[method] for method in methods), "change"],
            rows,
            f"{title}: single samples and their average",
        ) + paragraph(f"{note}Change is the average's value minus the mean single sample's.", "note")
    if len(metrics) > len(methods):
        rows = [[m, *(_with_error(by_place.get((method, m), {})) for method in methods)] for m in metrics]
        return table(["metric", *(METHODS.get(m, m) for m in methods)], rows, title)
    rows = [[METHODS.get(m, m), *(_with_error(by_place.get((m, metric), {})) for metric in metrics)] for m in methods]
    return table(["method", *metrics], rows, title)


def _beside_the_paper(by_place: dict[tuple[str, str], dict[str, Any]], methods: list[str], metrics: list[str]) -> str:
    """Return the table of the paper's numbers and ours, for the metrics in the paper."""
    header, groups, rows = ["method"], [("", 1)], [[METHODS.get(m, m)] for m in methods]
    for metric in metrics:
        known = any(is_finite(by_place.get((m, metric), {}).get("paper")) for m in methods)
        header += ["ours", "paper"] if known else ["ours"]
        groups.append((metric, 2 if known else 1))
        for row, method in zip(rows, methods, strict=True):
            found = by_place.get((method, metric), {})
            row.append(_with_error(found))
            if known:
                row.append(_with_error(found, "paper"))
    return table(header, rows, "Results and the paper's", groups)


def _with_error(row: dict[str, Any], name: str = "value") -> str:
    value, error = row.get(name), row.get("error" if name == "value" else f"{name}_error")
    if value is None:
        return number(None)
    return number(float(value)) + (f" ± {number(float(error))}" if error is not None else "")


def _has_errors(rows: list[dict[str, Any]]) -> bool:
    return any(row.get("error") is not None for row in rows)


def _change(metric: str, single: dict[str, Any], bma: dict[str, Any]) -> Any:
    if not (is_finite(single.get("value")) and is_finite(bma.get("value"))):
        return None
    change = float(bma["value"]) - float(single["value"])
    text = f"{change:+.4f}".replace("-", "−")
    direction = 1 if metric.endswith(HIGHER_IS_BETTER) else -1 if metric.endswith(LOWER_IS_BETTER) else 0
    if direction == 0 or abs(change) < 5e-5:
        return text
    return Cell(f"{text} better", "good") if change * direction > 0 else Cell(f"{text} worse", "bad")
