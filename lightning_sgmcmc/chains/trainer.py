"""Typed access to what Lightning leaves untyped: the trainer, example inputs, callbacks, loggers, folders."""

import math
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_sgmcmc.chains.callback import Place, RunCallback
from lightning_sgmcmc.chains.chains import Chains, chains_of
from lightning_sgmcmc.chains.layout import layout_of
from lightning_sgmcmc.files import MASK, is_remote, is_secret, text_without_secrets, without_scheme
from lightning_sgmcmc.namespace import pl, rank_zero_warn
from lightning_sgmcmc.plain import markdown_table

GradientAccumulationScheduler = pl.callbacks.GradientAccumulationScheduler
LearningRateMonitor = pl.callbacks.LearningRateMonitor
save_hparams_to_yaml = pl.core.saving.save_hparams_to_yaml
TensorBoardLogger = pl.loggers.TensorBoardLogger
_MultiProcessingLauncher = pl.strategies.launchers.multiprocessing._MultiProcessingLauncher

Kind = TypeVar("Kind")


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return the trainer's callbacks, in their order."""
    return cast("list[pl.Callback]", cast(Any, trainer).callbacks)


def instances_of(trainer: pl.Trainer, kind: type[Kind]) -> list[Kind]:
    """Return the trainer's callbacks of a class, in their order; a mock of one, which answers anything, is none."""
    return [cast(Kind, callback) for callback in callbacks_of(trainer) if issubclass(type(callback), kind)]


def declared(trainer: pl.Trainer) -> list[RunCallback]:
    """Return the trainer's callbacks that declare what they are, in their order."""
    return instances_of(trainer, RunCallback)


def log_interval(trainer: pl.Trainer) -> int:
    """Return `log_every_n_steps`; with 0 nothing is logged, and the interval is longer than any run."""
    return int(cast(Any, trainer).log_every_n_steps) or sys.maxsize


def is_trial(trainer: pl.Trainer) -> bool:
    """Return whether this is a `fast_dev_run`, which writes no files."""
    return bool(cast(Any, trainer).fast_dev_run)


def is_probe(trainer: pl.Trainer) -> bool:
    """Return whether this is a short fit of a tuner."""
    return any(callback.is_probe for callback in declared(trainer))


def fit_steps(trainer: pl.Trainer) -> float:
    """Return the optimizer steps of the present fit, infinite if unknown; the trainer may have made others before."""
    return total_steps(trainer) - chains_of(trainer.lightning_module).progress.steps_before


def total_steps(trainer: pl.Trainer) -> float:
    """Return the optimizer steps of all the trainer's epochs, infinite if unknown."""
    steps: float = trainer.estimated_stepping_batches
    if steps < 0:  # epochs of a loader without length
        return math.inf
    batches, epochs = float(trainer.num_training_batches), trainer.max_epochs
    for scheduler in instances_of(trainer, GradientAccumulationScheduler):  # Lightning counts by the present number
        if math.isfinite(batches) and epochs is not None and epochs > 0:
            counts = map(scheduler.get_accumulate_grad_batches, range(epochs))
            steps = sum(math.ceil(batches / count) for count in counts)
            steps = min(steps, trainer.max_steps) if trainer.max_steps >= 0 else steps
    return steps


def is_finished(trainer: pl.Trainer) -> bool:
    """Return, from `configure_optimizers` on, whether a fit without a checkpoint has reached its limit already."""
    by_steps = 0 <= trainer.max_steps <= trainer.global_step
    epochs = trainer.max_epochs
    processed: int = cast(Any, trainer.fit_loop.epoch_progress.current).processed
    by_epochs = epochs is not None and 0 <= epochs <= processed
    return not trainer.ckpt_path and (by_steps or by_epochs)


def repeated_batches(trainer: pl.Trainer) -> float:
    """Return `overfit_batches`."""
    return float(cast(Any, trainer).overfit_batches)


def was_terminated(trainer: pl.Trainer) -> bool:
    """Return whether the trainer has received SIGTERM."""
    return bool(cast(Any, trainer).received_sigterm)


def resume_command(trainer: pl.Trainer) -> str | None:
    """Return the shell's command that continues the run, None for a run that Python code has started."""
    command = getattr(trainer, "resume_command", None)
    return None if command is None else str(command)


def pass_on(trainer: pl.Trainer, exception: BaseException) -> None:
    """Pass Ctrl-C on to the ranks that a fork or spawn launcher has started from this process, which waits for them."""
    launcher: Any = trainer.strategy.launcher
    if isinstance(exception, KeyboardInterrupt) and isinstance(launcher, _MultiProcessingLauncher):
        launcher.kill(signal.SIGINT)


# -- example input -----------------------------------------------------------------------------------------------------


def is_example(module: pl.LightningModule, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether a call's inputs are the module's `example_input_array`, as it is or moved as a batch is."""
    example = module.example_input_array
    if example is None:
        return False
    private = cast(Any, module)
    moved = private._apply_batch_transfer_handler(private._on_before_batch_transfer(example))
    return any(_equal((arguments, named), _call_of(one)) for one in (example, moved))


def leave_out_graph(loggers: Iterable[Any]) -> None:
    """Let TensorBoard draw no graph of a module with several chains, which torch cannot trace, and say so."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger) and logger._log_graph:
            logger._log_graph = False
            rank_zero_warn(
                "TensorBoardLogger(log_graph=True) draws one network's graph, and this module holds several chains, so "
                "the graph is left out: draw it of a module with num_chains=1."
            )


def _call_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which Lightning calls a module for its example."""
    if isinstance(example, dict):
        return (), example
    return (tuple(example) if isinstance(example, list | tuple) else (example,)), {}


def _equal(one: Any, other: Any) -> bool:
    """Return whether two collections hold equal tensors."""
    ours, theirs = tree_flatten(one), tree_flatten(other)
    if ours[1] != theirs[1]:
        return False
    return all(
        a.shape == b.shape and torch.equal(a, b.to(a)) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b
        for a, b in zip(ours[0], theirs[0], strict=True)
    )


# -- places ------------------------------------------------------------------------------------------------------------


def put_in_place(trainer: pl.Trainer) -> None:
    """Sort the trainer's callbacks that have a place, among the positions of its list that they take.

    Lightning's monitor of the step size reads what the schedule has set.
    """
    places = {id(callback): callback.place for callback in declared(trainer) if callback.place is not None}
    places |= {id(monitor): Place.DIAGNOSIS for monitor in instances_of(trainer, LearningRateMonitor)}
    callbacks = callbacks_of(trainer)
    positions = [index for index, callback in enumerate(callbacks) if id(callback) in places]
    placed = sorted((callbacks[index] for index in positions), key=lambda c: (places[id(c)], type(c).__name__))
    for index, callback in zip(positions, placed, strict=True):
        callbacks[index] = callback


# -- baseline ----------------------------------------------------------------------------------------------------------


def baseline_of(trainer: pl.Trainer) -> str | None:
    """Return the name of the baseline that a run is, such as "deep ensemble" or "SWAG"; None for a run that samples."""
    # A callback that makes several networks of each of the schedule's names the run: "MC dropout ensemble".
    several = layout_of(trainer, chains_of(trainer.lightning_module).num_chains).total_chains > 1
    schedule = next((callback for callback in declared(trainer) if callback.as_schedule() is not None), None)
    if schedule is None or schedule.kinds is None:
        return None
    outer = next((c.kinds for c in declared(trainer) if c.kinds and c.as_schedule() is None), schedule.kinds)
    return outer[several]


# -- folder ------------------------------------------------------------------------------------------------------------


EVALUATIONS: "WeakKeyDictionary[pl.Trainer, tuple[Path, Path]]" = WeakKeyDictionary()
"""Of trainers that evaluate another run's samples: their folder, and the samples."""
_STARTED_IN: "WeakKeyDictionary[pl.Trainer, Path]" = WeakKeyDictionary()
"""The working folders in which trainers began to run, to which relative paths refer."""
OF_A_TRAINER = ("_default_root_dir",)
OF_A_LOGGER = ("_root_dir", "_save_dir")
OF_AN_EXPERIMENT = ("log_dir", "metrics_file_path")
"""Attributes of Lightning's objects that may be relative paths; its checkpoint callbacks' `dirpath` follows them."""


def settle_folders(trainer: pl.Trainer) -> None:
    """Make a trainer's relative folders absolute, so that `os.chdir` changes nothing, and warn of a remote one."""
    _STARTED_IN[trainer] = Path.cwd()
    _make_absolute(vars(trainer), OF_A_TRAINER)
    for logger in trainer.loggers:
        _make_absolute(vars(logger), OF_A_LOGGER)
        _make_absolute(vars(logger).get("_wandb_init"), ("dir",))
        _make_absolute(getattr(vars(logger).get("_experiment"), "__dict__", None), OF_AN_EXPERIMENT)
    for callback in trainer.checkpoint_callbacks:
        _make_absolute(vars(callback), ("dirpath",))
    remote = remote_root(trainer)
    if remote is not None and not is_trial(trainer):
        rank_zero_warn(
            f"The run's folder is in {remote}, not on a local disk. Checkpoints and the logger's own files go there; "
            f"samples, results and pictures are written below {_STARTED_IN[trainer] / 'sgmcmc'}: copy them afterwards, "
            "or pass a local default_root_dir or save_dir."
        )


def _make_absolute(attributes: dict[str, Any] | None, names: tuple[str, ...]) -> None:
    if attributes is None:
        return
    for name in names:
        value = attributes.get(name)
        local = without_scheme(str(value))
        if isinstance(value, str | Path) and local[:1] not in ("", "~", "$") and not is_remote(local):
            attributes[name] = type(value)(os.path.abspath(local))


def remote_root(trainer: pl.Trainer) -> str | None:
    """Return the address of the folder of this trainer's runs if it is not on a local disk (`s3://…`), else None."""
    folder = next((logger.save_dir for logger in trainer.loggers[:1]), None) or trainer.default_root_dir
    return str(folder) if is_remote(folder) else None


def _folder_of(trainer: pl.Trainer) -> str:
    for logger in trainer.loggers[:1]:
        own = getattr(logger, "log_dir", None)  # of loggers with a folder for each run, such as TensorBoard's
        if isinstance(own, str | Path):
            return str(own)
        parts = [str(part) for part in (logger.name, logger.version) if part]
        return os.path.join(str(logger.save_dir or trainer.default_root_dir), *parts)
    return os.path.join(trainer.default_root_dir, "sgmcmc")


def run_folder(trainer: pl.Trainer) -> Path:
    """Return the folder of this run, absolute and the same on all ranks: the first logger's, else `sgmcmc`.

    For a run whose folder is not on a local disk (`s3://bucket/run`) it is `sgmcmc/bucket/run`.
    """
    if trainer in EVALUATIONS:
        return Path(trainer.strategy.broadcast(str(EVALUATIONS[trainer][0])))
    folder = without_scheme(_folder_of(trainer))
    if is_remote(folder):
        parts = folder.partition("://")[2].replace("..", "").split("/")
        folder = os.path.join("sgmcmc", *(part for part in parts if part))
    return Path(trainer.strategy.broadcast(os.path.join(_STARTED_IN.get(trainer) or Path.cwd(), folder)))


# -- loggers -----------------------------------------------------------------------------------------------------------


def is_logged(trainer: pl.Trainer, chains: Chains, step_count: int) -> bool:
    """Return whether `trainer.log_every_n_steps` logs the step just made, number `step_count`."""
    return not chains.accumulation.accumulating and step_count % log_interval(trainer) == 0


def log_scalars(trainer: pl.Trainer, scalars: Mapping[str, float], step: int) -> None:
    """Write numbers to every logger."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(scalars), step=step)


def log_cost(trainer: pl.Trainer, chains: Chains) -> None:
    """Write the per-datum gradients that each chain has computed, and that number divided by N, to every logger."""
    evaluations = chains.counters.gradient_evaluations
    scalars = {
        "sampler/gradient_evaluations": float(evaluations),
        "sampler/data_passes": evaluations / chains.observed.num_data,
    }
    log_scalars(trainer, scalars, trainer.global_step)


def log_values(trainer: pl.Trainer, part: str, known: Mapping[str, Any]) -> None:
    """Write values that a run has found to every logger, as hyperparameters `part.…`, beside the user's own."""
    if not trainer.enable_autolog_hparams:
        return
    texts = {name: text_without_secrets(value) if isinstance(value, str) else value for name, value in known.items()}
    known = {name: MASK if is_secret(name) and isinstance(value, str) else value for name, value in texts.items()}
    values = {f"{part}.{name}": value for name, value in known.items()}
    for logger in trainer.loggers:
        if not isinstance(logger, TensorBoardLogger):
            fixed: Mapping[str, Any] = {}
            if isinstance(logger, pl.loggers.MLFlowLogger) and trainer.is_global_zero:  # a run that is continued
                fixed = logger.experiment.get_run(logger.run_id).data.params
            logger.log_hyperparams({name: value for name, value in values.items() if name not in fixed})
            continue
        if logger.hparams:  # TensorBoard keeps a run's first ones
            logger.hparams.update(values)
        else:
            logger.log_hyperparams(values)
        if trainer.is_global_zero:  # as text, and in `hparams.yaml`
            rows = [[name, str(value)] for name, value in known.items()]
            logger.experiment.add_text(part, markdown_table(["setting", "value"], rows))
            save_hparams_to_yaml(os.path.join(logger.log_dir, logger.NAME_HPARAMS_FILE), logger.hparams)
