"""Many runs of a recipe: side by side on a CPU's cores or on several machines, or one after the other on a GPU."""

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any, TypeVar

from lightning_sgmcmc.process import usable_cores
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.store import Finished, JobStore, name_of
from lightning_sgmcmc.recipes.shared.trainers import within_job
from lightning_sgmcmc.recipes.shared.workers import workers

HERE = "here"
Job = TypeVar("Job", bound=tuple[Any, ...])
BETWEEN_REPORTS = 10.0
"""Seconds between two lines on the progress."""


class Planned(Exception):
    """Raised instead of running the jobs of a dry run.

    Attributes:
        jobs: number of all jobs.
        seconds: processor time of each of those that an earlier run has ended.
        workers: number of jobs that would run at a time.
    """

    def __init__(self, jobs: int, seconds: Sequence[float], workers: int) -> None:
        super().__init__(f"{jobs} jobs, {len(seconds)} of them finished")
        self.jobs = jobs
        self.seconds = seconds
        self.workers = workers

    @property
    def finished(self) -> int:
        """Number of jobs that an earlier run has ended."""
        return len(self.seconds)


def run_jobs(
    function: Callable[..., Any],
    jobs: Sequence[Job],
    options: Options,
    *shared: Any,
    in_turn: bool = False,
) -> dict[Job, Any]:
    """Return what `function(*job, *shared, options)` returns, by job.

    Every outcome is written as soon as its job ends, and a later call with the same options does not repeat it (see
    `JobStore`). A job that fails does not stop the others. Trainers of `quiet_trainer` write checkpoints, from which
    `resumed_fit` continues.

    Args:
        function: a function at the top level of a module, because other processes import it by its name.
        jobs: tuples of arguments; the longest ones should come first.
        options: the recipe's options; with `executor` the jobs run on a dask.distributed cluster.
        shared: arguments that all jobs have.
        in_turn: run one after the other in this process, as for a single device; otherwise as many at a time as there
            are cores, each on one thread.

    Raises:
        Planned: in a dry run.
        RuntimeError: if jobs failed, after the others have ended; its cause is the first one's error.
    """
    in_turn = in_turn or options.device == "gpu" or options.executor == HERE
    store = JobStore(function, shared, options)
    done = {job: finished for job in jobs if (finished := store.read(job)) is not None}
    missing = [job for job in jobs if job not in done]
    if options.dry_run:
        raise Planned(len(jobs), [one.seconds for one in done.values()], 1 if in_turn else usable_cores())
    progress = Progress(len(jobs), len(done))
    call = functools.partial(_call, function, (*shared, options))
    failed: dict[Job, BaseException] = {}
    for job, result in _completed(call, missing, store, options, in_turn):
        if isinstance(result, Finished):
            store.write(job, result)
            done[job] = result
            progress.report()
        else:
            failed[job] = result
            print(f"the job {name_of(job)} failed: {type(result).__name__}: {result}", file=sys.stderr)
    if failed:
        job, error = next(iter(failed.items()))
        raise RuntimeError(
            f"{len(failed)} of {len(jobs)} jobs failed, the first is {name_of(job)} ({type(error).__name__}: {error}); "
            f"the others are kept in {store.folder}: mend the cause, and run the same command again"
        ) from error
    SECONDS.append(sum(one.seconds for one in done.values()))
    return {job: done[job].outcome for job in jobs}


SECONDS: list[float] = []
"""Processor time of the jobs of this process's recipe, for its results."""


class Progress:
    """Prints how many jobs have ended, and the time left, at most every ten seconds.

    Args:
        jobs: number of all jobs.
        finished: number of those that had ended before.
    """

    def __init__(self, jobs: int, finished: int) -> None:
        self.jobs, self.before, self.now = jobs, finished, 0
        self._start = self._last = time.monotonic()
        if finished:
            print(f"{finished} of {jobs} jobs are of an earlier run", file=sys.stderr)

    def report(self) -> None:
        """Count a job that has ended."""
        self.now += 1
        time_now = time.monotonic()
        left = self.jobs - self.before - self.now
        if left and time_now - self._last >= BETWEEN_REPORTS:
            self._last = time_now
            seconds = (time_now - self._start) / self.now * left
            print(f"{self.before + self.now} of {self.jobs} jobs, about {duration(seconds)} left", file=sys.stderr)


def duration(seconds: float) -> str:
    """Return a time as text, such as "4 min"."""
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


def _completed(
    call: Callable[..., Finished], jobs: Sequence[Job], store: JobStore, options: Options, in_turn: bool
) -> Iterator[tuple[Job, Finished | BaseException]]:
    """Run jobs, and yield each with its outcome or error as soon as it has ended."""
    if in_turn:
        for job in jobs:
            try:
                yield job, call(job, store.path(job), one_thread=False)
            except Exception as error:
                yield job, error
        return
    if not jobs:
        return  # a cluster is not needed
    with workers(options.executor) as pool:
        futures = {pool.submit(call, job, store.path(job)): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future.exception() or future.result()


def _call(
    function: Callable[..., Any], shared: tuple[Any, ...], job: tuple[Any, ...], folder: Path, one_thread: bool = True
) -> Finished:
    if one_thread:
        import torch

        torch.set_num_threads(1)
    start = time.process_time()
    options: Options = shared[-1]
    with within_job(folder, keeps_samples=options.full):
        outcome = function(*job, *shared)
    return Finished(outcome, time.process_time() - start)
