"""Output of a run to its loggers and folder: numbers, figures, histograms, tables."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytorch_lightning as pl
from pytorch_lightning.loggers import TensorBoardLogger, WandbLogger

from lightning_sgmcmc import figures
from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.files import write_output
from lightning_sgmcmc.run.notebook import show_inline
from lightning_sgmcmc.run.results import markdown_table
from lightning_sgmcmc.run.trainer import log_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Cell = str | float | int | None
DPI = 150


def is_logged(trainer: pl.Trainer, chains: Chains, step_count: int) -> bool:
    """Return whether `trainer.log_every_n_steps` logs the step just made, number `step_count`."""
    return not chains.accumulation.accumulating and step_count % log_interval(trainer) == 0


def log_scalars(trainer: pl.Trainer, scalars: Mapping[str, float], step: int) -> None:
    """Write numbers to every logger.

    Args:
        trainer: the run's.
        scalars: the numbers by name.
        step: the trainer's global step.
    """
    for logger in trainer.loggers:
        logger.log_metrics(dict(scalars), step=step)


def log_cost(trainer: pl.Trainer, chains: Chains) -> None:
    """Write the cost of the run to every logger.

    `sampler/gradient_evaluations` counts the per-datum gradients that each chain has computed;
    `sampler/data_passes` is that number divided by N.
    """
    evaluations = chains.counters.gradient_evaluations
    scalars = {
        "sampler/gradient_evaluations": float(evaluations),
        "sampler/data_passes": evaluations / chains.observed.num_data,
    }
    log_scalars(trainer, scalars, trainer.global_step)


def log_figure(
    trainer: pl.Trainer, name: str, figure: "Figure", step: int, folder: Path | None, for_print: bool = False
) -> None:
    """Write a figure to the loggers that accept pictures, and as a PNG file; in a notebook, show it.

    Args:
        trainer: the run's; only rank zero writes.
        name: a name such as "posterior/energy"; the part after the slash names the file.
        figure: a matplotlib figure.
        step: the trainer's global step.
        folder: folder of the file; None writes no file.
        for_print: whether the file has 300 dots per inch, with a PDF beside it.
    """
    if not trainer.is_global_zero:
        return
    png = io.BytesIO()
    with figures.styled():
        figure.savefig(png, format="png", dpi=DPI)
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            _log_object(logger, name, wandb.Image(_pixels(png)), step)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(name, np.asarray(_pixels(png)), step, dataformats="HWC")
    show_inline(trainer, name, png.getvalue())
    if folder is not None:
        write_output(folder / f"{_stem(name)}.png", png.getvalue())
        if for_print:
            figures.save_figure(figure, folder / f"{_stem(name)}.png")


def log_histogram(
    trainer: pl.Trainer, name: str, values: Sequence[float], label: str, step: int, folder: Path | None
) -> None:
    """Write a histogram to the loggers that accept them, and as a PNG file; non-finite numbers are left out.

    Args:
        trainer, name, step, folder: as in `log_figure`.
        values: the numbers.
        label: the axis label, with the unit.
    """
    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    if not trainer.is_global_zero or finite.size == 0:
        return
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            _log_object(logger, name, wandb.Histogram(np_histogram=figures.histogram(finite.tolist())), step)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(name, finite, step)
    if folder is not None:
        png = io.BytesIO()
        figures.histogram_figure(finite.tolist(), label).savefig(png, format="png", dpi=DPI)
        write_output(folder / f"{_stem(name)}.png", png.getvalue())


def log_table(
    trainer: pl.Trainer,
    name: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    step: int,
    folder: Path | None,
) -> None:
    """Write a table to the loggers that accept them, and as a CSV file; a non-finite number is an empty cell.

    Args:
        trainer, name, step, folder: as in `log_figure`.
        columns: the column names.
        rows: one cell for each column.
    """
    if not trainer.is_global_zero:
        return
    rows = [[_cell(cell) for cell in row] for row in rows]
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            table = wandb.Table(columns=list(columns), data=rows, allow_mixed_types=True)
            _log_object(logger, name, table, step)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(
                name, markdown_table(columns, [[_text(cell) for cell in row] for row in rows]), step
            )
    if folder is not None:
        text = io.StringIO(newline="")
        inert = [[_inert(cell) for cell in row] for row in (columns, *rows)]
        csv.writer(text, lineterminator="\n").writerows(inert)
        write_output(folder / f"{_stem(name)}.csv", text.getvalue().encode())


def _inert(cell: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula, as names of metrics that begin with "=" are."""
    if not isinstance(cell, str):
        return cell
    line = " ".join(cell.split())
    return f"'{line}" if line.startswith(("=", "+", "-", "@")) else line


def _log_object(logger: WandbLogger, name: str, value: Any, step: int) -> None:
    objects: dict[str, Any] = {name: value}  # W&B accepts more than the numbers that Lightning declares
    logger.log_metrics(objects, step=step)


def _pixels(png: io.BytesIO) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(png.getvalue())).convert("RGB")


def _stem(name: str) -> str:
    return name.rpartition("/")[2]


def _cell(cell: Cell) -> Cell:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.6g}"
    return "" if cell is None else str(cell)
