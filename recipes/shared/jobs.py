"""Many runs of a recipe, with a silent trainer: side by side on a CPU's cores, or one after the other on a GPU."""

import functools
import logging
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_sgmcmc.recipes.shared.results import Options

if TYPE_CHECKING:
    import pytorch_lightning as pl


Job = TypeVar("Job")


def run_jobs(
    function: Callable[..., Any], jobs: Sequence[Job], options: Options, *shared: Any, in_turn: bool
) -> dict[Job, Any]:
    """Return what `function(*job, *shared, options)` returns, by job.

    Args:
        function: a function at the top level of a module, because other processes import it by its name.
        jobs: tuples of arguments; the longest ones should come first.
        options: the recipe's options.
        shared: arguments that all jobs have.
        in_turn: run one after the other in this process, for a single device; otherwise as many at a time as there are
            cores, each on one thread.
    """
    call = functools.partial(_call, function, (*shared, options))
    if in_turn:
        return {job: call(job) for job in jobs}
    workers = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    call = functools.partial(_call_on_one_thread, function, (*shared, options))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_end_with_the_parent) as pool:
        return dict(zip(jobs, pool.map(call, jobs), strict=True))


def _end_with_the_parent() -> None:
    """End this worker when the recipe's process ends, also by a signal that lets it clean up nothing."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def _call(function: Callable[..., Any], shared: tuple[Any, ...], job: Any) -> Any:
    return function(*job, *shared)


def _call_on_one_thread(function: Callable[..., Any], shared: tuple[Any, ...], job: Any) -> Any:
    import torch

    torch.set_num_threads(1)
    return _call(function, shared, job)


def prepare_run(options: Options) -> None:
    """Silence Lightning, and keep a quick run on one thread."""
    import torch

    if not options.full:
        torch.set_num_threads(1)
    silence_lightning()


def silence_lightning() -> None:
    """Keep the trainer's remarks and warnings out of a recipe's output."""
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    warnings.filterwarnings("ignore", message=".*(LeafSpec|across ranks is zero).*")
    warnings.filterwarnings("ignore", message=".*has no validation data to evaluate the samples on")  # meant so
    warnings.filterwarnings("ignore", message="This fit draws no posterior samples")  # meant so
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


def quiet_trainer(**options: Any) -> "pl.Trainer":
    """Return a trainer that writes and shows nothing, unless one of its options says otherwise."""
    import pytorch_lightning as pl

    silent = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**(silent | options))
