"""Writing samples: a file, then a line in the manifest; at once, or by a thread while the device continues."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from weakref import WeakSet

from lightning_sgmcmc.chains.sample import PosteriorSample, SampleRecord, record_of
from lightning_sgmcmc.files import check_regular, flush, free_space, megabytes, write_atomically
from lightning_sgmcmc.posterior.manifest import MANIFEST, line_of, sample_name
from lightning_sgmcmc.posterior.sample_file import checksum, end_of_last_line, sample_content

LARGEST_WAITING = 2**30
"""Bytes that may wait for the thread; then the run waits until there is room."""

Job = Callable[[], Callable[[], None]]
"""Writes something; returns what to do in the run's thread once it is written."""


def write_sample(folder: Path, sample: PosteriorSample, earlier: int) -> SampleRecord:
    """Write a sample's file and its line in the manifest, both flushed to the disk; return its record.

    Args:
        folder: the store's.
        sample: the sample.
        earlier: number of samples before it, for the message.

    Raises:
        OSError: if either cannot be written.
    """
    name = sample_name(sample.step, sample.chain, sample.draw)
    content = sample_content(sample)
    record = record_of(sample, name, checksum(content))
    try:
        write_atomically(folder / name, content)
        add_line(folder / MANIFEST, line_of(record))
    except OSError as error:
        is_there = (folder / MANIFEST).exists()
        fate = (
            "are complete: free space, and" if is_there else "were deleted or moved during the run: restore them, and"
        )
        raise OSError(
            error.errno,
            f"the sample of step {sample.step} could not be written to {folder / name} "
            f"({megabytes(len(content))}): {error.strerror}{free_space(folder)}; the {earlier} earlier "
            f"samples {fate} resume from the last checkpoint",
        ) from error
    return record


def add_line(path: Path, line: str) -> None:
    """Add a line to a manifest, over a truncated last one."""
    check_regular(path)
    with open(path, "r+b") as manifest:
        content_end = end_of_last_line(manifest)
        manifest.seek(content_end)
        manifest.truncate()
        manifest.write((line + "\n").encode())
        try:
            flush(manifest)
        except OSError:
            manifest.truncate(content_end)
            raise


class BackgroundWriter:
    """Does the writing for a folder in a thread, one job after another; after a failure it does no further job.

    Args:
        folder: where the jobs write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")  # whose jobs are done before Python exits
        self._waiting: deque[tuple[Future[Callable[[], None] | None], int]] = deque()
        self._finished: list[Callable[[], None]] = []
        self._error: Exception | None = None
        _WRITERS.add(self)

    def __len__(self) -> int:
        """Return the number of jobs that `settle` has not finished."""
        return len(self._waiting) + len(self._finished)

    def submit(self, job: Job, size: int) -> None:
        """Queue a job; wait if more than `LARGEST_WAITING` bytes are waiting.

        Args:
            job: the job.
            size: bytes of memory that it holds.

        Raises:
            Exception: the one with which an earlier job failed.
        """
        while self._waiting and (self._waiting[0][0].done() or self._size() + size > LARGEST_WAITING):
            self._take()
        self._raise()
        self._waiting.append((self._thread.submit(self._do, job), size))

    def _size(self) -> int:
        return sum(size for _, size in self._waiting)

    def _do(self, job: Job) -> Callable[[], None] | None:
        if self._error is not None:
            return None
        try:
            return job()
        except Exception as error:
            self._error = error
            return None

    def _take(self) -> None:
        finish = self._waiting[0][0].result()
        self._waiting.popleft()
        if finish is not None:
            self._finished.append(finish)

    def wait(self) -> None:
        """Return when no job is waiting or being done."""
        for future, _ in list(self._waiting):
            future.result()

    def settle(self) -> None:
        """Wait for all jobs, and finish those that succeeded in the calling thread.

        Raises:
            Exception: the one with which a job failed.
        """
        while self._waiting:
            self._take()
        finished, self._finished = self._finished, []
        for finish in finished:
            finish()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wait for all jobs, and end the thread.

        Raises:
            Exception: the one with which a job failed.
        """
        try:
            self.settle()
        finally:
            self._thread.shutdown()
            _WRITERS.discard(self)


_WRITERS: WeakSet[BackgroundWriter] = WeakSet()
"""The writers of this process."""


def wait_for_writers(folder: Path) -> None:
    """Return when everything that this process has drawn for a folder is written, or has failed."""
    for writer in list(_WRITERS):
        if writer.folder == folder.absolute():
            writer.wait()
