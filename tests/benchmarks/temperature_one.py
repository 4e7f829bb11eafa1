"""Sampling at temperature 1, cold samples, ensembles and dropout in decisions that need joint uncertainty.

    python -m tests.benchmarks.temperature_one --root DIR --out FILE [--seeds 5] [--tasks labels,mushrooms] [--keep DIR]

Every method makes the same number of gradients in a task of `decision_tasks`, each counted by example. A cell is the
ensemble's mean over seeds, and for the others the mean difference to it with Student's 95 % interval of the paired
seeds. `--keep` stores every fit's figures, so that several processes may share the work.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from lightning_sgmcmc.recipes.equal_cost.settings import Settings
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.pages import table_of
from lightning_sgmcmc.recipes.shared.settings import read_settings
from tests.benchmarks.decision_tasks import ENSEMBLE, ROWS, Figures, Task, tasks
from tests.benchmarks.timing import measure_quietly

LABELS = {"auto": "`AutoSampling`", "both": '`AutoSampling("both")`'}
DIGITS = {"regret": 0, "distance to the posterior": 2, "seconds": 1}
"""Digits after the point where they are not one."""
CHOSEN, AT_RANDOM = "mean error, BatchBALD", "mean error, random"
Found = dict[str, dict[str, list[Figures]]]
"""By task and row: the figures of each seed."""


def kept(name: str, row: str, seed: int, task: Task, settings: Settings, root: Path, folder: Path | None) -> Figures:
    """Return a task's figures, from a file if there is one."""
    file = None if folder is None else folder / f"{name} {row} {seed}.json"
    if file is not None and file.is_file():
        loaded: Figures = json.loads(file.read_text())
        return loaded
    found = {name: round(value, 4) for name, value in task(row, seed, settings, root).items()}
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    return found


def difference(own: Sequence[float], reference: Sequence[float], digits: int) -> str:
    """Return the mean difference with Student's 95 % interval over the pairs."""
    pairs = np.subtract(own, reference)
    mean = float(pairs.mean())
    text = f"{mean:+.{digits}f}"
    if len(pairs) > 1:
        half = float(stats.t.ppf(0.975, len(pairs) - 1) * pairs.std(ddof=1) / math.sqrt(len(pairs)))
        text += f" [{mean - half:+.{digits}f}, {mean + half:+.{digits}f}]"
    return text.replace("-", "−")


def rows_of(found: Found) -> list[list[str]]:
    """Return the table's rows: a task's figures, and its seconds of a fit."""
    table = []
    for task, by_row in found.items():
        for figure in by_row[ENSEMBLE][0]:
            values = {row: [one[figure] for one in of if figure in one] for row, of in by_row.items()}
            digits, reference = DIGITS.get(figure, 1), values[ENSEMBLE]
            cells = []
            for row in ROWS:
                own = values.get(row)
                if not own:
                    cells.append("")
                elif row == ENSEMBLE or figure == "seconds":
                    cells.append(f"{np.mean(own):.{digits}f}")
                else:
                    cells.append(difference(own, reference, digits))
            table.append([task, figure, *cells])
        if CHOSEN in by_row[ENSEMBLE][0]:
            own = {row: [one.get(CHOSEN) for one in of] for row, of in by_row.items()}
            at_random = {row: [one[AT_RANDOM] for one in of] for row, of in by_row.items()}
            cells = [difference(own[row], at_random[row], 1) if None not in own[row] else "" for row in ROWS]
            table.append([task, "BatchBALD less random, of each", *cells])
    return table


def main() -> None:
    """Print the table, and write it with every seed's figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", default="", help="beginnings of the tasks' names; all without it")
    parser.add_argument("--keep", type=Path)
    chosen = parser.parse_args()
    measure_quietly()
    settings = read_settings(Settings, Options(out=chosen.root, data_root=chosen.root, full=True))
    found: Found = {}
    for name, (rows, task) in tasks().items():
        if not name.startswith(tuple(chosen.tasks.split(","))):
            continue
        found[name] = {
            row: [kept(name, row, seed, task, settings, chosen.root, chosen.keep) for seed in range(chosen.seeds)]
            for row in rows
        }
    header = ["task", "figure", *(LABELS.get(row, row) for row in ROWS)]
    table = rows_of(found)
    print(table_of(header, table))
    if chosen.out is not None:
        content: Mapping[str, Any] = {
            "title": "Decisions at equal cost",
            "command": f"python -m tests.benchmarks.temperature_one --root DIR --out FILE --seeds {chosen.seeds}",
            "n": f"{chosen.seeds} seeds",
            "date": date.today().isoformat(),
            "header": header,
            "rows": table,
            "values": found,
        }
        chosen.out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
