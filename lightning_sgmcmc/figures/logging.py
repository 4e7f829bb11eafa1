"""Figures, histograms and tables of a run: in its loggers, its notebook and its folder."""

import csv
import io
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from lightning_sgmcmc.figures.canvas import save_figure, styled
from lightning_sgmcmc.figures.evaluation import histogram, histogram_figure
from lightning_sgmcmc.files import write_output
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.plain import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MLFlowLogger = pl.loggers.MLFlowLogger
TensorBoardLogger = pl.loggers.TensorBoardLogger
WandbLogger = pl.loggers.WandbLogger


Cell = str | float | int | None
DPI = 150


def log_figure(
    trainer: pl.Trainer, name: str, figure: "Figure", step: int, folder: Path | None, for_print: bool = False
) -> None:
    """Write a figure to the loggers that accept pictures, and as a PNG in a folder; in a notebook, show it."""
    if not trainer.is_global_zero:
        return
    png = io.BytesIO()
    with styled():
        figure.savefig(png, format="png", dpi=DPI)

    def add(writer: Any) -> None:
        writer.add_image(name, np.asarray(_pixels(png)), step, dataformats="HWC")

    _send(trainer, name, step, lambda wandb: wandb.Image(_pixels(png)), add, _image_to_mlflow(name, png, step))
    show_inline(trainer, name, png.getvalue())
    if folder is not None:
        write_output(folder / f"{_stem(name)}.png", png.getvalue())
        if for_print:
            save_figure(figure, folder / f"{_stem(name)}.png")


def log_histogram(
    trainer: pl.Trainer, name: str, values: Sequence[float], label: str, step: int, folder: Path | None
) -> None:
    """Write a histogram to the loggers that accept them, and as a PNG file; non-finite numbers are left out."""
    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    if not trainer.is_global_zero or finite.size == 0:
        return

    def made(wandb: Any) -> Any:
        return wandb.Histogram(np_histogram=histogram(finite.tolist()))

    png = io.BytesIO()
    if folder is not None or any(isinstance(logger, MLFlowLogger) for logger in trainer.loggers):
        histogram_figure(finite.tolist(), label).savefig(png, format="png", dpi=DPI)
    stored = _image_to_mlflow(name, png, step)
    _send(trainer, name, step, made, lambda writer: writer.add_histogram(name, finite, step), stored)
    if folder is not None:
        write_output(folder / f"{_stem(name)}.png", png.getvalue())


def log_table(
    trainer: pl.Trainer,
    name: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    step: int,
    folder: Path | None,
) -> None:
    """Write a table to the loggers that accept them, and as a CSV file; a non-finite number is an empty cell."""
    if not trainer.is_global_zero:
        return
    rows = [[_cell(cell) for cell in row] for row in rows]

    def made(wandb: Any) -> Any:
        return wandb.Table(columns=list(columns), data=rows, allow_mixed_types=True)

    text = [[_text(cell) for cell in row] for row in rows]
    content = io.StringIO(newline="")
    inert = [[_inert(cell) for cell in row] for row in (columns, *rows)]
    csv.writer(content, lineterminator="\n").writerows(inert)

    def add(writer: Any) -> None:
        writer.add_text(name, markdown_table(columns, text), step)

    _send(trainer, name, step, made, add, lambda client, run: client.log_text(run, content.getvalue(), f"{name}.csv"))
    if folder is not None:
        write_output(folder / f"{_stem(name)}.csv", content.getvalue().encode())


def _inert(cell: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula, as names of metrics that begin with "=" are."""
    if not isinstance(cell, str):
        return cell
    line = " ".join(cell.split())
    return f"'{line}" if line.startswith(("=", "+", "-", "@")) else line


def _send(
    trainer: pl.Trainer,
    name: str,
    step: int,
    made: Callable[[Any], Any],
    add: Callable[[Any], None],
    store: Callable[[Any, str], None],
) -> None:
    """Send W&B what a function makes of its module, let another add it by TensorBoard's writer, and a third store it by
    MLflow's client in a run."""
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            objects: dict[str, Any] = {name: made(wandb)}  # more than the numbers that Lightning declares
            logger.log_metrics(objects, step=step)
        elif isinstance(logger, TensorBoardLogger):
            add(logger.experiment)
        elif isinstance(logger, MLFlowLogger):
            client = logger.experiment  # begins the run
            store(client, str(logger.run_id))


def _image_to_mlflow(name: str, png: io.BytesIO, step: int) -> Callable[[Any, str], None]:
    return lambda client, run: client.log_image(run, _pixels(png), key=name, step=step)


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


# -- notebook ----------------------------------------------------------------------------------------------------------


_shown: "WeakKeyDictionary[pl.Trainer, set[str]]" = WeakKeyDictionary()
"""Names of the figures that each trainer's run has in the notebook."""


def in_notebook() -> bool:
    """Return whether the process is a notebook's kernel; IPython in a terminal is none."""
    get_ipython: Any = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and hasattr(get_ipython(), "kernel")


def show_inline(trainer: pl.Trainer, name: str, png: bytes) -> None:
    """Show a picture below the notebook's cell, in place of the run's earlier one of the same name."""
    if not in_notebook():
        return
    from IPython.display import Image, display, update_display  # type: ignore[import-not-found,unused-ignore]

    shown = _shown.setdefault(trainer, set())
    show = update_display if name in shown else display
    show(Image(data=png), display_id=f"{id(trainer)}/{name}")
    shown.add(name)
