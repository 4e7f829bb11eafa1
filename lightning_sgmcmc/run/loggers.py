"""Output of a run to its loggers, notebook and folder: numbers, figures, histograms, tables, settings."""

import csv
import inspect
import io
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.core.saving import save_hparams_to_yaml
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_sgmcmc import figures
from lightning_sgmcmc.chains.chains import Chains, chains_of
from lightning_sgmcmc.files import MASK, is_secret, text_without_secrets, write_output
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.planning import RunPlan
from lightning_sgmcmc.run.results import markdown_table, versions
from lightning_sgmcmc.run.settings import Settings
from lightning_sgmcmc.run.trainer import callbacks_of, log_interval
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.tensors import mean_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


# -- offline -----------------------------------------------------------------------------------------------------------


def stay_offline_without_login(loggers: Iterable[Logger]) -> None:
    """Make W&B loggers record offline if no user is logged in and no mode was chosen.

    It must be called before a logger's experiment starts, since W&B would ask for a login then.
    """
    undecided = [
        logger
        for logger in loggers
        if isinstance(logger, WandbLogger)
        and logger._experiment is None
        and not logger._offline
        and logger._wandb_init.get("mode") is None
    ]
    if undecided and not os.environ.get("WANDB_MODE") and not _logged_in():
        for logger in undecided:
            logger._wandb_init["mode"] = "offline"  # W&B reads WANDB_MODE before it prompts for a login
        rank_zero_info(
            "No user is logged in to W&B, so this run is recorded offline: `wandb sync` uploads it later, and "
            "`wandb login` records the next run online."
        )


def _logged_in() -> bool:
    """Return whether W&B has credentials, without a prompt and without the network."""
    import wandb

    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False, verify=False))
    return wandb.api.api_key is not None


# -- hyperparameters ---------------------------------------------------------------------------------------------------


def log_settings(trainer: pl.Trainer, model: EnergyModel, settings: Settings) -> None:
    """Write a run's settings to every logger, as `run.…`, once its sampler, N and seed are known."""
    if trainer.loggers:
        log_values(trainer, "run", hyperparameters_of(trainer, model, settings))


def log_plan(trainer: pl.Trainer, plan: RunPlan) -> None:
    """Write a run's plan to every logger: its kind and its known numbers, as `plan.…`."""
    log_values(trainer, "plan", {"kind": plan.name or "unknown", **plan.scalars()})


def log_values(trainer: pl.Trainer, part: str, known: Mapping[str, Any]) -> None:
    """Write values that a run has found to every logger, as hyperparameters `part.…`, beside the user's own.

    `Trainer(enable_autolog_hparams=False)` writes none.
    """
    if not trainer.enable_autolog_hparams:
        return
    known = _without_secrets(known)
    values = {f"{part}.{name}": value for name, value in known.items()}
    for logger in trainer.loggers:
        if not isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(values)
            continue
        if logger.hparams:  # TensorBoard keeps a run's first ones
            logger.hparams.update(values)
        else:
            logger.log_hyperparams(values)
        if trainer.is_global_zero:
            _show_in_tensorboard(logger, part, known)


def hyperparameters_of(trainer: pl.Trainer, model: EnergyModel, settings: Settings) -> dict[str, Any]:
    """Return what determines a run's draws, by name: its settings (`sampler.friction`, `schedule.num_cycles`, …), the
    module's own arguments, the number of chains and of sampled parameters, the trainer's options, and versions."""
    chains = chains_of(model)
    plain = {k: v for k, v in model.recorded_arguments().items() if isinstance(v, str | int | float | bool)}
    known = {name: value for name, value in settings.items() if name != "data"}
    return {
        "model": type(model).__name__,
        **plain,
        **known,
        "num_chains": chains.layout.total_chains,
        "num_parameters": sum(p.numel() for p in chains.trainable.values()) // chains.num_chains,
        "callbacks": ", ".join(type(callback).__name__ for callback in callbacks_of(trainer)),
        "batch_size": getattr(trainer.train_dataloader, "batch_size", None),
        "precision": str(trainer.precision),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "max_steps": trainer.estimated_stepping_batches,
        **{f"version.{name}": found or "unknown" for name, found in versions().items()},
    }


def _without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: text_without_secrets(value) if isinstance(value, str) else value for name, value in values.items()}
    return {name: MASK if is_secret(name) and isinstance(value, str) else value for name, value in texts.items()}


def _show_in_tensorboard(logger: TensorBoardLogger, part: str, known: Mapping[str, Any]) -> None:
    """Show values as text, and write them to `hparams.yaml`."""
    rows = [[name, str(value)] for name, value in known.items()]
    logger.experiment.add_text(part, markdown_table(["setting", "value"], rows))
    save_hparams_to_yaml(os.path.join(logger.log_dir, logger.NAME_HPARAMS_FILE), logger.hparams)


# -- loggers -----------------------------------------------------------------------------------------------------------


Cell = str | float | int | None
DPI = 150


def is_logged(trainer: pl.Trainer, chains: Chains, step_count: int) -> bool:
    """Return whether `trainer.log_every_n_steps` logs the step just made, number `step_count`."""
    return not chains.accumulation.accumulating and step_count % log_interval(trainer) == 0


def log_scalars(trainer: pl.Trainer, scalars: Mapping[str, float], step: int) -> None:
    """Write numbers to every logger."""
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
        folder: folder of the file; None writes no file.
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
    """Write a table to the loggers that accept them, and as a CSV file; a non-finite number is an empty cell."""
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


# -- traces ------------------------------------------------------------------------------------------------------------


TRACED_WEIGHTS = 4


def traced_weights(module: nn.Module) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """Return, by name, up to four tensors and an index in each, spread over the network, the same in every run."""
    tensors = [(name, p) for name, p in module.named_parameters() if p.requires_grad and p.numel()]
    count = min(TRACED_WEIGHTS, len(tensors))
    traced: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
    for turn in range(count):
        name, tensor = tensors[round(turn * (len(tensors) - 1) / max(count - 1, 1))]
        place = derive_seed(0, "trace", name) % tensor.numel()
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), tensor.shape))
        traced[f"{name}[{', '.join(map(str, index))}]"] = (tensor, index)
    return traced


def named_step_sizes(sampler: Sampler) -> dict[str, float]:
    """Return the step sizes by name pattern as scalars, none if all parameters have one."""
    return {f"sampler/lr/{group['name']}": mean_of(group["lr"]) for group in sampler.param_groups if "name" in group}
