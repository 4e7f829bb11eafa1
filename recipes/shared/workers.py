"""The processes that run a recipe's jobs: those of this machine, or a cluster's."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from lightning_sgmcmc.process import usable_cores

START = "spawn"
"""How processes begin: torch's threads do not survive a fork."""


class LastingWorkers:
    """Processes of this machine that all calls of `workers` in a `with` block share.

    A new process imports torch and Lightning, which can take as long as a short job.

    Attributes:
        pool: the processes; None before the first use.
    """

    current: "LastingWorkers | None" = None

    def __init__(self) -> None:
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "LastingWorkers":
        LastingWorkers.current = self
        return self

    def __exit__(self, *error: object) -> None:
        LastingWorkers.current = None
        self.end()

    def start(self) -> ProcessPoolExecutor:
        """Return the processes; start them if there are none, or if one has died."""
        try:
            if self.pool is not None:
                self.pool.submit(int)
                return self.pool
        except BrokenProcessPool:
            self.end()
        context = multiprocessing.get_context(START)
        self.pool = ProcessPoolExecutor(usable_cores(), context, initializer=end_with_the_parent)
        return self.pool

    def end(self) -> None:
        """End the processes after their present jobs; jobs that have not begun are given up."""
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)


@contextmanager
def workers(address: str | None) -> Iterator[Executor]:
    """Yield what runs jobs, one at a time in each process; an error gives up those that have not begun.

    Args:
        address: of a dask.distributed scheduler; None uses as many processes of this machine as there are cores.

    Raises:
        ImportError: if an address is given and dask.distributed is not installed.
        ValueError: if a worker of the cluster has several threads.
    """
    if address is not None:
        with _cluster(address) as executor:
            yield executor
    elif LastingWorkers.current is None:
        with LastingWorkers() as own:
            yield own.start()
    else:
        lasting = LastingWorkers.current
        try:
            yield lasting.start()
        except BaseException:
            lasting.end()
            raise


@contextmanager
def _cluster(address: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ImportError as error:
        raise ImportError("--executor needs dask.distributed: pip install 'lightning-sgmcmc[cluster]'") from error
    with Client(address, set_as_default=False) as client:
        threads = client.nthreads()
        if any(count != 1 for count in threads.values()):
            raise ValueError(
                f"the cluster {address} has workers with {max(threads.values())} threads, and jobs of one "
                "process share torch's generators: start them by `dask worker ADDRESS --nworkers N --nthreads 1`"
            )
        executor = client.get_executor(pure=False)
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def end_with_the_parent() -> None:
    """End this worker when the recipe's process ends, also by a signal that lets it clean up nothing."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
