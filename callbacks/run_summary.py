"""The end of a run: a table and `results.json`."""

import math
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from lightning_sgmcmc.callbacks.base import SamplerCallback, bayesian
from lightning_sgmcmc.callbacks.schedule import is_optimization
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.run.folder import run_folder
from lightning_sgmcmc.run.results import OPTIMIZED, keep_earlier_results, markdown_table, write_results
from lightning_sgmcmc.run.trainer import is_trial

STAGE_NAMES = {"val": "validation data", "test": "test data"}


class RunSummary(SamplerCallback):
    """Prints a table at the end of a fit or test, and writes `results.json` and `table.md` to the run's folder.

    The table compares the mean single sample with the model average; it needs a `BayesianModelAverage`. At temperature
    0 it calls the samples states of an optimization. Results of another stage in the folder are kept: a test renames
    those of the fit to `results-val.json` and `table-val.md`. A `fast_dev_run` writes no files.

    Args:
        name: the run's name in `results.json`.
    """

    def __init__(self, name: str = "run") -> None:
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"name must be a text for results.json, got {name!r}")
        self.name = name
        self._seconds = 0.0
        self._start = time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start = time.monotonic()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seconds = time.monotonic() - self._start
        self._finish(trainer, bayesian(pl_module, self), "val")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(trainer, bayesian(pl_module, self), "test")

    def _finish(self, trainer: pl.Trainer, module: BayesianModule, stage: str) -> None:
        folder = run_folder(trainer)
        evaluation: Evaluation | None = module.evaluations.get(stage)
        if not trainer.is_global_zero or evaluation is None or not evaluation.members:
            return
        rows = _rows(evaluation)
        what = OPTIMIZED if is_optimization(trainer, module) else "posterior samples"
        if not is_trial(trainer):
            self._write_files(folder, module, stage, rows, what)
        worth = evaluation.effective_sample_size
        counted = f"{len(evaluation.members)} {what}" + (f", worth {worth:.1f}," if worth is not None else "")
        _print_table(evaluation, f"{counted} on the {STAGE_NAMES[stage]}", folder)

    def _write_files(
        self, folder: Path, module: BayesianModule, stage: str, rows: list[dict[str, Any]], what: str
    ) -> None:
        results = {
            "recipe": self.name,
            "scale": "run",
            "seed": module.chains.seed,
            "stage": stage,
            "samples": what,
            "rows": rows,
            "seconds": round(self._seconds, 3),
        }
        keep_earlier_results(folder, results)
        write_results(folder, results, _markdown(rows))


def _rows(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return the rows of `results.json`; the error of a mean over single samples is their standard deviation."""
    rows: list[dict[str, Any]] = []
    deviations = evaluation.single_std
    for method, values in (("single", evaluation.single), ("bma", evaluation.bma)):
        for metric, value in values.items():
            error = deviations[metric] if method == "single" and math.isfinite(deviations[metric]) else None
            rows.append(
                {"method": method, "metric": metric, "value": value, "error": error, "paper": None, "paper_error": None}
            )
    worth = evaluation.effective_sample_size
    if worth is not None:
        own = {"method": "bma", "metric": "ess", "value": worth, "error": None, "paper": None, "paper_error": None}
        rows.append(own)
    return rows


def _markdown(rows: list[dict[str, Any]]) -> str:
    columns = ["method", "metric", "value", "error"]
    errors = ["" if row["error"] is None else f"{row['error']:.4f}" for row in rows]
    return markdown_table(
        columns, [[r["method"], r["metric"], f"{r['value']:.4f}", e] for r, e in zip(rows, errors, strict=True)]
    )


def _print_table(evaluation: Evaluation, title: str, folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption=str(folder))
    table.add_column("")
    for column in ("mean single sample", "model average"):
        table.add_column(column, justify="right")
    for metric, value in evaluation.bma.items():
        table.add_row(metric, f"{evaluation.single[metric]:.4f}", f"{value:.4f}")
    Console().print(table)
