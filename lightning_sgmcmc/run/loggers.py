"""What a run has cost, in gradients of single data."""

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
from lightning_sgmcmc.files import write_atomically
from lightning_sgmcmc.module import BayesianModule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_sgmcmc.module import BayesianModule


def log_cost(trainer: pl.Trainer, module: BayesianModule) -> None:
    """Write `sampler/gradient_evaluations`, the gradients of single data that each chain has taken, and
    `sampler/data_passes`, the same over N, to every logger."""
    state = module.chain_state
    evaluations = state.gradient_evaluations
    scalars = {
        "sampler/gradient_evaluations": float(evaluations),
        "sampler/data_passes": evaluations / state.num_data,
    }
    log_scalars(trainer, scalars, trainer.global_step)


Cell = str | float | int | None
DPI = 120


def is_logged(trainer: pl.Trainer, module: "BayesianModule") -> bool:
    """Return whether the step that has just been made is one of those that `trainer.log_every_n_steps` logs."""
    if module.chain_state.accumulating:
        return False
    return module.sampler.step_count % trainer.log_every_n_steps == 0  # type: ignore[attr-defined, no-any-return]


def log_scalars(trainer: pl.Trainer, scalars: Mapping[str, float], step: int) -> None:
    """Write numbers to every logger.

    Args:
        trainer: the run's.
        scalars: the numbers by name.
        step: the trainer's global step.
    """
    for logger in trainer.loggers:
        logger.log_metrics(dict(scalars), step=step)


def log_figure(trainer: pl.Trainer, name: str, figure: "Figure", step: int, folder: Path | None) -> None:
    """Write a figure to the loggers that take pictures, and as a PNG file.

    Args:
        trainer: the run's; only its rank zero writes.
        name: such as "posterior/energy"; the file is called by the part behind the slash.
        figure: matplotlib's.
        step: the trainer's global step.
        folder: for the file; None writes none.
    """
    if not trainer.is_global_zero:
        return
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=DPI)
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            logger.log_metrics({name: wandb.Image(_pixels(png))}, step=step)  # type: ignore[dict-item]
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(name, np.asarray(_pixels(png)), step, dataformats="HWC")
    if folder is not None:
        write_output(folder / f"{_stem(name)}.png", png.getvalue())


def log_histogram(
    trainer: pl.Trainer, name: str, values: Sequence[float], label: str, step: int, folder: Path | None
) -> None:
    """Write a histogram to the loggers that take them, and as a PNG file; numbers that are not finite are left out.

    Args:
        trainer, name, step, folder: as in `log_figure`.
        values: the numbers.
        label: what they are, with their unit.
    """
    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    if not trainer.is_global_zero or finite.size == 0:
        return
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            logger.log_metrics({name: wandb.Histogram(np_histogram=figures.histogram(finite.tolist()))}, step=step)  # type: ignore[dict-item]
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
    """Write a table to the loggers that take them, and as a CSV file; a number that is not finite is an empty cell.

    Args:
        trainer, name, step, folder: as in `log_figure`.
        columns: their names.
        rows: one cell for each column.
    """
    if not trainer.is_global_zero:
        return
    rows = [[_cell(cell) for cell in row] for row in rows]
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            table = wandb.Table(columns=list(columns), data=rows, allow_mixed_types=True)
            logger.log_metrics({name: table}, step=step)  # type: ignore[dict-item]
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(name, _markdown(columns, rows), step)
    if folder is not None:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows([columns, *rows])
        write_output(folder / f"{_stem(name)}.csv", text.getvalue().encode())


def write_output(path: Path, content: bytes) -> None:
    """Write a file of a run's folder completely or not at all; the folder is made if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content, durable=False)


def _pixels(png: io.BytesIO) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(png.getvalue())).convert("RGB")


def _stem(name: str) -> str:
    return name.rpartition("/")[2]


def _cell(cell: Cell) -> Cell:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    shown = [
        ["" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in r] for r in rows
    ]
    lines = [columns, ["---"] * len(columns), *shown]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.6g}"
    return "" if cell is None else str(cell)
