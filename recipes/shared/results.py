"""The results of a recipe: `results.json`, and `table.md` with our figures next to the paper's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_sgmcmc.fit import results as run_results
from lightning_sgmcmc.fit.results import origin_of_run
from lightning_sgmcmc.plain import markdown_table
from lightning_sgmcmc.process import usable_cores
from lightning_sgmcmc.recipes.shared.options import Options

SCHEMA = 2
"""Version of the form of `results.json`."""


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        method, metric: what it is of.
        value: the mean over repeats.
        error: its standard error, None for a single value.
        paper: the paper's value, if there is one.
        paper_error: what the paper writes after ±.
        values: that of each repeat, empty if the figure is not a mean.
    """

    method: str
    metric: str
    value: float
    error: float | None = None
    paper: float | None = None
    paper_error: float | None = None
    values: tuple[float, ...] = ()


def mean_row(
    method: str, metric: str, values: Sequence[float], paper: float | None = None, paper_error: float | None = None
) -> Row:
    """Return the mean over repeats and its standard error (None for one repeat).

    Args:
        method, metric: what the values are of.
        values: that of each repeat, at least one.
        paper, paper_error: the paper's value, and what it writes after ±.
    """
    count = len(values)
    mean = sum(values) / count
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (count - 1) / count) if count > 1 else None
    return Row(method, metric, mean, error, paper, paper_error, tuple(map(float, values)))


def write_results(
    recipe: str,
    options: Options,
    rows: Sequence[Row],
    seconds: float,
    settings: Mapping[str, Any] | None = None,
    work: float | None = None,
    data: Mapping[str, str] | None = None,
) -> None:
    """Write `results.json` and `table.md` into the run's folder.

    Args:
        recipe: its name.
        options: the recipe's options.
        rows: the table.
        seconds: processor time of the jobs, over all attempts.
        settings: the values of the setting.
        work: what the time of a setting is proportional to, in a unit of the recipe's own.
        data: a checksum of each data set.
    """
    results = {
        "schema": SCHEMA,
        "recipe": recipe,
        "scale": options.scale,
        "seed": options.seed,
        "settings": dict(settings or {}),
        "error": "standard error of the mean over repeats",
        "rows": [_plain(row) for row in rows],
        "seconds": round(seconds, 1),
        "work": work,
        "data": dict(data or {}),
        "hardware": hardware(),
        "origin": origin_of_run(),
    }
    run_results.write_results(options.out, results, markdown(rows))


def hardware() -> dict[str, Any]:
    """Return the number of this machine's cores that may be used, the vector instructions that torch uses on them
    ("AVX2"), which tell slow machines from fast ones, and the name of its GPU, None without one."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cores": usable_cores(), "instructions": torch.backends.cpu.get_cpu_capability(), "gpu": gpu}


def _plain(row: Row) -> dict[str, Any]:
    return asdict(row) | {"values": list(row.values), "n": len(row.values) or None}


def markdown(rows: Sequence[Row]) -> str:
    """Return the table: a line for each figure."""
    figures = [(_with_error(row.value, row.error), _with_error(row.paper, row.paper_error)) for row in rows]
    return markdown_table(
        ["method", "metric", "ours", "paper"],
        [[row.method, row.metric, *both] for row, both in zip(rows, figures, strict=True)],
    )


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"
