"""The results of a recipe: `results.json`, and `table.md` with our figures next to the paper's."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_sgmcmc.run import results as run_results
from lightning_sgmcmc.run.origin import origin_of_run


@dataclass(frozen=True)
class Options:
    """The options of a recipe.

    Attributes:
        out: the run's folder.
        data_root: folder of the data sets.
        full: the paper's setting instead of a quick one.
        seed: seed of the run; repeats use the seeds after it.
    """

    out: Path
    data_root: Path
    full: bool = False
    seed: int = 0

    @property
    def scale(self) -> str:
        """The setting's name in `results.json`."""
        return "full" if self.full else "quick"


@dataclass(frozen=True)
class Row:
    """One figure: its value, its standard error over repeats, and the paper's value if there is one."""

    method: str
    metric: str
    value: float
    error: float | None = None
    paper: float | None = None
    paper_error: float | None = None


def mean_row(method: str, metric: str, values: Sequence[float], paper: float | None = None) -> Row:
    """Return the mean over repeats and its standard error (None for one repeat)."""
    count = len(values)
    mean = sum(values) / count
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (count - 1) / count) if count > 1 else None
    return Row(method, metric, mean, error, paper)


def write_results(recipe: str, options: Options, rows: Sequence[Row], seconds: float) -> None:
    """Write `results.json` and `table.md` into the run's folder."""
    results = {
        "recipe": recipe,
        "scale": options.scale,
        "seed": options.seed,
        "rows": [asdict(row) for row in rows],
        "seconds": round(seconds, 1),
        "origin": origin_of_run(),
    }
    run_results.write_results(options.out, results, markdown(rows))


def markdown(rows: Sequence[Row]) -> str:
    """Return the table: a line for each figure."""
    figures = [(_with_error(row.value, row.error), _with_error(row.paper, row.paper_error)) for row in rows]
    return run_results.markdown_table(
        ["method", "metric", "ours", "paper"],
        [[row.method, row.metric, *both] for row, both in zip(rows, figures, strict=True)],
    )


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"
