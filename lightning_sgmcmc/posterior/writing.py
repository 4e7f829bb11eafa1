"""Writing samples: a file, then a line in the manifest, under a lock that other processes see."""

import contextlib
import errno
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakSet

from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from lightning_sgmcmc.chains.samples import PosteriorSample, SampleRecord, record_of
from lightning_sgmcmc.files import (
    check_regular,
    flush,
    free_space,
    is_regular,
    make_folder,
    megabytes,
    write_atomically,
)
from lightning_sgmcmc.posterior.manifest import MANIFEST, checksum, line_of, sample_content, sample_name

LARGEST_WAITING = 2**30
"""Bytes that may wait for the thread; then the run waits until there is room."""

Job = Callable[[], Callable[[], None]]
"""Writes something; returns what to do in the run's thread once it is written."""


def write_sample(folder: Path, sample: PosteriorSample, earlier: int) -> SampleRecord:
    """Write a sample's file and its line in the manifest, both flushed to the disk; return its record."""
    name = sample_name(sample.step, sample.chain, sample.draw)
    content = sample_content(sample)
    record = record_of(sample, name, checksum(content))
    try:
        write_atomically(folder / name, content)
        add_line(folder / MANIFEST, line_of(record))
    except OSError as error:
        what = f"the {earlier} earlier samples are complete: free space, and resume from the last checkpoint"
        if not (folder / MANIFEST).exists():
            what = f"the folder was deleted, with the {earlier} earlier samples: start a new run"
        raise OSError(
            error.errno,
            f"the sample of step {sample.step} could not be written to {folder / name} "
            f"({megabytes(len(content))}): {error.strerror}{free_space(folder)}; {what}",
        ) from error
    return record


def add_line(path: Path, line: str, block: int = 4096) -> None:
    """Add a line to a manifest, over a truncated last one."""
    check_regular(path)
    with open(path, "r+b") as manifest:
        end = manifest.seek(0, os.SEEK_END)
        while end > 0:  # read from the end, for the position after the last newline
            start = manifest.seek(max(0, end - block))
            found = manifest.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        manifest.seek(end)
        manifest.truncate()
        manifest.write((line + "\n").encode())
        try:
            flush(manifest)
        except OSError:
            manifest.truncate(end)
            raise


class BackgroundWriter:
    """Does the writing for a folder in a thread, one job after another; after a failure it does no further job."""

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
        """Queue a job that holds `size` bytes; wait while more than `LARGEST_WAITING` bytes are waiting."""
        while self._waiting:
            if not self._waiting[0][0].done() and size + sum(own for _, own in self._waiting) <= LARGEST_WAITING:
                break
            self._take()
        self._raise()
        self._waiting.append((self._thread.submit(self._do, job), size))

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
        """Wait for all jobs, and finish those that succeeded in the calling thread."""
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
        """Wait for all jobs, and end the thread."""
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


# -- lock --------------------------------------------------------------------------------------------------------------

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
HELD_ELSEWHERE = (errno.EACCES, errno.EAGAIN)
TRIES, PAUSE = 6, 0.02
"""A reader that looks whether a fit is running holds the lock for some microseconds: so it is tried again."""


class InUseError(RuntimeError):
    """Another fit writes to the folder."""


class StoreLock:
    """Holds a folder for one fit, by a lock (`flock`) of the open file `.lock`; the folder is made if needed.

    Another fit of this process is refused like one of another process. The lock ends with the process, however it ends;
    processes forked later do not have it. Where the file system has none, only fits of this process are refused.
    """

    def __init__(self, path: Path) -> None:
        self._file: Any = None
        while True:
            try:
                make_folder(path)
                if os.path.lexists(path / LOCK):
                    check_regular(path / LOCK)  # not a link to another file, which would be emptied
                self._file = open(path / LOCK, "a+")  # noqa: SIM115, it stays open as long as the lock is held
            except OSError as error:
                raise unusable(path, error) from error
            self._take(path)
            if self._is_file_of(path):
                break
            self._file.close()  # the folder was moved meanwhile
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()
        _HELD.add(self)

    def _take(self, path: Path) -> None:
        try:
            _lock(self._file)
        except OSError as error:
            if error.errno in HELD_ELSEWHERE or any(held._is_file_of(path) for held in list(_HELD)):
                self._file.seek(0)
                owner = self._file.read().strip() or "unknown"
                self._file.close()
                by = "another fit of this process" if owner == str(os.getpid()) else f"another process (id {owner})"
                raise InUseError(
                    f"the sample store {path} is in use by {by}, and two runs in one store would mix their samples: "
                    "wait until it ends, or pass another dirpath"
                ) from None
            rank_zero_warn(
                f"{path} cannot be locked ({error.strerror}), so nothing prevents another process from writing there: "
                "start only one run in this folder."
            )

    def _is_file_of(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(path / LOCK))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let other fits use the folder."""
        _HELD.discard(self)
        if self._file.closed:
            return
        with contextlib.suppress(OSError):  # a disk that fails must not hide why the fit has ended
            self._file.truncate(0)
        self._file.close()


_HELD: WeakSet[StoreLock] = WeakSet()
"""The locks of this process."""


def _lock(file: Any) -> None:
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "this system has no file locks")
    for remaining in reversed(range(TRIES)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in HELD_ELSEWHERE or not remaining:
                raise
        time.sleep(PAUSE)


def _leave_all_to_parent() -> None:
    for held in list(_HELD):
        held._file.close()
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)


def is_in_use(path: Path) -> bool:
    """Return whether a fit, of this process or another one, holds a folder; False where that cannot be known."""
    if fcntl is None or not is_regular(path / LOCK):
        return False
    try:
        with open(path / LOCK, "rb") as file:
            if file.read(1):  # a fit that has ended leaves it empty, a killed one does not
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in HELD_ELSEWHERE
    return False


def lock_shared(folder: Path) -> int | None:
    """Note that this process uses a folder, once no other is about to remove it: return a descriptor with a shared
    lock, which ends when it is closed; None without locks."""
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def lock_alone(descriptor: int | None) -> bool:
    """Return whether no other process has a lock by `lock_shared` of the same folder; later ones then wait."""
    if descriptor is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def unusable(path: Path, error: OSError) -> OSError:
    """Return the error for a folder where no store can be written."""
    message = f"no sample store can be created at {path}: {error.strerror}; make it a writable folder, or"
    return OSError(error.errno, f"{message} pass another dirpath")
